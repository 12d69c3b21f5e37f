# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of `generate` against brute force: families, catalogues, options, rules, updates and drafts.

A case draws a catalogue with a history of updates, prompts with a view and exclusions for each, and options. Every row
of the answer must be a legal item of its own prompt, with the score that plain forwards give it, in order and without
repetition; where the search is exact, the rows are those of the slow search.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import NAMES, build_small
from brute_force import Processor, check_rows, requests_of
from draws import FORMS, Batch, Catalogue, pick
from families import DETAILS, EOS, FAMILIES, PAD, VOCABULARY, build
from transformers import LogitsProcessor, LogitsProcessorList

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable

# In addition to the listed families: one that is tried before it is trusted, and one with a recurrent state.
KNOWN = sorted([*FAMILIES, "gpt_neo", "mamba"])
DRAFTS = ("drafting", "assistant_model", "verification", "draft_token_budget", "num_assistant_tokens")
NO_CACHE = ("bloom", "gpt_neo", "mamba")  # decode in transformers' loop
NO_SDPA = ("bloom", "gemma2", "gpt_neo", "gptj", "mamba", "mpt")


class Bias(LogitsProcessor):
    """A user's own processor: what the last token adds to every score."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(table)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.table[input_ids[:, -1]].to(scores.dtype)


@dataclass
class Options:
    """Options of a call, and what they mean for the oracle."""

    given: dict[str, Any]
    processor: Processor | None
    is_exact: bool
    form: str | None  # of the prompts

    @classmethod
    def draw(
        cls, rng: np.random.Generator, catalogue: Catalogue, model: Any, drawn: Any, *, num_prompts: int = 1
    ) -> Options:
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
        loops = rng.random() < 0.05
        has_limits = loops or drawn[0] in (*NO_CACHE, *NAMES)  # transformers' loop refuses large penalties
        if beams > 1:
            given["early_stopping"] = pick(rng, "never", "never", True, False)
            given["length_penalty"] = pick(rng, 1.0, 1.0, 0.0, 0.5, 2.0, -1.0, *(() if has_limits else (6.0, 30.0)))
            given["renormalize_logits"] = bool(rng.random() < 0.25)
            if rng.random() < 0.2 and not samples and not loops and drawn[0] not in (*NO_CACHE, *NAMES):
                given["num_beams"] = [*rng.choice([1, 2, 5, 24, 64], size=rng.integers(4)).tolist(), beams]
        if rng.random() < 0.15:
            given["max_new_tokens"] = catalogue.index.max_length + int(rng.integers(0, 4))
        if loops:
            given["use_cache"] = False
        if rng.random() < 0.1:
            given["output_logits"] = True
        if samples and not loops and drawn[0] not in (*NO_CACHE, *NAMES):  # transformers' loop takes no seed
            seeds = [int(rng.integers(-(2**63), 2**63)) for _ in range(num_prompts)]
            given["seed"] = pick(rng, None, seeds[0], seeds)
        if not loops and rng.random() < 0.5:
            given |= cls.draft(rng, catalogue, model, drawn, may_relax=samples and beams > 1)
        steps = list(cls.steps(rng, given))

        def processor(last: int, scores: np.ndarray) -> np.ndarray:
            for step in steps:
                scores = step(last, scores)
            return scores

        never_stops = not catalogue.is_ragged or given.get("early_stopping") == "never"
        is_exact = not samples and (beams == 1 or never_stops)
        form = None
        is_plain = drawn[0] not in (*NO_CACHE, *NAMES) and not (loops or "logits_processor" in given)
        if is_plain and given.get("drafting") in (None, "trie") and rng.random() < 0.3:
            form = pick(rng, *FORMS[model.config.is_encoder_decoder])
        return cls(given, processor if steps else None, is_exact, form)

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
    def draft(
        rng: np.random.Generator, catalogue: Catalogue, model: Any, drawn: Any, *, may_relax: bool
    ) -> dict[str, Any]:
        """Drafts change no answer; relaxed ones change the distribution that is sampled."""
        is_known = drawn[0] not in (*NO_CACHE, *NAMES)
        kind = pick(rng, "trie", "trie", "auto", *(("assistant", "assistant", "head") if is_known else ()))
        drafts: dict[str, Any] = {"drafting": kind}
        if kind == "head" or (kind == "auto" and is_known and rng.random() < 0.5):
            torch.manual_seed(int(rng.integers(1000)))
            model.add_draft_head(catalogue.index, use_placeholders=False)
        if kind == "assistant" or (kind == "auto" and is_known and rng.random() < 0.5):
            drafts["assistant_model"] = model_of(drawn[0], int(rng.integers(3)), drawn[2])
        if kind in ("assistant", "head"):
            drafts["verification"] = "relaxed" if may_relax and rng.random() < 0.3 else "strict"
            if rng.random() < 0.5:
                drafts["num_assistant_tokens"] = int(rng.integers(1, 6))
        if rng.random() < 0.5:
            drafts["draft_token_budget"] = pick(rng, 1, 3, 20, 200)
        return drafts


@cache
def model_of(family: str, seed: int, attention: str | None) -> Any:
    """A model of a family of the tests, or, with the attention of its own choice, of another architecture."""
    if attention is None:
        return enable(build_small(family, seed=seed))
    return enable(build(family, seed=seed, attn_implementation=attention))


def draw_model(
    rng: np.random.Generator, families: Sequence[str] = KNOWN, *, others: float = 0.2
) -> tuple[str, int, str | None]:
    """The arguments of `model_of`; few models of other architectures, since each takes a second to make."""
    if rng.random() < others:
        return pick(rng, *NAMES), 0, None
    family = pick(rng, *families)
    return family, int(rng.integers(3)), "eager" if family in NO_SDPA else pick(rng, "sdpa", "eager")


def check(model: Any, batch: Batch, options: Options) -> int:
    """Generate and judge; returns the number of rows."""
    given = options.given
    rules = {"constraint_index": batch.index, "exclude_items": batch.excluded}
    inputs, prompt_length = batch.given(model, options.form)
    out = model.generate(**inputs, **rules, **given)
    assert len(out.sequences) == len(batch.legal) * given["num_return_sequences"]
    competes = given["num_beams"] != 1
    check_rows(
        batch,
        requests_of(model, batch, options.processor),
        out.sequences[:, prompt_length:].tolist(),
        out.sequences_scores.tolist() if competes else None,
        is_exact=options.is_exact,
        num_beams=given["num_beams"],
        renormalize=given.get("renormalize_logits", False),
        length_penalty=given.get("length_penalty", 1.0),
        proven=None if (proven := out.get("num_proven")) is None else proven.tolist(),
    )
    is_drafted = "drafting" in given and given.get("verification") != "relaxed"
    if is_drafted and (not given["do_sample"] or given.get("seed") is not None):
        plain = {name: value for name, value in given.items() if name not in DRAFTS}
        check_same(out, model.generate(**inputs, **rules, **plain))
    if not given["do_sample"] and len(out.sequences) % 5 == 0:
        bare = model.generate(**inputs, **rules, **given | {"output_scores": False})
        assert [bare.get("scores"), bare.get("sequences_scores")] == [None, None], "scores that nobody asked for"
        assert bare.sequences.tolist() == out.sequences.tolist()
    return len(out.sequences)


def check_same(drafted: Any, plain: Any) -> None:
    """A draft changes nothing: not the order either, but where rounding explains it."""
    assert drafted.sequences.shape == plain.sequences.shape
    differs = (drafted.sequences != plain.sequences).any(dim=-1)
    if plain.get("sequences_scores") is None:
        assert differs.float().mean() < 0.1, "rounding does not change so many paths"
        return
    torch.testing.assert_close(drafted.sequences_scores, plain.sequences_scores, rtol=1e-4, atol=1e-3)


def check_case(
    rng: np.random.Generator, drawn: tuple[str, int, str | None], model: Any = None, catalogue: Catalogue | None = None
) -> tuple[int, int]:
    """One call of a model; returns the numbers of prompts and rows."""
    model, catalogue = model or model_of(*drawn), catalogue or Catalogue(rng)
    batch = Batch.draw(rng, catalogue, sizes=(1, 2, 3, 5, 8))
    options = Options.draw(rng, catalogue, model, drawn, num_prompts=len(batch.legal))
    try:
        return len(batch.legal), check(model, batch, options)
    except Exception as error:
        error.add_note(f"model_of{drawn}.generate(**{options.given}), prompts as {options.form or 'tokens'}")
        raise


def check_operations(rng: np.random.Generator, folder: Path, *, number: int) -> int:
    """Calls of one model and index, with anything that a user may do to them before each; returns how many rows."""
    family = pick(rng, "bart", "gemma2", "mistral", "qwen3", "t5")
    still = {name: 0.0 for name in ("dropout", "dropout_rate") if family in ("bart", "t5")}
    model, catalogue, rows = enable(build(family, config=still)), Catalogue(rng), 0
    for _ in range(number):
        kind = pick(rng, "train", "eval", "copy", "pickle", "bfloat16", "save", "update", "threads")
        if kind in ("train", "eval"):
            getattr(model, kind)()
        elif kind == "copy":
            model, catalogue.index = copy.deepcopy((model, catalogue.index))
        elif kind == "pickle":
            model, catalogue.index = pickle.loads(pickle.dumps((model, catalogue.index)))
        elif kind == "bfloat16":
            model.to(torch.bfloat16).float()
        elif kind == "save":
            model.save_pretrained(folder)
            catalogue.index.save_pretrained(folder)
            model = AutoModelForGenerativeRetrieval.from_pretrained(folder)
            catalogue.index = ConstraintIndex.from_pretrained(folder)
        elif kind == "update":
            catalogue.update()
        calls = [np.random.default_rng(rng.integers(2**31)) for _ in range(4 if kind == "threads" else 1)]
        drawn = family if len(calls) == 1 else NO_CACHE[0], 0, "eager"  # which draws no heads: those change the model
        with ThreadPoolExecutor(len(calls)) as pool:
            found = pool.map(partial(check_case, drawn=drawn, model=model, catalogue=catalogue), calls)
            rows += sum(number for _, number in found)
    return rows


def check_exact_case(rng: np.random.Generator, drawn: tuple[str, int, str | None]) -> int:
    """One call with `exact=True`, also with a draft; returns how many of its answers are proven."""
    model, catalogue = model_of(*drawn), Catalogue(rng)
    batch = Batch.draw(rng, catalogue, sizes=(1, 2, 3, 5, 8))
    steps, number = max(catalogue.index.max_length - 1, 1), pick(rng, 1, 3, 10, 40)
    given = {
        "num_beams": pick(rng, None, 2, 3, 8, 64),
        "num_return_sequences": number,
        "max_nodes": pick(rng, None, 10**4, steps + int(rng.integers(50))),
        "length_penalty": pick(rng, 1.0, 1.0, 0.0, 0.5, 2.0, -1.0),
        "renormalize_logits": bool(rng.random() < 0.3),
        "do_sample": bool(rng.random() < 0.2),
        "seed": int(rng.integers(2**31)),
        "pad_token_id": PAD,
    }
    drafts = Options.draft(rng, catalogue, model, drawn, may_relax=False)
    given |= {"constraint_index": batch.index, "exclude_items": batch.excluded, "exact": True, **DETAILS}
    inputs, start = batch.given(model)
    penalty = 0.0 if given["do_sample"] else given["length_penalty"]
    how = {"is_exact": False, "num_beams": 0, "renormalize": given["renormalize_logits"], "length_penalty": penalty}
    requests, answers = requests_of(model, batch), []
    most = [min(number, len(request.sequences)) for request in requests]
    try:
        for more in ({}, drafts):
            out = model.generate(**inputs, **given, **more)
            rows, scores, proven = out.sequences[:, start:].tolist(), out.sequences_scores, out.num_proven.tolist()
            if given["do_sample"]:  # without replacement, in the order of another key
                assert (out.perturbed_scores.view(-1, number).diff(dim=-1).nan_to_num(0.0) <= 0).all()
            judged = {"proven": None if given["do_sample"] else proven, "is_ordered": not given["do_sample"]}
            check_rows(batch, requests, rows, scores.tolist(), **judged, **how)
            assert (scores.view(-1, number)[:, 0] > -torch.inf).tolist() == [n > 0 for n in most], "some item"
            assert given["max_nodes"] is None or (out.speculation.num_nodes <= given["max_nodes"]).all()
            if given["max_nodes"] == 10**4:
                assert proven == most
            answers.append(out)
        if given["max_nodes"] == 10**4:
            check_same(*answers)
    except Exception as error:
        error.add_note(f"model_of{drawn}.generate(**{given | drafts})")
        raise
    return sum(answers[0].num_proven.tolist())


@pytest.mark.slow
def test_exact_calls_equal_brute_force(fuzz: Any) -> None:
    families = [family for family in KNOWN if family not in NO_CACHE]
    for case in fuzz:
        fuzz.count(calls=2, proven=check_exact_case(case.rng, draw_model(case.rng, families, others=0.0)))


@pytest.mark.slow
def test_calls_equal_brute_force(fuzz: Any) -> None:
    for case in fuzz:
        num_prompts, rows = check_case(case.rng, draw_model(case.rng))
        fuzz.count(calls=1, prompts=num_prompts, rows=rows)


@pytest.mark.slow
def test_calls_after_operations_equal_brute_force(fuzz: Any, tmp_path: Path) -> None:
    for case in fuzz:
        fuzz.count(rows=check_operations(case.rng, tmp_path, number=8))


@pytest.mark.parametrize("seed", range(4))
def test_a_few_operations(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    check_operations(np.random.default_rng(seed), tmp_path, number=3)


# By day, families whose drafts and loops differ; each with catalogues, rules, updates, options and drafts of its own.
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["bart", "bloom", "deepseek_v3", "gemma2", "gpt2", "mistral", "qwen3", "t5"])
def test_a_few_calls_equal_brute_force(family: str, seed: int) -> None:
    torch.manual_seed(seed)
    drawn = family, 0, "eager" if family in NO_SDPA else "sdpa"
    check_case(np.random.default_rng([seed, len(family)]), drawn)
    if family not in NO_CACHE:
        check_exact_case(np.random.default_rng([seed, len(family)]), drawn)
