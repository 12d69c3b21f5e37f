# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters under dotted names, as attributes of nnx modules. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx
from jaxtyping import Array


class Parameters(nnx.Module):
    """Parameters, and groups of them, as attributes, such as `self_attn.q_proj.weight`.

    Args:
        arrays: by dotted names; numbers become places of an `nnx.List`.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        for name, group in _groups(arrays).items():
            setattr(self, name, _to_node(group))


def _groups(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    groups: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = array
    return groups


def _to_node(group: Mapping[str, Array]) -> nnx.Module | nnx.Param:
    if "" in group:
        return nnx.Param(group[""])
    if group and all(name[0].isdigit() for name in group):
        parts = _groups(group)
        # Places without parameters, such as activations, are empty modules.
        return nnx.List([_to_node(parts.get(str(place), {})) for place in range(max(map(int, parts)) + 1)])
    return Parameters(group)
