# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Forwards and accepted steps of drafts, for `speculation.py` and `atspeed.py`. Trains nothing and times nothing.

- `Memory`: the target's logits, so that drafts are counted without its forwards, many users at once;
- `accepted_steps`: of users under strict verification;
- `count`: these for every width of one draft.

Axes: U users, N nodes of a forward, S keys seen so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import product
from typing import Any

import numpy as np
import torch
from experiments import show_progress
from report import print_table
from speculation_models import Data, prompts_of
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_gr import ConstraintIndex

RESAMPLES = 5000
NUM_DRAFT_BEAMS, GAMMA = 40, 4
# A budget of one node keeps the catalogue from drafting: what remains is AtSpeed.
ASSISTANT = {
    "drafting": "assistant",
    "num_draft_beams": NUM_DRAFT_BEAMS,
    "num_assistant_tokens": GAMMA,
    "draft_token_budget": 1,
}
EIGHT = 8
SAMPLES = {"do_sample": True, "temperature": 1.0, "top_k": 0}
# Without a draft. Strict samples are transformers' (2 K drawn, the K best kept), relaxed ones the paper's (K drawn).
OWN = {"strict": SAMPLES, "relaxed": SAMPLES | {"verification": "relaxed"}}
TWICE = "none, two runs"


@dataclass(frozen=True)
class Counting:
    """How much is counted.

    Attributes:
        users: of `count`.
        checked: batches of `count` whose drafts are also scored by the target's own forwards.
        num_beams: K of `count`.
        batches: of eight users.
        batch_beams: K of `batch`.
        sample_users: of `sample`.
        sample_beams: K of `sample`.
        tv_users: users whose answers are drawn again and again.
        tv_draws: calls for each of them.
    """

    users: int = 1000
    checked: int = 1
    num_beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    batches: int = 10
    batch_beams: tuple[int, ...] = (5, 20)
    sample_users: int = 100
    sample_beams: tuple[int, ...] = (5, 10)
    tv_users: int = 4
    tv_draws: int = 256


FAST = Counting(
    users=2,
    checked=1,
    num_beams=(1, 5),
    batches=1,
    batch_beams=(5,),
    sample_users=2,
    sample_beams=(5,),
    tv_users=1,
    tv_draws=8,
)


def ask(
    target: Any,
    prompt: dict[str, Tensor],
    index: ConstraintIndex,
    settings: dict[str, Any],
    *,
    num_beams: int,
    **more: Any,
) -> Any:
    """One call."""
    return target.generate(
        **prompt,
        **settings,
        **more,
        constraint_index=index,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
    )


# ------------------------------------------------------------------------------------------------------------ forwards


class Forwards:
    """The shapes `(batch, tokens)` of all forwards of a model in this context, its prefill included."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.shapes: list[tuple[int, int]] = []

    def __enter__(self) -> Forwards:
        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            self.shapes.append(tuple(kwargs["input_ids"].shape))

        self.hook = self.model.register_forward_pre_hook(note, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def __len__(self) -> int:
        return len(self.shapes)

    def nodes(self, prompt: Tensor) -> int:
        """Tokens computed besides those of the prompt, padding included."""
        return sum(batch * tokens for batch, tokens in self.shapes) - prompt.numel()


class Memory:
    """The target's logits along plain searches of some users, so that drafts are counted without its forwards.

    Strict verification keeps plain search's beams, whatever is drafted: no other node's logits are read. So a target
    that remembers those and knows of the others nothing (NaN) gives the same counts, several times faster; an answer
    that used another node would not be plain search's, which is checked.

    A node is known by its user and the tokens that it sees after the prompt, itself included. While recalling, the
    cache holds the users' places and their tokens instead of keys and values: rows of a batch leave it when they are
    done.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.compute = target.forward
        self.base = target.config.vocab_size + 1
        self.is_recalling = False

    def __enter__(self) -> Memory:
        # Its signature tells the library what the model takes.
        self.target.forward = wraps(self.compute)(lambda input_ids, **kwargs: self._forward(input_ids, **kwargs))
        return self

    def __exit__(self, *_: object) -> None:
        del self.target.forward

    def forget(self, prompt: Tensor) -> None:
        """Begin with other users."""
        self.prompt_length = prompt.shape[1]
        self.tokens = prompt
        self.places: dict[tuple[int, int], int] = {}
        self.logits: list[Tensor] = [torch.full((1, self.target.config.vocab_size), torch.nan)]

    @contextmanager
    def recalling(self) -> Iterator[None]:
        """Forwards are looked up instead of computed."""
        self.logits = [torch.cat(self.logits)]
        self.is_recalling = True
        try:
            yield
        finally:
            self.is_recalling = False

    def _forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        kept = kwargs.get("logits_to_keep", 0)
        kept = slice(-kept, None) if isinstance(kept, int) else kept
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        past = 0 if cache is None else cache.get_seq_length()
        if not self.is_recalling:
            self.tokens = torch.cat([self.tokens[:, :past], input_ids], dim=1)
            outputs = self.compute(input_ids=input_ids, **kwargs)
            self._note(self._paths(self.tokens, mask, past)[:, kept], outputs.logits)
            return outputs
        cache = DynamicCache(config=self.target.config) if cache is None else cache
        layer: Any = cache.layers[0] if past else None
        users = layer.keys[:, 0, 0, 0] if past else torch.arange(len(input_ids))
        for number in range(self.target.config.num_hidden_layers):
            places = users[:, None, None, None].expand(-1, 1, input_ids.shape[1], 1)
            cache.update(places, input_ids[:, None, :, None], number)
        layer = cache.layers[0]
        paths = self._paths(layer.values[:, 0, :, 0], mask, past)[:, kept]
        pairs = zip(users.repeat_interleave(paths.shape[1]).tolist(), paths.flatten().tolist(), strict=True)
        places = torch.tensor([self.places.get(pair, 0) for pair in pairs]).view(paths.shape)
        return CausalLMOutputWithPast(logits=self.logits[0][places], past_key_values=cache)

    def _note(self, paths: Tensor, logits: Tensor) -> None:
        """Remember the logits of nodes."""
        start = sum(map(len, self.logits))
        pairs = ((user, path) for user, row in enumerate(paths.tolist()) for path in row)
        self.places |= {pair: start + number for number, pair in enumerate(pairs)}
        self.logits.append(logits.flatten(0, 1))

    def _paths(self, tokens: Tensor, mask: Tensor | None, past: int) -> Tensor:
        """A number for each token of a forward: that of its path after the prompt, 0 for the prompt's own tokens."""
        size = tokens.shape[1]
        if mask is None or mask.ndim < 4:
            mask = torch.ones((1, 1, size - past, size), dtype=torch.bool).tril(past)
        seen = mask[:, 0, :, self.prompt_length :].long()
        depth = (seen.cumsum(-1) - 1).clamp_min(0)
        return (seen * (tokens[:, None, self.prompt_length :] + 1) * self.base**depth).sum(-1)


@dataclass(frozen=True)
class Searches:
    """Plain searches of some users, remembered: the same for every draft.

    Attributes:
        prompts: of each batch.
        memories: by batch and K: what the target knows after them, and its answers.
    """

    prompts: list[dict[str, Tensor]]
    memories: dict[tuple[int, int], tuple[dict[tuple[int, int], int], Tensor, Tensor]]


def in_batches(data: Data, users: Sequence[int], size: int = 50) -> list[list[int]]:
    """Users with prompts of similar lengths together."""
    order = sorted(users, key=lambda user: len(data.prompts[user]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def search_all(target: Any, data: Data, batches: Sequence[Sequence[int]], beams: Sequence[int]) -> Searches:
    """Plain search for users, a batch at a time."""
    prompts = [prompts_of(target, data, batch) for batch in batches]
    memories = {}
    with Memory(target) as memory:
        for (number, prompt), num_beams in product(enumerate(prompts), beams):
            memory.forget(prompt["input_ids"])
            plain = ask(target, prompt, data.index, {}, num_beams=num_beams)
            memories[number, num_beams] = memory.places, torch.cat(memory.logits), plain.sequences
    return Searches(prompts, memories)


def accepted_steps(
    target: Any,
    data: Data,
    searches: Searches,
    settings: dict[str, Any],
    *,
    num_beams: int,
    batches: slice = slice(None),
    checked: int = 0,
) -> np.ndarray:
    """The accepted steps of every user under strict verification.

    Args:
        target: the model.
        data: the catalogue.
        searches: its plain searches.
        settings: of the draft.
        num_beams: K.
        batches: which of them.
        checked: batches that the target's own forwards decide once more.

    Raises:
        SystemExit: an answer is not plain beam search's, or another number of steps is accepted by own forwards.
    """
    steps = []
    numbers = range(len(searches.prompts))[batches]
    call = partial(ask, target, num_beams=num_beams)
    ways = [partial(call, searches.prompts[number], data.index, settings) for number in numbers]
    with Memory(target) as memory:
        for number, way in zip(numbers, ways, strict=True):
            memory.forget(searches.prompts[number]["input_ids"])
            memory.places, logits, expected = searches.memories[number, num_beams]
            memory.logits = [logits]
            with memory.recalling():
                output = way()
            if not torch.equal(output.sequences, expected):
                raise SystemExit(f"{settings}, K = {num_beams}, batch {number}: another answer")
            steps.append(output.speculation.accepted_steps)
    for number, way in enumerate(ways[:checked]):
        if not torch.equal(way().speculation.accepted_steps, steps[number]):
            raise SystemExit(f"{settings}, K = {num_beams}, {batches}, {number}: other counts by own forwards")
    return torch.cat(steps).numpy()


# -------------------------------------------------------------------------------------------------------------- counts


def widths(
    num_beams: int,
    *,
    times: Sequence[int] = (1, 2, 3, 4),
    fixed: Sequence[int] = (NUM_DRAFT_BEAMS, 2 * NUM_DRAFT_BEAMS),
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments of `generate` for drafts by a model alone, by name."""
    for factor in times:
        yield f"N = {factor} K" if factor > 1 else "N = K", ASSISTANT | {"num_draft_beams": factor * num_beams}
    for width in fixed:
        yield f"N = {width}", ASSISTANT | {"num_draft_beams": width}


TRIE = "trie", {"drafting": "trie"}
DEFAULTS = "N = 2 K and trie (defaults)", {"drafting": "assistant"}
BOTH = f"N = {NUM_DRAFT_BEAMS} and trie", {"drafting": "assistant", "num_draft_beams": NUM_DRAFT_BEAMS}


def counted(target: Any, draft: Any, call: Callable[[], Any], *, max_length: int) -> tuple[Any, tuple[int, int, int]]:
    """The answer of a call for one user; its accepted steps, and the forwards of target and draft in all.

    The loop reads the target's logits after the prompt and after the levels 1 to L - 1; every accepted step is one of
    these that needed no forward of its own.
    """
    with Forwards(target) as of_target, Forwards(draft) as of_draft:
        output = call()
    accepted = int(output.speculation.accepted_steps.sum())
    if accepted + len(of_target) != max_length:
        raise RuntimeError(f"{accepted} accepted steps and {len(of_target)} forwards for {max_length} levels")
    return output, (accepted, len(of_target), len(of_draft))


def count(target: Any, draft: Any, data: Data, counting: Counting) -> dict[str, Any]:
    """Accepted steps of users for all widths of the draft."""
    users = some_users(data, counting.users)
    searches = search_all(target, data, in_batches(data, users), counting.num_beams)
    rows = []
    for num_beams in counting.num_beams:
        for name, settings in [TRIE, *widths(num_beams), DEFAULTS, BOTH]:
            settings = settings if name == TRIE[0] else settings | {"assistant_model": draft}
            how: dict[str, Any] = {"num_beams": num_beams, "checked": counting.checked}
            found = accepted_steps(target, data, searches, settings, **how)
            ((interval,),) = [intervals(found[:, None])]
            rows.append({"num_beams": num_beams, "draft": name, "accepted_steps": interval})
        show_progress(f"count: K = {num_beams}")
    return {"users": len(users), "items": len(data.index), "levels": data.index.max_length, "rows": rows}


def some_users(data: Data, number: int) -> list[int]:
    """The same ones for every stage."""
    return np.random.default_rng(0).permutation(len(data.prompts))[:number].tolist()


def intervals(values: np.ndarray) -> list[tuple[float, ...]]:
    """The mean over users and its 95% bootstrap interval for every column of `[U, columns]`."""
    users = len(values)
    weights = np.random.default_rng(0).multinomial(users, np.full(users, 1 / users), size=RESAMPLES) / users
    low, high = np.quantile(weights @ values, [0.025, 0.975], axis=0)
    return [tuple(column) for column in np.stack([values.mean(0), low, high], axis=1).round(4).tolist()]


def show_counts(result: dict[str, Any]) -> None:
    """All counts of one catalogue."""
    rows = {(row["draft"], row["num_beams"]): row for row in result["rows"]}
    beams = sorted({width for _, width in rows})
    names = list(dict.fromkeys(draft for draft, _ in rows))
    print(
        f"{result['users']:,} users, {result['items']:,} items of {result['levels']} levels; accepted steps (AS@K), "
        f"at most {result['levels'] - 1}: means and 95% intervals"
    )
    print_table(
        ["draft", *(f"K = {num_beams}" for num_beams in beams)],
        [[name, *(interval_cell(rows[name, width]["accepted_steps"]) for width in beams)] for name in names],
    )
    print()


def interval_cell(interval: Sequence[float]) -> str:
    return "{:.2f} ({:.2f}, {:.2f})".format(*interval)


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
