# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs that `generate` compiles in JAX, each with a call that compiles it; and what compilers say of them.

Tests lower all of them for TPUs. Everything is random and made on the spot: models, heads, catalogues, prompts.

A TPU is not needed to compile for one: `pip install libtpu` (the version of `jax[tpu]`) brings the compiler, and
`tpu_devices` describes chips that are not there.

Axes: B batch, P prompt, K beams, L tokens of an item, D and M devices along "data" and "model".
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from transformers import Qwen3Config, T5Config

from hf_gr import ConstraintIndex, enable
from hf_gr.files.draft_head_config import DraftHeadConfig
from hf_gr.flax.devices import settings_of_ours
from hf_gr.flax.draft_head import DraftHead, shapes_of
from hf_gr.flax.families import to_spec
from hf_gr.flax.model import FlaxModel, random_arrays
from hf_gr.generation.flax import mixin

# Where `generate` finds what `jax.jit` has compiled.
COMPILED: tuple[tuple[Any, str], ...] = ((mixin, "decode_program"), (mixin, "decode_on_mesh"))
PAD, EOS, FIRST_CODE = 0, 1, 2
# Random weights of unit gain make logits that hardly differ.
GAIN = 2.0


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    layers: int = 1
    hidden: int = 32
    intermediate: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 64


TINY = Shape()


@dataclass(frozen=True)
class Size:
    """How large everything is.

    Attributes:
        shape: of the model; T5 takes the same widths.
        items: number of items.
        length: L.
        codes: of every level.
    """

    shape: Shape = TINY
    items: int = 200
    length: int = 3
    codes: int = 20
    batch: int = 2
    prompt: int = 20
    beams: int = 4


@dataclass(frozen=True)
class Program:
    """What tells a program from all others.

    Attributes:
        options: of `generate`, beside beams.
        family: of the model.
        catalogue: which one, of `Bench.catalogues`.
        has_head: whether the model has a draft head.
        has_assistant: whether another model drafts, of the same shape and with other weights.
        mesh: D and M; None for one device.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    catalogue: str = "fixed"
    has_head: bool = False
    has_assistant: bool = False
    mesh: tuple[int, int] | None = None


PATHS = {"num_beams": 1, "num_return_sequences": 1}
SAMPLES = {"do_sample": True, "temperature": 2.0, "top_k": 10, "top_p": 0.95, "min_p": 0.01}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
PROGRAMS: dict[str, Program] = {
    "beams": Program(),
    "greedy": Program(PATHS),
    "sampled paths": Program(SAMPLES | {"num_beams": 1}),
    "sampled beams": Program(SAMPLES, catalogue="ragged"),
    "all scores": Program(DETAILS | {"renormalize_logits": True}),
    "lengths": Program(
        {"length_penalty": 0.5, "early_stopping": True, "forced_eos_token_id": EOS}, catalogue="ragged"
    ),
    "several rules": Program(catalogue="views"),
    "exclusions": Program(catalogue="excluded"),
    "additions": Program(catalogue="added"),
    "trie": Program({"drafting": "trie"}),
    "trie, little room": Program({"drafting": "trie", "draft_token_budget": 24}, catalogue="ragged"),
    "head": Program({"drafting": "head"}, has_head=True),
    "head, verified": Program({"drafting": "head", "verification": "strict"}, has_head=True),
    "draft model": Program(has_assistant=True),
    "draft model, relaxed": Program(SAMPLES | {"verification": "relaxed"}, has_assistant=True),
    "t5": Program(family="t5", catalogue="ragged"),
    "t5, trie": Program({"drafting": "trie"}, family="t5"),
    "suppressed tokens": Program({"suppress_tokens": [5], "begin_suppress_tokens": [6]}),
}
ON_MESHES: dict[str, Program] = {
    "data": Program(mesh=(4, 1)),
    "data, all scores": Program(DETAILS, catalogue="views", mesh=(4, 1)),
    "model": Program(mesh=(1, 4)),
    "both, trie": Program({"drafting": "trie"}, mesh=(2, 2)),
    "both, t5 samples": Program(SAMPLES, family="t5", catalogue="excluded", mesh=(2, 2)),
}


class Bench:
    """Models, catalogues and prompts, made when they are needed first.

    Args:
        size: how large they are.
        dtype: of the models, whose numbers are the same in all of them but for rounding.
        seed: of everything random.
    """

    def __init__(self, size: Size | None = None, *, dtype: str = "float32", seed: int = 0) -> None:
        self.size = Size() if size is None else size
        self.dtype = dtype
        self.seed = seed
        self.model = cache(self._model)

    def _model(self, family: str = "qwen3", has_head: bool = False) -> Any:
        """A random model with `generate`."""
        config = config_of(self.size.shape, family)
        arrays = random_arrays(to_spec(config), nnx.Rngs(self.seed))
        scaled = {name: array if array.ndim == 1 else GAIN * array for name, array in arrays.items()}
        model = enable(FlaxModel(config, arrays={name: array.astype(self.dtype) for name, array in scaled.items()}))
        if has_head:
            model.add_draft_head(self._head())
        return model

    def _head(self) -> DraftHead:
        size, after_codes = self.size, FIRST_CODE + self.size.codes
        placeholders = tuple(range(after_codes, after_codes + size.length))
        config = DraftHeadConfig(size.shape.hidden, (size.codes,) * size.length, placeholder_token_ids=placeholders)
        rng = np.random.default_rng(self.seed)
        arrays = {name: rng.normal(size=of) * of[-1] ** -0.5 for name, of in shapes_of(config).items()}
        codebooks = [np.arange(FIRST_CODE, after_codes)] * size.length
        return DraftHead(config, codebooks, arrays={name: jnp.asarray(of, self.dtype) for name, of in arrays.items()})

    @cached_property
    def assistant(self) -> Any:
        """A draft model."""
        return Bench(self.size, dtype=self.dtype, seed=self.seed + 1).model()

    @cached_property
    def index(self) -> ConstraintIndex:
        """Items of L codes."""
        return ConstraintIndex.from_sequences(self._codes(self.size.items))

    def _codes(self, items: int, *, seed: int = 0) -> Any:
        rng = np.random.default_rng(self.seed + seed)
        return rng.integers(FIRST_CODE, FIRST_CODE + self.size.codes, size=(items, self.size.length))

    def catalogue(self, name: str, batch: int) -> dict[str, Any]:
        """The catalogue of a call, and the items that its rows exclude.

        Args:
            name: "fixed", "ragged" (items of 1 to L codes), "views" (another one for each row), "excluded" (items of
                each row) or "added" (after additions and removals).
            batch: number of rows.
        """
        items, index = self.size.items, self.index
        if name == "ragged":
            rows = [row[: 1 + number % len(row)].tolist() for number, row in enumerate(self._codes(items))]
            index = ConstraintIndex.from_sequences(rows, eos_token_id=EOS)
        elif name == "added":
            index = index.where(range(items))
            index.add(self._codes(items // 20, seed=1), range(items, items + items // 20))
            index.remove(range(items // 20))
        if name == "views":
            return {"constraint_index": [index.where(range(row, items, 1 + row % 3)) for row in range(batch)]}
        excluded = {"exclude_items": [range(row, items, 7) for row in range(batch)]} if name == "excluded" else {}
        return {"constraint_index": index, **excluded}

    def call(
        self, program: Program, *, seed: int = 0, model: Any = None, assistant: Any = None, **changes: Any
    ) -> Any:
        """The answers of a call that this program serves.

        Args:
            program: which.
            seed: of the prompts and of the samples.
            model: another one's answers, also PyTorch's.
            assistant: what drafts for that one, if something does.
            changes: of the call's options.
        """
        size = self.size
        rng = np.random.default_rng([self.seed, seed])
        prompts = rng.integers(FIRST_CODE, FIRST_CODE + size.codes, size=(size.batch, size.prompt))
        mask = np.arange(size.prompt) >= np.arange(size.batch)[:, None] % size.prompt  # padding, on the left
        inputs = {"input_ids": np.where(mask, prompts, PAD), "attention_mask": mask.astype(int)}
        options = {"num_beams": size.beams, "num_return_sequences": size.beams, **program.options, **changes}
        options |= {"seed": seed} if options.get("do_sample") else {}
        options |= {} if program.mesh is None else {"mesh": jax.make_mesh(program.mesh, ("data", "model"))}
        options |= {"assistant_model": self.assistant if model is None else assistant} if program.has_assistant else {}
        if model is None:
            model = self.model(program.family, program.has_head)
        elif isinstance(model, torch.nn.Module):
            inputs = {name: torch.from_numpy(values) for name, values in inputs.items()}
        generate: Any = model.generate
        return generate(**inputs, **self.catalogue(program.catalogue, size.batch), **options)

    def take(self, program: Program, **changes: Any) -> Taken:
        """The program that such a call runs, with its arguments: nothing is compiled."""
        found: list[Taken] = []

        def instead(function: Any, *arguments: Any) -> None:
            found.append(Taken(function, arguments))
            raise InterruptedError

        with ExitStack() as patches:
            for home, name in COMPILED:
                function = partial(instead, getattr(home, name))
                patches.enter_context(mock.patch.object(home, name, function))
            try:
                self.call(program, **changes)
            except InterruptedError:
                return found[0]
        raise AssertionError("the call ran no program that is known here")


def config_of(shape: Shape, family: str) -> Any:
    """A model of a shape."""
    special: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "t5":
        sizes: dict[str, Any] = {"d_model": shape.hidden, "d_ff": shape.intermediate, "d_kv": shape.head_dim}
        special |= {"num_layers": shape.layers, "num_heads": shape.heads, "decoder_start_token_id": PAD}
        return T5Config(**special | sizes)
    return Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **special,
    )


@dataclass(frozen=True)
class Taken:
    """A program and what it would have been called with.

    Attributes:
        function: compiled by `jax.jit`.
        arguments: static ones and arrays, in its order.
    """

    function: Any
    arguments: tuple[Any, ...]

    def exported(self) -> Any:
        """Lowered for TPUs, by `jax.export`."""
        with settings_of_ours(self.mesh):
            return jax.export.export(self.function, platforms=("tpu",))(*self.arguments)

    @property
    def mesh(self) -> Mesh | None:
        """Where it runs; None for one device."""
        return next((argument for argument in self.arguments if isinstance(argument, Mesh)), None)

    def compiled(self, devices: Sequence[Any] | None = None) -> Any:
        """Compiled, for other devices than those here if they are given."""
        mesh, arguments, platforms = self.mesh, self.arguments, None
        if devices is not None:
            platforms = (devices[0].platform,)
            if mesh is not None:
                grid = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
                mesh = Mesh(grid, mesh.axis_names, axis_types=(AxisType.Auto,) * grid.ndim)
            place = partial(_elsewhere, mesh=mesh, device=devices[0])
            arguments = tuple(mesh if isinstance(given, Mesh) else jax.tree.map(place, given) for given in arguments)
        with settings_of_ours(mesh):
            return self.function.trace(*arguments).lower(lowering_platforms=platforms).compile()


def _elsewhere(leaf: Any, *, mesh: Mesh | None, device: Any) -> Any:
    """An array without its numbers, on another device or mesh; anything else as it is."""
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return leaf
    sharding = SingleDeviceSharding(device) if mesh is None else None
    if mesh is not None and isinstance(leaf, jax.Array):
        sharding = NamedSharding(mesh, leaf.sharding.spec)  # pyright: ignore
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)


def tpu_devices(name: str) -> list[Any] | None:
    """The chips of a TPU that need not be there, such as "v5e:2x2"; None without libtpu, which compiles for them."""
    if find_spec("libtpu") is None:
        return None
    # What libtpu would else ask a TPU's own host for.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    return topologies.get_topology_desc(topology_name=name, platform="tpu").devices
