# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A language model of transformers as classification sees it: checked once, then asked about prompts. Knows no label.

Axes: B batch, P prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_gr.catalogue.fanout import Longs
from hf_gr.generation.models import growing_angles, start_token
from hf_gr.generation.torch.layouts import prefilled, takes_tree
from hf_gr.generation.torch.models import base_model, decoder_config, output_size_of
from hf_gr.generation.torch.sliced_head import sliced_head
from hf_gr.torch.scorers import TreeScorer

Prompts = tuple[Longs, Longs]  # `[B, P]` tokens, and their mask


class LabelModel:
    """A model that can score the nodes of a tree after a prompt, also in wrappers for training and with adapters."""

    def __init__(self, model: Any) -> None:
        adapter: Any = getattr(model, "active_peft_config", None)
        inner = base_model(model) if isinstance(model, torch.nn.Module) else None
        if not isinstance(inner, GenerationMixin):
            kind, is_flax = type(model).__name__, type(model).__module__.startswith("hf_gr.flax")
            why = ": classify runs on PyTorch (backend='torch')" if is_flax else ""
            raise ValueError(f"model is a {kind}, expected a language model of transformers{why}")
        if getattr(adapter, "is_prompt_learning", False):
            raise ValueError(
                f"model has a {adapter.peft_type.value} adapter, expected one of weights such as LoRA: a learned "
                "prefix is not supported"
            )
        if not takes_tree(inner):
            raise ValueError(
                f"model is a {type(inner).__name__}, which cannot score the nodes of a tree, "
                "expected another: its generate(constraint_index=...) finds the best labels"
            )
        self.model: Any = inner
        self.config, self.dtype = self.model.config, self.model.dtype
        self.vocab_size = output_size_of(inner)

    @property
    def broken(self) -> str:
        """What is wrong with a model that finds no label at all."""
        return (
            f"model gives logits that are no numbers, in {self.dtype}, expected finite ones: try bfloat16 or float32"
        )

    @property
    def bytes_of_keys(self) -> int:
        """About what the keys and values of one token take."""
        config = decoder_config(self.model)
        heads = config.num_attention_heads
        share = getattr(config, "num_key_value_heads", None) or heads
        return 2 * config.num_hidden_layers * config.hidden_size * share // heads * self.dtype.itemsize

    def batches(
        self, order: Sequence[int], lengths: Sequence[int], longest: int, batch_size: int
    ) -> list[Sequence[int]]:
        """Prompts in their order, so many at a time; LongRoPE turns all of a batch by the angles of its longest."""
        limit = growing_angles(decoder_config(self.model)).get("longrope")
        is_beyond = [limit is not None and length > limit for length in lengths]
        for number, length in enumerate(lengths):
            if limit is not None and not is_beyond[number] and length + longest - 1 > limit:
                raise ValueError(
                    f"texts[{number}] makes a prompt of {length} tokens, and labels have up to {longest}: angles "
                    f"change in between (rope_type='longrope', original_max_position_embeddings={limit}), expected "
                    f"all on one side: pass max_length={limit - longest + 1}"
                )
        parts = [[row for row in order if is_beyond[row] == is_part] for is_part in (True, False)]
        return [part[start : start + batch_size] for part in parts for start in range(0, len(part), batch_size)]

    def to_device(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Tokens and mask where the model reads them."""
        tokens, mask = (torch.from_numpy(array).to(self.model.device) for array in prompts)
        return tokens, mask

    def scorers(self, prompts: Prompts, *, width: int, only: Longs | None = None) -> Callable[[], TreeScorer]:
        """Makes scorers over a batch of prompts, which share one prefill; `width` nodes are expected of each.

        Of `only` these tokens logits are needed.
        """
        tokens, mask = self.to_device(prompts)
        if not self.config.is_encoder_decoder:
            head = None if only is None else sliced_head(self.model, [only])
            return prefilled(self.model, tokens, None, mask, width=width, head=head)
        start = start_token(self.model.generation_config, self.config)
        if start is None:
            raise ValueError("model has no decoder_start_token_id, expected one: set it in model.generation_config")
        return prefilled(self.model, torch.full_like(tokens[:, :1], start), tokens, mask, width=width)
