# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A draft head: semantic IDs from the hidden states of one prefill, with no further call of the model. Knows no trie.

The prompt ends with placeholders, one a level. Their hidden states give the head its position, a recurrent state
what it has chosen so far:

    s_1 = h_0;  p_l = logit_head_l(h_l + s_l);  s_{l+1} = transition_l(s_l, embedding_l(t_l))

Source: NEZHA, equations 1 to 3; the sum, the tanh cell and the head's own embeddings are those of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import ref

import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hf_gr.files import draft_head as head_files
from hf_gr.files.cards import head_card, head_facts
from hf_gr.files.draft_head_config import DraftHeadConfig
from hf_gr.files.hub_mixin import HubMixin

from .scorers import Depth
from .tree import Nodes

IGNORED = -100  # of a label that ends before the last level: transformers' own


class DraftHead(HubMixin, nn.Module, what="draft head", files=head_files.FILES):
    """Logits of every level's codes, from hidden states and from the codes before.

    `model.add_draft_head(...)` makes one for a model, or takes one that was loaded; `DraftHeadTrainer` trains it. Its
    files hold all that the model does not: the parameters, the codebooks and, if the head is part of a model, its rows
    of the placeholders' embeddings. A loaded head is in the dtype that it was saved in, and in evaluation mode.

    Args:
        config: its shape.
        codebooks: for every level the token ids of its codes, distinct; the vocabulary is the model's.

    Raises:
        ValueError: codebooks that do not match `config`.

    Example:
        >>> config = DraftHeadConfig(hidden_size=8, codebook_sizes=(2, 3), placeholder_token_ids=(5, 6))
        >>> head = DraftHead(config, [[0, 1], [2, 3, 4]])
        >>> hidden = torch.zeros(1, 3, 8)  # of the prompt's last token and of the two placeholders
        >>> [tuple(logits.shape) for logits in head(hidden, torch.tensor([[1, 4]]))]
        [(1, 2), (1, 3)]

    Source: NEZHA, equations 1 to 3.
    """

    # A weak reference to the model it was added to, which has the placeholders' embeddings; before that, see below.
    _model: Callable[[], Any] | None = None
    _placeholder_rows: Tensor | None = None

    def __init__(self, config: DraftHeadConfig, codebooks: Sequence[Any]) -> None:
        super().__init__()
        self.config = config
        codes = [torch.as_tensor(codes).long().flatten() for codes in codebooks]
        head_files.check_codebooks(config, [level.tolist() for level in codes])
        for level, tokens in enumerate(codes):
            self.register_buffer(f"codebook_{level}", tokens)
        self._number_codes()
        self.logit_heads, self.embeddings, self.transitions = _layers(config).values()

    def _number_codes(self) -> None:
        """By token, its place among the level's codes; a token that is no code gets one that is never read."""
        for level in range(self.config.num_levels):
            tokens = self.codebook(level)
            columns = torch.zeros(int(tokens.max()) + 1, dtype=torch.long, device=tokens.device)
            columns[tokens] = torch.arange(len(tokens), device=tokens.device)
            self.register_buffer(f"columns_{level}", columns, persistent=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As in torch; new codebooks give tokens new places."""
        super()._load_from_state_dict(*args, **kwargs)
        if not self.codebook(0).is_meta:
            self._number_codes()

    def codebook(self, level: int) -> Int[Tensor, " codes"]:
        """The tokens of a level's codes."""
        return self.get_buffer(f"codebook_{level}")

    def columns(self, tokens: Int[Tensor, "*shape"], *, level: int) -> Int[Tensor, "*shape"]:
        """The places of tokens among a level's codes; an arbitrary place for a token that is none of them."""
        columns = self.get_buffer(f"columns_{level}")
        return columns[tokens.clamp(0, len(columns) - 1)]

    def forward(
        self, hidden: Float[Tensor, "batch positions hidden"], tokens: Int[Tensor, "batch levels"]
    ) -> list[Float[Tensor, "batch codes"]]:
        """Logits of every level, given the tokens of earlier levels.

        Args:
            hidden: of the prompt's last token and of the placeholders.
            tokens: chosen, or known (teacher forcing); the last level's are not read.
        """
        state, logits = hidden[:, :1], []
        for level in range(self.config.num_levels):
            if level:
                state = self.advance(state, tokens[:, level - 1 : level], level=level - 1)
            logits.append(self.logits(state, hidden, level=level)[:, 0])
        return logits

    def loss(
        self, hidden: Float[Tensor, "batch positions hidden"], labels: Int[Tensor, "batch levels"]
    ) -> Float[Tensor, ""]:
        """The mean over levels of the cross entropy of the labels, each within its own codebook.

        Args:
            hidden: of the prompt's last token and of the placeholders.
            labels: tokens; -100 after the end of a short one.

        Source: NEZHA, equation 6, as a mean.
        """
        losses = []
        for level, logits in enumerate(self(hidden, labels)):
            target = self.columns(labels[:, level], level=level).masked_fill(labels[:, level] == IGNORED, IGNORED)
            losses.append(nn.functional.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="sum"))
        return torch.stack(losses).sum() / (labels != IGNORED).sum().clamp(min=1)

    def logits(
        self,
        state: Float[Tensor, "batch nodes hidden"],
        hidden: Float[Tensor, "batch positions hidden"],
        *,
        level: int,
    ) -> Float[Tensor, "batch nodes codes"]:
        """The logits of the codes that follow states: equation 2."""
        if not self.config.use_placeholders:
            read = state
        elif not self.config.use_state:
            read = hidden[:, level + 1, None].expand_as(state)
        else:
            read = state + hidden[:, level + 1, None]
        return self.logit_heads[level](read)

    def advance(
        self, state: Float[Tensor, "batch nodes hidden"], tokens: Int[Tensor, "batch nodes"], *, level: int
    ) -> Float[Tensor, "batch nodes hidden"]:
        """The states after one more token, which is of `level`: equation 3."""
        if self.config.transition == "none":
            return state
        embedded = self.embeddings[level](self.columns(tokens, level=level))
        if self.config.transition == "add":
            return state + embedded
        return self.transitions[level](embedded.flatten(0, 1), state.flatten(0, 1)).view(state.shape)

    @property
    def placeholder_embeddings(self) -> Float[Tensor, "placeholders embedding"] | None:
        """The placeholders' input embeddings: rows of the model it was added to, else those of its file.

        None if unknown: the head was never part of a model, or has no placeholders.

        Raises:
            ValueError: the model was deleted, or this is a copy of its head.
        """
        if self._model is None or not self.config.num_placeholders:
            return self._placeholder_rows
        model = self._model()
        if model is None:
            raise ValueError(
                "the draft head's model is gone, or this is a copy of its head, expected the model, which has the "
                "placeholders' embeddings: keep it, or model.add_draft_head(head) first"
            )
        weight: Tensor = model.get_input_embeddings().weight
        return weight.detach()[list(self.config.placeholder_token_ids)]

    @classmethod
    def _from_folder(cls, folder: Path) -> DraftHead:
        def make(config: DraftHeadConfig, tensors: dict[str, Tensor], rows: Tensor | None) -> DraftHead:
            with torch.device("meta"):  # before any memory is taken: the config may ask for terabytes
                layers = nn.ModuleDict(_layers(config)).state_dict()
            codebooks = {f"codebook_{level}": (size,) for level, size in enumerate(config.codebook_sizes)}
            head_files.check_tensors(codebooks | {name: layer.shape for name, layer in layers.items()}, tensors)
            with torch.random.fork_rng(devices=[]):  # loading draws no random numbers
                head = cls(config, [tensors[name] for name in codebooks])
            head.load_state_dict(tensors, assign=True)
            head._placeholder_rows = rows
            return head.eval()

        return head_files.load_head(folder, _to_tensor, make)

    def _save(self, directory: Path, *, name: str) -> None:
        card = head_card(self.facts(), name)
        save_files(directory, self.config, self.state_dict(), self.placeholder_embeddings, card=card)

    def facts(self) -> str:
        """What model cards say about it."""
        size = sum(parameter.numel() for parameter in self.parameters())
        return head_facts(self.config, size, str(next(self.parameters()).dtype).removeprefix("torch."))

    def _belong_to(self, model: Any) -> None:
        """Become part of a model, which holds the placeholders' embeddings from now on."""
        self._model, self._placeholder_rows = ref(model), None

    def __getstate__(self) -> dict[str, Any]:
        """A copy is part of no model: no model's embeddings are known to be its own."""
        return self.__dict__ if self._model is None else {**self.__dict__, "_model": _gone}


def save_files(
    directory: Path, config: DraftHeadConfig, tensors: Mapping[str, Tensor], rows: Tensor | None, *, card: str | None
) -> None:
    """Write a head's files; `rows` are its placeholders' embeddings, if known."""
    known = tensors if rows is None else {**tensors, head_files.PLACEHOLDERS: rows}
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in known.items()}
    head_files.save(safetensors.torch, directory, config.to_dict(), on_host, card=card)


def _to_tensor(dtype: str, shape: list[int], data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)


def _layers(config: DraftHeadConfig) -> dict[str, nn.ModuleList]:
    """A head's layers by the name of their list; each list has one a level, if any."""
    size, inner = config.hidden_size, config.codebook_sizes[:-1]
    embedded = () if config.transition == "none" else inner
    moved = inner if config.transition == "rnn" else ()
    return {
        "logit_heads": nn.ModuleList(nn.Linear(size, codes, bias=False) for codes in config.codebook_sizes),
        "embeddings": nn.ModuleList(nn.Embedding(codes, size) for codes in embedded),
        "transitions": nn.ModuleList(nn.RNNCell(size, size) for _ in moved),
    }


def _gone() -> None:
    """Stands for a deleted model."""


class HeadScorer:
    """A draft head as a scorer of one call: nodes cost a small matrix product and no forward of the model.

    `hidden` is of the prompt's last token and of the placeholders. With a `vocab_size`, as processors need, logits
    are over the whole vocabulary, `-inf` for all but the level's codes; else of the codes alone, at the places
    given by `columns`.
    """

    def __init__(
        self, head: DraftHead, hidden: Float[Tensor, "batch positions hidden"], *, vocab_size: int | None = None
    ) -> None:
        self.takes_prompt = False
        self.num_forwards = 0
        self.columns: Callable[..., Tensor] | None = head.columns if vocab_size is None else None
        self.head = head
        self.hidden = hidden
        self.vocab_size = vocab_size
        self.states = hidden[:, :1]  # of the nodes scored last

    def begin(self, levels: Sequence[Nodes] = ()) -> list[Float[Tensor, "batch _ codes"]]:
        """See `Scorer.begin`; no levels."""
        return [self._logits(self.states, level=0)]

    def score(self, levels: Sequence[Nodes], *, depth: Depth) -> list[Float[Tensor, "batch _ codes"]]:
        """See `Scorer.score`; all rows have one depth."""
        assert isinstance(depth, int)
        logits, states, above = [], [], self.states
        for level, nodes in enumerate(levels, start=depth):
            state = above.gather(1, nodes.parents[..., None].expand(-1, -1, above.shape[-1]))
            above = self.head.advance(state, nodes.tokens, level=level - 1)
            states.append(above)
            logits.append(self._logits(above, level=level))
        self.states = torch.cat(states, dim=1)
        return logits

    def _logits(self, state: Float[Tensor, "batch nodes hidden"], *, level: int) -> Float[Tensor, "batch nodes _"]:
        logits = self.head.logits(state, self.hidden, level=level)
        if self.vocab_size is None:
            return logits
        over = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return over.index_copy(-1, self.head.codebook(level), logits)
