# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of images, or whatever else a model's own arguments hold: which calls need transformers' loop.

Models are tiny and random, one of each family, and are held to transformers' own results.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from families import DECODERS, EOS, LLAMA, PAD, SPECIAL, VOCABULARY, build, prompts
from packaging.version import Version
from test_parity import assert_same, both, catalogue
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_gr import enable
from hf_gr.generation.torch import layouts, mixin

IMAGE = 60  # the placeholder
TEXT = {name: value for name, value in LLAMA.items() if name != "head_dim"} | SPECIAL
M_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGLIP = SIZES | {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
QWEN = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4}
QWEN |= {"spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
PLACEHOLDERS = {"image_token_id": IMAGE, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": DECODERS["gemma3_text"] | SPECIAL | {"model_type": "gemma3_text"},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
    },
    "paligemma": {
        "text_config": LLAMA | SPECIAL | {"model_type": "gemma"},
        "vision_config": SIGLIP | {"projection_dim": 32, "vision_use_head": False},
        "image_token_index": IMAGE,
        "projection_dim": 32,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "qwen2_vl": {
        "text_config": TEXT | M_ROPE,
        "vision_config": {**QWEN, "embed_dim": 32, "mlp_ratio": 2},
        **PLACEHOLDERS,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | M_ROPE,
        "vision_config": QWEN | {"window_size": 16, "fullatt_block_indexes": [0]},
        **PLACEHOLDERS,
    },
    "qwen3_vl": {
        "text_config": LLAMA | SPECIAL | M_ROPE,
        "vision_config": QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **PLACEHOLDERS,
    },
    "video_llama_3": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SIZES | {"patch_size": 4},
        "image_token_id": IMAGE,
        "video_token_id": 61,
    },
    "mllama": {
        "text_config": TEXT
        | {"model_type": "mllama_text_model", "cross_attention_layers": [1], "bos_token_id": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config": {**SIZES, "attention_heads": 4, "num_global_layers": 1, "image_size": 8, "patch_size": 4}
        | {"intermediate_layers_indices": [0], "vision_output_dim": 64, "max_num_tiles": 1}
        | {"supported_aspect_ratios": [[1, 1]]},
        "image_token_index": IMAGE,
    },
    "git": {
        **SIZES,
        **SPECIAL,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vision_config": SIZES | {"image_size": 8, "patch_size": 4},
    },
}


@cache
def vision_model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    config.eos_token_id, config.pad_token_id = None, PAD
    model = (AutoModelForCausalLM if family == "git" else AutoModelForImageTextToText).from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def with_images(family: str, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Two prompts of 10 tokens, one image in each; where images have sizes, they differ. The first row is padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 50, (2, 10), generator=generator)
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    own: dict[str, torch.Tensor] = {"pixel_values": pixels}
    if family == "mllama":
        tokens[:, 2] = IMAGE
        ones = torch.ones((2, 1), dtype=torch.long)
        own = {"pixel_values": pixels[:, None, None], "aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None]}
        own["cross_attention_mask"] = ones[..., None, None].expand(-1, 10, -1, -1)
    elif family.startswith("qwen"):
        tokens[0, 1:4] = torch.tensor([62, IMAGE, 63])
        tokens[1, 1:7] = torch.tensor([62, IMAGE, IMAGE, IMAGE, IMAGE, 63])
        sizes = torch.tensor([[1, 2, 2], [1, 4, 4]])
        own = {"pixel_values": torch.randn(20, 48, generator=generator), "image_grid_thw": sizes}
        own["mm_token_type_ids"] = (tokens == IMAGE).long()
    elif family == "video_llama_3":
        tokens[:, 2:6] = IMAGE
        own = {"pixel_values": torch.randn(8, 48, generator=generator), "image_merge_sizes": torch.ones(2).long()}
        own["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
    elif family != "git":
        tokens[:, 2:6] = IMAGE
        own |= {"token_type_ids": (tokens == IMAGE).long()} if family in ("gemma3", "paligemma") else {}
    mask = torch.ones_like(tokens)
    if family != "git":
        mask[0, 0], tokens[0, 0] = 0, PAD
    return {"input_ids": tokens, "attention_mask": mask, **own}


@pytest.fixture
def in_loop(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that went through transformers' loop."""
    calls: list[Any] = []
    generate: Callable[..., Any] = mixin.generate_by_processor
    monkeypatch.setattr(mixin, "generate_by_processor", lambda *args: calls.append(args) or generate(*args))
    return calls


# transformers 5.17 itself answers otherwise (Git), fails (VideoLLaMA 3), or warns of its own code (Mllama).
OF_5_23 = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="transformers 5.17 cannot")


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=OF_5_23) if one in ("git", "mllama", "video_llama_3") else one for one in CONFIGS],
)
def test_images_equal_transformers(family: str, in_loop: list[Any]) -> None:
    model = vision_model(family)  # Mllama reads a mask of images at every step; Git's cache holds more than tokens
    for seed in (1, 2):
        inputs = with_images(family, seed=seed)
        theirs, ours = both(model, catalogue(ragged=False), inputs, num_beams=5, num_return_sequences=5)
        assert assert_same(theirs, ours, 5) == 2
    text = prompts(2, 10, padded=True) if family != "git" else prompts(2, 10)
    theirs, ours = both(model, catalogue(ragged=False), text, num_beams=5, num_return_sequences=5)
    assert assert_same(theirs, ours, 5) == 2  # PaliGemma counts positions from 1
    assert len(in_loop) == (0 if family in layouts.IMAGE_FAMILIES else 2)


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "qwen2_vl"])
def test_a_single_path_and_drafts_start_from_images_too(family: str, in_loop: list[Any]) -> None:
    model, index, inputs = enable(vision_model(family)), catalogue(ragged=False), with_images(family)
    unpadded = inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}
    theirs, ours = both(model, index, unpadded, num_beams=1)
    assert torch.equal(ours.sequences, theirs.sequences)
    common = {**inputs, "constraint_index": index, "num_beams": 4, "num_return_sequences": 4}
    assert torch.equal(model.generate(**common, drafting="trie"), model.generate(**common))
    assert not in_loop


def test_an_argument_that_every_step_reads_needs_transformers_loop(in_loop: list[Any]) -> None:
    # The zeroth kind is what a step without kinds has: the numbers alone would not tell.
    model, inputs = build("gpt2"), prompts(2, 6)
    model.transformer.wte.weight.data[0] = 0
    types = torch.zeros_like(inputs["input_ids"])
    for kind in (0, 5):
        kinds = {"token_type_ids": types + kind}
        options = {"num_beams": 3, "num_return_sequences": 3, "forced_eos_token_id": EOS}
        theirs, ours = both(model, catalogue(ragged=True), inputs | kinds, **options)
        assert assert_same(theirs, ours, 3)
    assert len(in_loop) == 2


def test_memory_that_runs_out_during_a_trial_says_nothing_about_the_model() -> None:
    model = build("stablelm")
    forward, calls = model.forward, []

    def short_of_memory(*args: Any, **given: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **given)

    model.forward = short_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        layouts.takes_tree(model)
    assert layouts.takes_tree(model)


def test_layouts_are_tried_where_every_token_has_a_meaning() -> None:
    config = {"vocab_size": 3, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    model = build("stablelm", config={**config, **tokens, "intermediate_size": 16, "num_key_value_heads": 2})
    assert layouts.takes_tree(model)


@pytest.mark.parametrize("how", [{}, {"use_cache": False}], ids=str)
def test_a_models_own_generate_may_set_fields(how: dict[str, Any]) -> None:
    """As Kyutai's, which sets the length: transformers' `generate` is given what the call has decided otherwise."""
    model, family = build("qwen3"), type(build("qwen3"))

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return family.generate(self, *args, max_new_tokens=9, **kwargs)

    model.__class__ = type("Own", (family,), {"generate": generate})
    common = {**prompts(2, 6), "constraint_index": catalogue(ragged=False), "num_beams": 3, **how}
    assert torch.equal(enable(model).generate(**common), enable(build("qwen3")).generate(**common))
