# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Both backends: the same modules, names, arguments and options, but for what is listed here with its reason."""

import inspect
from importlib import import_module
from pathlib import Path

from hf_gr.generation.configuration import DRAFTING, VERIFICATION
from hf_gr.generation.flax.drafts import KINDS
from hf_gr.generation.flax.mixin import FlaxGenerationMixin
from hf_gr.generation.flax.prompts import NEUTRAL, NEUTRAL_SCORES, NEUTRAL_WARPERS
from hf_gr.generation.torch.mixin import GRGenerationMixin

# Modules of one side alone, and why, or what is there instead.
ALONE = {
    "assistants": "classes of drafters in torch",
    "processes": "several devices run one program",
    "log_probs": "XLA keeps no log-softmax of a whole vocabulary",
    "graphs": "XLA compiles programs and keeps them",
    "tree_attention": "programs of Flax attend by masks",
    "arrays": "PyTorch has these",
    "parameters": "the same",
    "checkpoint": "models are transformers' in PyTorch",
    "forward": "the same",
    "layers": "the same",
    "model": "the same",
    "families": "the same",
    "spec": "the same",
    "devices": "the same",
}


def test_every_module_is_on_both_sides_or_listed() -> None:
    ours, theirs = (
        {path.stem for path in Path(*import_module(f"hf_gr.{side}").__path__).glob("[!_]*.py")}
        for side in ("flax", "torch")
    )
    assert ours ^ theirs == set(ALONE)


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
    ours, theirs = (
        list(inspect.signature(mixin.generate).parameters) for mixin in (FlaxGenerationMixin, GRGenerationMixin)
    )
    assert set(ours) - set(theirs) == set(FLAX_ARGUMENTS)
    assert set(theirs) - set(ours) == set(TORCH_ARGUMENTS)
    in_both = [[name for name in own if name in ours and name in theirs] for own in (ours, theirs)]
    assert in_both[0] == in_both[1]


def test_fields_of_a_config_are_refused_for_a_reason() -> None:
    assert {**NEUTRAL, **NEUTRAL_SCORES, **NEUTRAL_WARPERS}.keys() == REFUSED_FIELDS.keys()


def test_drafts_and_verifications_are_the_same_but_for_those_that_are_listed() -> None:
    assert {*KINDS, "auto"} == set(DRAFTING)
    assert {name for kind in KINDS.values() for name in kind.lacks} == set(TORCH_VERIFICATIONS)
    assert set(TORCH_VERIFICATIONS) <= set(VERIFICATION)
