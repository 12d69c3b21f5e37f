# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels scored by a model in Flax: a tree of nodes in one compiled program. `torch_scoring` is its twin.

Shapes are those of buckets: sets of like size, and batches of like prompts, share a program.

Axes: B batch, P prompt, N inner nodes, E edges (all nodes but the root), S sequences, D depth, V vocabulary, K beams,
T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from hf_gr.catalogue.buckets import bucket
from hf_gr.catalogue.fanout import Longs
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import PADDING
from hf_gr.flax.arrays import HostOrDevice
from hf_gr.flax.buckets import padded
from hf_gr.flax.decode import decode_program
from hf_gr.flax.devices import DATA, decode_on_mesh, num_rows_on, replicated, settings_of_ours, to_mesh
from hf_gr.flax.model import FlaxModel
from hf_gr.flax.plan import DecodePlan
from hf_gr.flax.scorers import Params, Prompt, Scorer
from hf_gr.flax.transition import device_catalogue
from hf_gr.generation.flax.prompts import to_bucket
from hf_gr.generation.models import start_token

from .finders import Floats, Scoring
from .label_trees import LOGITS_AT_ONCE, NODES_AT_ONCE, Level, Sequences

SMALLEST, STEPS = 16, 2  # sizes of a tree's arrays: two a doubling


class FlaxScoring(Scoring):
    """See `Scoring`.

    Args:
        model: the model.
        mesh: where it runs; None for all local devices.
    """

    takes_trees = False  # a search node by node needs a program for every shape; all nodes need one

    def __init__(self, model: FlaxModel, mesh: Mesh | None) -> None:
        self.model = model
        self.mesh = to_mesh(mesh)
        self.config, self.dtype = model.config, model.dtype
        self.vocab_size: int = model.config.vocab_size

    def evaluation(self) -> AbstractContextManager[Any]:
        """See `Scoring.evaluation`: models in Flax have no mode."""
        return settings_of_ours(self.mesh)

    def read_answers(self, snapshot: Snapshot, separator: Any, max_labels: Any, tokenizer: Any) -> Any:
        """See `Scoring.read_answers`: there are none."""
        raise ValueError(
            f"separator={separator!r} with a model in Flax, expected None: an answer is one label there; load the "
            "model with backend='torch' for several"
        )

    def every(self, sequences: Sequences, *, batch_size: int) -> Callable[[Longs, Longs], Floats]:
        """See `Scoring.every`: a forward for every piece."""
        num_rows = num_rows_on(self.mesh, batch_size)
        room = max(min(NODES_AT_ONCE, LOGITS_AT_ONCE // (num_rows * self.vocab_size)), 1)
        pieces = [NodeTree.of(sequences.levels(piece)) for piece in sequences.pieces(room)]

        def score(input_ids: Longs, mask: Longs) -> Floats:
            prompt = self._prompt(input_ids, mask, num_rows, sequences.trie.max_length)
            scorer, params = self.model.scorer, self.model.params_on(self.mesh)
            found = [
                np.asarray(_score_tree(self.mesh, scorer, params, prompt, tree))[: len(input_ids), :number]
                for tree, number in pieces
            ]
            return np.concatenate(found, axis=1)

        return score

    def probable(self, sequences: Sequences, *, tolerance: float, at_least: int) -> Any:
        """See `Scoring.probable`: it is not there."""
        raise NotImplementedError("all labels are scored in Flax: takes_trees is False")

    def search(
        self, snapshot: Snapshot, answers: Any, *, num_beams: int, max_new_tokens: int, batch_size: int
    ) -> Callable[[Longs, Longs], tuple[Longs, Floats]]:
        """See `Scoring.search`."""
        rules, num_rows = combine_rules([snapshot]), num_rows_on(self.mesh, batch_size)
        plan = DecodePlan(  # by the probability of whole labels, however long: no length penalty, no early end
            num_beams=num_beams,
            num_return_sequences=num_beams,
            num_kept=2 * num_beams,
            do_sample=False,
            early_stopping=False,
            length_penalty=np.float32(0),
            max_new_tokens=np.int32(max_new_tokens),
            fill_token_id=np.int32(PADDING),
            missing_token_id=np.int32(PADDING),
        )
        program: Any = decode_program if self.mesh is None else partial(decode_on_mesh, self.mesh)

        def find(input_ids: Longs, mask: Longs) -> tuple[Longs, Floats]:
            prompt = self._prompt(input_ids, mask, num_rows, snapshot.max_length)
            catalogue = device_catalogue(rules, replicated(self.mesh), num_rows=num_rows)
            decoded = program(self.model.scorer, self.model.params_on(self.mesh), catalogue, prompt, plan)
            found = jax.device_get((decoded.sequences, decoded.scores, decoded.beam_indices))
            sequences, scores, beam_indices = (array[: len(input_ids)] for array in found)
            length = max(int((beam_indices >= 0).sum(-1).max()), 1)
            return sequences[..., :length].astype(np.int64), scores

        return find

    def _prompt(self, input_ids: Longs, mask: Longs, num_rows: int, longest: int) -> Prompt:
        """The prompts of a batch in the shape of a program."""
        start = None
        if self.config.is_encoder_decoder:
            token = start_token(self.model.generation_config, self.config)
            if token is None:
                raise ValueError(
                    "model has no decoder_start_token_id, expected one: set it in model.generation_config"
                )
            start = np.full((len(input_ids), 1), token, np.int32)
        else:
            self.model.spec.check_length(input_ids.shape[1] + longest)
        return to_bucket(input_ids.astype(np.int32), mask != 0, start, num_rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NodeTree:
    """Some sequences as a tree, padded to buckets: what one forward scores.

    Attributes:
        tokens: of the inner nodes, parents first.
        depths: tokens from the prompt to each.
        visible: which inner nodes are each node's ancestors, or itself.
        sources: of each edge: 0 for the prompt, else one more than the place of the inner node that it begins at.
        edge_tokens: the token of each edge.
        paths: the edges of each sequence; E where there is none.
    """

    tokens: Int[HostOrDevice, " nodes"]
    depths: Int[HostOrDevice, " nodes"]
    visible: Bool[HostOrDevice, "nodes nodes"]
    sources: Int[HostOrDevice, " edges"]
    edge_tokens: Int[HostOrDevice, " edges"]
    paths: Int[HostOrDevice, "sequences depth"]

    @classmethod
    def of(cls, levels: list[Level]) -> tuple[NodeTree, int]:
        """The tree of some levels, and the number of its sequences."""
        tokens, depths, sources, edge_tokens = ([np.zeros(0, np.int64)] for _ in range(4))
        ancestors: list[tuple[Longs, Longs]] = []  # inner nodes, and one ancestor of each or itself
        number = sum(len(level.sequences) for level in levels)
        paths = np.full((number, len(levels)), -1)
        places = np.zeros(1, np.int64)  # of the inner nodes above, as `sources` has them
        above, below_edges = np.zeros((1, 0), np.int64), np.zeros((1, 0), np.int64)  # their nodes, and their edges
        num_nodes = num_edges = 0
        for depth, level in enumerate(levels, start=1):
            sources.append(places[level.parents])
            edge_tokens.append(level.tokens)
            edges = num_edges + np.arange(len(level.tokens))
            num_edges += len(edges)
            reached = np.concatenate([below_edges[level.parents], edges[:, None]], axis=1)
            paths[level.sequences, :depth] = reached[level.ends]
            nodes = num_nodes + np.arange(len(level.inner))
            num_nodes += len(nodes)
            tokens.append(level.tokens[level.inner])
            depths.append(np.full(len(nodes), depth))
            above = np.concatenate([above[level.parents[level.inner]], nodes[:, None]], axis=1)
            ancestors += [(nodes, column) for column in above.T]
            below_edges, places = reached[level.inner], nodes + 1
        size, num_padded = (bucket(count, least=SMALLEST, steps=STEPS) for count in (num_nodes, num_edges))
        visible = np.eye(size, dtype=bool)
        for nodes, column in ancestors:
            visible[nodes, column] = True
        deepest = bucket(paths.shape[1], least=4, steps=STEPS)
        whole = np.where(paths < 0, num_padded, paths)
        whole = padded(padded(whole, deepest, num_padded, axis=1), bucket(number, least=SMALLEST, steps=STEPS))

        def filled(parts: list[Longs], size: int, fill: int = 0) -> Any:
            return padded(np.concatenate(parts).astype(np.int32), size, fill)

        made = cls(
            tokens=filled(tokens, size),
            depths=filled(depths, size, 1),
            visible=visible,
            sources=filled(sources, num_padded),
            edge_tokens=filled(edge_tokens, num_padded),
            paths=whole.astype(np.int32),
        )
        return made, number


@partial(jax.jit, static_argnames=("mesh", "scorer"))
def _score_tree(
    mesh: Mesh | None, scorer: Scorer, params: Params, prompt: Prompt, tree: NodeTree
) -> Float[Array, "batch sequences"]:
    """Log-probabilities of a tree's sequences after each prompt: sums over the full vocabulary's log-softmax."""
    if mesh is not None:
        prompt = lax.with_sharding_constraint(prompt, NamedSharding(mesh, P(DATA)))
    of_prompt, cache = scorer.prefill(params, prompt)
    size = len(of_prompt)
    tokens, depths, visible = (
        jnp.broadcast_to(array, (size, *array.shape)) for array in (tree.tokens, tree.depths, tree.visible)
    )
    logits, _ = scorer.score(params, cache, tokens, depths, visible)
    nodes = jnp.maximum(tree.sources - 1, 0)
    is_first = tree.sources == 0
    chosen = jnp.where(is_first, of_prompt[:, tree.edge_tokens], logits[:, nodes, tree.edge_tokens])
    of_first, of_nodes = (jax.nn.logsumexp(array, axis=-1) for array in (of_prompt, logits))
    log_probs = chosen - jnp.where(is_first, of_first[:, None], of_nodes[:, nodes])
    log_probs = jnp.pad(log_probs, ((0, 0), (0, 1)))  # of no edge
    return log_probs[:, tree.paths].sum(-1)
