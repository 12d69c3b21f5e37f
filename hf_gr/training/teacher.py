# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A target model's answers, written to disk for training draft models. Knows no draft model and no loss.

For each prompt: the K sequences of the target's *constrained* beam search, and its log-probabilities over the legal
tokens at each of their positions, taken from the search's own logits. A stopped run continues after its last shard.

Source: AtSpeed, section 3.1 and appendix A.3 (the sequences of the search's last step).
Axes: B batch, K sequences, L positions of the longest sequence, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.fingerprints import fingerprint_sequences
from hf_gr.files.atomic import replaced_file
from hf_gr.files.progress import progress_bar
from hf_gr.generation.models import fill_token
from hf_gr.generation.torch.fingerprints import probe_model
from hf_gr.generation.torch.mixin import GRGenerationMixin
from hf_gr.generation.torch.models import base_model, evaluation, is_sharded
from hf_gr.torch.processes import Processes
from hf_gr.torch.transition import DeviceCatalogue

from .packing import pad_prompts
from .paths import PathLevel, training_catalogue, training_snapshot, walk

FORMAT_VERSION = 2
SUMMARY_FILE = "teacher_data.json"
SHARD = "teacher-{:05d}.parquet"
LOWEST_LOG_PROB = -6e4  # fits fp16; stands for log 0

Prompt = Any  # a list, a NumPy array or a tensor of integers, one axis


@torch.no_grad()
def write_teacher_data(
    model: Any,
    prompts: Iterable[Prompt],
    index: ConstraintIndex,
    directory: str | Path,
    *,
    num_beams: int,
    labels: Iterable[Prompt] | None = None,
    batch_size: int = 32,
    shard_size: int = 1024,
    progress: bool = False,
) -> Path:
    """Write a target model's answers to prompts: the data for aligning draft models.

    Memory holds one shard, whatever the number of prompts. To resume an interrupted call, repeat it with the same
    arguments: existing shards are kept, and only their prompts are read again. Under a launcher of N processes, call
    it in every one, with a whole model, the same prompts and the same folder: each searches for every N-th shard, and
    the files are those of one process.

    Args:
        model: the target, a decoder with `GRGenerationMixin` (`hf_gr.enable`). Its generation config applies to the
            search, except for beams and sampling; log-probabilities are the model's own, without processors.
        prompts: token sequences of any length, without padding; any iterable, which is read once.
        index: the catalogue.
        directory: the shards' folder; created if necessary.
        num_beams: K, beams of the search and sequences kept per prompt.
        labels: for every prompt the tokens of the item that followed, for the losses that learn from it (all but a
            pure alignment). The end token of a ragged catalogue is added if it is missing.
        batch_size: prompts searched together.
        shard_size: prompts per file. A shard searches prompts of similar lengths together, which saves padding.
        progress: show a bar on a terminal or in a notebook, and log a line a minute elsewhere.

    Returns:
        The directory.

    Raises:
        ValueError: before any work for invalid arguments, or a directory that holds data of other settings, of
            another model or of another catalogue; later for a prompt or label that is empty or has values outside the
            vocabulary, prompts and labels that differ in number, and prompts that differ from those of existing
            shards, or between processes; with several processes, a model in pieces (FSDP).
        RuntimeError: another process died or failed; what is finished is kept.
        ImportError: pyarrow is missing: `pip install "hf-gr[tables]"`.

    Example:
        >>> import tempfile
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> import hf_gr
        >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
        >>> target = hf_gr.enable(Qwen3ForCausalLM(config))
        >>> index = hf_gr.ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]])
        >>> folder = write_teacher_data(target, [[1, 2], [2]], index, tempfile.mkdtemp(), num_beams=3)
        >>> sorted(path.name for path in folder.iterdir())
        ['teacher-00000.parquet', 'teacher_data.json']

    Source: AtSpeed, section 3.1.
    """
    from hf_gr.tables.shards import Shards

    index, directory = copy.copy(index), Path(directory)
    _check_arguments(model, prompts, labels, num_beams=num_beams, batch_size=batch_size, shard_size=shard_size)
    snapshot = training_snapshot(index)
    config = base_model(model).config.get_text_config(decoder=True)
    if index.max_token_id >= config.vocab_size:
        raise ValueError(
            f"model has a vocabulary of {config.vocab_size} tokens, expected more than the catalogue's largest, "
            f"{index.max_token_id}: resize its embeddings, or use the model that the catalogue was made for"
        )
    settings = {
        "format_version": FORMAT_VERSION,
        "num_beams": num_beams,
        "has_labels": labels is not None,
        "shard_size": shard_size,
        "vocab_size": config.vocab_size,
        "max_length": snapshot.max_length,
        "eos_token_id": snapshot.eos_token_id,
        "index": fingerprint_sequences(snapshot),
        "model": probe_model(model),
    }
    processes = Processes()
    if processes.count > 1 and is_sharded(model):
        raise ValueError(
            "model is in pieces (FSDP or tensor parallelism), expected whole weights in every process: here shards of "
            "prompts are divided among processes, not weights"
        )
    shards = Shards(directory, SHARD, settings)
    num_there = processes.by_main(lambda: _begin(shards), doing="has refused the directory")
    device = next(base_model(model).parameters()).device
    plan = _Plan(
        model, index, training_catalogue(snapshot, device), device, num_beams, batch_size, snapshot.max_length
    )
    chunks = _chunks(prompts, labels, shard_size)
    bar = progress_bar(
        "Asking the target model",
        lambda: len(prompts) if hasattr(prompts, "__len__") else None,  # pyright: ignore[reportArgumentType]
        unit="prompts",
        shown=progress and processes.is_main,
    )
    try:
        with evaluation(model), bar as advance:
            written = processes.by_all(lambda: _write_shards(plan, chunks, shards, num_there, processes, advance))
    finally:
        shards.release()
    if any(one != written[0] for one in written):
        raise ValueError("prompts or labels differ between processes, expected the same in all: use another directory")
    summary = settings | {"num_prompts": written[0][0], "num_shards": written[0][1]}
    processes.by_main(lambda: _write_summary(directory, summary), doing="could not write the summary")
    return directory


@dataclass(frozen=True)
class _Plan:
    """What all batches share."""

    model: Any
    index: ConstraintIndex
    catalogue: DeviceCatalogue
    device: torch.device
    num_beams: int
    batch_size: int
    max_length: int


@dataclass(frozen=True)
class _Row:
    prompt: np.ndarray
    label: np.ndarray | None


@dataclass(frozen=True)
class _Answer:
    """What is stored for one prompt; the fields are named as the columns."""

    sequences: np.ndarray
    scores: np.ndarray
    level_sizes: np.ndarray
    log_probs: np.ndarray


def _begin(shards: Any) -> int:
    """Take the folder, or refuse one of other data; return the number of its shards."""
    shards.begin()
    if not (different := shards.differences()):
        return len(shards.paths())
    shards.release()
    (path, *_), name = shards.paths(), different[0]
    there = shards.recorded(path)
    raise ValueError(
        f"{path} was written with {name}={there.get(name)!r}, expected {shards.settings.get(name)!r} as in this call: "
        "use another directory, or the same arguments"
    )


def _write_shards(
    plan: _Plan,
    chunks: Iterable[list[tuple[Any, Any]]],
    shards: Any,
    num_there: int,
    processes: Processes,
    advance: Callable[[int], None],
) -> tuple[int, int, str]:
    """Write the shards of this process; return how many prompts and shards there are in all, and their digest."""
    num_prompts, num_shards, whole = 0, 0, hashlib.sha256()
    for number, chunk in enumerate(chunks):
        rows = [_check_row(row, num_prompts + at, shards.settings) for at, row in enumerate(chunk)]
        of_shard = {"prompts": _rows_digest(rows), "num_rows": len(rows)}
        is_other = number % processes.count != processes.rank
        if is_other or _is_written(shards, number, of_shard, is_last=number == num_there - 1):
            advance(len(rows))
        else:
            table = _to_table(rows, _search_all(plan, rows, advance), shards.settings["has_labels"])
            shards.write(number, table, of_shard, compression="zstd", use_dictionary=False)
        num_prompts, num_shards = num_prompts + len(rows), number + 1
        whole.update(of_shard["prompts"].encode())
    if not num_prompts:
        raise ValueError("prompts is empty, expected at least one")
    if num_shards < num_there:
        raise ValueError(
            f"{shards.folder} has {num_there} shards, expected {num_shards} for {num_prompts} prompts: it holds data "
            "of more prompts; use another directory"
        )
    return num_prompts, num_shards, whole.hexdigest()


def _is_written(shards: Any, number: int, of_shard: dict[str, Any], *, is_last: bool) -> bool:
    """Whether a shard exists; refuses one of other prompts, except a truncated last one."""
    if not shards.has(number):
        return False
    there = shards.recorded(shards.path(number))["of_shard"]
    if there == of_shard:
        return True
    if is_last and there["num_rows"] < of_shard["num_rows"]:
        return False  # there are more prompts than last time
    raise ValueError(
        f"{shards.path(number)} holds data of other prompts or labels, expected those that are given: use another "
        "directory"
    )


def _write_summary(directory: Path, summary: dict[str, Any]) -> None:
    path = directory / SUMMARY_FILE
    with replaced_file(path, temporary=directory / f".{SUMMARY_FILE}.tmp") as file:
        file.write(f"{json.dumps(summary, indent=2)}\n".encode())


def _search_all(plan: _Plan, rows: Sequence[_Row], advance: Callable[[int], None]) -> list[_Answer]:
    """The answers to some prompts, in their order; those of similar lengths are searched together."""
    order = sorted(range(len(rows)), key=lambda at: len(rows[at].prompt), reverse=True)
    answers: dict[int, _Answer] = {}
    for start in range(0, len(order), plan.batch_size):
        batch = order[start : start + plan.batch_size]
        answers.update(zip(batch, _search(plan, [rows[at] for at in batch]), strict=True))
        advance(len(batch))
    return [answers[at] for at in range(len(rows))]


def _search(plan: _Plan, rows: Sequence[_Row]) -> list[_Answer]:
    """Search for one batch, and keep what the search computes anyway."""
    # The attention mask hides padding, whatever its token.
    pad_token_id = max(fill_token(plan.model.generation_config), 0)
    input_ids, mask = pad_prompts([row.prompt for row in rows], pad_token_id=pad_token_id)
    input_ids, mask = input_ids.to(plan.device), mask.to(plan.device)
    num_beams, batch_size = plan.num_beams, len(rows)
    out = plan.model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        constraint_index=plan.index,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        drafting=None,  # the logits of every level are needed
        verification="strict",
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    paths = out.sequences[:, input_ids.shape[1] :].unflatten(0, (batch_size, num_beams))
    sources = getattr(out, "beam_indices", None)
    if sources is None:  # a single path
        sources = torch.arange(batch_size, device=paths.device)[:, None].expand(-1, paths.shape[-1])
    sources = sources.long().unflatten(0, (batch_size, num_beams))
    if num_beams > 1:
        paths = paths.masked_fill(sources < 0, -1)
    paths = torch.nn.functional.pad(paths, (0, plan.max_length - paths.shape[-1]), value=-1)
    levels = walk(paths, plan.catalogue)
    # A greedy path has padding after its end: tokens that lead nowhere are not its own.
    is_there = torch.stack([level.is_there for level in levels], dim=-1)
    paths = paths.masked_fill(~is_there.cumprod(-1).bool(), -1)
    values, sizes, log_probs = _legal_log_probs(out.logits, sources, levels, num_beams)
    found = getattr(out, "sequences_scores", None)
    scores = log_probs.sum(-1) if found is None else found.view(batch_size, num_beams)
    scores = scores.masked_fill(~is_there[..., 0], -torch.inf)
    columns = (paths.int().cpu().numpy(), scores.float().cpu().numpy(), sizes, _split(values, sizes))
    return [_Answer(*row) for row in zip(*columns, strict=True)]


def _legal_log_probs(
    logits: Sequence[Float[Tensor, "paths vocab"]],
    sources: Int[Tensor, "batch sequences length"],
    levels: Sequence[PathLevel],
    num_beams: int,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, Float[Tensor, "batch sequences length"]]:
    """Log-probabilities after distinct prefixes, over the legal children, from the search's own logits.

    Returns:
        For every level the rows and the values, flat; `[B, L]` their number; and the values of the sequences' tokens.
    """
    flat: list[tuple[np.ndarray, np.ndarray]] = []
    sizes, tokens = [], []
    for number, level in enumerate(levels):
        sizes.append(level.stored.sum((1, 2)))
        if number >= len(logits):
            tokens.append(torch.zeros_like(tokens[0]))
            continue
        if number:
            beams = sources[..., number] if number < sources.shape[-1] else torch.full_like(sources[..., 0], -1)
        else:
            beams = torch.arange(len(sources), device=sources.device)[:, None] * num_beams
        rows, prefixes = level.is_first.nonzero(as_tuple=True)
        log_probs = logits[number][beams[rows, prefixes].clamp(min=0)].float().log_softmax(-1)
        children = log_probs.gather(-1, level.below.tokens[rows, prefixes])
        children = children.clamp(min=LOWEST_LOG_PROB).half()
        legal = level.below.legal[rows, prefixes]
        values = children[legal]
        flat.append((np.repeat(rows.cpu().numpy(), legal.sum(-1).cpu().numpy()), values.cpu().numpy()))
        tokens.append(level.of_chosen(level.restore(values)).float().masked_fill(~level.is_there, 0.0))
    return flat, torch.stack(sizes, dim=-1).int().cpu().numpy(), torch.stack(tokens, dim=-1)


def _split(flat: Sequence[tuple[np.ndarray, np.ndarray]], sizes: np.ndarray) -> list[np.ndarray]:
    """Regroup values from levels, each in the order of rows, to rows, each in the order of levels."""
    rows = np.concatenate([rows for rows, _ in flat])
    values = np.concatenate([values for _, values in flat])
    values = values[np.argsort(rows, kind="stable")]
    return np.split(values, np.cumsum(sizes.sum(-1))[:-1])


def _to_table(rows: Sequence[_Row], answers: Sequence[_Answer], has_labels: bool) -> Any:
    """The Arrow table of a shard."""
    import pyarrow as pa

    num_beams, length = answers[0].sequences.shape

    def ragged(arrays: Sequence[Any], kind: Any) -> Any:
        ends = np.cumsum([0, *(array.size for array in arrays)])
        return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(arrays), type=kind))

    def fixed(arrays: Sequence[np.ndarray], kind: Any, size: int) -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(arrays, axis=None), type=kind), size)

    columns = {
        "input_ids": ragged([row.prompt for row in rows], pa.int32()),
        "sequences": fixed([answer.sequences for answer in answers], pa.int32(), num_beams * length),
        "scores": fixed([answer.scores for answer in answers], pa.float32(), num_beams),
        "level_sizes": fixed([answer.level_sizes for answer in answers], pa.int32(), length),
        "log_probs": ragged([answer.log_probs for answer in answers], pa.float16()),
    }
    if has_labels:
        columns["label"] = ragged([row.label for row in rows], pa.int32())
    return pa.table(columns)


def _check_arguments(
    model: Any, prompts: Any, labels: Any, *, num_beams: int, batch_size: int, shard_size: int
) -> None:
    inner = base_model(model)
    if not isinstance(inner, GRGenerationMixin):
        raise ValueError(
            f"model is a {type(inner).__name__}, expected one with GRGenerationMixin: hf_gr.enable(model)"
        )
    if inner.config.is_encoder_decoder:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"model is a {type(inner).__name__}, expected a decoder: draft models continue its prompts")
    for name, value in {"num_beams": num_beams, "batch_size": batch_size, "shard_size": shard_size}.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}, expected a positive integer")
    if hasattr(prompts, "__len__") and hasattr(labels, "__len__") and len(prompts) != len(labels):
        raise ValueError(f"labels has {len(labels)} entries, expected {len(prompts)}: one for each prompt")


def _chunks(prompts: Iterable[Prompt], labels: Iterable[Prompt] | None, size: int) -> Iterator[list[tuple[Any, Any]]]:
    """Prompts with their labels, in chunks."""
    if labels is None:
        pairs: Iterator[tuple[Any, Any]] = ((prompt, None) for prompt in prompts)
    else:
        pairs = iter(zip(prompts, labels, strict=True))
    while True:
        try:
            rows = list(islice(pairs, size))
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ValueError(f"prompts and labels differ in number ({error}), expected one label a prompt") from error
        if not rows:
            return
        yield rows


def _check_row(row: tuple[Any, Any], number: int, settings: dict[str, Any]) -> _Row:
    prompt, label = row
    vocab_size, eos_token_id = settings["vocab_size"], settings["eos_token_id"]
    checked = _read_tokens(prompt, f"prompts[{number}]", vocab_size)
    if not settings["has_labels"]:
        return _Row(checked, None)
    tokens = _read_tokens(label, f"labels[{number}]", vocab_size)
    if eos_token_id is not None and tokens[-1] != eos_token_id:
        tokens = np.append(tokens, np.int64(eos_token_id))
    return _Row(checked, tokens)


def _read_tokens(tokens: Any, name: str, vocab_size: int) -> np.ndarray:
    array = np.asarray(tokens.detach().cpu() if isinstance(tokens, Tensor) else tokens)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has shape {list(array.shape)} and type {array.dtype}, expected one or more integers in one axis: "
            "one prompt is one token sequence, without padding"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(
            f"{name} has tokens from {array.min()} to {array.max()}, expected 0 to {vocab_size - 1}: was it tokenized "
            "for another model?"
        )
    return array.astype(np.int64)


def _rows_digest(rows: Sequence[_Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        for tokens in (row.prompt, row.label):
            array = np.zeros(0, np.int64) if tokens is None else tokens
            digest.update(np.int64(len(array)).tobytes() + array.tobytes())
    return digest.hexdigest()
