# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `evaluate` measures: on a file of rows, and on some single users. Knows no processes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from hf_gr.answering.requests import Request
from hf_gr.catalogue import ConstraintIndex
from hf_gr.files.tables import pyarrow

from .job import Job
from .metrics import RankingTotals
from .users import Users


def count_rows(
    output: Path, index: ConstraintIndex, cutoffs: tuple[int, ...], new_items: Collection[Any] | None
) -> dict[str, Any]:
    """Metrics of a file of rows, read in pieces."""
    totals, of_new = RankingTotals(cutoffs), RankingTotals(cutoffs)
    groups: dict[str, RankingTotals] = {}
    seen: set[Any] = set()
    num_items = num_invalid = 0
    with pyarrow.parquet.ParquetFile(output) as reader:
        for batch in reader.iter_batches(8192):
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
            found = {item for items in columns["items"] for item in items}
            unknown = found - seen
            listed = list(unknown)
            invalid = {item for item, there in zip(listed, index.has_items(listed), strict=True) if not there}
            seen |= unknown
            for row, (items, targets) in enumerate(zip(columns["items"], columns["targets"], strict=True)):
                if columns["error"][row] is not None if "error" in columns else False:
                    continue
                num_items += len(items)
                num_invalid += sum(item in invalid for item in items)
                totals.add(items, targets)
                if "group" in columns:
                    groups.setdefault(str(columns["group"][row]), RankingTotals(cutoffs)).add(items, targets)
                is_new = columns["is_new"][row] if "is_new" in columns else targets[0] in (new_items or ())
                if is_new:
                    of_new.add(items, targets)
    return {
        "metrics": totals.means(),
        "groups": {name: _with_size(groups[name]) for name in sorted(groups)},
        "new_items": _with_size(of_new) if new_items is not None or "is_new" in reader.schema_arrow.names else {},
        "coverage": len(seen) / max(1, len(set(index.item_ids))),
        "filled": num_items / max(1, totals.num_users * cutoffs[-1]),
        "invalid": num_invalid / max(1, num_items),
    }


def _with_size(totals: RankingTotals) -> dict[str, float]:
    return {"num_users": totals.num_users, **totals.means()}


def time_users(job: Job, users: Users, num_users: int) -> tuple[float | None, float | None]:
    """Mean seconds to answer one user alone, and the share of beams that are no item without the catalogue."""
    requests = job.maker(next(users.windows(num_users))).requests if num_users else []
    if not requests:
        return None, None
    decoder = job.decoder
    decoder.answer(requests[:1])  # warm-up: the first call is slower
    seconds = []
    for request in requests:
        start = perf_counter()
        decoder.answer([request])  # its items are on the host: the device has finished
        seconds.append(perf_counter() - start)
    return fmean(seconds), fmean(_free_invalid(job, request) for request in requests)


def _free_invalid(job: Job, request: Request) -> float:
    """The share of beams that are no item when the model generates without its catalogue."""
    decoder = job.decoder
    prompts = decoder.prompts([request])
    sequences: torch.Tensor = decoder.model.generate(
        **prompts,
        constraint_index=False,
        num_beams=decoder.num_beams,
        num_return_sequences=decoder.top_k,
        max_new_tokens=decoder.index.max_length,
        min_new_tokens=None,
        do_sample=False,
    )
    length = 1 if decoder.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
    # Not `index.items`, which refuses what goes on after an item: a free beam may.
    found = decoder.index.snapshot.items(sequences[:, length:].cpu().numpy())
    return sum(not items for items in found) / len(found)
