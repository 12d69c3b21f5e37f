# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Paired modules of both backends: the same public names, with the same parameters, but for what is listed here."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("jax")

PAIRS = (
    "beam",
    "children",
    "decode",
    "device_trie",
    "draft_head",
    "drafters",
    "head_cells",
    "speculation",
    "transition",
    "tree",
    "verifiers",
)
# By module: names of one side alone, and why.
TORCH_ONLY = {
    "beam": {
        "BLOCK": "top-k in blocks, which XLA does not need",
        "BLOCKS_FROM": "the same",
        "top_places": "the same",
    },
    "children": {
        "ChildrenInColumns": "kinds in Flax all read scores at their tokens: those are replaced",
        "UncheckedChildren": "every level is checked in Flax",
        "WideChildren": "wide levels are dense in torch alone",
    },
    "decode": {
        "process_scores": "logits processors are callables of PyTorch",
        "SCORES_AT_ONCE": "XLA keeps no log-softmax of a whole vocabulary",
    },
    "device_trie": {
        "FlatTrie": "several labels are a logits processor's, a callable of PyTorch",
        "MOST_NODES": "the same",
        "TOKEN_BITS": "the same",
        "LARGEST_TABLE": "of wide levels, see children",
        "CHILDREN_AT_ONCE": "the same",
        "WIDE_FROM": "the same",
        "WIDE_SHARE": "the same",
        "WideLevel": "the same",
    },
    "draft_head": {"IGNORED": "heads are trained in PyTorch"},
    "drafters": {"Assistant": "models draft in PyTorch alone", "nodes_of": "the same"},
    "speculation": {},
    "verifiers": {"LAST_RESORT": "relaxed verification is PyTorch's alone", "relaxed_places": "the same"},
    "transition": {
        "mask_illegal": "logits processors, callables of PyTorch, are given the whole vocabulary",
    },
    "head_cells": {},
    "tree": {"to_additive": "attention masks in Flax are boolean"},
}
FLAX_ONLY = {
    "beam": {},
    "decode": {"decode_program": "the compiled form of decode"},
    "children": {},
    "device_trie": {
        "ADDED_CHILDREN": "buckets",
        "ADDED_NODES": "buckets",
        "CHILDREN": "buckets",
        "PARENTS": "buckets",
        "SMALLEST": "buckets",
        "STEPS": "buckets",
        "added_on_device": "additions are in buckets of their own, and every program has some",
        "nothing_added": "the same",
    },
    "transition": {
        "HIDDEN_NODES": "buckets",
        "COMPARED": "how exclusions are looked up",
        "LARGEST_NODE": "32-bit integers",
    },
    "tree": {},
    "draft_head": {
        "HeadCache": "caches are arguments",
        "load_draft_head": "hf_gr.generation.torch.heads in PyTorch",
        "shapes_of": "torch's modules know theirs",
    },
    "head_cells": {"Cell": "torch.nn.Module", "Gated": "torch.nn.RNNCell and GRUCell"},
    "drafters": {
        "HEADROOM": "sizes of drafts are fixed in a program",
        "SMALLEST_DRAFT": "the same",
        "plan_sizes": "the same",
    },
    "speculation": {},
    "verifiers": {},
}
ALIASES = {  # of types, which have no module
    "Any",
    "HostOrDevice",
    "Callable",
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
RANDOMNESS = {"generator", "key"}
DRAFTS = {"picked", "drafter", "is_relaxed", "unchecked"}  # only the catalogue drafts; it is part of the plan
PROCESSORS = {"processors", "processor_width", "stopping_criteria", "prompt"}  # callables of PyTorch
# By name: what else differs.
OTHERWISE = {
    "beam.select": set(),
    "decode.decode": {"params"},  # a program holds no parameters
    "decode.child_scores": {"beams"},  # what processors read
    "decode.DecodePlan": {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_tokens_to_keep",
        "renormalize_logits",  # processors in torch, as those before
        "rows_axis",  # several devices run one program
    },
    "decode.Decoded": {"num_levels"},  # a program's outputs have fixed shapes
    "children.Children": {"legal"},  # a property
    "children.Children.scores": {"rows"},  # log-probabilities are not cut into pieces
    "children.MergedChildren": {"legal"},
    "children.PlainChildren": {"legal"},
    "device_trie.DeviceTrie.wide": {"(property)"},  # forms that are not read, like the next three
    "device_trie.DeviceTrie.edges": {"(property)"},
    "device_trie.DeviceTrie.flat": {"(property)"},
    "device_trie.DeviceTrie.follow": {"(property)"},
    "device_trie.bits_on_device": {"is_base"},  # its buckets are others
    "transition.DevicePart": {"wide"},
    "transition.DeviceCatalogue.nodes_per_level": {"(property)"},  # of plans of drafts
    "transition.device_catalogue": {"num_rows"},  # rows are filled up to a bucket
    "decode.in_columns": {"params"},
    "draft_head.DraftHead": {"arrays", "placeholder_embeddings"},  # loaded, not initialised
    "draft_head.DraftHead.columns": {"(property)"},  # of the scorer, like the next four
    "draft_head.DraftHead.forward": {"(property)"},
    "draft_head.DraftHead.logits": {"(property)"},
    "draft_head.DraftHead.advance": {"(property)"},
    "draft_head.DraftHead.loss": {"(property)"},
    "draft_head.DraftHead.params": {"(property)"},
    "draft_head.DraftHead.params_on": {"(property)"},
    "draft_head.DraftHead.parameters": {"(property)"},  # torch.nn.Module's
    "draft_head.DraftHead.astype": {"(property)"},  # torch.nn.Module's `to`
    "draft_head.DraftHead.config": {"(property)"},
    "draft_head.DraftHead.save_beside": {"(property)"},
    "head_cells.Add": {"args", "kwargs"},  # those of nn.Module
    "head_cells.Add.forward": {"(property)"},  # a call in Flax, where parameters are arguments
    "head_cells.Add.shapes": {"(property)"},  # torch's modules know theirs
    "head_cells.Residual": {"size"},
    "head_cells.Residual.forward": {"(property)"},
    "head_cells.Residual.shapes": {"(property)"},
    "draft_head.HeadScorer": {"head", "hidden", "config", "model"},  # arrays are arguments
    "draft_head.HeadScorer.prefill": {"(property)"},
    "draft_head.HeadScorer.advance": {"(property)"},
    "draft_head.HeadScorer.columns": {"(property)"},
    "draft_head.HeadScorer.score": {"params", "cache", "tokens", "visible", "depths", "levels", "depth"},
    "drafters.TreeDrafter": {"catalogue", "budget", "merges", "worth", "assistant", "from_zero", "sizes"},
    "drafters.TreeDrafter.size": {"(property)"},
    "drafters.TreeDrafter.num_forwards": {"(property)"},
    "drafters.TreeDrafter.draft": {"catalogue", "legal"},  # enumerated anew, as it is asked for before a level
    "speculation.Speculation.none": {"(property)"},
    "speculation.Drafter.size": {"(property)"},
    "speculation.Drafter.num_forwards": {"(property)"},
    "speculation.Drafter.draft": {"catalogue", "legal"},
    "speculation.Lookahead": {"scorer", "dead_state", "nodes", "scored", "speculation"},  # mutable in torch
    "speculation.Lookahead.over": {"(property)"},
    "speculation.Lookahead.samples": {"(property)"},
    "speculation.Lookahead.logits": {"legal", "level"},
    "tree.Nodes": {"is_complete", "log_probs", "depths"},  # of all levels, and never samples
    "tree.Tree.mask_with": {"(property)"},
    "tree.Tree.attention_mask": {"prompt_mask", "window"},  # scorers join the prompt's own
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
    return {name: value for name, value in vars(thing).items() if not name.startswith("_")}


def check(name: str, ours: Any, theirs: Any) -> None:
    allowed = DEVICES | RANDOMNESS | DRAFTS | PROCESSORS | OTHERWISE.get(name, set())
    mine, other = ([p for p in parameters(one) if p not in allowed] for one in (ours, theirs))
    if is_dataclass(ours):  # static fields with defaults may come in another order
        mine, other = sorted(mine), sorted(other)
    assert mine == other, name


@pytest.mark.parametrize("module", PAIRS)
def test_paired_modules_export_the_same_names_with_the_same_parameters(module: str) -> None:
    ours, theirs = public(import_module(f"hf_gr.flax.{module}")), public(import_module(f"hf_gr.torch.{module}"))
    assert set(theirs) - set(ours) == set(TORCH_ONLY[module])
    assert set(ours) - set(theirs) == set(FLAX_ONLY[module])
    for name in sorted(set(ours) & set(theirs)):
        if not callable(ours[name]):
            continue
        check(f"{module}.{name}", ours[name], theirs[name])
        if not inspect.isclass(ours[name]):
            continue
        mine, other = members(ours[name]), members(theirs[name])
        for method in set(mine) | set(other):
            full = f"{module}.{name}.{method}"
            if is_dataclass(ours[name]) and method in {field.name for field in fields(ours[name])}:
                continue
            if method not in mine or method not in other:
                alone = mine.get(method, other.get(method))
                is_field = method in OTHERWISE.get(f"{module}.{name}", set())
                is_listed = OTHERWISE.get(full) == {"(property)"} or method in PROCESSORS | DRAFTS | DEVICES
                is_default = not callable(alone) and not isinstance(alone, (property, classmethod))
                is_cut = full in ("decode.DecodePlan.full_sequences", "children.Children.legal")
                assert is_field or is_listed or is_default or is_cut, full
            elif callable(getattr(ours[name], method)):
                check(full, getattr(ours[name], method), getattr(theirs[name], method))


def test_generate_takes_the_same_arguments() -> None:
    from hf_gr.generation.flax.mixin import FlaxGenerationMixin
    from hf_gr.generation.torch.mixin import GRGenerationMixin

    ours, theirs = (
        list(inspect.signature(mixin.generate).parameters) for mixin in (FlaxGenerationMixin, GRGenerationMixin)
    )
    refused = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "args"}
    assert [name for name in ours if name not in ("key", "mesh")] == [
        name for name in theirs if name not in refused | {"generator"}
    ]


def test_a_planted_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_gr.flax import beam

    monkeypatch.setattr(beam, "keep_best", lambda beams, number: beams)
    with pytest.raises(AssertionError):
        check("beam.keep_best", beam.keep_best, import_module("hf_gr.torch.beam").keep_best)
    monkeypatch.delattr(beam, "retire")
    with pytest.raises(AssertionError):
        test_paired_modules_export_the_same_names_with_the_same_parameters("beam")
