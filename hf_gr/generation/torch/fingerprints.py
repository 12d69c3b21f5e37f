# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of models. The values are on users' disks: those of existing data never change.

There are two. A run of `recommend` resumes only if every bit of the model is the same. Teacher data, which takes long
to make, is rewritten only for another model, which a few of its weights identify at once.
"""

import hashlib
from operator import itemgetter
from typing import Any

import torch
from accelerate.utils import align_module_device

from hf_gr.generation.models import UNDECIDING

from .models import base_model

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
PROBED_WEIGHTS = 64  # of each parameter


def fingerprint_model(model: Any) -> str:
    """A digest of a model's config and weights, the same on every device: their bits are added up as integers."""
    config = model.config.to_dict()
    digest = hashlib.sha256(type(model).__name__.encode())
    for name in sorted(set(config) - UNDECIDING):
        digest.update(f"{name} {config[name]!r}".encode())
    with torch.no_grad():
        for prefix, module in sorted(model.named_modules()):
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            with align_module_device(module):  # weights that are on the disk
                for name, _ in sorted(tensors, key=itemgetter(0)):
                    tensor = getattr(module, name)
                    digest.update(f"{prefix} {name} {list(tensor.shape)} {tensor.dtype}".encode())
                    digest.update(_sums_of_bits(tensor).encode())
    return digest.hexdigest()


def _sums_of_bits(tensor: torch.Tensor) -> str:
    """Sums of all and of every other value, as integers: unlike floats' sums, they do not depend on order."""
    if not tensor.numel():
        return ""
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(INTEGERS[bits.element_size()]) if bits.element_size() in INTEGERS else bits.long()
    return f"{int(bits.sum(dtype=torch.int64))} {int(bits[1::2].sum(dtype=torch.int64))}"


def probe_model(model: Any) -> str:
    """A digest of a model's names, shapes and some weights of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in base_model(model).named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // PROBED_WEIGHTS)][:PROBED_WEIGHTS].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + some.tobytes())
    return digest.hexdigest()
