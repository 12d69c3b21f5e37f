# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Several devices against one of them. Run by test_flax_devices.py in a process that has four, by force, on a CPU."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import EOS, FAMILIES, LLAMA, SPECIAL, VOCABULARY
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_programs import ON_MESHES, bench, head_of, tpu_devices, what_a_tpu_lacks
from transformers import AutoConfig

from hf_gr import ConstraintIndex, enable, recommend
from hf_gr.files.draft_head_config import DraftHeadConfig
from hf_gr.flax import devices
from hf_gr.flax.decode import decode_program
from hf_gr.flax.devices import decode_on_mesh
from hf_gr.flax.families import to_spec
from hf_gr.flax.model import FlaxModel, random_arrays
from hf_gr.flax.scorers import Prompt

SCORE_TOL = 1e-4  # the issue's: sums over devices are in another order
ROWS = np.random.default_rng(0).integers(3, 24, size=(60, 2))
INDEX = ConstraintIndex.from_sequences(ROWS)
RAGGED = ConstraintIndex.from_sequences([row[: 1 + i % 2].tolist() for i, row in enumerate(ROWS)], eos_token_id=EOS)
BEAMS = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 1}
jax.config.update("jax_default_matmul_precision", "highest")


def random_model(family: str, *, gain: float) -> Any:
    fields = T5 | {"vocab_size": VOCABULARY} if family == "t5" else LLAMA | {"num_hidden_layers": 1}
    config = AutoConfig.for_model(family, **SPECIAL | fields)
    arrays = random_arrays(to_spec(config), nnx.Rngs(0))
    spread = {name: array * (1.0 if array.ndim == 1 else gain) for name, array in arrays.items()}
    return enable(FlaxModel(config, arrays=spread))


@cache
def model_of(family: str) -> Any:
    return random_model(family, gain=2.0)


def one_device() -> Mesh:
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


def prompts(rows: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, size=(rows, 9))
    mask = np.arange(9) >= np.arange(rows)[:, None] % 5
    return {"input_ids": np.where(mask, tokens, 1), "attention_mask": mask.astype(int)}


def check(family: str, rows: int, mesh: Mesh | None, index: Any, **kwargs: Any) -> Any:
    """The same call on one device and on several."""
    model, inputs, kwargs = model_of(family), prompts(rows), BEAMS | kwargs
    expected = model.generate(**inputs, constraint_index=index, mesh=one_device(), **kwargs)
    found = model.generate(**inputs, constraint_index=index, mesh=mesh, **kwargs)
    assert len(found.sequences) == rows * kwargs["num_return_sequences"]
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.beam_indices.tolist() == expected.beam_indices.tolist()
    assert str(found.num_proven) == str(expected.num_proven)
    both = (
        (out.sequences_scores, *(out.scores or ())) if kwargs["output_scores"] else () for out in (found, expected)
    )
    for one, other in zip(*both, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=SCORE_TOL, rtol=0)
    return found


def test_by_default_all_devices_have_rows_and_nothing_changes() -> None:
    """An uneven batch; some rows are done before others, and all scores are asked for."""
    mesh = devices.to_mesh(None)
    assert mesh is not None
    assert dict(mesh.shape) == {"data": 4, "model": 1}
    before = decode_program._cache_size()
    found = check("qwen3", 3, None, RAGGED)
    assert decode_program._cache_size() == before  # the program of one device was not asked
    programs = decode_on_mesh._cache_size()
    with jax.set_mesh(jax.make_mesh((4,), ("data",))):  # a context mesh of the caller changes nothing
        again = model_of("qwen3").generate(**prompts(3), constraint_index=RAGGED, **BEAMS)
    assert again.sequences.tolist() == found.sequences.tolist()
    assert decode_on_mesh._cache_size() == programs


@pytest.mark.parametrize("shape", [(4, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_each_device_searches_its_rows_best_first(shape: tuple[int, int]) -> None:
    found = check("qwen3", 5, jax.make_mesh(shape, ("data", "model")), RAGGED, exact=True, max_nodes=400)
    assert found.num_proven.tolist() == [4] * 5


def test_the_second_call_compiles_nothing_and_rules_are_by_row() -> None:
    views = [INDEX.where(list(range(start, start + 20))) for start in (0, 10, 40)]
    rules = [views[0], views[1], views[2], views[0], views[1]]
    excluded = [list(range(5)), [], [50, 51], [], [20]]
    check("qwen3", 5, None, rules, exclude_items=excluded)
    before = decode_on_mesh._cache_size()
    check("qwen3", 7, None, [*rules[::-1], *rules[:2]], exclude_items=[*excluded, [], []])
    assert decode_on_mesh._cache_size() == before


DEEP = ConstraintIndex.from_sequences(np.random.default_rng(1).integers(3, 24, size=(300, 3)))


@pytest.mark.slow
def test_drafts_are_made_where_they_fit() -> None:
    """A row with few items left drafts whatever the others do, on its device and on others."""
    few, others = DEEP.where(list(range(12))), DEEP.where(list(range(12, 24)))
    options = {"drafting": "trie", "draft_token_budget": 8}
    found = check("qwen3", 8, None, [few, others] * 4, **options)
    assert found.speculation.target_forwards == 1
    mixed = [few, few, DEEP, DEEP, few, few, few, few]
    found = check("qwen3", 8, None, mixed, **options)
    assert found.speculation.target_forwards == 2
    drafted = np.asarray(found.speculation.drafted_nodes)
    assert (drafted > 0).tolist() == [True, True, False, False, True, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "budget", "forwards"), [((2, 2), None, 0), ((4, 1), 64, 1), ((2, 2), 64, 1)])
def test_drafts_over_spread_weights_and_rows(shape: tuple[int, int], budget: int | None, forwards: int) -> None:
    """All nodes with the prompt, or those of the first token alone."""
    mesh = jax.make_mesh(shape, ("data", "model"))
    views = [DEEP.where(list(range(start, start + 12))) for start in (0, 12, 24, 36)]
    found = check("qwen3", 4, mesh, views, drafting="trie", draft_token_budget=budget)
    assert found.speculation.target_forwards == forwards


HEAD = DraftHeadConfig(LLAMA["hidden_size"], (22, 22, 22), placeholder_token_ids=(24, 25, 26))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ((4, 1), {"output_scores": False}),
        ((4, 1), {}),  # scores of every level keep the devices together
        ((2, 2), {}),
        ((4, 1), {"verification": "relaxed", "seed": 3, "output_scores": False}),
    ],
    ids=str,
)
def test_a_draft_model_drafts_on_all_devices(shape: tuple[int, int], how: dict[str, Any]) -> None:
    """Rows of one device may need more forwards than those of another."""
    rows = np.random.default_rng(0).integers(3, 24, size=(900, 4))
    index = ConstraintIndex.from_sequences(np.unique(rows, axis=0))
    mesh = jax.make_mesh(shape, ("data", "model"))
    options = {"assistant_model": random_model("qwen3", gain=0.5), "draft_token_budget": 1, "num_draft_beams": 12}
    happened = check("qwen3", 7, mesh, index, **options, **how).speculation
    assert happened.drafted_nodes.all()
    assert happened.draft_forwards


def test_placeholders_are_written_where_the_embeddings_are() -> None:
    model = FlaxModel(model_of("qwen3").config)
    parameter, spread = model.model.embed_tokens.weight, NamedSharding(jax.make_mesh((4,), ("x",)), P("x"))
    parameter.set_raw_value(jax.device_put(parameter.get_raw_value(), spread))
    model.add_draft_head(head_of(HEAD, placeholder_embeddings=np.full((3, HEAD.hidden_size), 7, np.float32)))
    assert parameter.get_raw_value().sharding == spread
    assert (np.asarray(parameter.get_raw_value())[24:27] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_a_draft_head_is_on_all_devices(shape: tuple[int, int]) -> None:
    model = model_of("llama")
    model.add_draft_head(head_of(HEAD))
    mesh = jax.make_mesh(shape, ("data", "model"))
    check("llama", 6, mesh, DEEP, drafting="head")


@pytest.mark.slow
def test_draws_are_those_of_one_device() -> None:
    model = model_of("qwen3")
    options = {"do_sample": True, "temperature": 3.0, "num_return_sequences": 2, "key": 5, "constraint_index": RAGGED}
    found = [model.generate(**prompts(5), mesh=mesh, **options).tolist() for mesh in (None, one_device())]
    assert found[0] == found[1]
    assert found[0] != model.generate(**prompts(5), **options | {"key": 6}).tolist()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("t5", marks=pytest.mark.slow)])
def test_weights_may_be_spread_over_two_of_four(family: str) -> None:
    """As JAX makes meshes by default, with explicit axes, which `generate` changes."""
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    check(family, 3, mesh, INDEX if family == "t5" else RAGGED)
    params = model_of(family).params_on(devices.to_mesh(mesh))
    spread = [array for array in jax.tree.leaves(params) if not array.sharding.is_fully_replicated]
    whole = [array for array in jax.tree.leaves(params) if array.sharding.is_fully_replicated]
    assert {array.ndim for array in spread} == {2}
    assert all(array.addressable_shards[0].data.size == array.size // 2 for array in spread)
    assert all(array.ndim == 1 or array.shape == (32, 4) for array in whole)  # norms, and T5's relative positions
    assert all(len(array.sharding.device_set) == 4 for array in spread + whole)


@pytest.mark.parametrize(
    ("name", "shape", "where"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 6), ("model", None)),
        ("self_attn.q_proj.weight", (28, 8, 6), (None, "model", None)),
        ("self_attn.k_proj.bias", (28, 8), (None, "model")),
        ("mlp.down_proj.weight", (6, 8), (None, "model")),
        ("mlp.down_proj.bias", (8,), ()),
        ("layer.1.EncDecAttention.o.weight", (6, 8), (None, "model")),
        ("layer.2.DenseReluDense.wi_1.weight", (8, 6), ("model", None)),
        ("shared.weight", (63, 6), ()),  # four devices do not divide 63
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), ()),
        ("mlp.experts.down_proj.weight", (5, 6, 8), (None, None, "model")),
        ("mlp.gate.weight", (8, 6), ()),  # which experts a token uses, all devices know
        ("fc1.bias", (8,), ("model",)),
    ],
)
def test_where_parameters_are(name: str, shape: tuple[int, ...], where: tuple[Any, ...]) -> None:
    mesh = devices._mesh(tuple(jax.devices()), 4)
    assert tuple(devices.parameter_sharding(name, shape, mesh).spec) == where


SLOW_LAYOUTS = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "phi3", "bart")]


@pytest.mark.parametrize("family", ["qwen3_moe", *SLOW_LAYOUTS])
def test_weights_of_every_layout_are_spread_and_nothing_changes(family: str) -> None:
    config = AutoConfig.for_model(family, **SPECIAL | FAMILIES[family])
    mesh, model = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), FlaxModel(config)
    inputs = prompts(4)
    start = jnp.full((4, 2), 3) if family == "bart" else None
    prompt = Prompt(jnp.asarray(inputs["input_ids"]), jnp.asarray(inputs["attention_mask"]) == 1, start)
    prefill = jax.jit(lambda params, prompt: model.scorer.prefill(params, prompt)[0])
    expected, params = prefill(model.params, prompt), model.params_on(devices.to_mesh(mesh))
    with devices.settings_of_ours(mesh):
        found = prefill(params, jax.device_put(prompt, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=SCORE_TOL, rtol=0)
    assert np.ptp(expected) > 1
    spread = {array.ndim for array in jax.tree.leaves(params) if not array.sharding.is_fully_replicated}
    assert spread == {"phi3": {2}, "qwen3_moe": {2, 3}}.get(family, {1, 2})  # gpt2 and bart have biases


def test_other_meshes_are_refused() -> None:
    for mesh, message in (
        (4, r"mesh is a int, expected jax\.make_mesh"),
        (jax.make_mesh((4,), ("batch",)), r'mesh has the axes .*batch.*, expected "data", "model" or both'),
    ):
        with pytest.raises(ValueError, match=message):
            model_of("qwen3").generate(**prompts(2), constraint_index=INDEX, mesh=mesh)
    turned = devices.to_mesh(jax.make_mesh((2, 2), ("model", "data"), axis_types=(AxisType.Auto,) * 2))
    assert turned is not None
    assert dict(turned.shape) == {"data": 2, "model": 2}


def test_a_job_runs_on_all_devices_or_on_a_mesh() -> None:
    """Six users, which four devices do not divide, with one program each."""
    users = [[number, 2 * number + 1] for number in range(6)]
    options: dict[str, Any] = {"num_beams": 4, "top_k": 4, "progress": False, "constraint_index": INDEX}
    found = recommend(model_of("qwen3"), users, **options)
    before = decode_on_mesh._cache_size()
    assert recommend(model_of("qwen3"), users[::-1], **options) == found[::-1]
    assert decode_on_mesh._cache_size() == before
    assert recommend(model_of("qwen3"), users, mesh=(1, 1), **options) == found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "both, t5 samples" else pytest.mark.slow) for name in ON_MESHES]
)
def test_every_program_of_a_mesh_lowers_for_tpus(name: str) -> None:
    exported = bench().take(ON_MESHES[name]).exported()
    assert (exported.platforms, exported.nr_devices) == (("tpu",), 4)
    assert what_a_tpu_lacks(exported) == set()


if find_spec("libtpu") is not None:

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ON_MESHES)
    def test_every_program_of_a_mesh_compiles_for_tpus(name: str) -> None:
        """Rows over "data" exchange nothing, unless all scores are asked for; weights over "model" are summed."""
        program = ON_MESHES[name]
        text = bench().take(program).compiled(tpu_devices("v5e:2x2")).as_text()
        exchanges = any(name in text for name in ("all-reduce", "all-gather", "reduce-scatter"))
        if program.mesh == (4, 1):
            assert not exchanges or "output_scores" in program.options
        else:
            assert exchanges
