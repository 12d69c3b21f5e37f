# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Both backends: the same modules, names, arguments and options, but for what is listed here with its reason."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("jax")

PAIRS = (
    "children",
    "decode",
    "device_trie",
    "draft_head",
    "drafters",
    "noise",
    "speculation",
    "transition",
    "tree",
)
# Modules that are compared as parts of another one.
PARTS = {"decode": ("plan", "scores")}
# Modules that are not compared, and why.
UNPAIRED = {
    "ops": "tests/test_core_ops.py compares them",
    "top_keys": "XLA's own top-k is fast",
    "assistants": "classes of drafters in torch",
    "scorers": "nothing but a protocol is on both sides",
    "processes": "several devices run one program",
    "log_probs": "XLA keeps no log-softmax of a whole vocabulary",
    "graphs": "XLA compiles programs and keeps them",
    "tree_attention": "programs of Flax attend by masks",
    "visibility": "the same",
    "transfers": "JAX copies without waiting",
    "arrays": "PyTorch has these",
    "parameters": "the same",
    "buckets": "sizes are fixed in a program",
    "checkpoint": "models are transformers' in PyTorch",
    "forward": "the same",
    "layers": "the same",
    "model": "the same",
    "experts": "the same",
    "families": "the same",
    "spec": "the same",
    "devices": "the same",
    "warpers": "the same",
    "processors": "the same",
}
# By module: names of one side alone, and why.
TORCH_ONLY = {
    "decode": {
        "process_scores": "a method of Processors in Flax",
    },
    "device_trie": {
        "windows": "flax.arrays.windows",
        "TOKEN_BITS": "of edges, for the same",
        "Level": "arrays of the trie in Flax",
        "TAKEN_ONE_BY_ONE": "measured on a CPU",
    },
    "draft_head": {"IGNORED": "heads are trained in PyTorch"},
    "drafters": {
        "Assistant": "flax.assistants.ModelDrafter",
        "DRAFTS": "imported by flax.assistants",
        "DraftSearch": "the same",
        "FixedTree": "a draft in Flax always has fixed sizes",
        "Best": "the function draft_best in Flax: a program has no objects",
        "Samples": "the function draw in Flax",
        "nodes_of": "of a search: flax.assistants",
    },
    "speculation": {
        "Frontier": "what a Context has in Flax",
        "Lookahead": "the loop itself in Flax",
        "Rows": "an array of flags in Flax: a program cannot look",
        "of_rows": "rows that wait are computed, too, in Flax",
    },
    "transition": {
        "TAKEN_ONE_BY_ONE": "measured on a CPU",
    },
    "tree": {
        "Tree": "two functions in Flax, where beams know their slots",
        "NO_SLOT": "nodes of one forward have several depths where rows advance on their own",
        "prompt_attention": "models in Flax make the mask of their prompt",
        "to_additive": "attention masks in Flax are boolean",
    },
}
FLAX_ONLY = {
    "decode": {
        "decode_program": "the compiled form of decode",
        "score_nodes": "rows have their own levels; a search scores its nodes like beams",
    },
    "device_trie": {
        "CHILDREN": "buckets",
        "PARENTS": "buckets",
        "SMALLEST": "buckets",
        "STEPS": "buckets",
        "padded_branching": "buckets",
        "exception_bits": "PyTorch searches among exceptions; a program without loops compiles faster",
    },
    "transition": {
        "HIDDEN_NODES": "buckets",
        "LARGEST_NODE": "32-bit integers",
    },
    "tree": {"nodes_seen": "of Tree in torch", "slots_seen": "the same"},
    "draft_head": {
        "HeadCache": "caches are arguments",
        "load_draft_head": "hf_gr.generation.torch.heads in PyTorch",
        "shapes_of": "torch's modules know theirs",
    },
    "drafters": {
        "subtree": "a method in torch",
    },
    "noise": {
        "HALF": "64 bits are two numbers",
    },
    "speculation": {
        "Drawn": "nodes of one level; Nodes are of all levels",
        "Context": "a frontier in torch",
        "Draft": "a list of levels in torch",
        "Scored": "a list in torch",
    },
}
ALIASES = set("Any Callable Depth Device HostOrDevice Key Number Params Protocol ScorerCache Sequence".split())
ALIASES |= {"WholeNumber", "annotations"}  # of types, which have no module


def public(side: str, module: str) -> set[str]:
    """The functions, classes and constants that a module of a backend defines itself."""
    names = [f"hf_gr.{side}.{name}" for name in (module, *PARTS.get(module, ()))]
    return {
        name
        for at in filter(find_spec, names)
        for name, value in vars(import_module(at)).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in ALIASES
        if getattr(value, "__module__", at) in (at, "typing", "types", "jax._src.pjit")
    }


@pytest.mark.parametrize("module", PAIRS)
def test_paired_modules_have_the_same_names(module: str) -> None:
    ours, theirs = public("flax", module), public("torch", module)
    assert theirs - ours == set(TORCH_ONLY.get(module, {}))
    assert ours - theirs == set(FLAX_ONLY.get(module, {}))


def test_every_module_is_compared_or_listed() -> None:
    names = {
        path.stem
        for side in ("torch", "flax")
        for path in Path(*import_module(f"hf_gr.{side}").__path__).glob("[!_]*.py")
    }
    compared = {*PAIRS, *(part for parts in PARTS.values() for part in parts)}
    assert names == compared | set(UNPAIRED)
    assert not compared & set(UNPAIRED)


# What `generate` of one side alone takes, and why.
TORCH_ARGUMENTS = {
    "prefix_allowed_tokens_fn": "Python code at every step; in Flax a function of arrays is a logits processor",
    "synced_gpus": "of processes that share a model by torch.distributed",
    "args": "transformers' own arguments by place",
    "separator": "answers of several labels are PyTorch's alone",
    "max_labels": "the same",
    "generator": "of torch; in Flax a key of jax.random",
}
FLAX_ARGUMENTS = {"key": "of jax.random", "mesh": "where the program runs"}
# Fields of a generation config that Flax refuses, unless they have no effect, and why.
REFUSED_FIELDS = {
    "repetition_penalty": "transformers' processors, of which few matter within a catalogue, like the next six",
    "no_repeat_ngram_size": "the same",
    "bad_words_ids": "the same",
    "sequence_bias": "the same",
    "min_length": "the same",
    "min_new_tokens": "the same",
    "exponential_decay_length_penalty": "the same",
    "encoder_repetition_penalty": "processors that read the encoder's prompt",
    "encoder_no_repeat_ngram_size": "the same",
    "guidance_scale": "a second forward without the prompt",
    "remove_invalid_values": "hides what is wrong with a model",
    "watermarking_config": "hashes by torch's own random numbers",
    "stop_strings": "needs a tokenizer at every step: the host's work",
    "max_time": "a program cannot look at the clock",
    "output_attentions": "programs keep no layer's outputs",
    "output_hidden_states": "the same",
    "prompt_lookup_num_tokens": "transformers' own drafts",
    "token_healing": "needs a tokenizer",
    "top_h": "rarely used warpers of samples, like the next three",
    "typical_p": "the same",
    "epsilon_cutoff": "the same",
    "eta_cutoff": "the same",
}


# Verifications that Flax has not, and why.
TORCH_VERIFICATIONS = {
    "last_level": "answers that need not be of the catalogue are for comparisons with NEZHA's",
    "none": "the same",
}


def test_generate_takes_the_same_arguments() -> None:
    from hf_gr.generation.flax.mixin import FlaxGenerationMixin
    from hf_gr.generation.torch.mixin import GRGenerationMixin

    ours, theirs = (
        list(inspect.signature(mixin.generate).parameters) for mixin in (FlaxGenerationMixin, GRGenerationMixin)
    )
    assert set(ours) - set(theirs) == set(FLAX_ARGUMENTS)
    assert set(theirs) - set(ours) == set(TORCH_ARGUMENTS)
    in_both = [[name for name in own if name in ours and name in theirs] for own in (ours, theirs)]
    assert in_both[0] == in_both[1]


def test_fields_of_a_config_are_refused_for_a_reason() -> None:
    from hf_gr.generation.flax.checks import NEUTRAL, NEUTRAL_SCORES, NEUTRAL_WARPERS

    assert {**NEUTRAL, **NEUTRAL_SCORES, **NEUTRAL_WARPERS}.keys() == REFUSED_FIELDS.keys()


def test_drafts_and_verifications_are_the_same_but_for_those_that_are_listed() -> None:
    from hf_gr.generation.configuration import DRAFTING, VERIFICATION
    from hf_gr.generation.flax.drafts import KINDS

    assert {*KINDS, "auto"} == set(DRAFTING)
    assert {name for kind in KINDS.values() for name in kind.lacks} == set(TORCH_VERIFICATIONS)
    assert set(TORCH_VERIFICATIONS) <= set(VERIFICATION)
