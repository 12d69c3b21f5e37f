# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A target model's answers, written to disk for training draft models. Knows no draft model and no loss.

For each prompt: the K sequences of the target's *constrained* beam search, and its log-probabilities over the legal
tokens at each of their positions, taken from the search's own logits. A stopped run continues after its last shard.

Source: AtSpeed, section 3.1 and appendix A.3 (the sequences of the search's last step).
Axes: B batch, K sequences, L positions of the longest sequence, V vocabulary.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.sequences import to_host
from hf_gr.files.atomic import replaced_file
from hf_gr.files.progress import progress_bar
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.models import fill_token
from hf_gr.generation.torch.fingerprints import probe_model
from hf_gr.generation.torch.mixin import GRGenerationMixin
from hf_gr.generation.torch.models import base_model, evaluation, is_sharded
from hf_gr.torch.processes import Processes
from hf_gr.torch.transition import DeviceCatalogue

from .packing import pad_prompts
from .paths import training_catalogue, walk

FORMAT_VERSION = 3
SUMMARY_FILE = "teacher_data.json"
SHARD = "teacher-{:05d}.parquet"
LOWEST_LOG_PROB = -6e4  # fits fp16; stands for log 0
COLUMNS = {  # of lists, by the type of their values
    "input_ids": "int32",
    "label": "int32",
    "sequences": "int32",
    "scores": "float32",
    "level_sizes": "int32",
    "log_probs": "float16",
}

Prompt = Any  # a list, a NumPy array or a tensor of integers, one axis
Row = dict[str, np.ndarray]  # some of the columns


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
        RuntimeError: another process died or failed; finished shards are kept.
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
    snapshot = index.snapshot.compact()
    config = base_model(model).config.get_text_config(decoder=True)
    check_tokens_of_catalogue(index, config.vocab_size, name="index")
    settings = {
        "format_version": FORMAT_VERSION,
        "num_beams": num_beams,
        "has_labels": labels is not None,
        "shard_size": shard_size,
        "vocab_size": config.vocab_size,
        "max_length": snapshot.max_length,
        "eos_token_id": snapshot.eos_token_id,
        "index": snapshot.fingerprint_of_sequences(),
        "model": probe_model(model),
    }
    processes = Processes()
    if processes.count > 1 and is_sharded(model):
        raise ValueError(
            "model is in pieces (FSDP or tensor parallelism), expected whole weights in every process: here shards of "
            "prompts are divided among processes, not weights"
        )
    shards = Shards(directory, SHARD, settings)
    processes.by_main(lambda: _begin(shards), doing="has refused the directory")
    catalogue = training_catalogue(snapshot, next(base_model(model).parameters()).device)
    search = partial(_search, model, index, catalogue, num_beams)
    rows = _read_rows(prompts, labels, settings)
    bar = progress_bar(
        "Asking the target model",
        lambda: len(prompts) if hasattr(prompts, "__len__") else None,  # pyright: ignore[reportArgumentType]
        unit="prompts",
        shown=progress and processes.is_main,
    )
    try:
        with evaluation(model), bar as advance:
            written = processes.by_all(lambda: _write_shards(shards, rows, search, batch_size, processes, advance))
    finally:
        shards.release()
    if any(one != written[0] for one in written):
        raise ValueError("prompts or labels differ between processes, expected the same in all: use another directory")
    summary = settings | {"num_prompts": written[0][0], "num_shards": written[0][1]}
    processes.by_main(lambda: _finish(shards, summary), doing="could not write the summary")
    return directory


def _begin(shards: Any) -> None:
    """Take the folder, or refuse one of other data."""
    shards.begin()
    if not (different := shards.differences()):
        return
    shards.release()
    (path, *_), name = shards.paths(), different[0]
    there = shards.recorded(path)
    raise ValueError(
        f"{path} was written with {name}={there.get(name)!r}, expected {shards.settings.get(name)!r} as in this call: "
        "use another directory, or the same arguments"
    )


def _write_shards(
    shards: Any,
    rows: Iterator[Row],
    search: Callable[[list[Row]], list[Row]],
    batch_size: int,
    processes: Processes,
    advance: Callable[[int], None],
) -> tuple[int, int, str]:
    """Write the shards of this process; return how many prompts and shards there are in all, and their digest."""
    from hf_gr.tables.files import pa

    num_prompts, num_shards, whole = 0, 0, hashlib.sha256()
    while chunk := list(islice(rows, shards.settings["shard_size"])):
        of_shard = {"prompts": _digest(chunk), "num_rows": len(chunk)}
        if num_shards % processes.count != processes.rank or _is_written(shards, num_shards, of_shard):
            advance(len(chunk))
        else:
            order = sorted(range(len(chunk)), key=lambda at: len(chunk[at]["input_ids"]), reverse=True)
            for start in range(0, len(order), batch_size):  # prompts of similar lengths together
                batch = order[start : start + batch_size]
                for at, row in zip(batch, search([chunk[at] for at in batch]), strict=True):
                    chunk[at] = row
                advance(len(batch))
            columns = {
                name: pa.array([row[name].astype(kind) for row in chunk], pa.large_list(pa.from_numpy_dtype(kind)))
                for name, kind in COLUMNS.items()
                if name in chunk[0]
            }
            shards.write(num_shards, pa.table(columns), of_shard, compression="zstd", use_dictionary=False)
        num_prompts, num_shards = num_prompts + len(chunk), num_shards + 1
        whole.update(of_shard["prompts"].encode())
    if not num_prompts:
        raise ValueError("prompts is empty, expected at least one")
    return num_prompts, num_shards, whole.hexdigest()


def _is_written(shards: Any, number: int, of_shard: dict[str, Any]) -> bool:
    """Whether a shard exists; refuses one of other prompts, except a last one to which prompts were added."""
    there = shards.recorded(shards.path(number))["of_shard"] if shards.has(number) else {"num_rows": 0}
    if there != of_shard and there["num_rows"] >= of_shard["num_rows"]:
        raise ValueError(
            f"{shards.path(number)} holds data of other prompts or labels, expected those that are given: use another "
            "directory"
        )
    return there == of_shard


def _finish(shards: Any, summary: dict[str, Any]) -> None:
    """Write the summary, which says that the data is complete."""
    if (num_there := len(shards.paths())) > summary["num_shards"]:
        raise ValueError(
            f"{shards.folder} has {num_there} shards, expected {summary['num_shards']} for {summary['num_prompts']} "
            "prompts: it holds data of more prompts; use another directory"
        )
    with replaced_file(shards.folder / SUMMARY_FILE) as file:
        file.write(f"{json.dumps(summary, indent=2)}\n".encode())


def _search(
    model: Any, index: ConstraintIndex, catalogue: DeviceCatalogue, num_beams: int, rows: Sequence[Row]
) -> list[Row]:
    """Search for one batch, and keep what the search computes anyway: rows with all columns."""
    # The attention mask hides padding, whatever its token.
    pad_token_id = max(fill_token(model.generation_config), 0)
    input_ids, mask = pad_prompts([row["input_ids"] for row in rows], pad_token_id=pad_token_id)
    out = model.generate(
        input_ids=input_ids.to(catalogue.device),
        attention_mask=mask.to(catalogue.device),
        constraint_index=index,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        drafting=None,  # the logits of every level are needed
        verification="strict",
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    paths = out.sequences[:, input_ids.shape[1] :]
    sources = getattr(out, "beam_indices", None)
    if sources is None:  # a single path
        sources = torch.arange(len(rows), device=paths.device)[:, None].expand_as(paths)
    paths, sources = (
        torch.nn.functional.pad(one, (0, catalogue.max_length - one.shape[1]), value=-1).unflatten(0, (-1, num_beams))
        for one in (paths.masked_fill(sources < 0, -1), sources.long())
    )
    levels = walk(paths, catalogue)
    is_there = torch.stack([level.is_there for level in levels], dim=-1)
    # A greedy path has padding after its end: tokens that lead nowhere are not its own.
    paths = paths.masked_fill(~is_there.cumprod(-1).bool(), -1)
    scores = torch.zeros(paths.shape[:2], device=paths.device)
    values: list[list[np.ndarray]] = [[] for _ in rows]  # log-probabilities after distinct prefixes, by level
    for level, logits, beams in zip(levels, out.logits, sources.unbind(-1), strict=False):
        of_prefix = beams[:, : level.below.shape[1], None].clamp(min=0)
        log_probs = logits.float().log_softmax(-1)[of_prefix, level.below.tokens].clamp(min=LOWEST_LOG_PROB)
        scores += level.of_chosen(log_probs).masked_fill(~level.is_there, 0.0)
        halves, stored = log_probs.half().cpu().numpy(), level.stored.cpu().numpy()
        for row, found in enumerate(values):
            found.append(halves[row][stored[row]])
    answers = {
        "sequences": paths.flatten(1),
        "scores": scores.masked_fill(~is_there[..., 0], -torch.inf),
        "level_sizes": torch.stack([level.stored.sum((1, 2)) for level in levels], dim=-1),
    }
    columns = {name: tensor.cpu().numpy() for name, tensor in answers.items()}
    return [
        row | {name: column[at] for name, column in columns.items()} | {"log_probs": np.concatenate(values[at])}
        for at, row in enumerate(rows)
    ]


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


def _read_rows(prompts: Iterable[Prompt], labels: Iterable[Prompt] | None, settings: dict[str, Any]) -> Iterator[Row]:
    """Prompts with their labels, checked."""
    vocab_size, eos_token_id = settings["vocab_size"], settings["eos_token_id"]
    for number, (prompt, label) in enumerate(zip_longest(prompts, () if labels is None else labels)):
        if prompt is None or (label is None and labels is not None):
            raise ValueError(f"prompts and labels differ in number, from {number} on, expected one label a prompt")
        row = {"input_ids": _read_tokens(prompt, f"prompts[{number}]", vocab_size)}
        if labels is not None:
            tokens = _read_tokens(label, f"labels[{number}]", vocab_size)
            if eos_token_id is not None and tokens[-1] != eos_token_id:
                tokens = np.append(tokens, eos_token_id)
            row["label"] = tokens
        yield row


def _read_tokens(tokens: Any, name: str, vocab_size: int) -> np.ndarray:
    array = np.asarray(to_host(tokens))
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


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        for tokens in row.values():
            digest.update(np.int64(len(tokens)).tobytes() + tokens.tobytes())
    return digest.hexdigest()
