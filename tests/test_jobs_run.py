# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend` against one user at a time, its output under kills and full disks, and with several processes."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import jobs_case
import label_tokenizers
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs_case import RUN, Case, make_case, make_users, oracle, read, run, same, write_users
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_gr
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, recommend
from hf_gr.generation.torch.fingerprints import fingerprint_model
from hf_gr.jobs import run as module
from hf_gr.jobs.job import Job
from hf_gr.jobs.parts import Parts, folder_of

NUM_USERS, NUM_PARTS = 84, 6  # windows of 16, the last of 4


@pytest.fixture(scope="module")
def expected(case: Case, users: Path) -> Path:
    """The output of a run that nothing disturbs."""
    return run(case, users, users.with_name("whole.parquet")).output


@pytest.fixture(scope="module")
def whole(expected: Path) -> bytes:
    return expected.read_bytes()


def users_with(case: Case, path: Path, changed: dict[int, dict[str, Any]]) -> Path:
    """The same users, but for some rows."""
    rows = make_users(case, NUM_USERS)
    return write_users(path, [row | changed.get(number, {}) for number, row in enumerate(rows)])


def parts_of(output: Path) -> list[int]:
    return sorted(int(part.stem[-8:]) for part in folder_of(output).glob("part-*"))


def interrupt(case: Case, users: Any, output: Path, after: int, **more: Any) -> None:
    """A run that ends as if killed after some windows."""
    original, left = Job.run, [after]

    def interrupted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return original(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Job, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(case, users, output, **more)
    assert len(parts_of(output)) == after


def same_rows(found: Path, expected: Path) -> bool:
    pairs = zip(read(found), read(expected), strict=True)
    return all(same(row, (one["items"], one["scores"])) for row, one in pairs)


@pytest.mark.parametrize(
    ("family", "strings", "eos"), [("llama", False, None), ("gpt2", True, 2), ("t5", True, 2), ("bart", False, None)]
)
def test_rows_are_those_of_one_user_at_a_time(tmp_path: Path, family: str, strings: bool, eos: int | None) -> None:
    case = make_case(tmp_path, family=family, strings=strings, eos=eos)
    users = make_users(case, 24)
    made = run(case, write_users(tmp_path / "users.parquet", users), tmp_path / "recs.parquet", token_budget=600)
    assert made == module.Recommended(tmp_path / "recs.parquet", num_rows=24, num_skipped=0, num_resumed=0)
    rows = read(made.output)
    assert [row["who"] for row in rows] == [user["who"] for user in users]
    model, index = case.load()
    expected = [oracle(model, index, case, user, top_k=6, num_beams=8) for user in users]
    assert all(same(*pair) for pair in zip(rows, expected, strict=True))
    assert not all(same(*pair) for pair in zip(rows[1:], expected, strict=False))  # the comparison can fail


OF_DRAFT = {"drafting": "assistant", "num_draft_beams": 8}


@pytest.mark.parametrize(
    "changed",
    [
        {"token_budget": 1, "window_rows": 7},
        {"drafting": "trie"},
        OF_DRAFT | {"assistant_model": lambda case: case.model},
        OF_DRAFT | {"assistant_model": lambda case: case.load()[0]},
    ],
)
def test_how_rows_are_batched_and_drafted_does_not_matter(
    tmp_path: Path, case: Case, users: Path, expected: Path, changed: Any
) -> None:
    given = {name: value(case) if callable(value) else value for name, value in changed.items()}
    assert same_rows(run(case, users, tmp_path / "recs.parquet", **given).output, expected)


def test_the_checkpoint_may_name_all(tmp_path: Path, case: Case, users: Path) -> None:
    model, index = case.load()
    model.add_draft_head(index)
    model.generation_config.update(constraint_index=".", num_beams=12, drafting="head", verification="strict")
    model.save_pretrained(tmp_path / "model")
    index.save_pretrained(tmp_path / "model")
    named = recommend(tmp_path / "model", users, tmp_path / "a.parquet", history="seen")
    given = {"history": "seen", "constraint_index": case.index, "num_beams": 12, "drafting": None}
    assert same_rows(named.output, recommend(tmp_path / "model", users, tmp_path / "b.parquet", **given).output)


def test_weights_may_be_loaded_in_half(tmp_path: Path, case: Case, users: Path, expected: Path) -> None:
    made = run(case, users, tmp_path / "recs.parquet", dtype="bfloat16")
    pairs = zip(read(made.output), read(expected), strict=True)
    assert sum(len(set(a["items"]) & set(b["items"])) for a, b in pairs) > 5 * NUM_USERS


def test_texts_are_prompts_with_a_tokenizer(tmp_path: Path, case: Case) -> None:
    tokenizer = label_tokenizers.tokenizer_of("bpe")
    model = hf_gr.enable(families.build("llama", config={"vocab_size": 512}))
    table = pa.table({"ask": ["a", "what else", "tea and jam", "b"]})
    index = ConstraintIndex.from_pretrained(case.index)
    options = {"constraint_index": index, "text": "ask", "tokenizer": tokenizer, "top_k": 3, "num_beams": 4}
    for text, row in zip(table["ask"].to_pylist(), recommend(model, table, **options).to_pylist(), strict=True):
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(prompt, constraint_index=index, num_beams=4, num_return_sequences=3)
        expected = [item for items in index.items(out[:, prompt.shape[1] :]) for item in items]
        assert row["items"] == expected[:3]
    with pytest.raises(ValueError, match="text= with a loaded model and tokenizer=None"):
        recommend(model, table, **(options | {"tokenizer": None}))


# transformers 5.17 says so of weights that are on no device until they are needed.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning")
def test_a_model_that_is_partly_on_the_disk(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    places = {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}

    def load(folder: Path, to: str) -> Any:
        how = {"device_map": places, "offload_folder": tmp_path / to}
        return AutoModelForGenerativeRetrieval.from_pretrained(folder, **how)

    model, index = load(case.model, "offload"), ConstraintIndex.from_pretrained(case.index)
    assert model.device.type == "meta"
    made = recommend(model, users, tmp_path / "a.parquet", constraint_index=index, window_rows=16, **RUN)
    assert made.output.read_bytes() == whole  # metadata included, and so the weights' digest
    for number, device_map in enumerate((places, "auto")):
        assert run(case, users, tmp_path / f"{number}.parquet", device_map=device_map).output.read_bytes() == whole
    other, _ = case.load()
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    moved = load(tmp_path / "other", "offload2")
    assert fingerprint_model(moved) == fingerprint_model(other) != fingerprint_model(model)


def test_a_run_that_stopped_at_a_row_goes_on_and_skips_it(tmp_path: Path, case: Case, expected: Path) -> None:
    path, output = users_with(case, tmp_path / "u.parquet", {40: {"seen": [7]}}), tmp_path / "recs.parquet"
    fresh = run(case, path, tmp_path / "fresh.parquet", on_error="skip")
    for number, (row, one) in enumerate(zip(read(fresh.output), read(expected), strict=True)):
        assert (row.pop("error") is None) == (number != 40)
        assert row["items"] == [] if number == 40 else same(row, (one["items"], one["scores"]))
    interrupt(case, path, tmp_path / "skipped.parquet", 3, on_error="skip")
    for stopped in (output, tmp_path / "skipped.parquet"):  # also at a row that an earlier run has skipped
        with pytest.raises(
            ValueError, match=r"u.parquet, row 40 cannot be answered: history has 7, .*on_error='skip'"
        ):
            run(case, path, stopped)
        assert not stopped.exists()
    assert parts_of(output) == [0, 1]
    again = run(case, path, output, on_error="skip")
    assert (again.num_skipped, again.num_resumed) == (1, 2)
    assert again.output.read_bytes() == fresh.output.read_bytes()


def test_arguments_are_checked_before_any_work(tmp_path: Path, case: Case, users: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "users").mkdir()
    path = tmp_path / "users" / "u.parquet"
    path.write_bytes(users.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    for options, message in (
        ({"history": "gone"}, "has no column 'gone', expected one of 'who', 'seen', 'not', 'only'"),
        ({"history": None}, "expected one of history=, tokens= and text="),
        ({"tokens": "seen"}, "history='seen' and tokens='seen' is given, expected one of history=, tokens= and text="),
        ({"top_k": 9}, "num_beams=8, expected at least top_k=9"),
        ({"num_beams": 1, "top_k": 1}, "num_beams=1, expected an integer of 2 or more"),
        ({"on_error": "ignore"}, "on_error='ignore', expected 'stop' or 'skip'"),
        ({"do_sample": True}, "expected beam search"),
        ({"seed": 7}, "seed=7 has no effect without sampling, expected none: omit it"),
        ({"temperature": 0.5}, "temperature=0.5 has no effect without sampling"),
        ({"num_return_sequences": 3}, "num_return_sequences= is given, expected none"),
        ({"user": "items_"}, "has no column 'items_'"),
        ({"user": "error"}, "user='error', expected another name than items, scores, is_fallback"),
        ({"generation_config": GenerationConfig(do_sample=True)}, "expected beam search"),
        ({"window_rows": 0}, "window_rows=0, expected an integer of 1 or more"),
        ({"prefix_tokens": [-1]}, r"prefix_tokens=\(-1,\), expected token ids"),
        ({"dtype": "int8"}, "dtype='int8', expected one of auto, float32, bfloat16, float16"),
        ({"device": "cpu", "device_map": "auto"}, "device='cpu' and device_map='auto', expected one of both"),
        ({"lenght_penalty": 0.5}, r"lenght_penalty= is given, expected .*: did you mean length_penalty=\?"),
        ({"windowrows": 9}, r"windowrows= is given, .* of generate: did you mean window_rows=\?"),
        ({"target": "seen"}, "target= is given, expected an option or an argument of generate"),
        ({"history": None, "text": "who"}, "has no tokenizer, expected one for a column of texts"),
        ({"output": "recs.csv"}, "expected a name that ends in .parquet"),
        ({"output": "gone/recs.parquet"}, "gone is no folder to write to"),
        ({"output": "folder.parquet"}, "is a folder, expected a file"),
        ({"output": "users/u.parquet", "users": path, "overwrite": True}, "is users=.*it would be read as users"),
        ({"output": "users/r.parquet", "users": path.parent}, "is in users=.*it would be read as users"),
        ({"model": "./nowhere"}, r"model='./nowhere' is no folder here and no repository id"),
        ({"model": "/nowhere/at/all"}, r"model='/nowhere/at/all' is no folder here and no repository id"),
    ):
        given = {"output": "recs.parquet", "model": case.model, "users": users} | options
        model, output, table = given.pop("model"), tmp_path / given.pop("output"), given.pop("users")
        with pytest.raises(ValueError, match=message):
            run(replace(case, model=model), table, output, **given)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments but 4 were given"):
        recommend(case.model, users, tmp_path / "recs.parquet", case.index)  # pyright: ignore


def test_a_model_that_cannot_answer_is_refused(case: Case) -> None:
    model, index = case.load()
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it is made on accelerators alone
    torch.nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = model
    with pytest.raises(ValueError, match=r"model is in pieces \(FSDP or tensor parallelism\), expected whole weights"):
        recommend(wrapped, [[100]], constraint_index=index)
    with pytest.raises(ValueError, match="model is in training mode, expected evaluation"):
        recommend(model.train(), [[100]], constraint_index=index)


def test_scores_that_are_no_numbers_are_told_of(case: Case) -> None:
    model, index = case.load()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = torch.nan  # of no item
    table, options = pa.table({"seen": [[3], [4], [5], [1]]}), {"constraint_index": index, "tokens": "seen"}
    with pytest.raises(ValueError, match=r"users, row 3 has no item with a score, expected some, .* are not numbers"):
        recommend(model, table, **options)
    rows = recommend(model, table, **options, on_error="skip").to_pylist()
    assert [len(row["items"]) for row in rows] == [10, 10, 10, 0]
    assert "row 3 has no item with a score" in rows[3]["error"]


def test_users_that_change_while_they_are_read(
    tmp_path: Path, case: Case, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = tmp_path / "u.parquet", Job.run
    path.write_bytes(users.read_bytes())
    monkeypatch.setattr(Job, "run", lambda *args: path.touch() or original(*args))
    with pytest.raises(ValueError, match=r"u.parquet has changed since the run began"):
        run(case, path, tmp_path / "recs.parquet")
    assert not (tmp_path / "recs.parquet").exists()


def test_a_run_that_finished_nothing_is_in_nobodys_way(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    interrupt(case, users, output, 0, top_k=3)
    assert folder_of(output).exists()
    assert run(case, users, output).output.read_bytes() == whole
    with pytest.raises(ValueError, match="row 0 cannot"):
        run(case, pa.table({"seen": [[7]]}), tmp_path / "a.parquet", user=None, exclude=None, filter=None)
    assert not folder_of(tmp_path / "a.parquet").exists()


def test_of_two_runs_at_once_the_second_is_refused(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    first = Parts(output, {"users": []}, with_errors=False)
    assert not first.prepare(overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"recs.parquet.parts is being written to by another run"):
            run(case, users, output, overwrite=overwrite)
    first.release()
    assert run(case, users, output).output.read_bytes() == whole


def test_a_process_that_failed_stops_the_others(
    tmp_path: Path, case: Case, users: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, original = tmp_path / "recs.parquet", Job.run
    with monkeypatch.context() as patched:
        patched.setattr(Job, "run", lambda *args: (folder_of(output) / "stopped").touch() or original(*args))
        with pytest.raises(ValueError, match="part-00000001.parquet is missing"):
            run(case, users, output)
    assert run(case, users, output).output.read_bytes() == whole  # begins again, whatever stopped it


def test_only_files_of_a_run_are_removed(tmp_path: Path, case: Case, users: Path) -> None:
    output = tmp_path / "recs.parquet"
    folder_of(output).mkdir()
    (folder_of(output) / "notes.txt").write_text("mine")
    (folder_of(output) / "part-00000000.parquet").write_text("of somebody")
    with pytest.raises(ValueError, match="has parts of another run .*, expected"):
        run(case, users, output)
    interrupt(case, users, output, 0, overwrite=True)
    assert [path.name for path in folder_of(output).iterdir()] == ["notes.txt"]


class Louder(LogitsProcessor):
    """Without a repr of its own, which would tell an address."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores


def test_the_same_run_again_does_nothing(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    assert run(case, users, output).output.read_bytes() == whole
    written = output.stat().st_mtime_ns
    assert run(case, users, output) == module.Recommended(output, NUM_USERS, 0, 0, already_finished=True)
    assert output.stat().st_mtime_ns == written
    assert not folder_of(output).exists()
    for _ in range(2):  # options that are objects are the same in the next run
        processors = {"stopping_criteria": None, "logits_processor": LogitsProcessorList([Louder()])}
        made = run(case, users, tmp_path / "b.parquet", **processors)
    assert made.already_finished


def test_another_run_is_never_mixed_in(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output, begun = tmp_path / "recs.parquet", tmp_path / "begun.parquet"
    output.write_bytes(whole)
    interrupt(case, users, begun, 2)
    model, index = case.load()
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 3] += 1
    model.save_pretrained(tmp_path / "model")
    index.remove([100])
    others = {"model": {}, "catalogue": {"constraint_index": index}, "options": {"length_penalty": 0.0}}
    for differs, changed in others.items():
        mine = replace(case, model=tmp_path / "model") if differs == "model" else case
        with pytest.raises(ValueError, match="recs.parquet is there already, of another run"):
            run(mine, users, output, **changed)
        with pytest.raises(
            ValueError, match=rf"begun.parquet.parts has parts of another run \(with another {differs}\)"
        ):
            run(mine, users, begun, **changed)
    made = run(case, users, output, length_penalty=0.0, overwrite=True)
    fresh = run(case, users, tmp_path / "fresh.parquet", length_penalty=0.0)
    assert made.output.read_bytes() == fresh.output.read_bytes() != whole
    assert run(case, users, begun, token_budget=4_000).num_resumed == 2  # a run may go on with smaller batches
    assert same_rows(begun, users.with_name("whole.parquet"))


def test_a_damaged_part_is_named(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    interrupt(case, users, output, 3)
    part = folder_of(output) / "part-00000001.parquet"
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"part-00000001.parquet is damaged .* remove it and repeat the run"):
        run(case, users, output)
    part.unlink()
    assert run(case, users, output).output.read_bytes() == whole


# Moments of a run, and the finished parts that they leave. A file is synced twice: before and after it gets its name.
MOMENTS = {
    "a part without its name": (1, "os.fsync", 0),
    "the name of a part": (2, "os.fsync", 1),
    "inside the merge": (NUM_PARTS, "hf_gr.jobs.parts.pyarrow.parquet.ParquetWriter.write_table", NUM_PARTS),
    "the output beside all parts": (1, "hf_gr.jobs.parts.shutil.rmtree", NUM_PARTS),
}


def test_killed_again_and_again_the_run_goes_on(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    """Each run begins with what the one before has left."""
    output = tmp_path / "recs.parquet"
    for moment, (call, name, num_parts) in MOMENTS.items():
        killed = jobs_case.in_another_process(jobs_case.run_until_call, call, name, case, users, output)
        killed.join(60)
        assert killed.exitcode == -signal.SIGKILL
        assert len(parts_of(output)) == num_parts, moment
        for part in folder_of(output).glob("part-*.parquet"):  # what has its name is complete
            assert pq.read_table(part).num_rows in (16, NUM_USERS % 16)
        assert not output.exists() or output.read_bytes() == whole
    assert run(case, users, output).already_finished
    assert output.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["recs.parquet"]


@pytest.mark.parametrize(("lacking", "num_parts"), [(2_300, 0), (1, NUM_PARTS)])
def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, case: Case, users: Path, whole: bytes, lacking: int, num_parts: int
) -> None:
    output, messages, limit = tmp_path / "recs.parquet", jobs_case.SERVER.SimpleQueue(), len(whole) - lacking
    process = jobs_case.in_another_process(jobs_case.run_with_small_disk, limit, messages, case, users, output)
    process.join(60)
    message = messages.get()
    assert "cannot be written" in message
    assert "what is finished is kept; make room and repeat the run" in message
    assert not output.exists()
    assert len(parts_of(output)) == num_parts
    assert not list(folder_of(output).glob("*.tmp"))
    assert run(case, users, output).output.read_bytes() == whole


PROMPTS = [[3 + number, 5] for number in range(10)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, case: Case, users: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A folder of outputs, and what two processes have to say of some runs, one after the other."""
    folder = tmp_path_factory.mktemp("scenes")
    interrupt(case, users, folder / "resumed.parquet", 2)
    (folder / "refused.parquet").write_text("of somebody else")
    bad = users_with(case, folder / "bad.parquet", {20: {"seen": []}})
    table = pq.read_table(users)

    def recommended(output: str | None, users: Any = users, other: Any = None, **more: Any) -> Any:
        path = None if output is None else folder / f"{output}.parquet"
        return jobs_case.run_with, [
            (case, users if other is None or not rank else other, path, more) for rank in (0, 1)
        ]

    def taught(output: str, other: Any = PROMPTS) -> Any:
        return jobs_case.teach, [(case, prompts, folder / output) for prompts in (PROMPTS, other)]

    scenes = {
        "whole": recommended("whole"),
        "resumed": recommended("resumed"),
        "bad": recommended("bad-recs", bad),
        "refused": recommended("refused"),
        "device_map": recommended("device_map", device_map="auto"),
        "divided": (jobs_case.run_divided, [(case, users, folder / "divided.parquet")] * 2),
        "memory": recommended(None, table),
        "backwards": recommended(None, table, table.take(list(range(NUM_USERS))[::-1])),
        "taught": taught("taught"),
        "taught others": taught("others", PROMPTS[:-1]),
    }
    return folder, jobs_case.in_two_processes(scenes)


@pytest.mark.parametrize(("scene", "num_resumed"), [("whole", 0), ("resumed", 2)])
def test_two_processes_make_the_file_of_one(
    played: Any, whole: bytes, expected: Path, scene: str, num_resumed: int
) -> None:
    folder, said = played
    made = module.Recommended(folder / f"{scene}.parquet", NUM_USERS, 0, num_resumed)
    left = range(num_resumed, NUM_PARTS)
    assert [one[scene] for one in said] == [(made, [*left[::2]]), (made, [*left[1::2]])]
    assert made.output.read_bytes() == whole
    assert [one["memory"] for one in said] == [(read(expected), [0, 2, 4]), (read(expected), [1, 3, 5])]


@pytest.mark.parametrize(
    ("scene", "kinds", "texts"),
    [
        ("bad", ("RuntimeError", "ValueError"), ("process 1 has stopped: .*row 20 cannot", "^.*row 20 cannot")),
        ("refused", ("ValueError", "RuntimeError"), ("is there already", "the first process has refused the run: ")),
        ("device_map", ("ValueError",) * 2, ("with 2 processes, expected one of both",) * 2),
        ("divided", ("ValueError",) * 2, (r"model is in pieces \(FSDP or tensor parallelism\)",) * 2),
        ("backwards", ("ValueError",) * 2, ("users differ between processes",) * 2),
        ("taught others", ("ValueError",) * 2, ("^prompts or labels differ between processes",) * 2),
    ],
)
def test_what_one_process_refuses_ends_both(played: Any, scene: str, kinds: Any, texts: Any) -> None:
    folder, said = played
    for one, kind, text in zip(said, kinds, texts, strict=True):
        assert one[scene][0] == kind
        with pytest.raises(Exception, match=text):
            raise Exception(one[scene][1])
    assert (folder / "refused.parquet").read_text() == "of somebody else"
    left = {path.name for path in folder.iterdir()} & {"bad-recs.parquet", "divided.parquet.parts"}
    assert not left
    assert not (folder / "others" / "teacher_data.json").exists()


def test_two_processes_share_teacher_data(played: Any, tmp_path: Path, case: Case) -> None:
    folder, said = played
    assert [one["taught"] for one in said] == [6, 4]  # shards of 3, the last of 1
    jobs_case.teach(case, PROMPTS, tmp_path)
    one, two = ({path.name: path.read_bytes() for path in there.iterdir()} for there in (tmp_path, folder / "taught"))
    assert one == two


def test_a_process_that_dies_is_told_of(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    arguments = (case, users, output, {})
    (said,) = jobs_case.in_two_processes({"run": (jobs_case.run_with, [arguments] * 2)}, dying=1)
    kind, message = said["run"]
    assert kind == "RuntimeError"
    assert message.startswith("another process has ended before its rows were done")
    assert parts_of(output) == [0, 2, 4]
    assert run(case, users, output).output.read_bytes() == whole


def test_a_corrupt_row_group_keeps_the_rows_before_it(tmp_path: Path, case: Case) -> None:
    path, output = tmp_path / "u.parquet", tmp_path / "recs.parquet"
    users = [{"seen": user["seen"]} for user in make_users(case, 300)]
    write_users(path, users, row_group_size=100, write_page_checksum=True, use_dictionary=False, compression="none")
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 8] = bytes(8 * [0xAA])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"u.parquet cannot be read from row \d+ on, expected complete parquet"):
        recommend(case.model, path, output, constraint_index=case.index, history="seen", window_rows=16)
    assert len(parts_of(output)) >= 4  # 64 rows at least
