# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Paired modules of both backends: the same public names, with the same parameters, but for what is listed here."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
    "children": {},
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
    "noise": {},
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
    "children": {},
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
ALIASES = {  # of types, which have no module
    "Any",
    "HostOrDevice",
    "Callable",
    "Depth",
    "Device",
    "Key",
    "Number",
    "Params",
    "Protocol",
    "ScorerCache",
    "Sequence",
    "WholeNumber",
    "annotations",
}
# Parameters that one side has and the other cannot have, wherever they are.
DEVICES = {"device"}  # arrays of a program are where it runs
DRAFTS = {"picked", "drafter", "is_relaxed", "unchecked"}  # only the catalogue drafts; it is part of the plan
PROCESSORS = {"processors", "processor_width", "stopping_criteria", "prompt"}  # callables of PyTorch
EVERYWHERE = DEVICES | DRAFTS | PROCESSORS
# A method or a property that one side alone has.
ALONE = {"(alone)"}
# By name: what else differs, all of it.
OTHERWISE = {
    "decode.decode": {"params", "draft_params", "noise"},  # arrays are arguments of a program
    # Read where they are; the longest sequence's length is static, apart from `max_new_tokens`, like the next one's.
    "decode.child_scores": {"logits", "places", "scored", "max_length"},
    "decode.DecodePlan": {
        "noise",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens_to_keep",
        "renormalize_logits",  # processors in torch, as those before
        "rows_axis",  # several devices run one program
        "tokens_per_beam",  # of the paper's own search, which a benchmark compares with
    },
    "decode.DecodePlan.apply": ALONE,  # callables of PyTorch
    "decode.Decoded": {"num_levels", "may_be_shorter"},  # a program's outputs have fixed shapes
    "decode.Decoded.cropped": ALONE,  # the call crops them, on the host
    "children.Children": {"first", "legal", "states"},  # found from tokens, and from the first child
    "children.Children.shape": ALONE,
    "children.Children.scores": ALONE,  # illegal tokens are -1
    "device_trie.DeviceTrie": {"branching", "exceptions", "has_bases", "levels", "offsets", "token_bases"},  # by level
    "device_trie.DeviceTrie.child_bounds": ALONE,
    "device_trie.DeviceTrie.child_range": ALONE,
    "device_trie.DeviceTrie.tokens_from": ALONE,
    "device_trie.DeviceTrie.edges": ALONE,
    "device_trie.DeviceTrie.follow": ALONE,
    "transition.DeviceCatalogue.nodes_per_level": ALONE,  # of plans of drafts
    "transition.device_catalogue": {"num_rows"},  # rows are filled up to a bucket
    "decode.in_columns": {"params"},
    "draft_head.DraftHead": {"arrays", "placeholder_embeddings"},  # loaded, not initialised
    "draft_head.DraftHead.columns": ALONE,  # of the scorer, like the next four
    "draft_head.DraftHead.forward": ALONE,
    "draft_head.DraftHead.logits": ALONE,
    "draft_head.DraftHead.advance": ALONE,
    "draft_head.DraftHead.loss": ALONE,
    "draft_head.DraftHead.params": ALONE,
    "draft_head.DraftHead.params_on": ALONE,
    "draft_head.DraftHead.parameters": ALONE,  # torch.nn.Module's
    "draft_head.DraftHead.astype": ALONE,  # torch.nn.Module's `to`
    "draft_head.DraftHead.config": ALONE,
    "draft_head.DraftHead.save_beside": ALONE,
    "draft_head.HeadScorer": {"head", "hidden", "config", "model"},  # arrays are arguments
    "draft_head.HeadScorer.prefill": ALONE,
    "draft_head.HeadScorer.begin": {"levels", "hidden", "params"},  # arrays are arguments
    "draft_head.HeadScorer.advance": ALONE,
    "draft_head.HeadScorer.columns": ALONE,
    "draft_head.HeadScorer.score": {"params", "cache", "tokens", "visible", "depths", "levels", "depth", "wanted"},
    "drafters.TreeDrafter": {"assistant", "sizes", "num_first", "least"},
    "drafters.TreeDrafter.size": ALONE,
    "drafters.TreeDrafter.start": ALONE,  # a model's drafter reads the prompts
    "drafters.TreeDrafter.tail": ALONE,
    "drafters.TreeDrafter.num_forwards": ALONE,
    "drafters.TreeDrafter.draft": {"frontier", "beams", "context", "levels", "wanted"},  # a frontier has the others
    "noise.Noise.of": ALONE,  # in halves
    "speculation.Speculation.none": ALONE,
    "speculation.Speculation.after_forward": ALONE,  # inside a program nothing is counted in place
    "speculation.Speculation.drafting": ALONE,
    "speculation.Speculation.accepting": ALONE,
    "speculation.Drafter.size": ALONE,
    "speculation.Drafter.start": ALONE,
    "speculation.Drafter.tail": ALONE,
    "speculation.Drafter.num_first": ALONE,
    "speculation.Drafter.num_forwards": ALONE,
    "speculation.Drafter.draft": {"frontier", "beams", "context", "levels", "wanted"},
    "tree.Nodes": {"is_complete", "log_probs", "depths"},  # of all levels, and never samples
    "tree.Nodes.none": ALONE,  # a draft always has its size
}


def public(module: ModuleType) -> dict[str, Any]:
    """What a module defines itself: functions, classes, constants, types."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", module.__name__) in (module.__name__, "typing", "types", "jax._src.pjit")
        and name not in ALIASES
    }


def parameters(thing: Any) -> list[str]:
    if is_dataclass(thing):
        return [field.name for field in fields(thing)]
    if inspect.isclass(thing) and "__init__" in vars(thing):  # nnx makes objects by a metaclass
        return list(inspect.signature(thing.__init__).parameters)[1:]
    return list(inspect.signature(thing).parameters)


def members(thing: Any) -> dict[str, Any]:
    # A class method is compared by its function.
    return {name: getattr(value, "__func__", value) for name, value in vars(thing).items() if not name.startswith("_")}


def sides(module: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both sides of a pair define."""
    names = [[f"hf_gr.{side}.{name}" for name in (module, *PARTS.get(module, ()))] for side in ("torch", "flax")]
    theirs, ours = [[public(import_module(name)) for name in of_side if find_spec(name)] for of_side in names]
    return (*({name: value for of in side for name, value in of.items()} for side in (ours, theirs)),)


def difference(ours: Any, theirs: Any) -> set[str]:
    """The parameters that one side alone has; those of both come in the same order."""
    mine, other = parameters(ours), parameters(theirs)
    in_order = [[name for name in own if name in mine and name in other] for own in (mine, other)]
    # Static fields with defaults may come in another order.
    assert is_dataclass(ours) or in_order[0] == in_order[1], f"{ours}: {in_order}"
    return set(mine) ^ set(other)


def differences(module: str) -> dict[str, set[str]]:
    """By name: how what both sides define differs."""
    ours, theirs = sides(module)
    found = {}
    for name in sorted(set(ours) & set(theirs)):
        if not callable(ours[name]):
            continue
        found[name] = difference(ours[name], theirs[name])
        if not inspect.isclass(ours[name]):
            continue
        mine, other = members(ours[name]), members(theirs[name])
        for method in set(mine) & set(other):
            if callable(mine[method]):
                found[f"{name}.{method}"] = difference(mine[method], other[method])
        for method in (set(mine) ^ set(other)) - found[name]:  # a property here is a field there
            alone = mine.get(method, other.get(method))
            if callable(alone) or isinstance(alone, (property, cached_property)):  # else the default of a field
                found[f"{name}.{method}"] = {method} - EVERYWHERE and ALONE
    return {f"{module}.{name}": how - EVERYWHERE for name, how in found.items() if how - EVERYWHERE}


@pytest.mark.parametrize("module", PAIRS)
def test_paired_modules_export_the_same_names_with_the_same_parameters(module: str) -> None:
    ours, theirs = sides(module)
    assert set(theirs) - set(ours) == set(TORCH_ONLY[module])
    assert set(ours) - set(theirs) == set(FLAX_ONLY[module])
    assert differences(module) == {name: how for name, how in OTHERWISE.items() if name.split(".")[0] == module}


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


def test_a_draft_that_flax_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_gr.generation.drafts import drafts_of
    from hf_gr.generation.flax.drafts import KINDS

    config = SimpleNamespace(drafting="exact", verification="strict")
    with pytest.raises(
        ValueError, match=r"drafting='exact', expected one of .*'auto'\) in Flax: omit it, or use backend"
    ):
        drafts_of(KINDS, None, config, None, None, None, {}, {})  # pyright: ignore


def test_a_planted_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_gr.flax import transition
    from hf_gr.flax.transition import DeviceCatalogue

    def is_red() -> bool:
        try:
            test_paired_modules_export_the_same_names_with_the_same_parameters("transition")
        except AssertionError:
            return True
        return False

    def planted(name: str, value: Any, *, of: Any = transition) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value, raising=False)
            if getattr(value, "__module__", None) == __name__:
                value.__module__ = transition.__name__
            return is_red()

    assert planted("over_vocabulary", lambda scores, legal, vocab_size, more=1: scores)  # a parameter
    assert planted("over_vocabulary", lambda legal, scores, vocab_size: scores)  # their order
    assert planted("another", lambda: None)  # a name
    assert planted("another", lambda self: None, of=DeviceCatalogue)  # a method
    assert planted("is_leaf", lambda self: None, of=DeviceCatalogue)  # its parameters
    monkeypatch.setitem(OTHERWISE, "transition.over_vocabulary", {"number"})  # what is no longer true
    assert is_red()
    monkeypatch.delitem(OTHERWISE, "transition.over_vocabulary")
    assert not is_red()
    monkeypatch.delattr(transition, "over_vocabulary")
    assert is_red()
