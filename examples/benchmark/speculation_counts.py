# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Forwards and accepted steps of drafts, old beside new, for `speculation.py`. Trains nothing and times nothing.

- `count`: how many forwards a user takes, for every width of a draft, with 95% bootstrap intervals over users;
- `batch`: the target's work for eight users in one batch, relative to that for the eight alone;
- `sample`: whether sampled answers are those of the target, and how many steps they accept.

Axes: U users, N nodes of a forward, S keys seen so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import product
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from experiments import show_progress
from report import print_table
from speculation_models import Data, prompts_of
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_gr import ConstraintIndex
from hf_gr.torch import beam, drafters
from hf_gr.torch.transition import children
from hf_gr.torch.tree import Nodes

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
        checked: users of `count` whose drafts are also scored by the target's own forwards.
        num_beams: K of `count`.
        batches: of eight users.
        batch_beams: K of `batch`.
        sample_users: of `sample`.
        sample_beams: K of `sample`.
        tv_users: users whose answers are drawn again and again.
        tv_draws: calls for each of them.
    """

    users: int = 1000
    checked: int = 10
    num_beams: tuple[int, ...] = (1, 3, 5, 10, 20)
    batches: int = 20
    batch_beams: tuple[int, ...] = (5, 20)
    sample_users: int = 300
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


# --------------------------------------------------------------------------------------------------------- old and new


class AllCompete(drafters.DraftSearch):
    """The N best by the draft's scores, among the children of all N above them: AtSpeed, equation 1."""

    def step(self, logits: Tensor, *, depth: int, number: int) -> Nodes:
        """See `DraftSearch.step`."""
        self.plan = replace(self.plan, num_beams=number, do_sample=False)
        legal, scores = self.children(logits, depth=depth)
        scores = torch.where(drafters.open_children(legal, self.catalogue, depth=depth), scores, self.dead)
        nodes = self.nodes = beam.select(
            self.nodes, legal, scores, num_kept=number, dead_state=self.catalogue.dead_state
        )
        return Nodes(nodes.tokens, nodes.parents, nodes.states)


def after_the_prefill(drafter: drafters.TreeDrafter, frontier: Any) -> list[Any]:
    """The catalogue's whole subtree if it fits, or guesses for all levels until it does; nothing in the prefill."""
    if not frontier.level:
        return [(frontier, [])]
    rest, fits = drafter._subtree(frontier.legal, [], frontier)
    guesses = iter(()) if drafter.assistant is None or all(fits) else drafter.assistant.draft(frontier)
    drafted: list[Nodes] = []
    for guess in guesses:
        drafted.append(guess)
        legal = children(guess.states, frontier.rows.catalogue, level=frontier.level + len(drafted))
        rest, fits = drafter._subtree(legal, drafted, frontier)
        if all(fits):
            break
    return [(frontier, [*drafted, *rest])]


@contextmanager
def old_drafts() -> Iterator[None]:
    """All beams of a draft compete, and nothing is drafted in the prefill."""
    with (
        patch.object(drafters, "Guesses", AllCompete),
        patch.object(drafters.TreeDrafter, "draft", after_the_prefill),
    ):
        yield


RULES: dict[str, Callable[[], AbstractContextManager[None]]] = {"old": old_drafts, "new": nullcontext}


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
    """The target's logits along one user's plain searches, so that drafts are counted without its forwards.

    Strict verification keeps plain search's beams, whatever is drafted: no other node's logits are read. So a target
    that remembers those and knows of the others nothing (NaN) gives the same counts, several times faster; an answer
    that used another node would not be plain search's, which is checked.

    A node is known by the tokens that it sees after the prompt, itself included. One prompt, without padding.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.compute = target.forward
        self.base = target.config.vocab_size + 1
        self.unknown = torch.full((target.config.vocab_size,), torch.nan)
        self.is_recalling = False

    def __enter__(self) -> Memory:
        # Its signature tells the library what the model takes.
        self.target.forward = wraps(self.compute)(lambda input_ids, **kwargs: self._forward(input_ids, **kwargs))
        return self

    def __exit__(self, *_: object) -> None:
        del self.target.forward

    def forget(self, prompt: Tensor) -> None:
        """Begin with another user."""
        self.prompt_length = prompt.shape[1]
        self.tokens = prompt[0]
        self.logits: dict[int, Tensor] = {}

    @contextmanager
    def recalling(self) -> Iterator[None]:
        """Forwards are looked up instead of computed."""
        self.is_recalling = True
        try:
            yield
        finally:
            self.is_recalling = False

    def _forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else cache.get_seq_length()
        self.tokens = torch.cat([self.tokens[:past], input_ids[0]])
        kept = kwargs.get("logits_to_keep", 0)
        paths = self._paths(kwargs.get("attention_mask"), past)[slice(-kept, None) if isinstance(kept, int) else kept]
        if not self.is_recalling:
            outputs = self.compute(input_ids=input_ids, **kwargs)
            self.logits |= zip(paths.tolist(), outputs.logits[0], strict=True)
            return outputs
        cache = DynamicCache(config=self.target.config) if cache is None else cache
        for layer in range(self.target.config.num_hidden_layers):
            nothing = torch.zeros((1, 1, input_ids.shape[1], 1))
            cache.update(nothing, nothing, layer)
        logits = torch.stack([self.logits.get(path, self.unknown) for path in paths.tolist()])
        return CausalLMOutputWithPast(logits=logits[None], past_key_values=cache)

    def _paths(self, mask: Tensor | None, past: int) -> Tensor:
        """A number for each token of a forward: that of its path after the prompt, 0 for the prompt's own tokens."""
        size = len(self.tokens)
        if mask is None or mask.ndim < 4:
            mask = torch.ones((1, 1, size - past, size), dtype=torch.bool).tril(past)
        seen = mask[0, 0, :, self.prompt_length :].long()
        depth = (seen.cumsum(-1) - 1).clamp_min(0)
        return (seen * (self.tokens[self.prompt_length :] + 1) * self.base**depth).sum(-1)


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


def count(
    target: Any, draft: Any, data: Data, counting: Counting, *, rules: Sequence[str] = (*RULES,)
) -> dict[str, Any]:
    """Every user goes through all widths of the draft by all rules, one at a time.

    Raises:
        SystemExit: an answer is not plain beam search's.
    """
    users = some_users(data, counting.users)
    counts: dict[tuple[int, str, str], list[tuple[int, int, int]]] = {}
    unlike = 0
    with Memory(target) as memory:
        for number, user in enumerate(users):
            prompt = prompts_of(target, data, [user])
            memory.forget(prompt["input_ids"])
            for num_beams in counting.num_beams:
                plain = ask(target, prompt, data.index, {}, num_beams=num_beams)
                for (name, settings), rule in product([TRIE, *widths(num_beams), DEFAULTS, BOTH], rules):
                    settings = settings if name == TRIE[0] else settings | {"assistant_model": draft}
                    call = partial(ask, target, prompt, data.index, settings, num_beams=num_beams)
                    run = partial(counted, target, draft, call, max_length=data.index.max_length)
                    with RULES[rule]():
                        with memory.recalling():
                            output, found = run()
                        unlike += number < counting.checked and run()[1] != found
                    if not torch.equal(output.sequences, plain.sequences):
                        raise SystemExit(f"{name}, {rule}, K = {num_beams}, user {user}: another answer")
                    counts.setdefault((num_beams, name, rule), []).append(found)
            if (number + 1) % 100 == 0:
                show_progress(f"count: {number + 1:,} users")
    columns = [(*key, what) for key in counts for what in ("accepted_steps", "target_forwards", "draft_forwards")]
    values = np.concatenate([np.array(found) for found in counts.values()], axis=1)
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    for (num_beams, name, rule, what), interval in zip(columns, intervals(values), strict=True):
        row = {"num_beams": num_beams, "draft": name, "rule": rule}
        rows.setdefault((num_beams, name, rule), row)[what] = interval
    return {
        "users": len(users),
        "checked": min(counting.checked, len(users)),
        "unlike": unlike,
        "items": len(data.index),
        "levels": data.index.max_length,
        "rows": [*rows.values()],
    }


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
    rows = {(row["draft"], row["rule"], row["num_beams"]): row for row in result["rows"]}
    beams = sorted({width for *_, width in rows})
    names = list(dict.fromkeys((draft, rule) for draft, rule, _ in rows))
    print(
        f"{result['users']:,} users one at a time, {result['items']:,} items of {result['levels']} levels\n"
        f"counts of {result['checked']} users that differ by the target's own forwards: {result['unlike']}\n"
    )

    def table(title: str, cell: Callable[[dict[str, Any]], str]) -> None:
        print(title)
        print_table(
            ["draft", "", *(f"K = {num_beams}" for num_beams in beams)],
            [[*name, *(cell(rows[*name, num_beams]) for num_beams in beams)] for name in names],
        )
        print()

    table(
        f"accepted steps (AS@K), at most {result['levels'] - 1}: means and 95% intervals",
        lambda row: interval_cell(row["accepted_steps"]),
    )
    table(
        "forwards in all, prefills included: target, draft",
        lambda row: f"{row['target_forwards'][0]:.2f}, {row['draft_forwards'][0]:.2f}",
    )


def interval_cell(interval: Sequence[float]) -> str:
    return "{:.2f} ({:.2f}, {:.2f})".format(*interval)


# ------------------------------------------------------------------------------------------------------------- batches


def batch(target: Any, draft: Any, data: Data, counting: Counting) -> dict[str, Any]:
    """The target's work for eight users in one batch, and for the eight alone.

    Work is tokens that the target computes besides the prompts', padding included.
    """
    users = some_users(data, EIGHT * counting.batches)
    batches = [users[start : start + EIGHT] for start in range(0, len(users) - EIGHT + 1, EIGHT)]
    model = {"assistant_model": draft}
    ways = {
        "none": {},
        TRIE[0]: TRIE[1],
        "N = 2 K": ASSISTANT | model | {"num_draft_beams": None},
        DEFAULTS[0]: DEFAULTS[1] | model,
    }
    rows = []
    for num_beams, (name, settings) in product(counting.batch_beams, ways.items()):
        work = partial(work_of, target, data, settings, num_beams=num_beams)
        together = [work(some) for some in batches]
        alone = [[work([user]) for user in some] for some in batches]
        nodes, nodes_alone = sum(one.nodes for one in together), sum(one.nodes for some in alone for one in some)
        rows.append(
            {
                "num_beams": num_beams,
                "draft": name,
                "nodes": nodes,
                "nodes_alone": nodes_alone,
                "ratio": nodes / nodes_alone,
                "forwards": mean(one.forwards for one in together),
                "forwards_alone": mean(one.forwards for some in alone for one in some),
                "most_forwards_alone": mean(max(one.forwards for one in some) for some in alone),
                "not_equal": sum(
                    answer != one.answers[0]
                    for joint, some in zip(together, alone, strict=True)
                    for answer, one in zip(joint.answers, some, strict=True)
                ),
            }
        )
        show_progress(f"batch: K = {num_beams}, {name}: {rows[-1]['ratio']:.2f}")
    return {"batches": len(batches), "batch_size": EIGHT, "rows": rows}


@dataclass(frozen=True)
class Work:
    """What a call computed: the answers by user, the target's tokens besides the prompts', and its forwards."""

    answers: list[list[list[int]]]
    nodes: int
    forwards: int


def work_of(target: Any, data: Data, settings: dict[str, Any], users: Sequence[int], *, num_beams: int) -> Work:
    prompt = prompts_of(target, data, users)
    with Forwards(target) as forwards:
        output = ask(target, prompt, data.index, settings, num_beams=num_beams)
    answers = output.sequences[:, prompt["input_ids"].shape[1] :].unflatten(0, (len(users), num_beams))
    return Work(answers.tolist(), forwards.nodes(prompt["input_ids"]), len(forwards))


def show_batches(result: dict[str, Any]) -> None:
    """Work for batches over that for their rows alone."""
    print(
        f"{result['batches']} batches of {result['batch_size']} and their rows alone: tokens after the prompts that\n"
        "the target computes, padding included; forwards of a batch, of a row alone, and of the row that needs most"
    )
    print_table(
        ["draft", "K", "nodes", "alone", "ratio", "forwards", "alone", "most", "rows that differ"],
        [
            [
                row["draft"],
                str(row["num_beams"]),
                f"{row['nodes']:,}",
                f"{row['nodes_alone']:,}",
                f"{row['ratio']:.2f}",
                f"{row['forwards']:.2f}",
                f"{row['forwards_alone']:.2f}",
                f"{row['most_forwards_alone']:.2f}",
                str(row["not_equal"]),
            ]
            for row in result["rows"]
        ],
    )
    print()


# ------------------------------------------------------------------------------------------------------------- samples


def sample(target: Any, draft: Any, data: Data, counting: Counting) -> dict[str, Any]:
    """Strict and relaxed sampling beams with a draft, each beside the same without one, from the same seeds."""
    users = some_users(data, counting.sample_users)
    rows = []
    for num_beams in counting.sample_beams:
        ways = [*sampling_ways(draft, num_beams)]
        counts: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
        unlike: Counter[tuple[str, str, str]] = Counter()
        with Memory(target) as memory:
            for user in users:
                prompt = prompts_of(target, data, [user])
                memory.forget(prompt["input_ids"])
                call = partial(ask, target, prompt, data.index, num_beams=num_beams)
                own = {name: call(settings, generator=seeded(user)) for name, settings in OWN.items()}
                for *key, settings in ways:
                    verification, name, rule = key
                    run = partial(call, settings, generator=seeded(user))
                    # A strict call reads the logits that the target's own has read.
                    with RULES[rule](), memory.recalling() if verification == "strict" else nullcontext():
                        output, found = counted(target, draft, run, max_length=data.index.max_length)
                    counts.setdefault((verification, name, rule), []).append(found)
                    unlike[verification, name, rule] += not torch.equal(output.sequences, own[verification].sequences)
        show_progress(f"sample: K = {num_beams}, {len(users):,} users")
        variation = variations(target, data, ways, users[: counting.tv_users], counting, num_beams=num_beams)
        for key, value in variation.items():
            row = {"num_beams": num_beams, **dict(zip(("verification", "draft", "rule"), key, strict=True))}
            rows.append(row | {"variation": value})
            if key in counts:
                accepted, forwards, _ = intervals(np.array(counts[key]))
                rows[-1] |= {"accepted_steps": accepted, "target_forwards": forwards, "unlike": unlike[key]}
    return {"users": len(users), "tv_users": counting.tv_users, "tv_draws": counting.tv_draws, "rows": rows}


def sampling_ways(draft: Any, num_beams: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Verification, name, rule and arguments of `generate`; the rules differ for strict verification alone."""
    for verification, rules in {"strict": (*RULES,), "relaxed": ("new",)}.items():
        for name, settings in widths(num_beams, times=(1, 2, 4), fixed=()):
            for rule in rules:
                yield verification, name, rule, OWN[verification] | settings | {"assistant_model": draft}


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def variations(
    target: Any,
    data: Data,
    ways: Sequence[tuple[str, str, str, dict[str, Any]]],
    users: Sequence[int],
    counting: Counting,
    *,
    num_beams: int,
) -> dict[tuple[str, str, str], float]:
    """The total variation from the target's own beams of how often each first code is drawn; mean over users.

    Two runs of the target's own from other seeds are apart by chance.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    for user in users:
        prompt = prompts_of(target, data, [user] * counting.tv_draws)
        start = prompt["input_ids"].shape[1]

        def shares(settings: dict[str, Any], seed: int, prompt=prompt, start=start) -> Tensor:
            output = ask(target, prompt, data.index, settings, num_beams=num_beams, generator=seeded(seed))
            return output.sequences[:, start].bincount(minlength=target.config.vocab_size) / len(output.sequences)

        own = {verification: shares(settings, user) for verification, settings in OWN.items()}
        for verification, settings in OWN.items():
            again = shares(settings, user + 1)
            found.setdefault((verification, TWICE, ""), []).append(apart(own[verification], again))
        for verification, name, rule, settings in ways:
            with RULES[rule]():
                theirs = shares(settings, user)
            found.setdefault((verification, name, rule), []).append(apart(own[verification], theirs))
        show_progress(f"sample: K = {num_beams}, user {user} drawn {counting.tv_draws} times")
    return {key: mean(values) for key, values in found.items()}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def show_samples(result: dict[str, Any]) -> None:
    """Accepted steps and total variation of sampling beams."""
    print(
        f"sampling beams of {result['users']:,} users, each with a seed: users whose answers are not those without a\n"
        "draft, accepted steps, forwards of the target in all; total variation of how often a first code is drawn\n"
        f"({result['tv_users']} users, {result['tv_draws']} calls each)"
    )
    print_table(
        ["verification", "draft", "", "K", "other answers", "AS@K", "forwards", "total variation"],
        [
            [
                *(row[what] for what in ("verification", "draft", "rule")),
                str(row["num_beams"]),
                str(row.get("unlike", "")),
                *(interval_cell(row[what]) if what in row else "" for what in ("accepted_steps", "target_forwards")),
                f"{row['variation']:.3f}",
            ]
            for row in result["rows"]
        ],
    )
    print()
