# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft heads as parts of models: made for one, saved and loaded with it. Knows no decoding and no file format.

A head is the submodule `model.draft_head`; its weights are in files of their own, so that the model's are those of
transformers. Its placeholders are rows of the model's embeddings and, where there is one, tokens of the tokenizer.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex, SemanticIds
from hf_gr.catalogue.code_book import compare
from hf_gr.catalogue.labels import check_is_tokenizer
from hf_gr.files import draft_head as head_files
from hf_gr.files.draft_head_config import DraftHeadConfig, Transition
from hf_gr.files.hub import Source
from hf_gr.generation.configuration import code_book_of
from hf_gr.generation.internals import ignore_on_save
from hf_gr.torch.draft_head import DraftHead, save_files

from .models import base_model, hidden_size_of

NAME = "draft_head"  # of the submodule


def add_draft_head(
    model: Any,
    codebooks: ConstraintIndex | SemanticIds | Sequence[Any] | DraftHead,
    *,
    tokenizer: Any = None,
    transition: Transition = "rnn",
    use_state: bool = True,
    use_placeholders: bool = True,
    placeholder_tokens: Sequence[str] | None = None,
) -> DraftHead:
    """`GRGenerationMixin.add_draft_head`, of any model, also inside wrappers."""
    inner = base_model(model)
    if tokenizer is not None:
        check_is_tokenizer(tokenizer)
    if isinstance(codebooks, DraftHead):
        head = codebooks
        if (transition, use_state, use_placeholders, placeholder_tokens) != ("rnn", True, True, None):
            raise ValueError(
                "codebooks is a DraftHead and transition=, use_state=, use_placeholders= or placeholder_tokens= is "
                "given, expected none of them: the head has its own; make a new one with its codebooks instead"
            )
        is_own = getattr(inner, NAME, None) is head
        rows = None if is_own else head.placeholder_embeddings
        _check_head(inner, head, rows)
        if not is_own and head._model is not None:
            head = copy.deepcopy(head)
        if tokenizer is not None and head.config.num_placeholders:
            _give_placeholders(tokenizer, head)
    else:
        codes = _read_codebooks(codebooks)
        _check_codebooks(inner, codes)
        book = codebooks.code_book() if isinstance(codebooks, ConstraintIndex | SemanticIds) else {}
        if book and (learned := code_book_of(inner)):
            given = codebooks.snapshot if isinstance(codebooks, ConstraintIndex) else codebooks
            compare(learned, given, whose="the model", argument="codebooks")  # pyright: ignore
        config = DraftHeadConfig(
            hidden_size=hidden_size_of(inner),
            codebook_sizes=tuple(map(len, codes)),
            placeholder_tokens=tuple(placeholder_tokens or ()),
            placeholder_token_ids=tuple(range(len(codes))) if use_placeholders else (),  # until they are known
            transition=transition,
            use_state=use_state,
            use_placeholders=use_placeholders,
            code_book=tuple(book.items()),
        )
        ids = _placeholder_ids(inner, tokenizer, config.placeholder_tokens, codes)
        head, rows = DraftHead(replace(config, placeholder_token_ids=ids), codes), None
        head.train(inner.training)
    needed = max(head.config.placeholder_token_ids, default=-1) + 1
    if needed > inner.get_input_embeddings().weight.shape[0]:
        with _without_warnings():  # about how transformers draws new rows, around the mean of the others
            inner.resize_token_embeddings(needed)
    if rows is not None:
        weight = inner.get_input_embeddings().weight
        with torch.no_grad():
            weight[list(head.config.placeholder_token_ids)] = rows.to(weight)
    weight = inner.get_output_embeddings().weight
    if not weight.is_meta:  # of a model whose last layer is offloaded to the host
        head.to(device=weight.device, dtype=weight.dtype)
    setattr(inner, NAME, head)
    head._belong_to(inner)
    # Exact names: the model's own file has what transformers knows, and nothing else.
    own = {f"{NAME}.{name}" for name in head.state_dict()}
    ignore_on_save(inner, own)
    return head


def save_draft_head(model: Any, directory: str | Path, *, state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write the draft head's files next to the model's; nothing, if it has no head.

    Tensors are taken from a `state_dict` of the model, where that was gathered from several processes, if it has
    them. If writing fails, the previous head is still readable; a head with layers of an adapter is refused.
    """
    inner = base_model(model)
    head: DraftHead | None = getattr(inner, NAME, None)
    if head is None:
        return
    check_bare(head)
    given: Mapping[str, Any] = state_dict or {}
    tensors = {name: given.get(f"{NAME}.{name}", tensor) for name, tensor in head.state_dict().items()}
    rows = None
    if head.config.num_placeholders:
        embeddings = inner.get_input_embeddings()
        name = next(name for name, module in inner.named_modules() if module is embeddings)
        weight = given.get(f"{name}.weight", embeddings.weight)
        rows = weight[list(head.config.placeholder_token_ids)]
    save_files(Path(directory), head.config, tensors, rows, card=None)


def load_draft_head(model: Any, source: Source, *, force_download: bool = False) -> DraftHead | None:
    """Give a model the draft head of its checkpoint; None if that has neither of its files.

    If the model already has a head of the same shape, that head is kept and gets the weights: an optimizer may
    hold it. A `ValueError` for a head that is not whole or not for this model; a `ConnectionError` if the Hub does
    not say whether there is one.
    """
    folder = head_files.find(source, force_download=force_download)
    if folder is None:
        return None
    head = DraftHead.from_pretrained(folder)
    inner = base_model(model)
    own: DraftHead | None = getattr(inner, NAME, None)
    levels = range(head.config.num_levels)
    if (
        own is None
        or own.config != head.config
        or not all(torch.equal(own.codebook(level).cpu(), head.codebook(level).cpu()) for level in levels)
    ):
        return add_draft_head(inner, head)
    rows = head.placeholder_embeddings
    with torch.no_grad():
        own.load_state_dict(head.state_dict())
        if rows is not None:
            weight = inner.get_input_embeddings().weight
            weight[list(own.config.placeholder_token_ids)] = rows.to(weight)
    return own


def check_size(model: Any, head: DraftHead) -> None:
    """Refuse a head for hidden states of another size."""
    size = hidden_size_of(model)
    if head.config.hidden_size != size:
        raise ValueError(
            f"the draft head has hidden_size={head.config.hidden_size}, expected the model's, {size}: it is another "
            "model's head; load that model, or make a head for this one by model.add_draft_head(index)"
        )


def check_bare(head: Any) -> None:
    """Refuse a head that an adapter has put layers into, or around: its weights would have other names."""
    if not isinstance(head, DraftHead) or any(hasattr(module, "base_layer") for module in head.modules()):
        raise ValueError(
            "model.draft_head has layers of an adapter (PEFT), expected its own, which are trained with the "
            "adapter: exclude it by LoraConfig(exclude_modules=r'draft_head\\..*'), and keep it out of modules_to_save"
        )


def check_tokenizer(head: DraftHead, tokenizer: Any) -> None:
    """Check that a tokenizer has the head's placeholders, with the head's ids."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for name, token in zip(head.config.placeholder_tokens, head.config.placeholder_token_ids, strict=True):
        if vocabulary.get(name) != token:
            raise ValueError(
                f"tokenizer has id {vocabulary.get(name)} for {name!r}, expected {token}, the head's placeholder: "
                "load the tokenizer that was saved with the head, add the token by "
                "model.add_draft_head(head, tokenizer=tokenizer), or, if prompts are token ids, give none"
            )


def _read_codebooks(codebooks: Any) -> list[Tensor]:
    """By level the tokens of its codes."""
    if isinstance(codebooks, ConstraintIndex):
        # Dead nodes included: what is out of stock today may come back tomorrow.
        return [torch.from_numpy(tokens) for tokens in codebooks.snapshot.trie.codebooks]
    if isinstance(codebooks, SemanticIds):
        if codebooks.is_ragged:
            raise ValueError(
                "codebooks is SemanticIds that differ in length, expected one length, as they do not tell the end "
                "token: pass codebooks.constraint_index(eos_token_id=...), or lists made of codebooks.codebooks()"
            )
        return [torch.from_numpy(tokens) for tokens in codebooks.codebooks()]
    if isinstance(codebooks, (str, Mapping)) or not hasattr(codebooks, "__len__") or not len(codebooks):
        raise ValueError(
            f"codebooks is {codebooks!r}, expected a ConstraintIndex, SemanticIds, a DraftHead, or the token ids of "
            "every level: [[5, 6], [7, 8, 9]]"
        )
    return [_read_level(level, tokens) for level, tokens in enumerate(codebooks, start=1)]


def _read_level(level: int, tokens: Any) -> Tensor:
    try:
        codes = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"codebooks has no list of token ids on level {level} ({error}), expected one") from error
    if codes.ndim != 1 or not len(codes) or codes.is_floating_point() or codes.dtype == torch.bool:
        raise ValueError(
            f"codebooks has {codes.dtype} of shape {list(codes.shape)} on level {level}, expected a list of token "
            "ids, at least one: [[5, 6], [7, 8, 9]]"
        )
    values, counts = codes.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"codebooks has token {int(values[counts > 1][0])} twice on level {level}, expected distinct ones"
        )
    return codes.long().cpu()


def _check_codebooks(model: Any, codebooks: Sequence[Tensor]) -> None:
    """Refuse codes that the model has no token for."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for level, codes in enumerate(codebooks, start=1):
        unknown = codes[(codes < 0) | (codes >= vocabulary)]
        if len(unknown):
            raise ValueError(
                f"codebooks has token {int(unknown[0])} on level {level}, expected 0 to {vocabulary - 1}, the model's "
                "vocabulary: are the codes another model's? If they were added to the tokenizer, "
                "model.resize_token_embeddings(len(tokenizer)) first"
            )


def _check_head(model: Any, head: DraftHead, rows: Tensor | None) -> None:
    """Refuse a head that was made for another model."""
    check_size(model, head)
    embeddings = model.get_input_embeddings().weight
    if rows is not None and rows.shape[1] != embeddings.shape[1]:
        raise ValueError(
            f"the draft head has placeholder embeddings of size {rows.shape[1]}, expected the model's, "
            f"{embeddings.shape[1]}: it is another model's head; load that model"
        )
    _check_codebooks(model, [head.codebook(level) for level in range(head.config.num_levels)])


def _give_placeholders(tokenizer: Any, head: DraftHead) -> None:
    """A head's placeholders for a tokenizer that lacks them; none are added if they would have other ids."""
    if all(name not in tokenizer.get_vocab() for name in head.config.placeholder_tokens):
        trial = copy.deepcopy(tokenizer)
        _add_tokens(trial, head.config.placeholder_tokens)
        check_tokenizer(head, trial)
        _add_tokens(tokenizer, head.config.placeholder_tokens)
    check_tokenizer(head, tokenizer)


def _placeholder_ids(
    model: Any, tokenizer: Any, names: tuple[str, ...], codebooks: Sequence[Tensor]
) -> tuple[int, ...]:
    """The ids of a new head's placeholders."""
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"placeholder_tokens={names!r}, expected strings such as '<SP_1>'")
    if tokenizer is not None:
        trial = copy.deepcopy(tokenizer)
        _add_tokens(trial, names)
        vocabulary: dict[str, int] = trial.get_vocab()
        codes = torch.cat(list(codebooks)).tolist()
        clashes = [name for name in names if vocabulary[name] in codes]
        if clashes:
            raise ValueError(
                f"tokenizer has or would have id {vocabulary[clashes[0]]} for {clashes[0]!r}, expected one that is no "
                "code: the codes are no tokens of this tokenizer; give it theirs first "
                "(SemanticIds.from_tokenizer), or give none"
            )
        _add_tokens(tokenizer, names)
        return tuple(vocabulary[name] for name in names)
    before: DraftHead | None = getattr(model, NAME, None)
    if before is not None and before.config.placeholder_tokens == names:
        return before.config.placeholder_token_ids
    start = model.get_input_embeddings().weight.shape[0]
    return tuple(range(start, start + len(names)))


def _add_tokens(tokenizer: Any, names: Sequence[str]) -> None:
    """Special tokens for what a tokenizer lacks: they are never split, and decoding may skip them."""
    vocabulary = tokenizer.get_vocab()
    missing = [name for name in names if name not in vocabulary]
    if missing:
        tokenizer.add_tokens(missing, special_tokens=True)


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
