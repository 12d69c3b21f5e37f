# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of a batch in their own forwards: equal ones once, and short ones without the padding of long ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_gr.generation import internals
from hf_gr.generation.models import growing_angles

from .caches import SlotLayer, cache_of
from .layouts import may_take_nodes
from .models import decoder_config, is_patched, layer_types
from .prompts import positions_of

# Tokens that take as long as a forward that has none: the weights are read, and the host says what to do.
OF_A_FORWARD = {"cpu": 192}
OF_A_FORWARD_ELSEWHERE = 2**14


def prefill_in_groups(
    model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any], *, room: int, synced_gpus: bool
) -> Any:
    """`internals.prefill` of left-padded prompts, with the same outputs; in one forward where groups save nothing."""
    num_rows, width = input_ids.shape
    spare = OF_A_FORWARD.get(input_ids.device.type, OF_A_FORWARD_ELSEWHERE)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if (
        num_rows > 1
        and num_rows * width > spare
        and not (synced_gpus or model.training or is_patched(model) or model.config.is_encoder_decoder)
        and set(layer_types(text := decoder_config(model))) == {"full_attention"}
        and all(width <= limit for limit in growing_angles(text).values())
        and not any(
            one._forward_hooks or one._forward_pre_hooks for one in model.modules()
        )  # which may tell rows apart
        and may_take_nodes(model, config, kwargs)
        and mask.shape == input_ids.shape
        and (positions is None or torch.equal(positions, positions_of(mask)))  # as everybody's are
    ):
        seen, tokens = mask.cpu().numpy() != 0, input_ids.cpu().numpy()
        rows = [row[width - int(one.sum()) :] for row, one in zip(tokens, seen, strict=True)]
        if all(one[width - len(row) :].all() for row, one in zip(rows, seen, strict=True)):
            groups, like, num_shared = groups_of(rows, spare)
            num_computed = sum(len(group) * (len(rows[group[0]]) - num_shared) for group in groups) + num_shared
            if num_computed + spare * (len(groups) - 1 + (num_shared > 0)) < num_rows * width:
                parts = _Parts(model, input_ids, config, kwargs, mask, [len(row) for row in rows])
                return parts.outputs(groups, like, num_shared, room)
    return internals.prefill(model, input_ids, config, kwargs)


def groups_of(rows: Sequence[NDArray[Any]], spare: int) -> tuple[list[list[int]], list[int], int]:
    """How prompts are computed: rows in groups, the longest first, each with at most `spare` tokens of padding.

    And for every row the one that is computed for it, its equal; and how many first tokens all share, computed once.
    """
    first: dict[bytes, int] = {}
    like = [first.setdefault(row.tobytes(), number) for number, row in enumerate(rows)]
    groups: list[list[int]] = []
    longest = padding = 0
    for number in sorted(first.values(), key=lambda number: -len(rows[number])):
        padding += longest - len(rows[number])
        if not groups or padding > spare:
            groups.append([])
            longest, padding = len(rows[number]), 0
        groups[-1].append(number)
    shortest = min(len(row) for row in rows) - 1  # something is left of each
    begun = np.stack([rows[number][:shortest] for number in first.values()])
    num_shared = int((begun == begun[:1]).all(axis=0).cumprod().sum())
    return groups, like, num_shared if num_shared * (len(first) - 1) > spare else 0


@dataclass(frozen=True)
class _Parts:
    """A batch that is computed in parts."""

    model: Any
    input_ids: Tensor
    config: Any
    kwargs: dict[str, Any]
    mask: Tensor
    lengths: Sequence[int]

    def outputs(self, groups: Sequence[Sequence[int]], like: Sequence[int], num_shared: int, room: int) -> Any:
        """As if all rows had been computed in one forward."""
        num_rows, width = self.input_ids.shape
        starts = [width - length for length in self.lengths]
        first = starts[groups[0][0]]
        shared = self._forward(groups[0][:1], slice(first, first + num_shared), None) if num_shared else None
        made: list[tuple[Tensor, Tensor]] = []
        logits: Any = None
        for group in groups:
            last = slice(starts[group[0]] + num_shared, width)
            part = self._forward(group, last, shared)
            rows = [row for row in range(num_rows) if like[row] in group]
            places = [group.index(like[row]) for row in rows]
            if logits is None:
                logits = part.logits.new_empty((num_rows, *part.logits[:, -1:].shape[1:]))
            logits[rows] = part.logits[places, -1:]
            for number, layer in enumerate(part.past_key_values.layers):
                if number == len(made):
                    shape = (num_rows, layer.keys.shape[1], width + room)
                    made.append(tuple(one.new_zeros((*shape, one.shape[-1])) for one in (layer.keys, layer.values)))
                for own, into in zip((layer.keys, layer.values), made[number], strict=True):
                    into[rows, :, last] = own[places, :, num_shared:]
                layer.keys = layer.values = own = None  # or all would be there twice
        cache: Any = DynamicCache()
        for number, buffers in enumerate(made):
            if shared is not None:
                columns = np.add.outer(starts, range(num_shared))
                layer = shared.past_key_values.layers[number]
                for own, into in zip((layer.keys, layer.values), buffers, strict=True):
                    into[np.arange(num_rows)[:, None], :, columns] = own.transpose(1, 2)
            cache.layers.append(SlotLayer.of_buffers(*buffers, used=width))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    def _forward(self, rows: Sequence[int], columns: slice, shared: Any) -> Any:
        """Some tokens of some rows, after those that all share, which are not read again where a row is shorter."""
        tokens, mask, cache = self.input_ids[rows, columns], self.mask[rows, columns], DynamicCache()
        if shared is not None:
            of = [(layer.keys, layer.values) for layer in shared.past_key_values.layers]
            cache = cache_of(tuple(one.expand(len(rows), -1, -1, -1) for one in layer) for layer in of)
            num_shared = cache.get_seq_length()
            begun = self.input_ids[rows[:1], columns.start - num_shared : columns.start].expand(len(rows), -1)
            is_own = self.mask[rows].cumsum(1)[:, columns] > num_shared
            tokens, mask = torch.cat([begun, tokens], 1), torch.cat([torch.ones_like(begun), is_own.to(mask)], 1)
        own = {"attention_mask": mask, "position_ids": positions_of(mask), "past_key_values": cache}
        return internals.prefill(self.model, tokens, self.config, self.kwargs | own)
