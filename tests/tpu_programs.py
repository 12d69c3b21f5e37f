# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs that `generate` compiles in JAX, each with a call that compiles it; and what a TPU lacks of them.

A TPU is not needed to compile for one: `pip install libtpu` (the version of `jax[tpu]`) brings the compiler, and
`tpu_devices` describes chips that are not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from transformers import Qwen3Config, T5Config

from hf_gr import ConstraintIndex, enable
from hf_gr.files.draft_head_config import DraftHeadConfig
from hf_gr.flax.devices import settings_of_ours
from hf_gr.flax.draft_head import DraftHead, shapes_of
from hf_gr.flax.families import to_spec
from hf_gr.flax.model import FlaxModel, random_arrays
from hf_gr.generation.flax import mixin

PAD, EOS, FIRST_CODE, CODES, VOCABULARY = 0, 1, 2, 20, 64
GAIN = 2.0  # random weights of unit gain make logits that hardly differ
# Custom calls that the TPU's compiler knows; all others are code of a CPU or GPU, or of the host.
CUSTOM_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
TO_HOSTS = {"stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"}
WIDE = {"f64", "i64", "ui64", "complex<f64>"}


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    layers: int = 1
    hidden: int = 32
    items: int = 200
    length: int = 3  # tokens of an item
    batch: int = 2
    prompt: int = 20
    beams: int = 4


@dataclass(frozen=True)
class Program:
    """What tells a program from all others."""

    options: Mapping[str, Any] = field(default_factory=dict)  # of `generate`, besides beams
    family: str = "qwen3"
    catalogue: str = "fixed"  # see `Bench.catalogue`
    has_head: bool = False
    has_assistant: bool = False  # whether another model drafts, of the same shape and with other weights
    mesh: tuple[int, int] | None = None  # devices along "data" and "model"; None for one device


PATHS = {"num_beams": 1, "num_return_sequences": 1}
SAMPLES = {"do_sample": True, "temperature": 2.0, "top_k": 10, "top_p": 0.95, "min_p": 0.01}
DETAILS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LENGTHS = {"length_penalty": 0.5, "early_stopping": True, "forced_eos_token_id": EOS}
PROGRAMS: dict[str, Program] = {
    "beams": Program(),
    "greedy": Program(PATHS),
    "sampled paths": Program(SAMPLES | {"num_beams": 1}),
    "sampled beams": Program(SAMPLES, catalogue="ragged"),
    "all scores": Program(DETAILS | {"renormalize_logits": True}),
    "lengths": Program(LENGTHS, catalogue="ragged"),
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
    """Random models, catalogues and prompts; models of other types have the same numbers but for rounding."""

    def __init__(self, size: Size | None = None, *, dtype: str = "float32") -> None:
        self.size = Size() if size is None else size
        self.dtype = dtype
        self.model = cache(self._model)

    def _model(self, family: str = "qwen3", has_head: bool = False, seed: int = 0) -> Any:
        size = self.size
        special: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": PAD}
        special |= {"bos_token_id": None, "eos_token_id": None}
        if family == "t5":
            sizes: dict[str, Any] = {"d_model": size.hidden, "d_ff": 48, "d_kv": 8, "num_heads": 4}
            config: Any = T5Config(**special, **sizes, num_layers=size.layers, decoder_start_token_id=PAD)
        else:
            sizes = {"hidden_size": size.hidden, "intermediate_size": 48, "num_hidden_layers": size.layers}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
            config = Qwen3Config(**special, **sizes)
        arrays = random_arrays(to_spec(config), nnx.Rngs(seed))
        scaled = {name: array if array.ndim == 1 else GAIN * array for name, array in arrays.items()}
        model = enable(FlaxModel(config, arrays={name: array.astype(self.dtype) for name, array in scaled.items()}))
        if has_head:
            placeholders = tuple(range(FIRST_CODE + CODES, FIRST_CODE + CODES + self.size.length))
            sizes = (CODES,) * self.size.length
            model.add_draft_head(head_of(DraftHeadConfig(self.size.hidden, sizes, placeholder_token_ids=placeholders)))
        return model

    def codes(self, items: int, *, seed: int = 0) -> Any:
        return np.random.default_rng(seed).integers(FIRST_CODE, FIRST_CODE + CODES, size=(items, self.size.length))

    def catalogue(self, name: str) -> dict[str, Any]:
        """One that is "fixed", "ragged" (items of 1 to L codes) or "added" (after additions and removals), "views" of
        one, another for each row, or "excluded" items of each row."""
        items, rows = self.size.items, range(self.size.batch)
        codes = self.codes(items)
        if name == "ragged":
            codes = [row[: 1 + number % len(row)].tolist() for number, row in enumerate(codes)]
        index = ConstraintIndex.from_sequences(codes, eos_token_id=EOS if name == "ragged" else None)
        if name == "added":
            index.add(self.codes(items // 20, seed=1), range(items, items + items // 20))
            index.remove(range(items // 20))
        if name == "views":
            return {"constraint_index": [index.where(range(row, items, 1 + row % 3)) for row in rows]}
        excluded = {"exclude_items": [range(row, items, 7) for row in rows]} if name == "excluded" else {}
        return {"constraint_index": index, **excluded}

    def call(self, program: Program) -> Any:
        """The answers of a call that this program serves."""
        size, rng = self.size, np.random.default_rng(0)
        prompts = rng.integers(FIRST_CODE, FIRST_CODE + CODES, size=(size.batch, size.prompt))
        mask = np.arange(size.prompt) >= np.arange(size.batch)[:, None] % size.prompt  # padding, on the left
        options = {"num_beams": size.beams, "num_return_sequences": size.beams, **program.options}
        options |= {"seed": 0} if options.get("do_sample") else {}
        options |= {} if program.mesh is None else {"mesh": jax.make_mesh(program.mesh, ("data", "model"))}
        options |= {"assistant_model": self.model(seed=1)} if program.has_assistant else {}
        return self.model(program.family, program.has_head).generate(
            np.where(mask, prompts, PAD),
            attention_mask=mask.astype(int),
            **self.catalogue(program.catalogue),
            **options,
        )

    def take(self, program: Program) -> Taken:
        """The program that such a call runs, with its arguments: nothing is compiled."""
        name = "decode_program" if program.mesh is None else "decode_on_mesh"
        function = getattr(mixin, name)
        with mock.patch.object(mixin, name, side_effect=InterruptedError) as instead:
            try:
                self.call(program)
            except InterruptedError:
                return Taken(function, instead.call_args.args)
        raise AssertionError("the call ran another program")


bench = cache(Bench)


def head_of(config: DraftHeadConfig, **options: Any) -> DraftHead:
    """A random head for codes from FIRST_CODE on."""
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.normal(size=of), jnp.float32) for name, of in shapes_of(config).items()}
    codebooks = [np.arange(FIRST_CODE, FIRST_CODE + size) for size in config.codebook_sizes]
    return DraftHead(config, codebooks, arrays=arrays, **options)


@dataclass(frozen=True)
class Taken:
    """A program, compiled by `jax.jit`, and what it would have been called with."""

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


def what_a_tpu_lacks(exported: Any) -> set[str]:
    """By operation, what keeps a lowered program off a TPU, or slows it down there; empty as it should be."""
    found: set[str] = set()

    def look(operation: Any) -> Any:
        name = operation.name
        if name in TO_HOSTS:
            found.add(name)
        if name == "stablehlo.custom_call":
            found.update({str(operation.attributes["call_target_name"].value)} - CUSTOM_CALLS)
        for kind in (result.type for result in operation.results):
            if isinstance(kind, ir.RankedTensorType):
                found.update([] if kind.has_static_shape else [f"{name} of unknown size"])
                found.update([f"{name} of 64 bits"] if str(kind.element_type) in WIDE else [])
        return ir.WalkResult.ADVANCE

    with jax.interpreters.mlir.make_ir_context():
        ir.Module.parse(exported.mlir_module()).operation.walk(look)
    return found
