# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a decode launches beside the model, and what memory it makes, at the sizes of a real vocabulary and wide beams.

Counted on the pretend CUDA device: every operation is at least one kernel, and some ten microseconds of the host.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import build, prompts
from pretend_cuda import PretendCuda, as_one_operation, on_device

from hf_gr import ConstraintIndex, enable
from hf_gr.generation.torch import mixin
from hf_gr.torch import log_probs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is there: pytest -m gpu")

NUM_BEAMS, VOCABULARY, LENGTH, LEVELS = 512, 151_936, 200, 3
MOST_OPERATIONS = 50  # a level, beside the model
HEAD_DIM = 16  # a mask of beams and query heads is as large as keys of few numbers
MODEL = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "max_position_embeddings": 256, "head_dim": HEAD_DIM}
INDEX = ConstraintIndex.from_sequences(
    np.random.default_rng(0).integers(0, 8192, size=(20_000, LEVELS)) + VOCABULARY - 8192
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendCuda]:
    monkeypatch.setattr(log_probs, "_compiled", lambda: as_one_operation(log_probs._log_probs))
    with PretendCuda() as cuda:
        yield cuda


def test_a_level_takes_few_operations_and_little_memory(cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, logs = mixin.decode, []

    def counted(scorer: Any, *args: Any) -> Any:
        """The loop after the prefill; what the model does is counted apart."""
        prefilled, model = scorer.begin(), scorer.model
        scorer.begin = lambda levels=(): prefilled

        def forward(*args: Any, **kwargs: Any) -> Any:
            with cuda.within("model"):
                return model(*args, **kwargs)

        scorer.model = forward
        logs.append(cuda.clear())
        with cuda.within("decode"):
            return decode(scorer, *args)

    model, inputs = enable(build("qwen3", config=MODEL, dtype=torch.bfloat16)).cuda(), on_device(prompts(1, LENGTH))
    model.generate(**inputs, constraint_index=INDEX, num_beams=2)  # moves the catalogue, tries kernels
    monkeypatch.setattr(mixin, "decode", counted)
    model.generate(**inputs, constraint_index=INDEX, num_beams=NUM_BEAMS, num_return_sequences=NUM_BEAMS)
    (log,) = logs
    assert log.operations["decode"] <= MOST_OPERATIONS * LEVELS
    assert not log.waits
    logits = NUM_BEAMS * VOCABULARY
    for made in log.made:
        number = made.shape.numel()
        assert number < logits or (made.region, made.dtype) == ("model", torch.bfloat16), made
        assert number < NUM_BEAMS * LENGTH * HEAD_DIM or number == logits or made.shape[-1] == VOCABULARY, made
        # No copy of the prompt's keys, with or without those of the beams.
        is_of_keys = len(made.shape) > 1 and made.shape[-1] == HEAD_DIM and made.shape[-2] >= LENGTH
        assert not is_of_keys or made.shape[-2] % NUM_BEAMS == 0, made
    assert max(made.num_bytes for made in log.made if made.region == "decode") < 2**26
