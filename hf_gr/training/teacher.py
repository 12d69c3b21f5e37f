# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A target model's answers, written to disk for training draft models. Knows no draft model and no loss.

For each prompt: the K sequences of the target's *constrained* beam search, and its log-probabilities over the legal
tokens (or all) at each of their positions, taken from the search's own logits. They are kept in Parquet shards: each
is written whole or not at all, so that a stopped run continues after the last one.

Source: AtSpeed, section 3.1 (D') and appendix A.3 (the sequences of the search's last step).
Axes: B batch, K sequences, L positions of the longest sequence, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.fingerprints import fingerprint_sequences
from hf_gr.catalogue.trie import PADDING
from hf_gr.files.atomic import replaced_file
from hf_gr.files.progress import progress_bar
from hf_gr.generation.models import fill_token
from hf_gr.generation.torch.fingerprints import probe_model
from hf_gr.generation.torch.mixin import GRGenerationMixin
from hf_gr.generation.torch.models import base_model, evaluation, is_sharded, takes_argument
from hf_gr.torch.processes import Processes
from hf_gr.torch.transition import DeviceCatalogue

from .mixture import Mixture
from .packing import pad_prompts, pad_rows, score_paths
from .paths import PathLevel, training_catalogue, training_snapshot, walk

FORMAT_VERSION = 1
SUMMARY_FILE = "teacher_data.json"
METADATA_KEY = b"hf_gr.teacher_data"
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
    full_vocabulary: bool | Literal["sequences"] = False,
    draft_model: Any = None,
    target_share: float = 1.0,
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
        full_vocabulary: keep the target's log-probabilities over the whole vocabulary at the label's positions, as
            WordKD and TVDKD need them: `2 * L * V` bytes per prompt. With `"sequences"`, also at the positions of the
            sequences, for an alignment without the catalogue (`AtSpeedTrainer(constrained=False)`): up to K times as
            much.
        draft_model: the draft model before its alignment, a decoder of the target's tokens on its device; only with
            a `target_share` below 1.
        target_share: the paper's lambda. Below 1, beams are those of `lambda * p + (1 - lambda) * q`, where q is the
            draft model: sequences that the draft would choose, too. Log-probabilities are the target's all the same,
            and sequences are kept in the order of its scores. Takes two beams or more.
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
    import_pyarrow()
    index, directory = copy.copy(index), Path(directory)
    _check_arguments(model, prompts, labels, num_beams=num_beams, batch_size=batch_size, shard_size=shard_size)
    snapshot = training_snapshot(index)
    config = base_model(model).config.get_text_config(decoder=True)
    if index.max_token_id >= config.vocab_size:
        raise ValueError(
            f"model has a vocabulary of {config.vocab_size} tokens, expected more than the catalogue's largest, "
            f"{index.max_token_id}: resize its embeddings, or use the model that the catalogue was made for"
        )
    _check_mixture(draft_model, target_share, num_beams, config.vocab_size)
    settings = {
        "format_version": FORMAT_VERSION,
        "num_beams": num_beams,
        "has_labels": labels is not None,
        "full_vocabulary": full_vocabulary,
        "shard_size": shard_size,
        "vocab_size": config.vocab_size,
        "max_length": snapshot.max_length,
        "eos_token_id": snapshot.eos_token_id,
        "index": fingerprint_sequences(snapshot),
        "model": probe_model(model),
        "draft_model": None if draft_model is None else probe_model(draft_model),
        "target_share": None if draft_model is None else target_share,
    }
    if not (isinstance(full_vocabulary, bool) or full_vocabulary == "sequences"):
        raise ValueError(f"full_vocabulary={full_vocabulary!r}, expected True, False or 'sequences'")
    if full_vocabulary is True and labels is None:
        raise ValueError("full_vocabulary=True without labels, expected labels: it is kept at the label's positions")
    processes = Processes()
    if processes.count > 1 and is_sharded(model):
        raise ValueError(
            "model is in pieces (FSDP or tensor parallelism), expected whole weights in every process: here shards of "
            "prompts are divided among processes, not weights"
        )
    num_there = processes.by_main(lambda: _prepare(directory, settings), doing="has refused the directory")
    device = next(base_model(model).parameters()).device
    catalogue = training_catalogue(snapshot, device)
    plan = _Plan(
        model, index, catalogue, device, num_beams, batch_size, snapshot.max_length, full_vocabulary, draft_model,
        target_share,
    )  # fmt: skip
    pairs = _shards(prompts, labels, shard_size)
    bar = progress_bar(
        "Asking the target model",
        lambda: len(prompts) if hasattr(prompts, "__len__") else None,  # pyright: ignore[reportArgumentType]
        unit="prompts",
        shown=progress and processes.is_main,
    )
    drafts = nullcontext() if draft_model is None else evaluation(draft_model)
    with evaluation(model), drafts, bar as advance:
        written = processes.by_all(
            lambda: _write_shards(plan, pairs, directory, settings, num_there, processes, advance)
        )
    if any(one != written[0] for one in written):
        raise ValueError("prompts or labels differ between processes, expected the same in all: use another directory")
    summary = settings | {"num_prompts": written[0][0], "num_shards": written[0][1]}
    processes.by_main(lambda: _write_summary(directory, summary), doing="could not write the summary")
    return directory


def shard_paths(directory: Path) -> list[Path]:
    """The complete shards of a directory, in order."""
    return sorted(directory.glob("teacher-[0-9]*.parquet"))


def read_shard_settings(path: Path) -> dict[str, Any]:
    """The settings of a shard, including the digest of its prompts."""
    _, parquet = import_pyarrow()
    metadata = parquet.read_schema(path).metadata or {}
    if METADATA_KEY not in metadata:
        raise ValueError(f"{path} holds no teacher data, expected a file of write_teacher_data: remove it")
    return json.loads(metadata[METADATA_KEY])


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
    full_vocabulary: bool | Literal["sequences"]
    draft_model: Any
    target_share: float


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
    label_log_probs: np.ndarray | None


def _prepare(directory: Path, settings: dict[str, Any]) -> int:
    """Create the folder, or refuse one of other data; return the number of its shards."""
    directory.mkdir(parents=True, exist_ok=True)
    _check_summary(directory, settings)
    return len(shard_paths(directory))


def _write_shards(
    plan: _Plan,
    shards: Iterable[list[tuple[Any, Any]]],
    directory: Path,
    settings: dict[str, Any],
    num_there: int,
    processes: Processes,
    advance: Callable[[int], None],
) -> tuple[int, int, str]:
    """Write the shards of this process; return how many prompts and shards there are in all, and their digest."""
    num_prompts, num_shards, whole = 0, 0, hashlib.sha256()
    for number, rows in enumerate(shards):
        rows = [_check_row(row, num_prompts + at, settings) for at, row in enumerate(rows)]
        path = directory / f"teacher-{number:05d}.parquet"
        digest = _rows_digest(rows)
        is_other = number % processes.count != processes.rank
        if is_other or _is_written(path, settings, digest, len(rows), is_last=number == num_there - 1):
            advance(len(rows))
        else:
            _write_shard(path, rows, _search_all(plan, rows, advance), settings | {"prompts": digest})
        num_prompts, num_shards = num_prompts + len(rows), number + 1
        whole.update(digest.encode())
    if not num_prompts:
        raise ValueError("prompts is empty, expected at least one")
    if num_shards < num_there:
        raise ValueError(
            f"{directory} has {num_there} shards, expected {num_shards} for {num_prompts} prompts: it holds data of "
            "more prompts; use another directory"
        )
    return num_prompts, num_shards, whole.hexdigest()


def _write_summary(directory: Path, summary: dict[str, Any]) -> None:
    with replaced_file(path := directory / SUMMARY_FILE, temporary=_temporary(path)) as file:
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
    mixture = None
    if plan.draft_model is not None:
        mixture = LogitsProcessorList([Mixture(plan.draft_model, mask, num_beams, plan.target_share)])
    out = plan.model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        constraint_index=plan.index,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        logits_processor=mixture,
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
    whole = plan.full_vocabulary == "sequences"
    if mixture is not None:
        _, _, chosen = _legal_log_probs(out.logits, sources, levels, num_beams, whole=False)
        order = chosen.sum(-1).masked_fill(~is_there[..., 0], -torch.inf).argsort(dim=-1, descending=True, stable=True)
        paths, sources = (one.gather(1, order[..., None].expand_as(one)) for one in (paths, sources))
        levels = walk(paths, plan.catalogue)
        is_there = torch.stack([level.is_there for level in levels], dim=-1)
    values, sizes, chosen = _legal_log_probs(out.logits, sources, levels, num_beams, whole=whole)
    if mixture is None and getattr(out, "sequences_scores", None) is not None:
        scores = out.sequences_scores.view(batch_size, num_beams)
    else:
        scores = chosen.sum(-1)
    scores = scores.masked_fill(~is_there[..., 0], -torch.inf)
    answers = _split(values, sizes)
    is_labelled = plan.full_vocabulary and rows[0].label is not None
    labels = _label_log_probs(plan, out, input_ids, mask, rows) if is_labelled else [None] * batch_size
    columns = (paths.int().cpu().numpy(), scores.float().cpu().numpy(), sizes, answers, labels)
    return [_Answer(*row) for row in zip(*columns, strict=True)]


def _legal_log_probs(
    logits: Sequence[Float[Tensor, "paths vocab"]],
    sources: Int[Tensor, "batch sequences length"],
    levels: Sequence[PathLevel],
    num_beams: int,
    *,
    whole: bool,
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray, Float[Tensor, "batch sequences length"]]:
    """Log-probabilities after distinct prefixes, over the legal children or `whole`, from the search's own logits.

    Returns:
        For every level the rows and the values, flat; `[B, L]` their number; and the values of the sequences' tokens.
    """
    flat: list[tuple[np.ndarray, np.ndarray]] = []
    sizes, tokens = [], []
    for number, level in enumerate(levels):
        width = logits[0].shape[-1]
        sizes.append(level.is_first.sum(1) * width if whole else level.stored.sum((1, 2)))
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
        if whole:
            kept = log_probs.clamp(min=LOWEST_LOG_PROB).half().flatten()
            flat.append((rows.repeat_interleave(width).cpu().numpy(), kept.cpu().numpy()))
        else:
            flat.append((np.repeat(rows.cpu().numpy(), legal.sum(-1).cpu().numpy()), values.cpu().numpy()))
        tokens.append(level.of_chosen(level.restore(values)).float().masked_fill(~level.is_there, 0.0))
    return flat, torch.stack(sizes, dim=-1).int().cpu().numpy(), torch.stack(tokens, dim=-1)


def _split(flat: Sequence[tuple[np.ndarray, np.ndarray]], sizes: np.ndarray) -> list[np.ndarray]:
    """Regroup values from levels, each in the order of rows, to rows, each in the order of levels."""
    rows = np.concatenate([rows for rows, _ in flat])
    values = np.concatenate([values for _, values in flat])
    values = values[np.argsort(rows, kind="stable")]
    return np.split(values, np.cumsum(sizes.sum(-1))[:-1])


def _label_log_probs(
    plan: _Plan, out: Any, input_ids: Int[Tensor, "batch prompt"], mask: Int[Tensor, "batch prompt"], rows: Any
) -> list[np.ndarray]:
    """The whole distributions at the labels' positions, with the prompt's keys from the search if they are there."""
    labels = pad_rows([row.label for row in rows], fill=PADDING).to(input_ids.device)
    width = labels.shape[1]
    first = out.logits[0][:: plan.num_beams][:, None]
    cache = out.past_key_values
    tokens = labels[:, :-1].clamp(min=0)
    if width == 1:
        logits = first
    elif _is_prompts_cache(cache, input_ids):
        steps = torch.arange(width - 1, device=input_ids.device)
        given: dict[str, Any] = {"attention_mask": torch.nn.functional.pad(mask, (0, width - 1), value=1)}
        if takes_argument(base_model(plan.model), "position_ids"):
            given["position_ids"] = mask.sum(-1, keepdim=True) + steps
        rest = plan.model(input_ids=tokens, past_key_values=cache, use_cache=True, return_dict=True, **given).logits
        logits = torch.cat([first, rest.float()], dim=1)
    else:
        logits = score_paths(plan.model, input_ids, mask, labels[:, None]).of_path(0)
    log_probs = logits.float().log_softmax(-1).clamp(min=LOWEST_LOG_PROB).half().cpu().numpy()
    return [log_probs[number, : len(row.label)] for number, row in enumerate(rows)]


def _is_prompts_cache(cache: Any, input_ids: Tensor) -> bool:
    """Whether a search has left the prompts' keys, one row a prompt, and nothing else."""
    layers = getattr(cache, "layers", None)
    if not layers or getattr(layers[0], "keys", None) is None:
        return False
    return layers[0].keys.shape[0] == len(input_ids) and cache.get_seq_length() == input_ids.shape[1]


def _write_shard(path: Path, rows: Sequence[_Row], answers: Sequence[_Answer], settings: dict[str, Any]) -> None:
    """Write one Parquet file, which gets its name once it is complete."""
    arrow, parquet = import_pyarrow()
    num_beams, length = answers[0].sequences.shape

    def ragged(arrays: Sequence[np.ndarray], kind: Any) -> Any:
        ends = np.cumsum([0, *(array.size for array in arrays)])
        values = np.concatenate([array.reshape(-1) for array in arrays])
        return arrow.LargeListArray.from_arrays(ends, arrow.array(values, type=kind))

    def fixed(arrays: Sequence[np.ndarray], kind: Any, size: int) -> Any:
        return arrow.FixedSizeListArray.from_arrays(arrow.array(np.concatenate(arrays, axis=None), type=kind), size)

    columns = {
        "input_ids": ragged([row.prompt for row in rows], arrow.int32()),
        "sequences": fixed([answer.sequences for answer in answers], arrow.int32(), num_beams * length),
        "scores": fixed([answer.scores for answer in answers], arrow.float32(), num_beams),
        "level_sizes": fixed([answer.level_sizes for answer in answers], arrow.int32(), length),
        "log_probs": ragged([answer.log_probs for answer in answers], arrow.float16()),
    }
    if settings["has_labels"]:
        columns["label"] = ragged([row.label for row in rows if row.label is not None], arrow.int32())
    full = [answer.label_log_probs for answer in answers if answer.label_log_probs is not None]
    if full:
        columns["label_log_probs"] = ragged(full, arrow.float16())
    table = arrow.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(settings).encode()})
    with replaced_file(path, temporary=_temporary(path)) as file:
        parquet.write_table(table, file, compression="zstd", use_dictionary=False)


def _temporary(path: Path) -> Path:
    """A file's name until it is complete: the same in every run, so that the next one replaces what a kill left."""
    return path.with_name(f".{path.name}.tmp")


def _is_written(path: Path, settings: dict[str, Any], digest: str, num_rows: int, *, is_last: bool) -> bool:
    """Whether a shard exists; refuses one of other settings or prompts, except a truncated last one."""
    if not path.exists():
        return False
    there = read_shard_settings(path)
    _refuse_other(path, there, settings)
    if there["prompts"] == digest:
        return True
    _, parquet = import_pyarrow()
    if is_last and parquet.read_metadata(path).num_rows < num_rows:
        return False  # there are more prompts than last time
    raise ValueError(
        f"{path} holds data of other prompts or labels, expected those that are given: use another directory"
    )


def _check_summary(directory: Path, settings: dict[str, Any]) -> None:
    path = directory / SUMMARY_FILE
    if path.exists():
        _refuse_other(path, json.loads(path.read_text(encoding="utf-8")), settings)
    elif shards := shard_paths(directory):
        _refuse_other(shards[0], read_shard_settings(shards[0]), settings)


def _refuse_other(path: Path, there: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if there.get(name) != value:
            raise ValueError(
                f"{path} was written with {name}={there.get(name)!r}, expected {value!r} as in this call: "
                "use another directory, or the same arguments"
            )


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


def _check_mixture(draft_model: Any, target_share: float, num_beams: int, vocab_size: int) -> None:
    if not 0 <= target_share <= 1:
        raise ValueError(f"target_share={target_share!r}, expected 0 to 1: lambda of the paper")
    if (draft_model is None) != (target_share == 1):
        found = "no draft_model" if draft_model is None else "a draft_model"
        raise ValueError(
            f"target_share={target_share!r} with {found}, expected both a draft_model and a share below 1, or neither"
        )
    if draft_model is None:
        return
    if num_beams < 2:
        raise ValueError(f"num_beams={num_beams} with draft_model, expected 2 or more: beams are chosen by a mixture")
    inner = base_model(draft_model)
    if inner.config.is_encoder_decoder:
        raise ValueError(f"draft_model is a {type(inner).__name__}, expected a decoder")
    found = inner.config.get_text_config(decoder=True).vocab_size
    if found < vocab_size:
        raise ValueError(
            f"draft_model has a vocabulary of {found} tokens, expected the target's {vocab_size} or more: build it "
            "with the target's tokenizer"
        )


def _shards(prompts: Iterable[Prompt], labels: Iterable[Prompt] | None, size: int) -> Iterator[list[tuple[Any, Any]]]:
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


def import_pyarrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet module, from an extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('teacher data needs pyarrow: pip install "hf-gr[tables]"') from error
    return pyarrow, pyarrow.parquet
