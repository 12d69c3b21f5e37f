# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls with ever new models, catalogues, views, exclusions and shapes: nothing of them stays in memory.

One case is one call; `--fuzz-cases 10000` makes so many. Flax is left out: XLA keeps a program for every shape.
"""

import ctypes
import gc
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from families import VOCABULARY, build

import hf_gr
from hf_gr import ConstraintIndex

pytestmark = pytest.mark.slow

LOOK_EVERY = 100  # calls; a look counts a million objects
CALLS_PER_MODEL = 10
JUDGED_FROM = 1000  # calls, half a minute: in shorter runs caches by class and by option still fill
FAMILIES = ("qwen3", "gpt2", "mistral", "t5", "bart")
# Growth is judged over the second half of the calls. What fills once (a cache by class or by option, the allocator's
# pools) is filled by then, but for rare options, which SLACK allows for. What a call keeps is 1 object a call or more,
# what a model keeps is tens of modules a model, so several a call.
OBJECTS_PER_CALL, SLACK = 0.05, 30
# The allocator's pools move by a few MB. Over 5,000 calls this is 2 KB a call: less than a call's smallest array with
# its header, and a hundredth of a model.
MEGABYTES = 10.0


def look() -> Counter[str]:
    """Living objects by type, and memory in MB."""
    gc.collect()
    with suppress(OSError, AttributeError):  # other systems than Linux with glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    objects = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    objects["megabytes"] = psutil.Process().memory_info().rss // 10**6
    return objects


class Caller:
    """Makes calls that have as much new about them as can be."""

    def __init__(self) -> None:
        self.calls = 0
        self.model: Any = None
        self.index: Any = None

    def __call__(self, rng: np.random.Generator) -> Any:
        if self.calls % CALLS_PER_MODEL == 0:
            family = str(rng.choice(FAMILIES))
            self.model = hf_gr.enable(build(family, seed=int(rng.integers(1000))))
            rows = rng.integers(3, VOCABULARY, size=(int(rng.integers(20, 60)), 3))
            self.index = ConstraintIndex.from_sequences(rows, item_ids=list(range(len(rows))))
            if not self.model.config.is_encoder_decoder:
                self.model.add_draft_head([list(range(3, VOCABULARY))] * 3, use_placeholders=False)
        self.calls += 1
        index, ids = self.index, list(self.index.item_ids)
        if rng.random() < 0.2:
            index.add(rng.integers(3, VOCABULARY, size=(1, 3)), [10_000 + self.calls])
            index.remove([ids[0]])
            ids = ids[1:]
        num_rows, length, beams = (int(rng.integers(1, end)) for end in (4, 12, 6))
        views = [index.where(rng.permutation(ids)[: len(ids) // 2].tolist()) for _ in range(num_rows)]
        excluded = [rng.permutation(ids)[:3].tolist() for _ in range(num_rows)]
        draftings: list[Any] = [None, "trie", "auto", *["head"] * (not self.model.config.is_encoder_decoder)]
        return self.model.generate(
            torch.from_numpy(rng.integers(3, VOCABULARY, size=(num_rows, length))),
            constraint_index=[index, views[0], views][int(rng.integers(3))],
            exclude_items=excluded if rng.random() < 0.5 else None,
            num_beams=beams,
            num_return_sequences=beams,
            drafting=draftings[int(rng.integers(len(draftings)))],
            return_dict_in_generate=True,
            output_scores=bool(rng.random() < 0.5),
            use_cache=bool(rng.random() < 0.9),
        )


def test_nothing_of_a_call_stays(fuzz: Any) -> None:
    caller, looks = Caller(), list[Counter[str]]()
    for case in fuzz:
        caller(case.rng)
        if caller.calls % LOOK_EVERY == 0:
            looks.append(look())
    if len(looks) > 2 and caller.calls >= JUDGED_FROM:
        half = (len(looks) - 1) // 2
        allowed = SLACK + OBJECTS_PER_CALL * LOOK_EVERY * (len(looks) - 1 - half)
        grown = {name: number - looks[half][name] for name, number in looks[-1].items()}
        grown = {name: more for name, more in grown.items() if more > (MEGABYTES if name == "megabytes" else allowed)}
        assert not grown, f"in the second half of {caller.calls} calls"
    fuzz.count(models=1 + (caller.calls - 1) // CALLS_PER_MODEL)
