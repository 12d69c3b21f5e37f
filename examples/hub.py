# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Share a recommender on the Hub: its catalogue, its draft head, and a checkpoint that carries both.

    hf auth login
    python examples/hub.py --repo me/recommender    # makes private me/recommender, -catalogue and -head

    python examples/hub.py --loopback               # seconds, as in CI: a local stand-in for the Hub

A release is a tag: what it loads stays the same, whatever is pushed later. Copy the lines of `push` and `load`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, DraftHead, SemanticIds, enable

PROMPT = torch.tensor([[5, 70, 140]])


def make() -> tuple[Any, ConstraintIndex]:
    """A model with a draft head, both with random weights, and a catalogue of 1,000 items."""
    torch.manual_seed(0)
    ids = SemanticIds(torch.randint(0, 64, (1_000, 3)), level_sizes=[64] * 3, offset=3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    model = enable(Qwen3ForCausalLM(Qwen3Config(vocab_size=ids.vocab_size, **size)))
    model.add_draft_head(ids)
    return model.eval(), ids.constraint_index()


def push(repo: str, model: Any, index: ConstraintIndex) -> None:
    # Separately: a catalogue that several models share, a head for a model that others have.
    index.push_to_hub(f"{repo}-catalogue", private=True)
    model.draft_head.push_to_hub(f"{repo}-head", private=True)

    # All in one repository. The checkpoint names its catalogue: "." is its own.
    model.generation_config.constraint_index = "."
    model.generation_config.num_beams = 20
    model.push_to_hub(repo, private=True)  # weights, and the draft head's files beside them
    index.push_to_hub(repo)
    HfApi().create_tag(repo, tag="v1", exist_ok=True)  # an existing tag stays where it is


def load(repo: str, **options: Any) -> tuple[Any, ConstraintIndex]:
    """Checkpoint and catalogue; `revision="v1"` is a tag, a branch or a commit; `local_files_only` stays offline."""
    model = AutoModelForGenerativeRetrieval.from_pretrained(repo, **options)
    return model, ConstraintIndex.from_pretrained(repo, **options)


def answer(model: Any, index: ConstraintIndex, **how: Any) -> list[list[Any]]:
    out = model.generate(PROMPT, num_beams=20, num_return_sequences=5, **how)
    return index.items(out[:, PROMPT.shape[1] :])


def run(repo: str) -> None:
    model, index = make()
    expected = {name: answer(model, index, constraint_index=index, drafting=name) for name in (None, "head")}
    push(repo, model, index)
    print(f"pushed {repo}, {repo}-catalogue and {repo}-head; {repo} is tagged v1")

    # Reassemble the parts.
    head, catalogue = DraftHead.from_pretrained(f"{repo}-head"), ConstraintIndex.from_pretrained(f"{repo}-catalogue")
    backbone, _ = make()
    backbone.add_draft_head(head)
    assert answer(backbone, catalogue, constraint_index=catalogue, drafting="head") == expected["head"]

    # The checkpoint: the catalogue need not be passed.
    model, index = load(repo, revision="v1")
    assert {name: answer(model, index, drafting=name) for name in (None, "head")} == expected
    print(f"v1 answers as before it was pushed: {[items[0] for items in expected[None]]}")

    # An item sells out, and only the catalogue is pushed again. The tag still loads the release, main the new
    # catalogue.
    sold_out = expected[None][0]
    index.remove(sold_out)
    index.push_to_hub(repo, commit_message=f"Sold out: {sold_out}")
    new_model, new_index = load(repo)
    new = answer(new_model, new_index)
    assert sold_out not in new
    print(f"main, after item {sold_out[0]} sold out: {[items[0] for items in new]}")

    # Cached files need no connection.
    model, index = load(repo, revision="v1", local_files_only=True)
    assert answer(model, index) == expected[None]
    print("v1 from the cache alone answers as before, too")


def run_on_loopback() -> None:
    """The same in a process with another Hub: `huggingface_hub` reads its address on import."""
    stand_in = Path(__file__).resolve().parents[1] / "tests" / "hub_server.py"
    if not stand_in.is_file():
        print(f"skipped: no {stand_in}, which is in hf_gr's repository: run it there, or with --repo")
        return
    sys.path.insert(0, str(stand_in.parent))
    from hub_server import HubServer

    with HubServer() as hub, tempfile.TemporaryDirectory() as home:
        command = [sys.executable, __file__, "--repo", "me/recommender"]
        subprocess.run(command, check=True, env={**os.environ, **hub.environment(home)})
        assert not hub.problems, hub.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--repo", help="your repository, such as me/recommender")
    where.add_argument("--loopback", "--fast", action="store_true")
    options = parser.parse_args()
    logging.disable_progress_bar()
    if options.loopback:
        run_on_loopback()
    else:
        run(options.repo)


if __name__ == "__main__":
    main()
