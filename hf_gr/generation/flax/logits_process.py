# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The constraint as a function of tokens and scores in JAX, for any other loop. Knows no beams and no PyTorch.

Axes: P prompts; R rows, as many for each prompt; T tokens; V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.generated import items_of_batch
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.catalogue.rules import BatchRules
from hf_gr.flax.arrays import WholeNumber
from hf_gr.flax.devices import settings_of_ours
from hf_gr.flax.transition import DeviceCatalogue, advance, children, device_catalogue, over_vocabulary
from hf_gr.generation.checks import check_processor, check_scores_of_rules, check_tokens_of_catalogue
from hf_gr.generation.named_catalogues import batch_rules

FILLING = -1e30  # as in PyTorch: see `hf_gr.generation.torch.constraints`


class _Facts(NamedTuple):
    """Facts about a processor that are compiled into its program."""

    prompt_length: int
    max_token_id: int
    end_token: int
    num_prompts: int


@jax.tree_util.register_pytree_node_class
class FlaxConstraintLogitsProcessor:
    """Keeps the tokens that continue a sequence of the catalogue, and drops all others to `-inf`.

    The twin of PyTorch's `ConstraintLogitsProcessor`, with the same scores: a row that is complete, or not a prefix of
    the catalogue, keeps one token: the end token (token 0 without one), with a very low finite score. Legal tokens
    get that score where other processors forbid all of them. `generate(constraint_index=...)` is faster.

    A call depends on its arguments alone, and may be traced: inside `jax.jit`, `lax.scan`, `lax.while_loop`. The
    processor is a pytree: pass it to a compiled function as an argument, or its arrays are constants of the program.

    Args:
        separator, max_labels, tokenizer: None: answers of several labels are PyTorch's alone.
        all others: as for `ConstraintLogitsProcessor`; `prompt_length` or `attention_mask` must be given.

    Raises:
        ValueError: as `generate` for `constraint_index` and `exclude_items`; no length of the prompt; a separator.

    Example:
        >>> index = ConstraintIndex.from_sequences([[5, 7], [6, 7]])
        >>> processor = FlaxConstraintLogitsProcessor(index, prompt_length=2)
        >>> scores = processor(jnp.array([[1, 2]]), jnp.zeros((1, 8)))
        >>> jnp.isfinite(scores).nonzero()[1].tolist()
        [5, 6]

        In a loop over arrays of a fixed size, `cur_len` says how many tokens are there:

        >>> scores = jax.jit(lambda it, *args: it(*args))(processor, jnp.array([[1, 2, 5, 0]]), jnp.zeros((1, 8)), 3)
        >>> jnp.isfinite(scores).nonzero()[1].tolist()
        [7]

    Source: STATIC, section 4.
    """

    def __init__(
        self,
        index: ConstraintIndex | Sequence[ConstraintIndex],
        prompt_length: int | None = None,
        *,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        attention_mask: Any = None,
        separator: Any = None,
        max_labels: int | None = None,
        tokenizer: Any = None,
    ) -> None:
        for name, value in (("separator", separator), ("max_labels", max_labels), ("tokenizer", tokenizer)):
            if value is not None:
                raise ValueError(
                    f"{name} is given, expected None in Flax, where an answer is one label: hf_gr."
                    "ConstraintLogitsProcessor, in PyTorch, knows answers of several"
                )
        length = check_processor(index, prompt_length, attention_mask)
        if length is None:
            raise ValueError(
                "prompt_length=None, expected 0 or more tokens, as input_ids.shape[1] of the prompt has them: a "
                "traced call cannot remember where its prompt ended"
            )
        self.rules: BatchRules | None = batch_rules(index, exclude_items)
        shared = self.rules.shared
        self._facts = _Facts(length, shared.max_token_id, shared.eos_token_id or 0, self.rules.num_rows or 1)
        with settings_of_ours(None):
            self._catalogue = device_catalogue(self.rules, num_rows=self.rules.num_rows or 1)

    def __call__(
        self,
        input_ids: Int[Array, "rows tokens"],
        scores: Float[Array, "rows vocab"],
        cur_len: WholeNumber | None = None,
    ) -> Float[Array, "rows vocab"]:
        """Mask scores by the tokens before them.

        Args:
            input_ids: the prompt and the generated tokens; those after the first `cur_len` are not read.
            scores: after them.
            cur_len: how many tokens are there, also traced; None for all of `input_ids`. Scores inside the prompt stay
                as they are.

        Raises:
            ValueError: tokens of the catalogue outside the vocabulary, a number of rows that the prompts do not
                divide, or fewer tokens than the prompt has.
        """
        prompt_length = self._facts.prompt_length
        if scores.ndim != 2 or input_ids.ndim != 2 or len(scores) != len(input_ids):
            raise ValueError(
                f"input_ids are {list(input_ids.shape)} and scores {list(scores.shape)}, expected [rows, tokens] and "
                "[rows, vocabulary]: call it once for every position"
            )
        check_tokens_of_catalogue(self._facts, scores.shape[-1], name="index")
        check_scores_of_rules(len(scores), self._facts.num_prompts)
        length = input_ids.shape[1] if cur_len is None else cur_len
        if isinstance(length, int) and not prompt_length <= length <= input_ids.shape[1]:
            raise ValueError(
                f"input_ids have {min(length, input_ids.shape[1])} tokens, expected prompt_length={prompt_length} or "
                "more, and cur_len= of them: is it another prompt's?"
            )
        with settings_of_ours(None):
            return self._mask(jnp.asarray(input_ids)[:, prompt_length:], jnp.asarray(scores), length - prompt_length)

    @property
    def prompt_length(self) -> int:
        """Tokens before the generated ones."""
        return self._facts.prompt_length

    def items(self, sequences: Any) -> list[list[ItemId]]:
        """The items of generated answers, as `ConstraintLogitsProcessor.items`; on the host."""
        if self.rules is None:
            raise ValueError("items of a processor that a program was given, expected the one that was made: ask that")
        return items_of_batch(self.rules, sequences)

    def _mask(self, generated: Any, scores: Array, level: Any) -> Array:
        """The scores after `level` of the generated tokens."""
        catalogue, num_prompts = self._catalogue, self._facts.num_prompts
        num_rows, num_levels = len(scores), catalogue.max_length
        states = jnp.zeros((num_prompts, num_rows // num_prompts), jnp.int32)
        is_known = isinstance(level, int)
        for done in range(min(level if is_known else num_levels, num_levels, generated.shape[1])):
            tokens = generated[:, done].astype(jnp.int32).reshape(states.shape)
            moved = advance(states, tokens, catalogue, level=done)
            states = moved if is_known else jnp.where(done < level, moved, states)
        ways: list[Any] = [
            lambda states, scores: scores,  # inside the prompt
            *(partial(self._mask_level, at) for at in range(num_levels)),
            lambda states, scores: self._over(scores),
        ]
        if is_known:
            return ways[min(level, num_levels) + 1](states, scores)
        return lax.switch(jnp.clip(level + 1, 0, num_levels + 1), ways, states, scores)

    def _mask_level(self, level: int, states: Array, scores: Array) -> Array:
        by_prompt = scores.reshape(*states.shape, -1)
        legal = children(states, self._catalogue, level=level)
        kept = legal.scores(by_prompt)
        # Where others left no legal token, all are possible: the constraint holds.
        is_left = (legal.legal & (kept > -jnp.inf)).any(-1, keepdims=True)
        kept = jnp.where(is_left, kept, _filling(scores.dtype))
        masked = over_vocabulary(kept, legal, scores.shape[-1]).reshape(scores.shape)
        is_going_on = legal.legal.any(-1).reshape(-1, 1)
        return jnp.where(is_going_on, masked, self._over(scores))

    def _over(self, scores: Array) -> Array:
        """The scores of finished rows."""
        return jnp.full_like(scores, -jnp.inf).at[:, self._facts.end_token].set(_filling(scores.dtype))

    def tree_flatten(self) -> tuple[tuple[DeviceCatalogue], _Facts]:
        """The catalogue's arrays, and the facts that are compiled into a program."""
        return (self._catalogue,), self._facts

    @classmethod
    def tree_unflatten(cls, facts: _Facts, arrays: tuple[DeviceCatalogue]) -> FlaxConstraintLogitsProcessor:
        """A processor inside a program; it does not know items."""
        made = cls.__new__(cls)
        (made._catalogue,), made._facts, made.rules = arrays, facts, None
        return made


def _filling(dtype: Any) -> float:
    """The score of the only token of a finished row: still finite when divided by a temperature of 1/16."""
    return max(FILLING, float(jnp.finfo(dtype).min) / 16)
