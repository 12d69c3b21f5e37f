# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine answers as `generate` does, whoever else asks at the same time and whatever happens to the catalogue."""

import asyncio
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCABULARY, build, shared
from label_tokenizers import tokenizer_of
from serving_fake import Log, in_loop
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_gr
from hf_gr import ConstraintIndex, Engine, classify, enable
from hf_gr.answering import recommender
from hf_gr.core import auto
from hf_gr.generation.torch.scorers import Prompts
from hf_gr.serving import costs, update_log
from hf_gr.serving import engine as engine_module
from hf_gr.serving.answers import BrokenAnswer, Closed, Observer, Overloaded, Recommendation, TooLate
from hf_gr.serving.catalogues import LiveCatalogue, Update
from hf_gr.serving.costs import Costs
from hf_gr.serving.errors import read_message
from hf_gr.serving.update_log import UpdateLog
from hf_gr.torch.graphs import Captured

TOLERANCE = 1e-4  # of scores in another batch: fp32, other padding
ROWS = np.random.default_rng(0).permutation(
    [[a, b, c] for a in range(4, 9) for b in range(10, 15) for c in range(20, 26)]
)[:60]
IDS = [f"B{number:02}" for number in range(60)]
INDEX = ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
RULES = {"even": IDS[::2], "few": IDS[:3]}


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual one takes a second."""
    monkeypatch.setattr(costs, "SHAPES", ((1, 4), (4, 9)))
    monkeypatch.setattr(costs, "ROUNDS", 2)


def model_of(family: str = "qwen3") -> Any:
    return enable(shared(family))


def tokens_of(history: list[str]) -> list[int]:
    return [token for item in history for token in ROWS[IDS.index(item)].tolist()]


def expected(
    model: Any, index: ConstraintIndex, prompt: list[int], *, num_beams: int = 8, num_results: int = 5, **how: Any
) -> tuple[list[str], list[float]]:
    """What `generate` answers to one prompt."""
    given, results = torch.tensor([prompt]), {"num_beams": num_beams, "num_return_sequences": num_results}
    how |= {"attention_mask": torch.ones_like(given), "return_dict_in_generate": True, "output_scores": True}
    out = model.generate(given, constraint_index=index, **results, **how)
    pairs = zip(out.item_ids, out.sequences_scores.tolist(), strict=True)
    found = [(items[0], score) for items, score in pairs if items and score > -np.inf]
    return [item for item, _ in found], [score for _, score in found]


def same(answer: Recommendation, wanted: tuple[list[str], list[float]]) -> None:
    assert answer.items == wanted[0]
    assert answer.scores == pytest.approx(wanted[1], abs=TOLERANCE)


class Broken(Observer):
    def ended(self, *told: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("family", ["qwen3", "t5", "bloom"])
@in_loop
async def test_a_request_alone_is_answered_as_by_generate(family: str) -> None:
    model = model_of(family)
    async with Engine(model, INDEX, num_beams=8, num_results=5) as engine:
        for history in (["B07"], ["B01", "B02", "B03"], IDS[:9]):
            answer = await engine.recommend(history=history)
            assert (answer.items, answer.scores) == expected(model, INDEX, tokens_of(history))  # bit for bit
            assert (answer.batch_size, answer.catalogue_version, answer.dropped) == (1, 0, ())
            assert answer.seconds is not None
            assert answer.seconds["total"] >= answer.seconds["computed"] > 0.0


@in_loop
async def test_exact_requests_are_batched_apart_and_proven() -> None:
    model = model_of()
    async with Engine(model, INDEX, num_beams=2, num_results=2) as engine:
        wishes: list[dict[str, Any]] = [{"exact": True, "num_results": 9, "num_beams": 5}, {}]
        wishes.append({"exact": True, "exclude": IDS[:5]})
        exact, beams, excluded = await asyncio.gather(*[engine.recommend(history=["B07"], **wish) for wish in wishes])
        with pytest.raises(ValueError, match="exact=1, expected true or false"):
            await engine.recommend(history=["B07"], exact=1)  # pyright: ignore
    same(exact, expected(model, INDEX, tokens_of(["B07"]), num_beams=len(IDS), num_results=9))
    assert exact.num_proven == len(exact.items) == 9
    assert excluded.num_proven == 2
    assert not set(excluded.items) & set(IDS[:5])
    same(beams, expected(model, INDEX, tokens_of(["B07"]), num_beams=2, num_results=2))
    assert beams.num_proven is not None
    log, how = Log(), {"exact": True, "max_nodes": 200, "cache_implementation": "static"}
    twice = ConstraintIndex.from_sequences([*ROWS[:9], *ROWS[:9]], item_ids=IDS[:18])
    async with Engine(model, twice, num_results=18, workers=1, observer=log, **how) as engine:
        ask = partial(engine.recommend, history=["B07"], num_beams=9)
        wishes = [{"exclude": IDS[:1]}, {"exact": False, "num_results": 2}, {"exact": True, "num_results": 3}]
        answers = await asyncio.gather(*[ask(**wish) for wish in wishes])
    assert [answer.num_proven for answer in (answers[0], answers[2])] == [17, 3]  # B09 has the tokens of B00
    assert answers[2].items == answers[1].items + answers[2].items[2:]
    assert sorted(batch.num_requests for batch in log.batches) == [1, 2]


@in_loop
async def test_many_requests_with_all_kinds_of_wishes() -> None:
    model, log, draw = model_of(), Log(), random.Random(0)
    asked: list[dict[str, Any]] = []
    for _ in range(80):
        wish: dict[str, Any] = {"history": draw.choices(IDS, k=draw.randint(1, 12))}
        wish |= {"num_results": draw.randint(1, 6), "num_beams": draw.choice([6, 9])}
        wish |= {"exclude": draw.sample(IDS, draw.choice([0, 3]))}
        wish |= draw.choice([{}, {"rule": "even"}, {"rule": "few"}, {"filter": draw.sample(IDS, 7)}])
        wish |= {"filter": draw.sample(IDS[::2], 4)} if wish.get("rule") == "even" and draw.random() < 0.5 else {}
        asked.append(wish)

    async with Engine(model, INDEX, rules=RULES, observer=Broken(), token_budget=400) as engine:
        engine.observers.append(log)  # one may come later, and one may fail
        answers = await asyncio.gather(*[engine.recommend(**wish) for wish in asked])
    for wish, answer in zip(asked, answers, strict=True):
        allowed = set(wish.get("filter", IDS)) & set(RULES.get(wish.get("rule", ""), IDS))
        wanted = expected(
            model,
            INDEX.where(sorted(allowed)),
            tokens_of(wish["history"]),
            num_beams=wish["num_beams"],
            num_results=wish["num_results"],
            exclude_items=[wish["exclude"]],
        )
        same(answer, wanted)
    assert max(batch.num_requests for batch in log.batches) > 2
    assert max(batch.num_tokens for batch in log.batches) <= 400
    assert log.outcomes == {"answered": 80}
    assert log.batches[0].target_forwards == 2


@in_loop
async def test_samples_depend_on_the_seed_alone() -> None:
    how: dict[str, Any] = {"do_sample": True, "temperature": 2.0}
    async with Engine(model_of(), INDEX, num_beams=4, num_results=4, **how) as engine:
        alone = [await engine.recommend(history=[item], seed=7) for item in IDS[:3]]
        asked = [engine.recommend(history=[item], seed=7) for item in IDS[:3]]
        *together, _, _ = await asyncio.gather(*asked, *[engine.recommend(history=IDS[:4], seed=n) for n in range(2)])
        *different, seeded = await asyncio.gather(
            *[engine.recommend(history=["B00"]) for _ in range(6)], engine.recommend(history=IDS[:1], seed=7)
        )
        for one, two in zip([*alone, alone[0]], [*together, seeded], strict=True):
            assert two.batch_size > 1  # of the last one, with others that have no seed
            same(two, (one.items, one.scores or []))
        assert len({tuple(answer.items) for answer in different}) > 1


@in_loop
async def test_bad_requests_are_refused_by_name() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "history=None, expected one of history, text and tokens: send one"),
        ({"history": ["B00"], "tokens": [5]}, "tokens is given together with history, expected one"),
        ({"history": "B00"}, "history='B00', expected a list of item ids"),
        ({"history": [7]}, "history has 7, expected strings"),
        ({"history": []}, "history is empty, expected one item or more"),
        (
            {"history": ["gone", "lost"]},
            "history has 'gone', expected at least one item of the catalogue: send known items",
        ),
        ({"history": ["B00"], "rule": "x" * 3000}, r"rule='x{79}\.\.\., expected one of"),
        ({"history": ["B00"], "exclude": [5]}, "exclude has 5, expected strings"),
        ({"history": ["B00"], "rule": "odd"}, r"rule='odd', expected one of \['even', 'few'\]"),
        ({"history": ["B00"], "num_results": 0}, "num_results=0, expected an integer from 1 to 100"),
        ({"history": ["B00"], "num_results": True}, "num_results=True"),
        ({"history": ["B00"], "num_beams": 101}, "num_beams=101, expected an integer from 2 to 100"),
        ({"history": ["B00"], "num_beams": 4, "num_results": 5}, "num_beams=4, expected at least num_results=5"),
        ({"history": ["B00"], "seed": 0.5}, "seed=0.5"),
        ({"history": ["B00"], "timeout": 0}, "timeout=0, expected a number of seconds"),
        ({"history": ["B00"], "timeout": float("nan")}, "timeout=nan"),
        ({"tokens": [5, VOCABULARY]}, f"tokens has {VOCABULARY}, expected 0 to {VOCABULARY - 1}"),
        ({"tokens": "5 6"}, "tokens='5 6', expected a list of token ids"),
        ({"text": "a film"}, "there is no tokenizer"),
    ]
    log = Log()
    async with Engine(model_of(), INDEX, rules=RULES, max_beams=100, observer=log) as engine:
        for wish, message in bad:
            good = asyncio.ensure_future(engine.recommend(history=["B01"]))
            with pytest.raises(ValueError, match=message) as refused:
                await engine.recommend(**wish)
            assert read_message(str(refused.value)).argument in (wish or {"history"})  # which the server tells
            assert (await good).items
        assert log.outcomes == {"invalid": len(bad), "answered": len(bad)}


@in_loop
async def test_histories_that_are_unknown_empty_or_too_long() -> None:
    model = model_of()
    how: dict[str, Any] = {"fallback": ["B05", "gone", "B04", "B03"], "num_results": 2, "num_beams": 4}
    async with Engine(model, INDEX, max_prompt_tokens=8, rules=RULES, **how) as engine:
        answer = await engine.recommend(history=["B00", "gone", "B01", "B02", "gone"])
        assert (answer.dropped, answer.num_cut, answer.is_fallback) == (("gone",), 1, False)
        same(answer, expected(model, INDEX, tokens_of(["B01", "B02"]), num_beams=4, num_results=2))
        answer = await engine.recommend(tokens=list(range(4, 20)))
        assert answer.num_cut == 8
        same(answer, expected(model, INDEX, list(range(12, 20)), num_beams=4, num_results=2))
        answer = await engine.recommend(history=["gone"], exclude=["B05"])
        assert (answer.items, answer.scores, answer.is_fallback) == (["B04", "B03"], None, True)
        assert answer.dropped == ("gone",)
        assert (await engine.recommend(history=[], rule="even")).items == ["B04"]
        answer = await engine.recommend(history=[], filter=["B03", "gone"])
        assert (answer.items, answer.dropped) == (["B03"], ("gone",))
    how["fallback"] = {"item_id": ["gone", "left", None], "similar_items": [["B04", "B03"], ["B04"], ["B05"]]}
    async with Engine(model, INDEX, rules=RULES, **how) as engine:
        answer = await engine.recommend(
            history=["left", "gone", "never"], num_results=3, filter=["B05", "B04", "left"]
        )
        assert (answer.items, answer.is_fallback, answer.similar_to) == (["B04", "B05"], True, ("gone", "left"))
        engine.catalogue.apply(Update.from_dict({"remove": ["B04"]}))
        answer = await engine.recommend(history=["left"])
        assert (answer.items, answer.is_fallback, answer.similar_to) == (["B05"], True, ())
        assert not (await engine.recommend(history=["B00", "gone"])).similar_to
    async with Engine(model, INDEX, max_prompt_tokens=2, unknown_items="refuse") as engine:
        with pytest.raises(ValueError, match="history has 'gone', expected items of the catalogue"):
            await engine.recommend(history=["B00", "gone"])
        with pytest.raises(ValueError, match="filter has 'gone', expected items of the catalogue"):
            await engine.recommend(history=["B00"], filter=["B01", "gone"])
        with pytest.raises(ValueError, match="history ends with 'B00' of 3 tokens, expected an item that fits"):
            await engine.recommend(history=["B00"])


@in_loop
async def test_filters_by_attributes_are_those_of_their_items(tmp_path: Path) -> None:
    """With rules and exclusions; kept for an edition; the table is read again with another model."""
    kinds, table = ["tea", "jam", "pie"], tmp_path / "items.csv"
    lines = [f"{item},{kinds[number % 3]},{number}" for number, item in enumerate([*IDS[:50], "coming"])]
    table.write_text("\n".join(["item_id,kind,price", *lines]))
    wanted = {"kind": ["tea", "pie"], "price": {"min": 2, "max": 40}}
    ids = [item for number, item in enumerate(IDS) if number % 3 != 1 and 2 <= number <= 40]
    async with Engine(model_of(), INDEX, rules=RULES, num_beams=8, num_results=5, attributes=table) as engine:
        for wish in ({}, {"rule": "even"}, {"exclude": ids[:9]}, {"rule": "few"}, {"num_results": 2}):
            answers = [await engine.recommend(history=["B07"], filter=one, **wish) for one in (wanted, ids)]
            assert answers[0].items == answers[1].items
            assert set(answers[0].items) <= set(ids)
        assert len(engine._recommender._views) == 6  # two filters alone and under each of two rules
        with pytest.raises(ValueError, match="filter has 'colour', expected some of kind, price"):
            await engine.recommend(history=["B07"], filter={"colour": ["red"]})
        engine.catalogue.apply(Update(add=[{"item_id": "coming", "sequence": [8, 14, 30]}], remove=ids[:9]))
        answer = await engine.recommend(history=["B07"], filter={"price": {"min": 2}}, num_results=60)
        assert set(answer.items) == set(IDS[2:50]) - set(ids[:9]) | {"coming"}
        assert (await engine.recommend(history=["B07"], filter={})).items
        table.write_text("item_id,price\nB01,3")
        await engine.swap(model_of(), INDEX)
        answer = await engine.recommend(history=["B07"], filter={"price": {"min": 2}})
        assert (answer.items, answer.catalogue_version) == (["B01"], 2)
    async with Engine(model_of(), INDEX) as engine:
        with pytest.raises(ValueError, match="filter={'kind': .*, expected item ids: the server has no table"):
            await engine.recommend(history=["B07"], filter={"kind": ["tea"]})


@in_loop
async def test_answers_are_legal_in_the_version_that_they_name() -> None:
    """Hundreds of requests while items come and go: 115 of 430 answers were wrong without an edition a batch."""
    catalogue, draw = LiveCatalogue(INDEX, {"half": IDS[:30]}), random.Random(1)
    editions = {0: catalogue.edition}
    new = [[a, b, c] for a in range(4, 9) for b in range(10, 15) for c in range(40, 44)]
    async with Engine(model_of(), catalogue, num_beams=6, num_results=6) as engine:

        async def ask() -> None:
            rule = draw.choice([None, "half"])
            answer = await engine.recommend(history=draw.choices(IDS, k=4), rule=rule)
            edition = editions[answer.catalogue_version]
            assert edition.index.has_items(answer.items).all()
            assert rule is None or edition.rules["half"].has_items(answer.items).all()
            assert len(answer.items) == 6

        async def change() -> None:
            for number, sequence in enumerate(new):
                added = [{"item_id": f"N{number}", "sequence": sequence}]
                gone = [draw.choice(list(catalogue.edition.index.item_ids))]
                edition = catalogue.apply(Update(add=added, remove=gone if number % 2 else []))
                editions[edition.version] = edition
                await asyncio.sleep(0.002)
            edition = catalogue.swap(INDEX)
            editions[edition.version] = edition

        await asyncio.gather(change(), *[ask() for _ in range(300)])
        assert (await engine.recommend(history=["B00"])).catalogue_version == len(new) + 1


@in_loop
async def test_a_cancelled_request_and_a_late_one_leave_the_others_alone() -> None:
    log = Log()
    async with Engine(model_of(), INDEX, workers=1, cores=1, observer=log) as engine:
        tasks = [asyncio.ensure_future(engine.recommend(history=[item])) for item in IDS[:20]]
        await asyncio.sleep(0)
        tasks[3].cancel()
        with pytest.raises((TooLate, Overloaded)):
            await engine.recommend(history=["B00"], timeout=1e-4)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (log.outcomes["answered"], log.outcomes["cancelled"]) == (19, 1)


@pytest.mark.parametrize("family", ["qwen3", "t5", "bloom"])
@in_loop
async def test_what_nobody_waits_for_is_not_computed_to_its_end(family: str) -> None:
    model, begun = enable(build(family)), []
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    slow = [layer.register_forward_hook(lambda *_: begun.append(time.sleep(0.1))) for layer in layers]
    async with Engine(model, INDEX, workers=1, cores=1) as engine:
        for timeout in (0.05, 9):
            begun.clear()
            asked = asyncio.ensure_future(engine.recommend(history=["B00"], timeout=timeout))
            asyncio.get_running_loop().call_later(0.06, asked.cancel)
            with pytest.raises((TooLate, asyncio.CancelledError)):
                await asked
            await asyncio.to_thread(engine._workers.submit(int).result)
            assert len(begun) == 1  # of every layer and level
        for hook in slow:
            hook.remove()
        assert (await engine.recommend(history=["B00"])).items
    assert not any(layer._forward_pre_hooks for layer in layers)


@in_loop
async def test_a_batch_for_which_memory_is_too_small_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Engine(model_of(), INDEX, workers=1, cores=1, token_budget=1000) as engine:
        compute = engine._recommended

        def limited(batch: Any, recommender: Any) -> Any:
            if len(batch) > 2:
                raise torch.OutOfMemoryError
            return compute(batch, recommender)

        monkeypatch.setattr(engine, "_recommended", limited)
        await asyncio.gather(*[engine.recommend(history=[item]) for item in IDS[:4]])
        assert engine._batcher is not None
        assert engine._batcher.token_budget == 4 * (3 + 40) // 2


@in_loop
async def test_catalogues_that_change() -> None:
    """Small or empty, as a server has that reads updates from a log; what leaves while a request waits; bad tokens."""
    catalogue = LiveCatalogue(ConstraintIndex.from_sequences(ROWS[:3], item_ids=IDS[:3]))
    values: dict[str, Any] = {"item_groups": ["tea", "jam", "tea"], "item_bias": np.zeros(3)}  # of the first items
    async with Engine(model_of(), catalogue, workers=1, cores=1, **values) as engine:
        assert sorted((await engine.recommend(history=["B00"])).items) == IDS[:3]
        is_changed = threading.Event()
        engine._workers.submit(is_changed.wait)  # the worker is busy
        waiting = asyncio.ensure_future(engine.recommend(history=["B00"], filter=["B01", "B02"]))
        await asyncio.sleep(0.01)  # it is in the queue
        catalogue.apply(Update(remove=["B01"]))
        is_changed.set()
        answer = await waiting
        assert (answer.items, answer.catalogue_version) == (["B02"], 1)
        assert len((await engine.recommend(history=["B00"], max_per_group=1)).items) == 1  # the jam has left
        with pytest.raises(ValueError, match=f"the catalogue has token {VOCABULARY}, expected less than"):
            catalogue.apply(Update(add=[{"item_id": "new", "sequence": [4, 10, VOCABULARY]}]))
        catalogue.apply(Update(remove=["B00", "B02"]))
    async with Engine(model_of(), catalogue) as engine:
        assert (await engine.recommend(history=["B00"])).items == []
        catalogue.apply(Update(add=[{"item_id": "B00", "sequence": ROWS[0].tolist()}]))
        assert (await engine.recommend(history=["B00"], filter=["B00"])).items == ["B00"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ConstraintIndex]]:
    """Models and their catalogues of the same items, by the folder of both; the second has other tokens for them."""
    made: dict[str, tuple[Any, ConstraintIndex]] = {}
    for seed, rows in enumerate((ROWS, ROWS[::-1])):
        folder = tmp_path_factory.mktemp("models") / f"v{seed}"
        index = ConstraintIndex.from_sequences(rows, item_ids=IDS)
        torch.manual_seed(seed)
        model = enable(type(shared("qwen3"))(shared("qwen3").config)).eval()
        model.generation_config.code_book = index.code_book()
        model.save_pretrained(folder)
        index.save_pretrained(folder)
        made[str(folder)] = model, index
    return made


@in_loop
async def test_a_swap_under_load(pairs: Any) -> None:
    """Every answer is wholly of one pair, cached keys, too; the old one goes when its last request is answered."""
    (old, new), log = pairs, Log()
    histories = [IDS[start : start + 8] for start in range(5)]
    wanted = {
        (Path(folder).name, start): expected(model, index, index.encode(histories[start]))
        for folder, (model, index) in pairs.items()
        for start in range(5)
    }
    how: dict[str, Any] = {"num_beams": 8, "num_results": 5, "rules": RULES, "workers": 2, "cores": 2}
    async with Engine(old, observer=log, **how) as engine:
        before = weakref.ref(engine.model)

        async def ask(start: int) -> list[str]:
            versions = ["v0"]
            while versions[-1] == "v0":
                answer = await engine.recommend(history=histories[start])
                same(answer, wanted[answer.model_version, start])
                assert answer.catalogue_version == ("v0", "v1").index(answer.model_version)
                versions.append(answer.model_version)
            return versions

        asked = [asyncio.create_task(ask(user % 5)) for user in range(30)]
        await asyncio.sleep(0.05)
        edition = await engine.swap(new)
        assert (edition.version, edition.model, edition.rules["few"].num_items) == (1, new, 3)
        assert sum(map(len, await asyncio.gather(*asked))) > 3 * 30
        may_end = [threading.Event() for _ in range(2)]
        for event in may_end:
            engine._workers.submit(event.wait)  # the workers are busy, and what waits was read by the pair before
        waiting = asyncio.create_task(engine.recommend(history=histories[0]))
        await asyncio.sleep(0.01)
        await engine.swap(old)
        assert before() is None
        for event in may_end:
            event.set()
        same(await waiting, wanted["v1", 0])
        assert ((await waiting).model_version, (await waiting).catalogue_version) == ("v1", 1)
        answer = await engine.recommend(history=histories[0])
        same(answer, wanted["v0", 0])
        assert (answer.model_version, answer.catalogue_version) == ("v0", 2)
        assert set(log.outcomes) == {"answered"}


@in_loop
async def test_one_model_with_another_catalogue_is_another_pair_and_the_old_catalogue_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are in a file whose name has as many letters as there are items."""
    monkeypatch.chdir(tmp_path)
    name = "g" * (len(IDS) - 4) + ".csv"
    Path(name).write_text("item_id,group\n" + "\n".join(f"{item},all" for item in IDS))
    model, index = model_of(), ConstraintIndex.from_sequences(ROWS, item_ids=IDS)
    async with Engine(model, index, num_beams=8, num_results=5, workers=1, item_groups=name) as engine:
        assert len((await engine.recommend(history=IDS[:4], max_per_group=1)).items) == 1
        old, may_end = weakref.ref(index.snapshot.items), threading.Event()
        wanted = await engine.recommend(history=IDS[:4])
        engine._workers.submit(may_end.wait)
        waiting = asyncio.create_task(engine.recommend(history=IDS[:4]))
        await asyncio.sleep(0.01)
        await engine.swap(model, ConstraintIndex.from_sequences(ROWS[::-1], item_ids=IDS))
        may_end.set()
        assert (await waiting).items == wanted.items
        await engine.recommend(history=IDS[:4])
        del waiting, index
        gc.collect()
        assert old() is None


@in_loop
async def test_a_swap_that_fails_changes_nothing(pairs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is killed, at each of its steps: a restart serves the pair that the log names, and no other."""
    (old, new), folder = pairs, tmp_path / "updates"
    numbers = ConstraintIndex.from_sequences(ROWS[::-1])
    catalogue = LiveCatalogue(pairs[old][1], log=UpdateLog(folder), model=old)
    engine = Engine(old, catalogue, num_beams=8, num_results=5)
    with pytest.raises(Closed, match="after start"):
        await engine.swap(new)
    async with engine:
        edition, begun = catalogue.edition, threading.Event()

        async def fails(error: type[Exception], message: str, *given: Any) -> None:
            with pytest.raises(error, match=message):
                await engine.swap(*given)
            assert catalogue.edition is edition
            answer = await engine.recommend(history=["B07"])
            same(answer, expected(pairs[old][0], INDEX, tokens_of(["B07"])))
            assert (answer.model_version, answer.catalogue_version) == ("v0", 0)

        shared("qwen3").config.save_pretrained(tmp_path / "bare")
        await fails(ValueError, "model='.*', expected a saved model", str(tmp_path / "bare"))
        await fails(ValueError, "has another code book", new, pairs[old][1])
        with monkeypatch.context() as patched:
            patched.setattr(engine_module, "fit_costs", lambda *_: begun.wait())  # the warm-up
            first = asyncio.create_task(engine.swap(new, numbers))
            await asyncio.sleep(0.01)
            await fails(Overloaded, "another model is being swapped in", new)
            begun.set()
            with pytest.raises(ValueError, match="has item ids of integers, expected strings"):
                await first
        for step in ("_save", "_write_head"):
            with monkeypatch.context() as patched:
                patched.setattr(UpdateLog, step, lambda *_: 1 / 0)
                await fails(ZeroDivisionError, "zero", new)
            assert LiveCatalogue(log=UpdateLog(folder)).edition.model == old
        catalogue.apply(Update(remove=["B07"]))
        monkeypatch.setattr(update_log, "shutil", SimpleNamespace(rmtree=Path.rmdir))  # it fails: old bases stay
        await engine.swap(new)
        catalogue.apply(Update(remove=["B01"]))
    restarted = LiveCatalogue(log=UpdateLog(folder))
    assert (restarted.edition.version, restarted.edition.model, len(restarted.edition.index)) == (3, new, 58)
    with pytest.raises(ValueError, match="has another code book"):
        Engine(old, restarted)
    assert Engine(new, restarted).model_version == "v1"


@in_loop
async def test_a_returning_users_prefix_is_cached() -> None:
    model, log = model_of(), Log()
    histories = [IDS[start : start + 8] for start in range(4)]
    around: dict[str, Any] = {"prefix_tokens": [30] * 20, "suffix_tokens": [32]}
    async with Engine(model, INDEX, num_beams=8, num_results=5, observer=log, **around) as engine:
        for more in range(3):
            asked = [history + IDS[40 : 40 + more] for history in histories]
            answers = await asyncio.gather(*[engine.recommend(history=history) for history in asked])
            for history, answer in zip(asked, answers, strict=True):
                same(answer, expected(model, INDEX, [30] * 20 + tokens_of(history) + [32]))
    cached = [batch.num_cached_tokens for batch in log.batches]
    assert cached[0] == 0  # the second worker may begin before the first has ended, or after
    assert cached[-1] >= 2 * 32  # blocks of 16 tokens


@in_loop
async def test_an_engine_is_closed_before_it_is_ready_and_after_it_has_ended() -> None:
    engine = Engine(model_of(), INDEX)
    assert not engine.is_ready
    assert engine._recommender.max_prompt_tokens == 4096
    with pytest.raises(Closed, match="warming up"):
        await engine.recommend(history=["B00"])
    await engine.start()
    assert engine.is_ready
    with pytest.raises(RuntimeError, match="started in another event loop, expected that one"):
        await asyncio.to_thread(asyncio.run, engine.recommend(history=["B00"]))
    pending = asyncio.ensure_future(engine.recommend(history=["B00"]))
    await asyncio.sleep(0)
    await engine.close()
    assert (await pending).items
    assert not engine.is_ready
    with pytest.raises(Closed, match="closing"):
        await engine.recommend(history=["B00"])
    with pytest.raises(Closed, match="a closed engine cannot start again"):
        await engine.start()


@in_loop
async def test_a_large_request_does_not_keep_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    async with Engine(model_of(), INDEX, max_prompt_tokens=30) as engine:
        latest_that_fit = recommender.latest_that_fit

        def watched(*given: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return latest_that_fit(*given)

        monkeypatch.setattr(recommender, "latest_that_fit", watched)
        answers = [await engine.recommend(history=["gone"] * many + IDS[:10]) for many in (0, 9000)]
    assert answers[0].items == answers[1].items
    assert threads == [True, False]


@in_loop
async def test_scores_that_are_no_numbers_are_the_servers_error() -> None:
    model = enable(build("qwen3"))
    async with Engine(model, INDEX, num_beams=4, num_results=4) as engine:
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(BrokenAnswer):
            await engine.recommend(history=["B00"])
        # That nothing is allowed is no error.
        assert (await engine.recommend(history=["B00"], filter=["B01"], exclude=["B01"])).items == []


@in_loop
async def test_auto_is_settled_while_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(build("qwen3"))
    async with Engine(model, INDEX, num_beams=8, num_results=5, drafting="auto", max_batch=8) as engine:
        known = auto._KNOWN[model]
        assert {kind[-2] for kind in known} >= {1, 3}  # bits of the rows of a batch
        monkeypatch.setattr(auto, "time", None)  # no clock is read again
        same(await engine.recommend(history=["B00"]), expected(model, INDEX, tokens_of(["B00"])))


@in_loop
async def test_calls_are_captured_while_warming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, replayed, replay = enable(build("qwen3")), [], Captured.replay
    monkeypatch.setattr(Captured, "replay", lambda *args: replayed.append(args) or replay(*args))
    how: dict[str, Any] = {"num_beams": 8, "num_results": 5, "max_batch": 2, "cache_implementation": "static"}
    async with Engine(model, INDEX, **how) as engine:
        replayed.clear()
        for exclude in ([], ["B00", "B01"]):
            wanted = expected(model, INDEX, tokens_of(["B00"]), exclude_items=[exclude])
            same(await engine.recommend(history=["B00"], exclude=exclude), wanted)
        assert len(replayed) == 2


@pytest.mark.parametrize(
    ("how", "count", "threads"),
    [({"workers": 2, "cores": 2}, 2, 1), ({"cores": 3}, 3, 1), ({"cores": 3, "workers": 1}, 1, 3)],
)
def test_an_engine_keeps_to_its_cores(how: dict[str, int], count: int, threads: int) -> None:
    """Of a machine that others share, such as replicas of Ray; the program's own threads stay."""
    before = torch.get_num_threads()
    workers = Engine(model_of(), INDEX, **how)._workers
    try:
        assert workers.run_on_all(torch.get_num_threads) == [threads] * count  # all at the same time
    finally:
        workers.shutdown()
    assert torch.get_num_threads() == before


def test_workers_prefill_at_once() -> None:
    """Prompts of several threads do not wait for each other, as by `functools.cached_property` of Python 3.11."""
    together = threading.Barrier(2, timeout=10)
    prompts = [Prompts(torch.ones(1, 1, dtype=torch.long), {}, lambda: together.wait() >= 0) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.outputs, prompts)) == [True, True]


@in_loop
async def test_labels_are_ranked_as_by_classify(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("bpe")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = enable(LlamaForCausalLM(config)).eval()
    labels = ConstraintIndex.from_labels(["sports", "science", "politics"], tokenizer)
    texts = ["The match", "A long text of science and technology", "abc"]
    async with Engine(model, labels, tokenizer=tokenizer, max_tree_nodes=4, workers=1) as engine:
        answers = await asyncio.gather(*[engine.classify(text=text, num_labels=2) for text in texts])
        for answer, ranked in zip(answers, classify(model, tokenizer, texts, labels, top_k=2), strict=True):
            assert answer.labels == [label for label, _ in ranked]
            assert answer.probabilities == pytest.approx([value for _, value in ranked], abs=TOLERANCE)
        how: dict[str, Any] = {"score": "sum", "threshold": 1e-9, "hierarchy": "i"}
        computed: list[Any] = []
        monkeypatch.setattr(engine_module, "classify", lambda *a, **b: computed.append(a[2]) or classify(*a, **b))
        answers = await asyncio.gather(*[engine.classify(text=text, num_labels=2, **how) for text in texts])
        expected = classify(model, tokenizer, texts, labels, top_k=2, max_tree_nodes=4, **how)
        assert max(map(len, computed)) > 1  # several texts in one batch
        for number, answer in enumerate(answers):
            assert (answer.method, answer.parents is not None) == ("bounded", True)
            assert answer.labels == [label for label, _ in expected[number]]
            assert answer.mass_left == pytest.approx(expected.mass_left[number], abs=TOLERANCE)
            for level, wanted in zip(answer.parents or [], (expected.parents or [])[number], strict=True):
                assert dict(level) == pytest.approx(dict(wanted), abs=TOLERANCE)
        for wish, message in (
            ({"text": ""}, "text=''"),
            ({"text": "a", "score": "best"}, "score='best'"),
            ({"text": "a", "num_labels": 513}, "to 512"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.classify(**wish)
        assert (await engine.recommend(text="The match", num_results=3, num_beams=3)).items
    async with Engine(model_of(), INDEX, tokenizer=tokenizer) as engine:
        with pytest.raises(ValueError, match="the catalogue has items and no labels"):
            await engine.classify(text="a")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"workers": 0}, "workers=0, expected an integer, 1 or more"),
        ({"num_beams": 50, "max_beams": 20}, "expected 2 to max_beams=20"),
        ({"unknown_items": "ignore"}, "unknown_items='ignore', expected one of drop, refuse"),
        ({"rules": {"a": ["Z"]}}, "'Z'"),
        ({"constraint_index": ConstraintIndex.from_sequences([[5, VOCABULARY]])}, "less than the vocabulary"),
        ({"timeout": -1}, "timeout=-1, expected a number of seconds"),
        ({"fallback": [5]}, "fallback has 5, expected strings"),
        ({"attributes": {"id": ["B00"]}}, "attributes has no column 'item_id'"),
        ({"key_cache_bytes": -1}, "key_cache_bytes=-1"),
        ({"constraint_index": LiveCatalogue(INDEX), "rules": {}}, "rules= with a LiveCatalogue"),
    ],
)
def test_engines_that_cannot_be(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(model_of(), **{"constraint_index": INDEX, **how})


@pytest.mark.parametrize(
    ("own", "given", "num_results", "beams"),
    [(None, None, 10, 20), (4, None, 10, 10), (12, None, 10, 12), (4, 6, 5, 6)],
)
def test_the_checkpoints_beams_are_the_default_of_tables_and_servers(
    own: int | None, given: int | None, num_results: int, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = enable(build("qwen3"))
    if own is not None:
        model.generation_config.num_beams = own
    engine = Engine(model, INDEX, num_beams=given, num_results=num_results)
    generate, asked = model.generate, []
    monkeypatch.setattr(model, "generate", lambda **how: asked.append(how["num_beams"]) or generate(**how))
    hf_gr.recommend(model, [["B00"]], constraint_index=INDEX, num_beams=given, top_k=num_results)
    assert (engine._recommender.num_beams, asked) == (beams, [beams])


def test_costs_are_never_negative() -> None:
    assert Costs.fit([100, 200, 400], [0.3, 0.5, 0.9]) == Costs(0.1, 0.002)
    for tokens, seconds in (([100, 200], [0.5, 0.4]), ([100, 400], [0.1, 0.9]), ([100, 100], [0.1, 0.1])):
        found = Costs.fit(tokens, seconds)
        assert found.fixed >= 0.0
        assert found.token > 0.0
        assert 128 <= found.token_budget <= 65_536
