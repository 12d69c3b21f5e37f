# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of `generate` against brute force: families, catalogues, options, rules, updates and drafts.

A case draws a catalogue with a history of updates, prompts with a view and exclusions for each, and options. Every row
of the answer must be a legal item of its own prompt, with the score that plain forwards give it, in order and without
repetition; where the search is exact, the rows are those of the slow search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from brute_force import Processor, Request, is_close
from families import EOS, FAMILIES, LLAMA, PAD, SEQ2SEQ, VOCABULARY, build
from transformers import LogitsProcessor, LogitsProcessorList

from hf_gr import ConstraintIndex, enable

pytestmark = pytest.mark.slow

FIRST = 3  # tokens below are padding and end tokens, which prompts do not contain
# Beside the families of the tests: models that are tried before they are trusted, and one with a recurrent state.
MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "granite": LLAMA,
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "umt5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    | SEQ2SEQ,
}
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
NO_CACHE = ("mamba",)
NO_SDPA = ("bloom", "gemma2", "gpt_neo", "gptj", "mamba", "mpt")


class Bias(LogitsProcessor):
    """A user's own processor: what the last token adds to every score."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(table)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.table[input_ids[:, -1]].to(scores.dtype)


class Catalogue:
    """An index and its slow twin, a list of pairs of a sequence and an item."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.is_ragged = bool(rng.random() < 0.5)
        self.length = int(rng.integers(1, 6))
        self.tokens = rng.choice(
            [token for token in range(VOCABULARY) if not (self.is_ragged and token == EOS)],
            size=int(rng.choice([1, 2, 3, 6, 20, 40])),
            replace=False,
        )
        self.has_names = bool(rng.random() < 0.3)
        self.num_items = 0
        self.pairs = self.new_pairs(int(rng.choice([1, 2, 5, 30, 100, 250])))
        sequences, ids = zip(*self.pairs, strict=True)
        eos = EOS if self.is_ragged else None
        self.history = [f"index = ConstraintIndex.from_sequences({sequences}, item_ids={ids}, eos_token_id={eos})"]
        self.index = ConstraintIndex.from_sequences(sequences, item_ids=ids, eos_token_id=eos)
        for _ in range(int(rng.choice([0, 0, 1, 3]))):
            self.update()

    @property
    def ids(self) -> list[Any]:
        return list(dict.fromkeys(item for _, item in self.pairs))

    def new_pairs(self, number: int) -> list[tuple[list[int], Any]]:
        made = []
        for _ in range(number):
            length = int(self.rng.integers(1, self.length + 1)) if self.is_ragged else self.length
            item = f"item {self.num_items}" if self.has_names else self.num_items
            made.append((self.rng.choice(self.tokens, size=length).tolist(), item))
            self.num_items += 1
        return made

    def update(self) -> None:
        kind = self.rng.choice(["add", "remove", "compact"])
        if kind == "add":
            new = self.new_pairs(int(self.rng.integers(1, 8)))
            sequences, ids = zip(*new, strict=True)
            self.index.add(sequences, ids)
            self.history.append(f"index.add({sequences}, {ids})")
            self.pairs += new
        elif kind == "remove" and len(self.ids) > 1:
            gone = self.some(int(self.rng.integers(1, len(self.ids))))
            self.index.remove(gone)
            self.history.append(f"index.remove({gone})")
            self.pairs = [pair for pair in self.pairs if pair[1] not in gone]
        elif kind == "compact":
            self.index.compact()
            self.history.append("index.compact()")

    def some(self, number: int) -> list[Any]:
        ids = self.ids
        return [ids[place] for place in self.rng.permutation(len(ids))[:number]]

    def legal(self, items: set[Any]) -> list[tuple[int, ...]]:
        """The sequences of some items, with their end tokens."""
        end = (EOS,) if self.is_ragged else ()
        return [(*sequence, *end) for sequence, item in self.pairs if item in items]


@dataclass
class Batch:
    """Prompts, and what is legal for each."""

    inputs: dict[str, torch.Tensor]
    index: Any
    excluded: list[list[Any]] | None
    legal: list[list[tuple[int, ...]]]
    wanted: list[set[Any]]
    history: list[str]

    @classmethod
    def draw(cls, rng: np.random.Generator, catalogue: Catalogue) -> Batch:
        num_rows, length = int(rng.choice([1, 2, 3, 5])), int(rng.integers(1, 12))
        lengths = rng.integers(1, length + 1, size=num_rows) if rng.random() < 0.5 else np.full(num_rows, length)
        length = int(lengths.max())
        prompts = [rng.integers(FIRST, VOCABULARY, size=size).tolist() for size in lengths]
        inputs = {
            "input_ids": torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in prompts]),
            "attention_mask": torch.tensor([[0] * (length - size) + [1] * size for size in lengths.tolist()]),
        }
        index: Any = catalogue.index
        wanted = [set(catalogue.ids)] * num_rows
        history = []
        if rng.random() < 0.5:
            kept = [catalogue.some(int(rng.integers(0, len(catalogue.ids) + 1))) for _ in range(num_rows)]
            kept = [catalogue.ids if rng.random() < 0.3 else some for some in kept]
            wanted = [set(some) for some in kept]
            index = [catalogue.index.where(some) for some in kept]
            history.append(f"index = [index.where(some) for some in {kept}]")
        excluded = None
        if rng.random() < 0.4:
            excluded = [catalogue.some(int(rng.integers(0, len(catalogue.ids) + 1))) for _ in range(num_rows)]
            wanted = [some - set(gone) for some, gone in zip(wanted, excluded, strict=True)]
        return cls(
            inputs,
            index,
            excluded,
            [catalogue.legal(some) for some in wanted],
            wanted,
            catalogue.history + history,
        )


@dataclass
class Options:
    """Options of a call, and what they mean for the oracle."""

    given: dict[str, Any]
    processor: Processor | None
    is_exact: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, catalogue: Catalogue, model: Any) -> Options:
        beams = int(rng.choice([1, 2, 5, 24, 64, 128], p=[0.15, 0.1, 0.2, 0.2, 0.2, 0.15]))
        samples = bool(rng.random() < 0.2)
        most = beams if beams > 1 else 16 if samples else 1
        given: dict[str, Any] = {
            "num_beams": beams,
            "num_return_sequences": most if rng.random() < 0.7 else int(rng.integers(1, most + 1)),
            "do_sample": samples,
            "pad_token_id": pick(rng, PAD, PAD, PAD, 0, int(rng.choice(catalogue.tokens)), None),
            "eos_token_id": pick(rng, None, EOS, [EOS, 7]),
            **DETAILS,
        }
        if beams > 1:
            given["early_stopping"] = pick(rng, "never", "never", True, False)
            given["length_penalty"] = pick(rng, 1.0, 1.0, 1.0, 0.0, 0.5, 2.0, -1.0, 6.0, 30.0)
            given["renormalize_logits"] = bool(rng.random() < 0.25)
        if rng.random() < 0.15:
            given["max_new_tokens"] = catalogue.index.max_length + int(rng.integers(0, 4))
        if rng.random() < 0.1:
            given |= pick(rng, {"output_hidden_states": True}, {"use_cache": False}, {"output_logits": True})
        elif rng.random() < 0.4:
            given |= cls.draft(rng, catalogue, model, samples=samples)
        steps = list(cls.steps(rng, given))

        def processor(last: int, scores: np.ndarray) -> np.ndarray:
            for step in steps:
                scores = step(last, scores)
            return scores

        never_stops = not catalogue.is_ragged or given.get("early_stopping") == "never"
        is_exact = not samples and (beams == 1 or never_stops)
        return cls(given, processor if steps else None, is_exact)

    @staticmethod
    def steps(rng: np.random.Generator, given: dict[str, Any]) -> Iterator[Processor]:
        """Draws what changes scores, in the order in which transformers applies it."""
        if rng.random() < 0.15:
            gone = rng.choice(VOCABULARY, size=int(rng.integers(1, 30)), replace=False).tolist()
            given["suppress_tokens"] = gone
            yield lambda last, scores: np.where(np.isin(np.arange(VOCABULARY), gone), -np.inf, scores)
        if rng.random() < 0.15:
            table = rng.normal(size=(VOCABULARY, VOCABULARY))
            given["logits_processor"] = LogitsProcessorList([Bias(table)])
            yield lambda last, scores: scores + table[last]
        if given["do_sample"]:
            given["temperature"] = warmth = pick(rng, 0.5, 1.0, 3.0)
            yield lambda last, scores: scores / warmth

    @staticmethod
    def draft(rng: np.random.Generator, catalogue: Catalogue, model: Any, *, samples: bool) -> dict[str, Any]:
        """Drafts change no answer; relaxed ones change the distribution that is sampled."""
        kind = pick(rng, "trie", "trie", "auto", "assistant", "head")
        drafts: dict[str, Any] = {"drafting": kind}
        if kind == "head":
            if model.config.is_encoder_decoder or model.config.model_type in NO_CACHE:
                return {}
            torch.manual_seed(int(rng.integers(1000)))
            model.add_draft_head(catalogue.index, use_placeholders=False)
        if kind == "assistant":
            drafts["assistant_model"] = model_of(model.config.model_type, int(rng.integers(3)), "eager")
        if kind in ("assistant", "head"):
            drafts["verification"] = "relaxed" if samples and rng.random() < 0.5 else "strict"
        if rng.random() < 0.5:
            drafts["draft_token_budget"] = pick(rng, 1, 3, 20, 200)
        return drafts


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """One of the values, whatever their types."""
    return values[int(rng.integers(len(values)))]


@cache
def model_of(family: str, seed: int, attention: str) -> Any:
    return enable(build(family, seed=seed, config=MORE.get(family), attn_implementation=attention))


def check(model: Any, batch: Batch, options: Options, catalogue: Catalogue) -> int:
    """Generate and judge; returns the number of rows."""
    given = options.given
    out = model.generate(**batch.inputs, constraint_index=batch.index, exclude_items=batch.excluded, **given)
    is_seq2seq = model.config.is_encoder_decoder
    start = [model.config.decoder_start_token_id] if is_seq2seq else []
    prompt_length = len(start) if is_seq2seq else batch.inputs["input_ids"].shape[1]
    each = given["num_return_sequences"]
    competes = given["num_beams"] > 1
    prompts = batch.inputs["input_ids"].tolist()
    assert len(out.sequences) == len(prompts) * each
    scores = out.sequences_scores.tolist() if competes else [None] * len(out.sequences)
    for number, (prompt, legal) in enumerate(zip(prompts, batch.legal, strict=True)):
        mask = batch.inputs["attention_mask"][number].tolist()
        request = Request(model, prompt, mask, start=start, sequences=legal, processor=options.processor)
        rows = out.sequences[number * each : (number + 1) * each, prompt_length:].tolist()
        view = batch.index[number] if isinstance(batch.index, list) else batch.index
        excluded = None if batch.excluded is None else [batch.excluded[number]]
        items = view.items(rows, exclude_items=excluded)
        found = []
        for row, of_row in zip(rows, items, strict=True):
            sequence = next(
                (tuple(row[:end]) for end in range(1, len(row) + 1) if tuple(row[:end]) in request.legal), None
            )
            assert (sequence is None) == (not of_row), f"row {row} of prompt {number} has items {of_row}"
            assert set(of_row) <= batch.wanted[number]
            if sequence is not None:
                assert len(set(row[len(sequence) :])) <= 1, f"row {row} goes on after its end"
            found.append(sequence)
        judge(request, found, scores[number * each : (number + 1) * each], options)
    return len(out.sequences)


def judge(request: Request, found: list[Any], scores: list[Any], options: Options) -> None:
    """Compare one request's rows with the oracle."""
    given = options.given
    there = [sequence for sequence in found if sequence is not None]
    assert found[: len(there)] == there, "missing rows come last"
    if given["num_beams"] == 1:
        check_one = request.is_greedy if options.is_exact else request.is_possible
        assert all(check_one(sequence) for sequence in there), found
        if options.processor is None:
            assert len(there) == (len(found) if request.sequences else 0)
        return
    renormalize, penalty = given["renormalize_logits"], given["length_penalty"]
    assert len(set(there)) == len(there), "a sequence twice"
    assert not np.isnan(scores).any(), scores
    assert all(score == -np.inf for score in scores[len(there) :]), scores
    own = [request.score(one, renormalize=renormalize, length_penalty=penalty) for one in there]
    scales = [len(one) ** -penalty for one in there]
    wrong = [
        (one, score, expected)
        for one, score, expected, scale in zip(there, scores, own, scales, strict=False)
        if not is_close(score, expected, scale=scale)
    ]
    assert not wrong, f"(sequence, score, expected): {wrong}"
    assert all(left >= right for left, right in pairwise(scores)), scores
    if not options.is_exact:
        return
    num_beams, each = given["num_beams"], given["num_return_sequences"]

    def search(noise: int | None) -> list[tuple[tuple[int, ...], float]]:
        return request.beams(num_beams, renormalize=renormalize, length_penalty=penalty, noise=noise)[:each]

    expected = search(None)
    same = len(there) == len(expected) and all(
        is_close(score, value, scale=len(sequence) ** -penalty)
        for score, (sequence, value) in zip(scores, expected, strict=False)
    )
    # Where two candidates are as good as equal, rounding decides which one goes on.
    assert same or any([one for one, _ in search(noise)] == there for noise in range(20)), (
        f"found {list(zip(there, scores, strict=False))}, expected {expected}"
    )


def test_calls_equal_brute_force(fuzz: Any) -> None:
    families = sorted((FAMILIES | MORE).keys() - {"umt5"})
    for case in fuzz:
        rng = case.rng
        family = str(rng.choice(families))
        seed, attention = int(rng.integers(3)), "eager" if family in NO_SDPA else str(rng.choice(["sdpa", "eager"]))
        catalogue = Catalogue(rng)
        batch = Batch.draw(rng, catalogue)
        model = model_of(family, seed, attention)
        options = Options.draw(rng, catalogue, model)
        try:
            rows = check(model, batch, options, catalogue)
        except Exception as error:
            inputs = {name: value.tolist() for name, value in batch.inputs.items()}
            how = {"constraint_index": "index", "exclude_items": batch.excluded, **options.given}
            error.add_note(f"model = enable(build({family!r}, seed={seed}, attn_implementation={attention!r}))")
            error.add_note("\n".join(batch.history))
            error.add_note(f"inputs = {{name: torch.tensor(value) for name, value in {inputs}.items()}}")
            error.add_note(f"model.generate(**inputs, **{how})".replace("'index'", "index"))
            raise
        fuzz.count(calls=1, prompts=len(batch.legal), rows=rows)
