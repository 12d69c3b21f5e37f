# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`Recommender`: from a request to a prompt, and from prompts by `model.generate` to items. Knows no files, no queue.

Tables, the server, Ray and the demo answer by it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_values import ItemBias, ItemGroups
from hf_gr.catalogue.sequences import is_integer, to_host
from hf_gr.generation.defaults import NODES_AT_ONCE
from hf_gr.generation.seeds import row_seeds

from .backends import Backend, backend_of
from .fallback import Fallback, bought_with
from .loading import prompt_room
from .requests import Request, item_list, latest_that_fit, shown, split_items, tokens_of_items

if TYPE_CHECKING:
    from .attributes import Attributes
    from .prefix_cache import PrefixCache

NUM_BEAMS, NUM_RESULTS, MOST_BEAMS = 20, 10, 512
UNKNOWN_ITEMS = ("drop", "refuse")
MOST_VIEWS = 64  # filters kept for later rows: most tables have few distinct ones
OUTPUTS = {  # what `answer` asks of `generate`; no scores of steps, `[batch * beams, vocab]` at every level
    "return_dict_in_generate": True,
    "output_scores": True,
    "_step_scores": False,
}


def default_beams(model: Any, options: Mapping[str, Any], num_results: int) -> int:
    """The beams of a search by default: the checkpoint's own, else 20, or as many as results; or for `exact`."""
    if option_of(model, options, "exact"):
        return NODES_AT_ONCE
    configs = (options.get("generation_config"), model.generation_config)
    numbers = (getattr(config, "num_beams", None) for config in configs)
    own = next((number for number in numbers if number is not None), 1)
    return max(own if own > 1 else NUM_BEAMS, num_results)


def option_of(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """An option of `generate`: from this call, else the config passed to it, else the checkpoint's."""
    if name in options:
        return options[name]
    own = getattr(options.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if own is None else own


def useful_beams(num_beams: int, index: ConstraintIndex, num_results: int) -> int:
    """The beams of a search that can differ: more than the catalogue has sequences find nothing, but take memory."""
    return min(num_beams, max(len(index), num_results, 2))


@dataclass(frozen=True)
class Answer:
    """The answer to one request, best first: `[k]` items and their scores, k at most `num_results`.

    `is_broken`: there are none although some are allowed, since the model's scores are not numbers. `num_proven`: how
    many of the first are certainly the best; None where `generate` cannot tell.
    """

    items: list[Any]
    scores: list[float]
    is_broken: bool = False
    num_proven: int | None = None


@dataclass(frozen=True)
class Recommender:
    """A model, its catalogue, how requests are read, and how they are answered; arguments as those of `Engine`.

    Example:
        >>> recommender = Recommender(model, index)  # doctest: +SKIP
        >>> request = recommender.read(history=["B01", "B07"], exclude=["B01", "B07"])  # doctest: +SKIP
        >>> recommender.answer_all([request])[0].items  # doctest: +SKIP
    """

    model: Any  # with `GRGenerationMixin`, in evaluation mode; None reads and does not answer
    index: ConstraintIndex  # a snapshot
    version: int = 0  # of the catalogue
    model_version: str = ""  # the model's name in answers
    num_results: int = NUM_RESULTS  # these two unless a request says otherwise
    num_beams: int = NUM_BEAMS
    token_budget: int = 16_384  # of a batch: see `make_batches`
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `generate`
    rules: Mapping[str, ConstraintIndex] = field(default_factory=dict)  # views of the catalogue that requests name
    prefix_cache: PrefixCache | None = None  # shared by recommenders; None to compute every prompt whole
    attributes: Attributes | None = None  # of items, for filters
    pair: object = field(default_factory=object, repr=False)  # tells a model and its options from others
    max_beams: int = MOST_BEAMS
    unknown_items: str = "drop"
    fallback: Fallback | None = None
    tokenizer: Any = None
    vocab_size: int | None = None  # tokens are below it; None if unknown
    max_prompt_tokens: int | None = None
    prefix_tokens: tuple[int, ...] = ()
    suffix_tokens: tuple[int, ...] = ()
    _views: OrderedDict[tuple[Any, ...], ConstraintIndex] = field(default_factory=OrderedDict, repr=False)
    _values: dict[str, ItemBias | ItemGroups] = field(default_factory=dict, repr=False)  # read once for the catalogue

    # Reading

    def read(
        self,
        *,
        history: Any = None,
        text: Any = None,
        tokens: Any = None,
        num_results: Any = None,
        num_beams: Any = None,
        exclude: Any = (),
        filter: Any = None,
        rule: Any = None,
        seed: Any = None,
        exact: Any = None,
        max_per_group: Any = None,
    ) -> Request:
        """Read a request, with the arguments of `Engine.recommend`.

        Its prompt is empty if the history is: then `fallback_items` answers it.
        """
        sources = {"history": history, "text": text, "tokens": tokens}
        given = [name for name, value in sources.items() if value is not None]
        if not given:
            raise ValueError("history=None, expected one of history, text and tokens: send one of them")
        if len(given) > 1:
            raise ValueError(
                f"{given[1]} is given together with {given[0]}, expected one of history, text and tokens: omit one"
            )
        wanted = self.num_results if num_results is None else _count(num_results, "num_results", self.max_beams)
        own = self.model is not None and bool(self.option("exact"))
        if exact is not None and not isinstance(exact, bool):
            raise ValueError(f"exact={shown(exact)}, expected true or false")
        is_exact = own if exact is None else exact
        beams = self.num_beams
        if is_exact != own:
            beams = min(default_beams(self.model, {**self.options, "exact": is_exact}, wanted), self.max_beams)
        beams = beams if is_exact else max(beams, wanted)
        if num_beams is not None:
            beams = _count(num_beams, "num_beams", self.max_beams, fewest=2)
        if beams < wanted and not is_exact:
            raise ValueError(f"num_beams={beams}, expected at least num_results={wanted}: ask for more beams")
        excluded = tuple(item_list(exclude, "exclude", self.index.snapshot))
        allowed, unknown, passing = None, [], ()
        if isinstance(filter, Mapping):
            if self.attributes is None:
                raise ValueError(f"filter={shown(filter)}, expected item ids: the server has no table of attributes")
            passing = self.attributes.read(filter)
        elif filter is not None:
            allowed, unknown = split_items(item_list(filter, "filter", self.index.snapshot), self.index)
            allowed = tuple(allowed)
        if unknown and self.unknown_items == "refuse":
            raise ValueError(f"filter has {shown(unknown[0])}, expected items of the catalogue: remove it")
        if rule is not None:
            self._rule(rule)
        own_seed = None if seed is None else int(row_seeds(seed, 1)[0])
        known: tuple[Any, ...] = ()
        dropped: tuple[Any, ...] = ()
        if history is not None:
            prompt, known, dropped, num_cut = self._read_history(history)
        else:
            prompt = self._read_tokens(tokens) if text is None else self._read_text(text)
            num_cut = 0 if self.room is None else max(0, len(prompt) - self.room)
            prompt = prompt[num_cut:]
        if not prompt and self.fallback is None:
            problem, fix = f"{given[0]} is empty, expected one item or more", "send some"
            if dropped:
                problem = f"history has {shown(dropped[0])}, expected at least one item of the catalogue"
                fix = "send known items"
            raise ValueError(f"{problem}: {fix}, or have a fallback answer")
        missing = (*dropped, *unknown)
        variety = None if max_per_group is None else _count(max_per_group, "max_per_group", self.max_beams)
        search = (wanted, beams, is_exact, variety)
        return Request(prompt, excluded, allowed, passing, rule, own_seed, *search, known, missing, num_cut)

    @cached_property
    def room(self) -> int | None:
        """The most tokens of a prompt; None if there is no limit."""
        if self.model is None:
            return self.max_prompt_tokens
        room = prompt_room(self.model, self.index, drafting=self.option("drafting"), options=self.options)
        return min((limit for limit in (room, self.max_prompt_tokens) if limit is not None), default=None)

    def _read_history(self, history: Any) -> tuple[list[int], tuple[Any, ...], tuple[Any, ...], int]:
        """The prompt of a history, its items that the catalogue ever had (or all), others, and how many are cut."""
        items = item_list(history, "history", self.index.snapshot)
        tokens_of = tokens_of_items(self.index.snapshot, items) if items else {}
        known = [item for item in items if item in tokens_of]
        dropped = tuple(dict.fromkeys(item for item in items if item not in tokens_of))
        if dropped and self.unknown_items == "refuse":
            raise ValueError(
                f"history has {shown(dropped[0])}, expected items of the catalogue: remove it, or drop such items by "
                "unknown_items='drop'"
            )
        if not known:
            return [], tuple(items), dropped, 0
        room = (2**31 if self.room is None else self.room) - len(self.prefix_tokens) - len(self.suffix_tokens)
        latest = latest_that_fit(known, tokens_of, room)
        if not latest:
            raise ValueError(
                f"history ends with {shown(known[-1])} of {len(tokens_of[known[-1]])} tokens, expected an item that "
                f"fits the {room} tokens that there is room for: take a model with more positions"
            )
        middle = [token for item in latest for token in tokens_of[item]]
        prompt = [*self.prefix_tokens, *middle, *self.suffix_tokens]
        return prompt, tuple(known), dropped, len(known) - len(latest)

    def _read_tokens(self, tokens: Any) -> list[int]:
        if not isinstance(tokens, (list, tuple)) or not all(is_integer(token) for token in tokens):
            raise ValueError(f"tokens={shown(tokens)}, expected a list of token ids")
        most = (self.vocab_size or 2**31) - 1
        if (wrong := next((token for token in tokens if not 0 <= token <= most), None)) is not None:
            raise ValueError(f"tokens has {wrong}, expected 0 to {most}: the model's vocabulary")
        return [int(token) for token in tokens]

    def _read_text(self, text: Any) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("text is given and there is no tokenizer, expected history or tokens: pass tokenizer=")
        if not isinstance(text, str):
            raise ValueError(f"text={shown(text)}, expected a string")
        return list(self.tokenizer(text, verbose=False)["input_ids"]) if text else []

    # Answering

    def with_catalogue(
        self, index: ConstraintIndex | None, rules: Mapping[str, ConstraintIndex] | None = None, version: int = 0
    ) -> Recommender:
        """The same over another catalogue, or none yet."""
        return replace(
            self, index=cast(Any, index), rules=rules or {}, version=version, _views=OrderedDict(), _values={}
        )

    def tokens_ahead(self, num_beams: int) -> int:
        """The tokens that are generated for a prompt, as `num_batch_tokens` counts them.

        With `exact=True` a forward for each level is assumed, which is about what a trained model needs.
        """
        return num_beams * (self.index.max_length - 1)

    def fallback_items(self, request: Request) -> tuple[list[Any], tuple[Any, ...]]:
        """What answers a request without a prompt, and the items of its history that some of it is bought with.

        It is what goes with the history (`bought_with`), then what is popular: living items that the request allows.
        """
        view, fallback = self._view(request), self.fallback or {}
        near, lists = bought_with(fallback, request.history)
        popular = self._living_popular if view is self.index else split_items(fallback.get(None, ()), view)[0]
        exclude = {*request.exclude, *request.history}
        items = [item for item in dict.fromkeys([*split_items(near, view)[0], *popular]) if item not in exclude]
        if items and (most := request.max_per_group or self.option("max_per_group")):
            seen, groups = Counter[Any](), self._groups_of(items)
            for place, group in enumerate(groups):
                seen[group] += 1
                groups[place] = seen[group] <= most
            items = [*compress(items, groups)]
        items = items[: request.num_results or self.num_results]
        return items, tuple(item for item, similar in lists.items() if not set(similar).isdisjoint(items))

    def _groups_of(self, items: list[Any]) -> list[Any]:
        """The groups of items for `max_per_group`: by default the first tokens."""
        self._item_values()
        rows, given = self.index.snapshot.sequences_of(items)[1], cast(Any, self._values.get("item_groups"))
        return (rows[:, 0] if given is None else given.by_leaf[given.trie.walk(rows, None)[0]]).tolist()

    @cached_property
    def _living_popular(self) -> list[Any]:
        return split_items((self.fallback or {}).get(None, ()), self.index)[0]  # 3 ms for a thousand texts

    def answer_all(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] = lambda num_rows: None
    ) -> list[Answer]:
        """Answers in the order of the requests; `on_progress` gets the number of new ones."""
        batches = self._backend.make_batches(
            [len(request.tokens) for request in requests],
            token_budget=self.token_budget,
            tokens_ahead=self.tokens_ahead(self.num_beams),
            mesh=self.options.get("mesh"),
        )
        answers: dict[int, Answer] = {}
        for batch in batches:  # a request may be there twice, to fill a batch
            for number, answer in zip(batch, self.answer([requests[number] for number in batch]), strict=True):
                answers[number] = answer
            on_progress(len(set(batch)))
        return [answers[number] for number in range(len(requests))]

    def answer(
        self, batch: Sequence[Request], on_output: Callable[[Any, int], None] = lambda out, num_cached_tokens: None
    ) -> list[Answer]:
        """Answers to one batch with this object's beams and results, whatever the requests say.

        `on_output` gets what `generate` returned, and how many tokens of prompts were cached.
        """
        prompts = self.prompts(batch)
        views = [self._view(request) for request in batch]
        rules: Any = views if any(view is not self.index for view in views) else self.index
        cache = self.prefix_cache
        given = [request.tokens for request in batch]
        reuse = None if cache is None else cache.begin(given)
        excluded = [request.exclude for request in batch] if any(request.exclude for request in batch) else None
        out = self.model.generate(
            **prompts,
            **({} if reuse is None else reuse.arguments),
            constraint_index=rules,
            exclude_items=excluded,
            num_beams=self.num_beams,
            num_return_sequences=self.num_results,
            **OUTPUTS,
            **self._seeds(batch),
            **{**self.options, **self._item_values()},
        )
        on_output(out, 0 if reuse is None else reuse.num_cached_tokens)
        if cache is not None and reuse is not None:
            cache.keep(given, reuse, out)
        length = 1 if self.model.config.is_encoder_decoder else prompts["input_ids"].shape[1]
        found = self.index.items(to_host(out.sequences)[:, length:])
        scores = out.sequences_scores.tolist()
        proven = getattr(out, "num_proven", None)
        proven = [None] * len(batch) if proven is None else to_host(proven).tolist()
        answers = []
        for number, (request, view) in enumerate(zip(batch, views, strict=True)):
            rows = slice(number * self.num_results, (number + 1) * self.num_results)
            answers.append(self._best_of(request, view, found[rows], scores[rows], proven[number]))
        return answers

    def _item_values(self) -> dict[str, Any]:
        """Options of `generate` that have a value for each item, read once: that takes a second for a million."""
        read = {
            "item_bias": lambda given, of: ItemBias.read(
                given, of, length_penalty=self.option("length_penalty") or 0.0
            ),
            "item_groups": ItemGroups.read,
        }
        for name in read.keys() & self.options.keys() - self._values.keys():
            if self.options[name] is not None:
                self._values[name] = read[name](self.options[name], (self.index.snapshot,))
        unused = {} if self.option("max_per_group") else {"item_groups": None}  # a request may have it
        return self._values | unused

    def option(self, name: str) -> Any:
        """An option of `generate`: see `option_of`."""
        return option_of(self.model, self.options, name)

    def prompts(self, batch: Sequence[Request]) -> dict[str, Any]:
        """`input_ids` and `attention_mask` `[B, P]`: decoders need padding on the left, encoders on the right."""
        return self._backend.prompts(self.model, [request.tokens for request in batch])

    @cached_property
    def _backend(self) -> Backend:
        return backend_of(self.model)

    def _seeds(self, batch: Sequence[Request]) -> dict[str, Any]:
        """The argument of `generate`: requests without a seed draw one where others have theirs."""
        seeds = [request.seed for request in batch]
        if all(seed is None for seed in seeds):
            return {}
        drawn = self._backend.draw_seeds(len(seeds))
        return {"seed": [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]}

    def _rule(self, name: Any) -> ConstraintIndex:
        if not isinstance(name, str) or name not in self.rules:
            raise ValueError(f"rule={shown(name)}, expected one of {sorted(self.rules)}: name one of them, or omit it")
        return self.rules[name]

    def _view(self, request: Request) -> ConstraintIndex:
        """What a request may be answered with."""
        whole = self.index if request.rule is None else self._rule(request.rule)
        if request.allowed is None and not request.passing:
            return whole
        key = request.rule, request.passing, *sorted(set(request.allowed or ()))
        view = self._views.pop(key, None)  # each step is atomic: threads share this object
        if view is None:
            items = self.attributes.items(request.passing) if self.attributes and request.passing else key[2:]
            # What the rule rules out, or what has left the catalogue since, need not be named again.
            view = whole.where(split_items(items, whole)[0])
        self._views[key] = view
        if len(self._views) > MOST_VIEWS:
            self._views.popitem(last=False)
        return view

    def _best_of(
        self,
        request: Request,
        view: ConstraintIndex,
        found: Sequence[Sequence[Any]],
        scores: Sequence[float],
        num_proven: int | None,  # of these sequences
    ) -> Answer:
        """The items allowed for a request, from `num_results` sequences in order: `num_results` at most."""
        exclude, best = set(request.exclude), dict[Any, float]()
        for items, score in zip(found, scores, strict=True):
            for item in items if score > -math.inf else ():  # several if items share a sequence
                if item not in exclude:
                    best.setdefault(item, score)
        if view is not self.index:  # others may share the sequence of an allowed one
            best = {item: best[item] for item in split_items(list(best), view)[0]}
        kept = list(best)[: self.num_results]
        is_broken = not kept and view.num_items > int(np.count_nonzero(view.has_items(exclude)))
        if is_broken:
            num_proven = None
        if num_proven is not None:
            certain = {item for items in found[:num_proven] for item in items}
            num_proven = sum(item in certain for item in kept)
        return Answer(kept, [best[item] for item in kept], is_broken=is_broken, num_proven=num_proven)


def _count(value: Any, name: str, most: int, *, fewest: int = 1) -> int:
    if not is_integer(value) or not fewest <= value <= most:
        raise ValueError(f"{name}={shown(value)}, expected an integer from {fewest} to {most}")
    return int(value)
