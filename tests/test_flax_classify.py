# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify` with a model in Flax, against the same checkpoint in PyTorch: every way of finding labels."""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("flax")

import jax
import numpy as np
from families import build
from label_tokenizers import tokenizer_of

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, classify
from hf_gr.classification import flax_scoring
from hf_gr.classification.flax_scoring import NodeTree
from hf_gr.classification.label_trees import Sequences

LOG_TOL = 1e-4  # of log-probabilities: fp32 sums of at most 13 of some tens
LABELS = [
    "Technology",
    "Technology > AI",
    "Technology > AI > Deep learning",
    "Sports",
    "sport",
    "Café & crème",
    "北京",
]
TEXTS = ["a", "the technology of sports, and politics", "北京"]
OPTIONS: dict[str, Any] = {"top_k": None, "prompt": "Text: {text}\nCategory:", "batch_size": 2, "progress": False}


@pytest.fixture(autouse=True)
def _highest_precision() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def pair(family: str, folder: Path) -> tuple[Any, Any]:
    """One checkpoint on both sides."""
    model = build(family, config={"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 0})
    model.save_pretrained(folder / family)
    return model, AutoModelForGenerativeRetrieval.from_pretrained(folder / family, backend="flax")


@cache
def index_of(*labels: str) -> ConstraintIndex:
    return ConstraintIndex.from_labels(list(labels), tokenizer_of("bpe"))


def both(models: tuple[Any, Any], index: ConstraintIndex, **options: Any) -> tuple[Any, Any]:
    """What PyTorch finds, and Flax."""
    theirs, ours = (classify(model, tokenizer_of("bpe"), TEXTS, index, **OPTIONS | options) for model in models)
    return theirs, ours


def agree(theirs: Any, ours: Any) -> bool:
    """The same labels in the same order, with log-probabilities within `LOG_TOL`."""
    return all(
        [label for label, _ in one] == [label for label, _ in other]
        and np.allclose([math.log(p) for _, p in one], [math.log(p) for _, p in other], atol=LOG_TOL, rtol=0)
        for one, other in zip(theirs, ours, strict=True)
    )


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_all_labels_in_one_program_and_in_pieces(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts in batches of two, calibration, hierarchies, and a narrower set: one program for all of it."""
    models, index = pair(family, folder), index_of(*LABELS)
    program: Any = flax_scoring._score_tree
    before = program._cache_size()
    theirs, ours = both(models, index, hierarchy=" > ")
    assert agree(theirs, ours)
    assert (ours.method, ours.num_nodes, ours.num_scored) == (theirs.method, theirs.num_nodes, theirs.num_scored)
    assert all(map(agree, theirs.parents, ours.parents))
    assert agree(*both(models, index, neutral_text="N/A"))
    assert agree(*both(models, index.where(LABELS[2:]), threshold=0.01, top_k=2))
    assert program._cache_size() - before <= 2  # the neutral text is a batch of one
    monkeypatch.setattr(flax_scoring, "NODES_AT_ONCE", 3)
    assert agree(theirs, both(models, index)[1])


def test_beams_find_the_same(folder: Path) -> None:
    models, index = pair("llama", folder), index_of(*LABELS)
    theirs, ours = both(models, index, max_tree_nodes=0, num_beams=4, neutral_text="N/A")
    assert agree(theirs, ours)
    assert theirs.method == ours.method == "beams"
    assert ours.num_scored == theirs.num_scored


def test_where_pytorch_bounds_the_error_all_labels_are_scored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_gr.classification.classify"], "LOGITS_AT_ONCE", 512)
    theirs, ours = both(pair("llama", folder), index_of(*LABELS), top_k=3, tolerance=0.001)
    assert (theirs.method, ours.method) == ("bounded", "exact")
    for one, other in zip(theirs, ours, strict=True):
        assert [label for label, _ in one] == [label for label, _ in other]
        assert np.allclose([p for _, p in one], [p for _, p in other], rtol=0.002, atol=0)


def test_what_flax_lacks_is_refused_with_its_remedy(folder: Path) -> None:
    torch_model, model = pair("llama", folder)
    ask = {"tokenizer": tokenizer_of("bpe"), "texts": TEXTS, "index": index_of(*LABELS)}
    with pytest.raises(ValueError, match=r"separator=',' with a model in Flax, expected None.*backend='torch'"):
        classify(model, **ask, separator=",", max_labels=2)
    with pytest.raises(ValueError, match=r"mesh=\(1, 1\) with backend='torch', expected none: pass device="):
        classify(torch_model, **ask, mesh=(1, 1))


def test_a_tree_has_every_path() -> None:
    """By plain loops: the edges of a sequence spell it, and a node sees its ancestors and itself."""
    index = index_of(*LABELS)
    sequences = Sequences.of(index.snapshot.trie)
    for room in (3, 100):
        spelt = []
        for piece in sequences.pieces(room):
            tree, number = NodeTree.of(sequences.levels(piece))
            num_edges = len(tree.sources)
            for path in np.asarray(tree.paths)[:number].tolist():
                edges = [edge for edge in path if edge < num_edges]
                spelt.append([int(tree.edge_tokens[edge]) for edge in edges])
                nodes = [int(tree.sources[edge]) - 1 for edge in edges]  # that each edge begins at
                assert nodes[0] == -1
                for place, node in enumerate(nodes[1:], start=1):
                    assert tree.depths[node] == place
                    assert tree.tokens[node] == spelt[-1][place - 1]
                    assert np.flatnonzero(tree.visible[node]).tolist() == sorted(nodes[1 : place + 1])
        assert sorted(spelt) == sorted(row[row >= 0].tolist() for row in index.snapshot.rows())


def test_a_planted_error_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that see all others."""
    right = NodeTree.of

    def wrong(levels: Any) -> Any:
        tree, number = right(levels)
        tree.visible[:] = True
        return tree, number

    monkeypatch.setattr(NodeTree, "of", wrong)
    assert not agree(*both(pair("llama", folder), index_of(*LABELS)))
