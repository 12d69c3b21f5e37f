# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""GPT-2's checkpoints: their config, and how their parameters become those of a decoder. Knows no forward.

GPT-2 is a decoder with learned positions, norms with biases and no gate; its matrices are `[in, out]`, and q, k and v
are one of them.

Axes: V vocabulary, H heads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from .arrays import view
from .spec import EMBEDDING, HEAD, LAYERS, NORM, POSITIONS, Arrays, DecoderSpec, check_activation

PREFIX = "transformer."
_LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)\.(weight|bias)")
_TOP = {
    "transformer.wte.weight": EMBEDDING,
    "transformer.wpe.weight": POSITIONS,
    "transformer.ln_f.weight": f"{NORM}.weight",
    "transformer.ln_f.bias": f"{NORM}.bias",
}
_PARTS = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


@dataclass(frozen=True)
class GPT2Spec(DecoderSpec):
    """The static facts of a GPT-2."""

    @classmethod
    def from_config(cls, config: Any) -> GPT2Spec:
        """Read a `GPT2Config`.

        Raises:
            NotImplementedError: a field that is not implemented here; the message names the field.
        """
        for field, expected in (("add_cross_attention", False), ("scale_attn_by_inverse_layer_idx", False)):
            if (value := getattr(config, field)) != expected:
                raise NotImplementedError(
                    f"config.{field}={value!r}, expected {expected!r}: not implemented in Flax; use backend='torch'"
                )
        head_dim = config.n_embd // config.n_head
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.n_inner or 4 * config.n_embd,
            num_layers=config.n_layer,
            num_heads=config.n_head,
            num_key_value_heads=config.n_head,
            head_dim=head_dim,
            activation=check_activation(config, "activation_function"),
            norm_eps=config.layer_norm_epsilon,
            scale=head_dim**-0.5 if config.scale_attn_weights else 1.0,
            norm="layer",
            is_gated=False,
            num_positions=config.n_positions,
            is_tied=bool(config.tie_word_embeddings),
        )

    @property
    def embedding(self) -> str:
        """See `DecoderSpec.embedding`."""
        return "transformer.wte.weight"

    @property
    def aliases(self) -> dict[str, str]:
        """See `DecoderSpec.aliases`: the first checkpoints have no prefix."""
        bare = {name.removeprefix(PREFIX): name for name in self.shapes() if name != HEAD}
        return bare | ({HEAD: self.embedding} if self.is_tied else {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `DecoderSpec.shapes`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes = {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }
        layer: dict[str, tuple[int, ...]] = {}
        for name in ("ln_1", "ln_2"):
            layer |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
        for name, size in sizes.items():
            layer |= {f"{name}.weight": size, f"{name}.bias": size[1:]}
        assert self.num_positions is not None
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (self.vocab_size, hidden),
            "transformer.wpe.weight": (self.num_positions, hidden),
        }
        for place in range(self.num_layers):
            shapes |= {f"transformer.h.{place}.{name}": shape for name, shape in layer.items()}
        shapes |= {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
        return shapes if self.is_tied else {**shapes, HEAD: (self.vocab_size, hidden)}

    def arrange(self, arrays: Arrays) -> Arrays:
        """See `DecoderSpec.arrange`."""
        found: dict[str, Array] = {}
        for name, array in arrays.items():
            match = _LAYER.fullmatch(name)
            if match is None:
                found[_TOP.get(name, name)] = array
                continue
            place, part, kind = match.groups()
            array = view(array)
            rows = array.T if array.ndim == 2 else array  # [out, in], or a bias
            if part == "attn.c_attn":
                of_part = zip("qkv", range(0, 3 * self.hidden_size, self.hidden_size), strict=True)
                parts = {f"self_attn.{one}_proj": rows[start : start + self.hidden_size] for one, start in of_part}
            else:
                parts = {_PARTS[part]: rows}
            found |= {f"{LAYERS}.{place}.{own}.{kind}": value for own, value in parts.items()}
        return found
