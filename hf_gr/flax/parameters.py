# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters under dotted names, as attributes of nnx modules. Knows no model."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array


class Parameters(nnx.Module):
    """Parameters by dotted names, as attributes such as `self_attn.q_proj.weight`; numbers become places of a list."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        for name, group in _groups(arrays).items():
            setattr(self, name, _to_node(group))


class Facts:
    """A module's data other than parameters: their names and `others`. Opaque to nnx, equal only to itself."""

    def __init__(self, names: Sequence[str], **others: Any) -> None:
        vars(self).update(others)
        self.names = tuple(names)
        self._get = attrgetter(*self.names, self.names[0])  # finds 300 parameters in 0.1 ms; of one name, a tuple too
        # Parameters, and what was made from them for every place in use.
        self._made: tuple[Sequence[Array], dict[Hashable, Any]] = ((), {})

    def arrays(self, module: Any) -> dict[str, Array]:
        """The parameters by name."""
        return {name: one.get_raw_value() for name, one in zip(self.names, self._get(module), strict=False)}

    def params(self, module: Any, where: Hashable, make: Callable[[dict[str, Array]], Any]) -> Any:
        """The result of `make` on the parameters; cached by `where` until a parameter is replaced."""
        named = self.arrays(module)
        arrays = [*named.values()]
        made_of, made = self._made
        if len(arrays) != len(made_of) or not all(map(is_, arrays, made_of)):
            made = {}
            self._made = (arrays, made)  # at once: other threads may be here
        if where in made:
            return made[where]
        params = make(named)
        if any(isinstance(array, Tracer) for array in jax.tree.leaves(params)):
            self._made = ((), {})
        else:
            made[where] = params
        return params


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
