# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models run faster on one thread
# Programs of tiny models compile in half the time without LLVM's optimisations.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so large that all catalogues of `flax_catalogues` fit the first: one program serves them."""
    from hf_gr.flax import transition

    monkeypatch.setattr(transition, "SMALLEST", 4096)
    monkeypatch.setattr(transition, "CHILDREN", 8)
    monkeypatch.setattr(transition, "HIDDEN_NODES", 64)
