# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: texts to ranked labels. Knows tokenizers and prompts; scores nothing itself.

The way of a call: texts to padded prompts, prompts to a prefilled scorer, and then either every label exactly
(`hf_gr.classification.exhaustive`) or the best that a beam search finds (`hf_gr.torch.decode`).

Axes: B batch, P prompt, S sequences, K beams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationMixin

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import SPACES, check_is_tokenizer, check_is_unicode, encode
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot, combine_rules
from hf_gr.generation.models import position_limit, start_token
from hf_gr.generation.prompts import Side, pad, padding_side
from hf_gr.generation.torch.checks import check_vocabulary
from hf_gr.generation.torch.layouts import choose_layout, prefilled
from hf_gr.generation.torch.models import base_model, evaluation, output_size_of
from hf_gr.torch.decode import DecodePlan, decode
from hf_gr.torch.scorers import Scorer
from hf_gr.torch.transition import device_catalogue

from .exhaustive import ExhaustiveScorer, Sequences

PLACE = "{text}"
DEFAULT_PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"
NO_LIMIT = 10**9  # tokenizers without a largest length say 10**30

# Of a batch, by row: the log-probabilities of label sequences, and what labels each of those stands for.
Found = list[tuple[Float[Tensor, " sequences"], Sequence[Sequence[str]]]]


@torch.no_grad()
def classify(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    index: ConstraintIndex,
    *,
    top_k: int | None = 5,
    prompt: str = DEFAULT_PROMPT,
    threshold: float | None = None,
    neutral_text: str | None = None,
    batch_size: int = 8,
    max_tree_nodes: int = 8192,
    num_beams: int = 32,
    max_length: int | None = None,
    progress: bool | None = None,
) -> list[list[tuple[str, float]]]:
    """Rank the labels of an index for every text.

    A label's probability is that of the model writing it, end token included, behind the prompt: a product over the
    full vocabulary, as all scores are. It is then divided by the sum over all labels of the index (its living ones:
    `index.where` narrows it down), so that the probabilities of a text sum to one. Labels that tokenize alike are one
    sequence, and have equal shares of its probability.

    Where the label set has at most `max_tree_nodes` inner nodes (distinct proper prefixes of its labels; a phrase adds
    some four), all of it is scored: one prefill and one forward over those nodes, or several where the logits of one
    would take more than 256 MB. Larger sets are searched by a constrained beam search instead. It may miss labels;
    those that it does not return are taken to be impossible, so its probabilities are divided by the sum over what was
    *found*, and are upper bounds of the exact ones.

    Args:
        model: a language model of transformers, decoder-only or encoder-decoder; it need not be enabled. It is used
            in evaluation mode. One that takes neither layout (Mamba, RWKV) reads every path anew: exact, but slow.
        tokenizer: the model's, with which the index was built.
        texts: what to classify.
        index: of `ConstraintIndex.from_labels`, or any index whose item ids are strings.
        top_k: the most labels of one text; None for all that were scored.
        prompt: what the model reads, with `{text}` in the text's place, to be followed by a label. For a chat model:
            `tokenizer.apply_chat_template(..., tokenize=False, add_generation_prompt=True)`. Other braces are
            themselves.
        threshold: labels with a smaller probability are left away. No label at all is the answer "none of them".
        neutral_text: a text that says nothing, such as "N/A". Every label's probability is first divided by the one
            that it has behind this text, so that labels which the model likes to write anyway, short ones for example,
            have no advantage (contextual calibration). Only for label sets that are scored as a whole.
        batch_size: texts of one forward; they are sorted by length and padded, for a decoder on the left.
        max_tree_nodes: the largest label set that is scored as a whole; 0 for beams in any case.
        num_beams: of the search in larger sets, which finds as many labels; `top_k` of them, if that is more.
        max_length: the longest prompt in tokens, by default what model and tokenizer allow. Of a longer one the
            text's end is cut off, never the template.
        progress: whether to show a progress bar; None for where stderr is a terminal.

    Returns:
        For every text its labels with their probabilities, the most probable first.

    Raises:
        ValueError: before any work: no text, or one that is no string; a prompt without `{text}`, too long by itself,
            or ending with a space although labels begin with theirs; an index without labels, without living ones, or
            of another tokenizer or vocabulary; numbers out of range; a neutral text and a label set that is searched.
            And while it works: a model whose logits are no
            numbers.

    Example:
        A tokenizer of single bytes, and a model with random weights:

        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> alphabet = ["</s>", *pre_tokenizers.ByteLevel.alphabet()]
        >>> made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
        >>> made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1))
        >>> index = ConstraintIndex.from_labels(["Sports", "Science"], tokenizer)
        >>> ((first, second),) = classify(model, tokenizer, ["The match ended in a shootout."], index)
        >>> sorted([first[0], second[0]]), first[1] >= second[1], round(first[1] + second[1], 6)
        (['Science', 'Sports'], True, 1.0)

    Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", which decodes one label of one text; the
    neutral text is that of Zhao et al., "Calibrate Before Use: Improving Few-Shot Performance of Language Models".
    """
    read_texts = _check_texts(texts)
    snapshot = _check_index(index, tokenizer)
    inner = _check_model(model)
    check_vocabulary(inner, snapshot, name="index")
    counts = {"top_k": 1 if top_k is None else top_k, "batch_size": batch_size, "num_beams": num_beams}
    _check_numbers(counts, max_tree_nodes, threshold)
    room = _room(inner, tokenizer, snapshot, max_length)
    encoder = _PromptEncoder.of(prompt, tokenizer, snapshot, room, ends_open=not inner.config.is_encoder_decoder)
    sequences = _sequences_of(snapshot, max_tree_nodes)
    if neutral_text is not None and (not isinstance(neutral_text, str) or sequences is None):
        raise ValueError(
            f"neutral_text={neutral_text!r}, expected None or a string, and a label set that is scored as a whole: it "
            f"must have at most max_tree_nodes={max_tree_nodes} inner nodes"
        )

    prompts = encoder.encode(read_texts)
    # Longest first: what does not fit fails at once, and neighbours need little padding.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batch_size = min(batch_size, len(prompts))
    side = padding_side(is_encoder_decoder=inner.config.is_encoder_decoder)
    answers: list[list[tuple[str, float]]] = [[] for _ in prompts]
    with (
        evaluation(inner),
        tqdm(total=len(prompts), unit="text", disable=None if progress is None else not progress) as bar,
    ):
        find = _make_finder(inner, snapshot, sequences, batch_size, max(num_beams, top_k or 1))
        prior: Any = 0.0
        if neutral_text is not None:
            ((prior, _),) = find(*_padded(encoder.encode([neutral_text]), tokenizer, inner.device, side=side))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            found = find(*_padded([prompts[row] for row in rows], tokenizer, inner.device, side=side))
            for row, (log_probs, labels) in zip(rows, found, strict=True):
                answers[row] = _rank(log_probs - prior, labels, top_k, threshold or 0.0, inner.dtype)
            bar.update(len(rows))
    return answers


def _sequences_of(snapshot: Snapshot, max_tree_nodes: int) -> Sequences | None:
    """All sequences of a label set that is small enough to be scored as a whole; None for a larger one."""
    sequences = Sequences(snapshot.rows()) if max_tree_nodes else None
    return sequences if sequences is not None and sequences.num_nodes <= max_tree_nodes else None


def _make_finder(
    model: Any, snapshot: Snapshot, sequences: Sequences | None, batch_size: int, num_beams: int
) -> Callable[[Tensor, Tensor], Found]:
    """What scores label sequences behind a batch of prompts: all of them exactly, or those that beams find."""
    layout = choose_layout(model)
    if sequences is not None:
        labels: Any = snapshot.items(sequences.rows.astype(np.int64))
        head = model.get_output_embeddings()
        exhaustive = ExhaustiveScorer(
            sequences,
            batch_size=batch_size,
            vocab_size=output_size_of(model),
            as_tree=layout == "tree" and not model.config.is_encoder_decoder,
            device=model.device if head is None else head.weight.device,
        )

        def find_all(input_ids: Tensor, mask: Tensor) -> Found:
            scores = exhaustive.score(_scorers(model, input_ids, mask, width=2))
            return [(row, labels) for row in scores.cpu()]

        return find_all

    rules = combine_rules([snapshot])

    def find_best(input_ids: Tensor, mask: Tensor) -> Found:
        scorer = _scorers(model, input_ids, mask, width=num_beams)()
        catalogue = device_catalogue(rules, scorer.prompt_logits.device)
        decoded = decode(
            scorer, catalogue, _beam_search(input_ids.to(scorer.prompt_logits.device), num_beams, snapshot)
        )
        items: Any = snapshot.items(decoded.sequences.cpu().numpy())
        scores = decoded.scores.view(-1, num_beams).cpu()
        there = [
            range(row * num_beams, row * num_beams + int(found.isfinite().sum())) for row, found in enumerate(scores)
        ]
        return [(row[: len(of)], items[of.start : of.stop]) for row, of in zip(scores, there, strict=True)]

    return find_best


def _scorers(model: Any, input_ids: Tensor, mask: Tensor, *, width: int) -> Callable[[], Scorer]:
    """Scorers over a batch of prompts, all of one prefill."""
    if not model.config.is_encoder_decoder:
        return prefilled(model, input_ids, None, mask, width=width)
    start = start_token(model.generation_config, model.config)
    if start is None:
        raise ValueError("model has no decoder_start_token_id, expected one: set it in model.generation_config")
    return prefilled(model, torch.full_like(input_ids[:, :1], start), input_ids, mask, width=width)


def _beam_search(input_ids: Int[Tensor, "batch prompt"], num_beams: int, snapshot: Snapshot) -> DecodePlan:
    """A search by the probability of whole labels, however long: no length penalty, no early end."""
    return DecodePlan(
        prompt=input_ids,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        num_kept=2 * num_beams,
        do_sample=False,
        length_penalty=0.0,
        early_stopping=False,
        max_new_tokens=snapshot.max_length,
        fill_token_id=-1,
        missing_token_id=-1,
    )


def _rank(
    log_probs: Float[Tensor, " sequences"],
    labels: Sequence[Sequence[str]],
    top_k: int | None,
    threshold: float,
    dtype: Any,
) -> list[tuple[str, float]]:
    """The most probable labels, by their shares of what their sequences have."""
    shares = torch.tensor([max(len(alike), 1) for alike in labels], dtype=torch.float64)
    probabilities = log_probs.double().softmax(dim=0) / shares
    if not len(labels) or bool(probabilities.isnan().any()):
        raise ValueError(
            f"model gives logits that are no numbers, in {dtype}, expected finite ones: try bfloat16 or float32"
        )
    best = probabilities.sort(descending=True, stable=True)
    ranked: list[tuple[str, float]] = [
        (label, float(probability))
        for probability, number in zip(best.values[:top_k].tolist(), best.indices[:top_k].tolist(), strict=True)
        for label in labels[int(number)]
        if probability >= threshold
    ]
    return ranked[:top_k]


@dataclass(frozen=True)
class _PromptEncoder:
    """Texts to the tokens of prompts.

    Attributes:
        template: the prompt with a place for the text.
        tokenizer: the tokenizer.
        room: the most tokens of a prompt.
        add_special_tokens: whether the tokenizer adds its own: not where the template begins with them.
        closing: tokens that the tokenizer puts behind every text, which are taken off again for a label to follow.
    """

    template: str
    tokenizer: Any
    room: int
    add_special_tokens: bool
    closing: frozenset[int]

    @classmethod
    def of(cls, template: Any, tokenizer: Any, snapshot: Snapshot, room: int, *, ends_open: bool) -> _PromptEncoder:
        """Check a template."""
        if not isinstance(template, str) or PLACE not in template:
            raise ValueError(f"prompt is {template!r}, expected a string with {PLACE}, where the text goes")
        if ends_open and template.endswith(" "):
            first = [str(token) for token in tokenizer.convert_ids_to_tokens(snapshot.rows()[:, 0].tolist())]
            if any(token.startswith((" ", *SPACES)) for token in first):
                raise ValueError(
                    f"prompt ends with a space, {template[-8:]!r}, expected none, for the labels begin with theirs: "
                    'cut it off, or build the index with prefix=""'
                )
        begin = getattr(tokenizer, "bos_token", None)
        closing: set[Any] = set()
        if ends_open:
            own = encode(tokenizer, [template])[0][-1:]  # a template may end with such a token itself
            closing = {tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None)} - {None, *own}
        has_own = bool(begin) and template.startswith(begin)  # as a chat template's text does
        encoder = cls(template, tokenizer, room, not has_own, frozenset(closing))
        alone = len(encoder.encode_one(""))
        if alone >= room:
            raise ValueError(
                f"prompt has {alone} tokens without a text, expected less than {room}, which is the model's largest "
                "length less the longest label's, or max_length: shorten it"
            )
        return encoder

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every prompt."""
        return [
            row if len(row) <= self.room else self._shortened(text)
            for text, row in zip(texts, self._rows([self._filled(text) for text in texts]), strict=True)
        ]

    def encode_one(self, text: str) -> list[int]:
        """The tokens of one prompt, however many."""
        return self._rows([self._filled(text)])[0]

    def _filled(self, text: str) -> str:
        return self.template.replace(PLACE, text)

    def _rows(self, prompts: list[str]) -> list[list[int]]:
        rows = self.tokenizer(prompts, add_special_tokens=self.add_special_tokens, verbose=False)["input_ids"]
        return [row[:-1] if row and row[-1] in self.closing else row for row in rows]

    def _shortened(self, text: str) -> list[int]:
        """The prompt with as many characters of a text as there is room for."""
        low, high, best = 0, len(text), self.encode_one("")
        while low < high:
            middle = (low + high + 1) // 2
            row = self.encode_one(text[:middle])
            if len(row) <= self.room:
                low, best = middle, row
            else:
                high = middle - 1
        return best


def _padded(
    rows: Sequence[Sequence[int]], tokenizer: Any, device: torch.device, *, side: Side
) -> tuple[Tensor, Tensor]:
    """Prompts of one batch with padding, and their mask."""
    fill = getattr(tokenizer, "pad_token_id", None)
    fill = tokenizer.eos_token_id or 0 if fill is None else fill
    input_ids, mask = map(torch.from_numpy, pad(rows, fill, side=side))
    return input_ids.to(device), mask.to(device)


def _room(model: Any, tokenizer: Any, snapshot: Snapshot, max_length: int | None) -> int:
    """The most tokens of a prompt."""
    if max_length is not None and (not is_integer(max_length) or max_length < 1):
        raise ValueError(f"max_length={max_length!r}, expected 1 or more tokens of a prompt")
    largest = min(
        size
        for size in (
            position_limit(model.config, of_encoder=model.config.is_encoder_decoder),
            getattr(tokenizer, "model_max_length", None),
            NO_LIMIT,
        )
        if size is not None and size > 0
    )
    room = largest if model.config.is_encoder_decoder else largest - snapshot.max_length
    if max_length is not None and max_length > room:
        raise ValueError(
            f"max_length={max_length}, expected at most {room}: the model's largest length less the longest label's"
        )
    return room if max_length is None else max_length


def _check_texts(texts: Any) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise ValueError(f"texts is {texts!r}, expected a list of strings: put a single one into a list")
    found = list(texts)
    if not found:
        raise ValueError("texts is empty, expected at least one text")
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise ValueError(f"texts[{number}] is {text!r}, expected a string: str(...) makes it one")
        check_is_unicode(text, f"texts[{number}]")
    return [str(text) for text in found]


def _check_index(index: Any, tokenizer: Any) -> Snapshot:
    check_is_tokenizer(tokenizer)
    if not isinstance(index, ConstraintIndex):
        raise ValueError(
            f"index is a {type(index).__name__}, expected a ConstraintIndex: ConstraintIndex.from_labels(...)"
        )
    snapshot = index.snapshot
    if not snapshot.are_strings:
        raise ValueError("index has numbers for item ids, expected labels: build it by ConstraintIndex.from_labels")
    if not snapshot.num_items:
        raise ValueError("index has no living label, expected at least one: all of them were removed, or left out")
    index.check_tokenizer(tokenizer)
    return snapshot


def _check_model(model: Any) -> Any:
    """The model of transformers inside; refuse what cannot write."""
    adapter: Any = getattr(model, "active_peft_config", None)
    inner = base_model(model) if isinstance(model, torch.nn.Module) else None
    if not isinstance(inner, GenerationMixin):
        raise ValueError(f"model is a {type(model).__name__}, expected a language model of transformers")
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {adapter.peft_type.value} adapter, expected one of weights such as LoRA: a learned prefix "
            "is not supported"
        )
    return inner


def _check_numbers(counts: dict[str, Any], max_tree_nodes: Any, threshold: Any) -> None:
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}={value!r}, expected 1 or more")
    if not is_integer(max_tree_nodes) or max_tree_nodes < 0:
        raise ValueError(f"max_tree_nodes={max_tree_nodes!r}, expected 0, for beams in any case, or more")
    if threshold is not None and (not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1):
        raise ValueError(f"threshold={threshold!r}, expected a probability from 0 to 1, or None")
