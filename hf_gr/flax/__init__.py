# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding and models in JAX, for TPUs: the PyTorch side's names for the same things, and models of its own.

Knows no PyTorch. Needs the extra `flax`.
"""

from importlib.util import find_spec

for _package in ("jax", "flax"):
    if find_spec(_package) is None:
        raise ImportError(f'hf_gr.flax needs {_package}: pip install "hf-gr[flax]"', name=_package)
