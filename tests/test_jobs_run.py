# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend` against one user at a time, its output under kills and full disks, and with several processes."""

from __future__ import annotations

import random
import signal
import time
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
from jobs_case import Case, make_case, make_users, oracle, read, run, same, write_users
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_gr
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, recommend
from hf_gr.generation.torch.fingerprints import fingerprint_model
from hf_gr.jobs import run as module
from hf_gr.jobs.job import Job
from hf_gr.jobs.parts import Parts, folder_of

NUM_USERS = 100  # 7 windows of 16, the last of 4
TELLING = (1, 2, 3, 7, 14, 15, 16)  # of the moments of a kill: the first and last parts, and one between


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def users(case: Case) -> Path:
    return write_users(case.folder / "users.parquet", make_users(case, NUM_USERS))


@pytest.fixture(scope="module")
def whole(case: Case, users: Path) -> bytes:
    """The output of a run that nothing disturbs."""
    output = case.folder / "whole.parquet"
    run(case, users, output)
    return output.read_bytes()


def kill(case: Case, users: Path, output: Path, call: int, name: str = "os.fsync", **more: Any) -> None:
    """A run in another process, killed at a call of a function."""
    process = jobs_case.in_another_process(jobs_case.run_until_call, call, name, case, users, output, more)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def parts_of(output: Path) -> list[str]:
    return sorted(part.name for part in folder_of(output).glob("part-*"))


def same_rows(found: Path, expected: Path) -> bool:
    pairs = zip(read(found), read(expected), strict=True)
    return all(same(row, (one["items"], one["scores"])) for row, one in pairs)


# The rows


@pytest.mark.parametrize(
    ("family", "strings", "eos"), [("llama", False, None), ("gpt2", True, 2), ("t5", True, 2), ("bart", False, None)]
)
def test_rows_are_those_of_one_user_at_a_time(tmp_path: Path, family: str, strings: bool, eos: int | None) -> None:
    case = make_case(tmp_path, family=family, strings=strings, eos=eos)
    users = make_users(case, 40)
    made = run(case, write_users(tmp_path / "users.parquet", users), tmp_path / "recs.parquet", token_budget=600)
    assert made == module.Recommended(tmp_path / "recs.parquet", num_rows=40, num_skipped=0, num_resumed=0)
    rows = read(made.output)
    assert [row["who"] for row in rows] == [user["who"] for user in users]
    model, index = case.load()
    expected = [oracle(model, index, case, user, top_k=6, num_beams=8) for user in users]
    assert [same(*pair) for pair in zip(rows, expected, strict=True)] == [True] * 40
    assert not all(same(*pair) for pair in zip(rows[1:], expected, strict=False))  # the comparison can fail
    for row, user in zip(rows, users, strict=True):
        assert not set(row["items"]) & set(user["not"])
        assert user["only"] is None or set(row["items"]) <= set(user["only"])
        assert len(set(row["items"])) == len(row["items"])


OF_DRAFT = {"drafting": "assistant", "num_draft_beams": 8}


@pytest.mark.parametrize(
    "changed",
    [
        {"token_budget": 1},
        {"token_budget": 10**6},
        {"window_rows": 7},
        {"drafting": "trie"},
        OF_DRAFT | {"assistant_model": lambda case: case.model},
        OF_DRAFT | {"assistant_model": lambda case: case.load()[0]},
    ],
)
def test_how_rows_are_batched_and_drafted_does_not_matter(
    tmp_path: Path, case: Case, users: Path, whole: bytes, changed: Any
) -> None:
    given = {name: value(case) if callable(value) else value for name, value in changed.items()}
    made = run(case, users, tmp_path / "recs.parquet", **given)
    assert same_rows(made.output, case.folder / "whole.parquet")


def test_scores_of_all_steps_are_never_kept(case: Case, users: Path, tmp_path: Path) -> None:
    model, index = case.load()
    kept: list[Any] = []
    generate = type(model).generate

    class Watched(type(model)):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            out = generate(self, *args, **kwargs)
            kept.append(out.scores)
            return out

    model.__class__ = Watched
    recommend(model, users, tmp_path / "recs.parquet", constraint_index=index, history="seen")
    assert kept
    assert set(kept) == {None}


def test_a_model_and_a_catalogue_in_memory(tmp_path: Path, case: Case, users: Path) -> None:
    model, index = case.load()
    index.remove([100, 101])
    made = recommend(model, users, tmp_path / "recs.parquet", constraint_index=index, history="seen", top_k=3)
    rows = read(made.output)
    assert [row["row"] for row in rows] == list(range(NUM_USERS))
    assert not {item for row in rows for item in row["items"]} & {100, 101}
    assert {len(row["items"]) for row in rows} == {3}


def test_the_checkpoint_may_name_all(tmp_path: Path, case: Case, users: Path) -> None:
    model, index = case.load()
    model.generation_config.constraint_index = "."
    model.generation_config.num_beams = 12
    model.save_pretrained(tmp_path / "model")
    index.save_pretrained(tmp_path / "model")
    named = recommend(tmp_path / "model", users, tmp_path / "a.parquet", history="seen")
    given = {"constraint_index": case.index, "num_beams": 12}
    assert read(named.output) == read(
        recommend(case.model, users, tmp_path / "b.parquet", history="seen", **given).output
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_may_be_loaded_in_half(tmp_path: Path, case: Case, users: Path, dtype: str, whole: bytes) -> None:
    made = run(case, users, tmp_path / "recs.parquet", dtype=dtype)
    pairs = zip(read(made.output), read(case.folder / "whole.parquet"), strict=True)
    assert sum(len(set(a["items"]) & set(b["items"])) for a, b in pairs) > 5 * NUM_USERS
    assert made.num_rows == NUM_USERS


def test_prompts_of_tokens(tmp_path: Path, case: Case, whole: bytes) -> None:
    rows = make_users(case, NUM_USERS)
    for row in rows:
        row["seen"] = [token for item in row["seen"] for token in case.tokens[item]]
    made = run(case, write_users(tmp_path / "u.parquet", rows), tmp_path / "recs.parquet", history=None, tokens="seen")
    assert read(made.output) == read(case.folder / "whole.parquet")


def test_an_empty_filter_leaves_nothing(tmp_path: Path, case: Case) -> None:
    table = pa.table({"seen": [[100], [101]], "only": pa.array([[], [103]], pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "u.parquet")
    made = run(case, tmp_path / "u.parquet", tmp_path / "recs.parquet", user=None, exclude=None)
    assert [row["items"] for row in read(made.output)] == [[], [103]]


# What stops a run, and what is skipped


def test_a_bad_row_stops_the_run_and_keeps_what_is_finished(tmp_path: Path, case: Case) -> None:
    users = make_users(case, NUM_USERS)
    users[40]["seen"] = []
    users[45]["seen"] = [100, 7]
    path, output = write_users(tmp_path / "u.parquet", users), tmp_path / "recs.parquet"
    with pytest.raises(
        ValueError, match=r"u.parquet, column 'seen', row 40 is \[\], expected .* with on_error='skip'"
    ):
        run(case, path, output)
    assert not output.exists()
    assert parts_of(output) == [f"part-{i:08d}.parquet" for i in (0, 1)]


def test_bad_rows_are_skipped_with_a_reason(tmp_path: Path, case: Case, whole: bytes) -> None:
    users = make_users(case, NUM_USERS)
    users[40]["seen"] = None
    users[45]["seen"] = [100, 7]
    users[99]["only"] = [7]
    made = run(case, write_users(tmp_path / "u.parquet", users), tmp_path / "recs.parquet", on_error="skip")
    rows = read(made.output)
    assert (made.num_rows, made.num_skipped) == (NUM_USERS, 3)
    for number, (row, one) in enumerate(zip(rows, read(case.folder / "whole.parquet"), strict=True)):
        error = row.pop("error")
        if number in (40, 45, 99):
            assert (row["items"], row["scores"]) == ([], [])
            assert f"row {number} is" in error
        else:
            assert error is None
            assert same(row, (one["items"], one["scores"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": "gone"}, "has no column 'gone', expected one of 'who', 'seen', 'not', 'only'"),
        ({"history": None}, "expected one of history=, tokens= and text="),
        ({"top_k": 9}, "num_beams=8, expected at least top_k=9"),
        ({"num_beams": 1, "top_k": 1}, "num_beams=1, expected an integer of 2 or more"),
        ({"on_error": "ignore"}, "on_error='ignore', expected 'stop' or 'skip'"),
        ({"do_sample": True}, "expected beam search"),
        ({"seed": 7}, "seed=7 has no effect without sampling, expected none: omit it"),
        ({"num_return_sequences": 3}, "num_return_sequences= is given, expected none"),
        ({"user": "items_"}, "has no column 'items_'"),
        ({"generation_config": GenerationConfig(do_sample=True)}, "expected beam search"),
        ({"window_rows": 0}, "window_rows=0, expected an integer of 1 or more"),
        ({"prefix_tokens": [-1]}, r"prefix_tokens=\(-1,\), expected token ids"),
        ({"dtype": "float8"}, "dtype='float8', expected one of auto, float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype='int8', expected one of auto, float32, bfloat16, float16"),
        ({"temperature": 0.5}, "temperature=0.5 has no effect without sampling"),
        ({"lenght_penalty": 0.5}, r"lenght_penalty= is given, expected .*: did you mean length_penalty=\?"),
        ({"windowrows": 9}, r"windowrows= is given, .* of generate: did you mean window_rows=\?"),
        ({"history": None, "text": "who"}, "has no tokenizer, expected one for a column of texts"),
        ({"output": "recs.csv"}, "expected a name that ends in .parquet"),
        ({"output": "gone/recs.parquet"}, "gone is no folder to write to"),
        ({"model": "./nowhere"}, r"model='./nowhere' is no folder here and no repository id"),
        ({"model": "/nowhere/at/all"}, r"model='/nowhere/at/all' is no folder here and no repository id"),
    ],
)
def test_arguments_are_checked_before_any_work(
    tmp_path: Path, case: Case, users: Path, options: Any, message: str
) -> None:
    options = {"output": "recs.parquet", "model": case.model} | options
    model, output = options.pop("model"), tmp_path / options.pop("output")
    with pytest.raises(ValueError, match=message):
        run(replace(case, model=model), users, output, **options)
    assert not list(tmp_path.iterdir())
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(ValueError, match="is a folder, expected a file"):
        run(case, users, tmp_path / "folder.parquet")


def test_ids_of_another_type(tmp_path: Path, case: Case) -> None:
    for cell, found in (["17"], "list<.*string>"), (17, "int64"), ([1.5], "list<.*double>"):
        path = write_users(tmp_path / "u.parquet", [{"seen": cell}])
        with pytest.raises(ValueError, match=f"column 'seen' has type {found}, expected lists of integers"):
            recommend(case.model, path, tmp_path / "recs.parquet", constraint_index=case.index, history="seen")


def test_a_model_in_pieces_is_refused(tmp_path: Path, case: Case, users: Path) -> None:
    model, index = case.load()
    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it is made on accelerators alone
    torch.nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = model
    with pytest.raises(ValueError, match=r"model is in pieces \(FSDP or tensor parallelism\), expected whole weights"):
        recommend(wrapped, users, tmp_path / "recs.parquet", constraint_index=index, history="seen")
    with pytest.raises(ValueError, match="model is in training mode, expected evaluation"):
        recommend(case.load()[0].train(), users, tmp_path / "r.parquet", constraint_index=index, history="seen")


def test_a_model_that_fsdp_has_divided_is_refused(tmp_path: Path, case: Case, users: Path, port: int) -> None:
    said = run_ranks(case, users, tmp_path / "recs.parquet", port, divided=True)
    assert {kind for kind, _ in said.values()} == {"ValueError"}
    assert "model is in pieces (FSDP or tensor parallelism)" in said[0][1]
    assert not (tmp_path / "recs.parquet.parts").exists()


def test_a_corrupt_row_group_keeps_the_rows_before_it(tmp_path: Path, case: Case) -> None:
    path, output = tmp_path / "u.parquet", tmp_path / "recs.parquet"
    users = [{"seen": user["seen"]} for user in make_users(case, 300)]
    write_users(path, users, row_group_size=100, write_page_checksum=True, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 8] = bytes(8 * [0xAA])
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"u.parquet cannot be read from row \d+ on, expected complete parquet"):
        recommend(case.model, path, output, constraint_index=case.index, history="seen", window_rows=16)
    assert len(parts_of(output)) >= 4  # 64 rows at least


def test_a_column_of_users_keeps_its_cells(tmp_path: Path, case: Case) -> None:
    rows = [{"seen": [100], "targets": "ann"}, {"seen": [101], "targets": "bob"}]
    path = write_users(tmp_path / "u.parquet", [row | {"error": row["targets"]} for row in rows])
    options = {"constraint_index": case.index, "history": "seen"}
    made = recommend(case.model, path, tmp_path / "recs.parquet", **options, user="targets")
    assert [row["targets"] for row in read(made.output)] == ["ann", "bob"]
    with pytest.raises(ValueError, match="user='error', expected another name than items, scores, is_fallback"):
        recommend(case.model, path, tmp_path / "r.parquet", **options, user="error")


def test_scores_that_are_no_numbers_are_told_of(tmp_path: Path, case: Case) -> None:
    model, index = case.load()
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = torch.nan  # of no item
    path = write_users(tmp_path / "u.parquet", [{"seen": [token]} for token in (3, 4, 5, 1)])
    options = {"constraint_index": index, "tokens": "seen"}
    with pytest.raises(
        ValueError, match=r"u.parquet, row 3 has no item with a score, expected some, .* scores are not numbers"
    ):
        recommend(model, path, tmp_path / "a.parquet", **options)
    made = recommend(model, path, tmp_path / "b.parquet", **options, on_error="skip")
    rows = read(made.output)
    assert [len(row["items"]) for row in rows] == [10, 10, 10, 0]
    assert made.num_skipped == 1
    assert "row 3 has no item with a score" in rows[3]["error"]


# transformers 5.17 says so of weights that are on no device until they are needed.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids` being on a device:UserWarning")
def test_a_model_that_is_partly_on_the_disk(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    places = {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForGenerativeRetrieval.from_pretrained(
        case.model, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert model.device.type == "meta"
    index = ConstraintIndex.from_pretrained(case.index)
    made = recommend(model, users, tmp_path / "a.parquet", constraint_index=index, window_rows=16, **jobs_case.RUN)
    assert made.output.read_bytes() == whole  # metadata included, and so the weights' digest
    assert run(case, users, tmp_path / "b.parquet", device_map=places).output.read_bytes() == whole
    assert run(case, users, tmp_path / "c.parquet", device_map="auto").output.read_bytes() == whole
    with torch.no_grad():
        other = AutoModelForGenerativeRetrieval.from_pretrained(case.model)
        other.get_input_embeddings().weight[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    moved = AutoModelForGenerativeRetrieval.from_pretrained(
        tmp_path / "other", device_map=places, offload_folder=tmp_path / "offload2"
    )
    assert fingerprint_model(moved) == fingerprint_model(other) != fingerprint_model(model)


def test_the_draft_head_of_a_checkpoint_that_names_it(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    model, index = case.load()
    model.add_draft_head(index)
    model.generation_config.drafting = "head"
    model.generation_config.verification = "strict"
    model.save_pretrained(tmp_path / "model")
    options = jobs_case.RUN | {"constraint_index": index, "window_rows": 16}
    made = recommend(tmp_path / "model", users, tmp_path / "recs.parquet", **options)
    plain = recommend(tmp_path / "model", users, tmp_path / "plain.parquet", **options, drafting=None)
    assert same_rows(made.output, plain.output)


def test_an_output_that_would_be_read_as_users(tmp_path: Path, case: Case, users: Path) -> None:
    path = tmp_path / "u.parquet"
    path.write_bytes(users.read_bytes())
    for given, message in {path: "is users=", tmp_path: "is in users="}.items():
        with pytest.raises(ValueError, match=f"{message}.*it would be read as users"):
            run(case, given, path, overwrite=True)
    assert path.read_bytes() == users.read_bytes()


def test_users_that_change_while_they_are_read(
    tmp_path: Path, case: Case, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, original = tmp_path / "u.parquet", Job.run
    path.write_bytes(users.read_bytes())

    def touching(*args: Any) -> Any:
        path.touch()
        return original(*args)

    monkeypatch.setattr(Job, "run", touching)
    with pytest.raises(ValueError, match=r"u.parquet has changed since the run began"):
        run(case, path, tmp_path / "recs.parquet")
    assert not (tmp_path / "recs.parquet").exists()


# Resuming


def stop_at_a_bad_row(tmp_path: Path, case: Case) -> tuple[Path, Path]:
    """A table whose row 40 is bad, and the output of a run that has stopped there."""
    users = make_users(case, NUM_USERS)
    users[40]["seen"] = [7]
    path, output = write_users(tmp_path / "u.parquet", users), tmp_path / "recs.parquet"
    with pytest.raises(ValueError, match=r"row 40 is \[7\]"):
        run(case, path, output)
    return path, output


def test_a_run_that_stopped_at_a_row_goes_on_and_skips_it(tmp_path: Path, case: Case) -> None:
    path, output = stop_at_a_bad_row(tmp_path, case)
    made = run(case, path, output, on_error="skip")
    assert (made.num_skipped, made.num_resumed) == (1, 2)
    fresh = run(case, path, tmp_path / "fresh.parquet", on_error="skip")
    assert made.output.read_bytes() == fresh.output.read_bytes()
    with pytest.raises(ValueError, match="is there already, of another run"):
        run(case, path, output)


def test_skipped_rows_stop_a_run_that_goes_on_without_skipping(tmp_path: Path, case: Case) -> None:
    path, output = stop_at_a_bad_row(tmp_path, case)
    kill(case, path, output, 9, on_error="skip")
    assert len(parts_of(output)) == 6
    with pytest.raises(ValueError, match=r"u.parquet, column 'seen', row 40 is \[7\]"):
        run(case, path, output)
    assert not output.exists()
    assert run(case, path, output, on_error="skip").num_resumed == 7


def test_a_run_may_go_on_with_smaller_batches(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    kill(case, users, output, 7)
    assert run(case, users, output, token_budget=200).num_resumed == 3
    assert same_rows(output, case.folder / "whole.parquet")


def test_a_run_that_finished_nothing_is_in_nobodys_way(
    tmp_path: Path, case: Case, users: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "recs.parquet"
    with monkeypatch.context() as patched:
        patched.setattr(Job, "run", lambda *args: (_ for _ in ()).throw(ValueError("at once")))
        with pytest.raises(ValueError, match="at once"):
            run(case, users, output, top_k=3)
        assert not folder_of(output).exists()
        patched.setattr(Job, "run", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(case, users, output, top_k=3)
    assert folder_of(output).exists()
    assert run(case, users, output).output.read_bytes() == whole


def test_of_two_runs_at_once_the_second_is_refused(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    first = Parts(output, {"users": []}, with_errors=False)
    assert not first.prepare(overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"recs.parquet.parts is being written to by another run"):
            run(case, users, output, overwrite=overwrite)
    first.release()
    assert run(case, users, output).output.read_bytes() == whole


def test_only_files_of_a_run_are_removed(tmp_path: Path, case: Case, users: Path) -> None:
    output = tmp_path / "recs.parquet"
    folder_of(output).mkdir()
    (folder_of(output) / "notes.txt").write_text("mine")
    (folder_of(output) / "part-00000000.parquet").write_text("of somebody")
    with pytest.raises(ValueError, match="has parts of another run .*, expected"):
        run(case, users, output)
    seen = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            Job, "run", lambda *args: seen.append(sorted(p.name for p in folder_of(output).iterdir())) or 1
        )
        with pytest.raises(AttributeError):
            run(case, users, output, overwrite=True)
    assert seen == [["notes.txt"]]


class Louder(LogitsProcessor):
    """Without a repr of its own, which would tell an address."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores


def test_options_that_are_objects_are_the_same_in_the_next_run(tmp_path: Path, case: Case, users: Path) -> None:
    output = tmp_path / "recs.parquet"
    run(case, users, output, stopping_criteria=None, sequence_bias=None, logits_processor=make_processors())
    written = output.stat().st_mtime_ns
    run(case, users, output, stopping_criteria=None, sequence_bias=None, logits_processor=make_processors())
    assert output.stat().st_mtime_ns == written


def make_processors() -> LogitsProcessorList:
    return LogitsProcessorList([Louder()])


def test_the_same_run_again_does_nothing(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    run(case, users, output)
    assert output.read_bytes() == whole
    written = output.stat().st_mtime_ns
    assert run(case, users, output) == module.Recommended(output, NUM_USERS, 0, 0, already_finished=True)
    assert output.stat().st_mtime_ns == written
    assert not folder_of(output).exists()


@pytest.mark.parametrize("changed", [{"top_k": 5}, {"exclude": None}, {"length_penalty": 0.0}, {"window_rows": 32}])
def test_another_run_is_never_mixed_in(tmp_path: Path, case: Case, users: Path, changed: Any) -> None:
    output = tmp_path / "recs.parquet"
    run(case, users, output)
    with pytest.raises(ValueError, match="recs.parquet is there already, of another run"):
        run(case, users, output, **changed)
    made = run(case, users, output, **changed, overwrite=True)
    fresh = run(case, users, tmp_path / "fresh.parquet", **changed)
    assert made.output.read_bytes() == fresh.output.read_bytes()


def test_parts_of_another_run_are_refused_by_what_differs(tmp_path: Path, case: Case, users: Path) -> None:
    output = tmp_path / "recs.parquet"
    kill(case, users, output, 6)
    model, index = case.load()
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 3] += 1
    index.remove([100])
    with pytest.raises(ValueError, match=r"recs.parquet.parts has parts of another run \(with another catalogue\)"):
        run(case, users, output, constraint_index=index)
    with pytest.raises(ValueError, match=r"parts of another run \(with another model\)"):
        recommend(model, users, output, constraint_index=case.index, **jobs_case.RUN, window_rows=16, progress=False)
    made = run(case, users, output)
    assert made.num_resumed == 3


def check_left(output: Path, whole: bytes) -> None:
    """Whatever a kill leaves under its own name is complete."""
    for part in folder_of(output).glob("part-*.parquet"):
        assert pq.read_table(part).num_rows in (16, NUM_USERS % 16)
    assert not output.exists() or output.read_bytes() == whole


# 2 calls for each of 7 parts, 2 for the output: one before each name is taken, one after it
MOMENTS = [pytest.param(call, "os.fsync", marks=[] if call in TELLING else pytest.mark.slow) for call in range(1, 17)]
MOMENTS += [
    pytest.param(3, "hf_gr.tables.shards.pyarrow.parquet.write_table"),  # inside a part, which has no byte yet
    pytest.param(1, "hf_gr.tables.shards.pyarrow.parquet.ParquetWriter.write_table"),  # it has its first bytes
    pytest.param(8, "hf_gr.jobs.parts.pyarrow.parquet.ParquetWriter.write_table"),  # inside the merge
    pytest.param(1, "hf_gr.jobs.parts.shutil.rmtree"),  # the output is there, and so are the parts
    pytest.param(5, "pathlib.Path.replace"),
]


@pytest.mark.parametrize(("call", "name"), MOMENTS)
def test_killed_at_any_moment_the_run_goes_on(
    tmp_path: Path, case: Case, users: Path, whole: bytes, call: int, name: str
) -> None:
    output = tmp_path / "recs.parquet"
    kill(case, users, output, call, name)
    check_left(output, whole)
    made = run(case, users, output)
    assert made.output.read_bytes() == whole
    assert name != "os.fsync" or made.num_resumed == (min(call // 2, 7) if call < 16 else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["recs.parquet"]


def test_killed_at_random_moments_three_times(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output, chance, kept = tmp_path / "recs.parquet", random.Random(0), 0
    for least in (1, 2, 4):
        process = jobs_case.in_another_process(jobs_case.run_quietly, case, users, output, {})
        while process.is_alive() and len(parts_of(output)) < least:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.01)
        process.kill()
        process.join()
        check_left(output, whole)
        parts = {part: part.stat().st_mtime_ns for part in folder_of(output).glob("part-*")}
        assert output.exists() or len(parts) >= max(kept, least)
        kept = len(parts)
    made = run(case, users, output)
    assert made.output.read_bytes() == whole
    assert made.num_resumed == kept


def test_a_damaged_part_is_named(tmp_path: Path, case: Case, users: Path, whole: bytes) -> None:
    output = tmp_path / "recs.parquet"
    kill(case, users, output, 7)
    part = folder_of(output) / "part-00000001.parquet"
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"part-00000001.parquet is damaged .* remove it and repeat the run"):
        run(case, users, output)
    part.unlink()
    assert run(case, users, output).output.read_bytes() == whole


@pytest.mark.parametrize(("limit", "num_parts"), [(1_500, 0), (5_000, 7)])
def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, case: Case, users: Path, whole: bytes, limit: int, num_parts: int
) -> None:
    assert len(whole) > 5_000
    output, messages = tmp_path / "recs.parquet", jobs_case.SERVER.SimpleQueue()
    arguments = (limit, messages, case, users, output)
    process = jobs_case.in_another_process(jobs_case.run_with_small_disk, *arguments)
    process.join(60)
    message = messages.get()
    assert "cannot be written" in message
    assert "what is finished is kept; make room and repeat the run" in message
    assert not output.exists()
    assert len(parts_of(output)) == num_parts
    assert not list(folder_of(output).glob("*.tmp"))
    assert run(case, users, output).output.read_bytes() == whole


# Several processes


@pytest.fixture
def port() -> int:
    return jobs_case.free_port()


def run_ranks(
    case: Case, users: Path, output: Path, port: int, *, dying: int | None = None, **more: Any
) -> dict[int, Any]:
    """What two processes have to say."""
    given = [(rank == dying, case, users, output, more) for rank in (0, 1)]
    return jobs_case.start_ranks(jobs_case.run_as_rank, given, port, dying=dying)


def test_two_processes_make_the_same_file(tmp_path: Path, case: Case, users: Path, whole: bytes, port: int) -> None:
    output = tmp_path / "recs.parquet"
    said = run_ranks(case, users, output, port)
    assert said == {rank: ["done", (NUM_USERS, 0, True)] for rank in (0, 1)}
    assert output.read_bytes() == whole


def test_two_processes_go_on_where_one_stopped(
    tmp_path: Path, case: Case, users: Path, whole: bytes, port: int
) -> None:
    output = tmp_path / "recs.parquet"
    kill(case, users, output, 7)
    assert run_ranks(case, users, output, port)[1] == ["done", (NUM_USERS, 0, True)]
    assert output.read_bytes() == whole


def test_a_process_that_dies_is_told_of(tmp_path: Path, case: Case, users: Path, whole: bytes, port: int) -> None:
    output = tmp_path / "recs.parquet"
    kind, message = run_ranks(case, users, output, port, dying=1)[0]
    assert kind == "RuntimeError"
    assert message.startswith("another process has ended before its rows were done")
    assert parts_of(output)[1:3] == [
        "part-00000002.parquet",
        "part-00000004.parquet",
    ]
    assert run(case, users, output).output.read_bytes() == whole


def test_a_bad_row_of_one_process_stops_both(tmp_path: Path, case: Case, port: int) -> None:
    users = make_users(case, NUM_USERS)
    users[20]["seen"] = []
    path, output = write_users(tmp_path / "u.parquet", users), tmp_path / "recs.parquet"
    said = run_ranks(case, path, output, port)
    assert said[1][0] == "ValueError"
    assert "row 20 is []" in said[1][1]
    assert said[0][0] == "RuntimeError"
    assert said[0][1].startswith("process 1 has stopped: ")
    assert "row 20 is []" in said[0][1]
    assert not output.exists()


def test_what_the_first_process_refuses_is_refused_by_all(tmp_path: Path, case: Case, users: Path, port: int) -> None:
    output = tmp_path / "recs.parquet"
    output.write_text("of somebody else")
    said = run_ranks(case, users, output, port)
    assert said[0][0] == "ValueError"
    assert "is there already" in said[0][1]
    assert said[1][1].startswith("the first process has refused the run: ")
    assert output.read_text() == "of somebody else"


def test_device_map_is_of_one_process(tmp_path: Path, case: Case, users: Path, port: int) -> None:
    said = run_ranks(case, users, tmp_path / "recs.parquet", port, device_map="auto")
    assert {kind for kind, _ in said.values()} == {"ValueError"}
    assert "with 2 processes, expected one of both" in said[0][1]


@pytest.mark.parametrize("is_same", [True, False])
def test_two_processes_share_teacher_data(tmp_path: Path, case: Case, port: int, is_same: bool) -> None:
    prompts = [[3 + number, 5] for number in range(10)]
    given = [(case, tmp_path / "two", prompts if is_same or rank else prompts[:-1]) for rank in (0, 1)]
    said = jobs_case.start_ranks(jobs_case.teach_as_rank, given, port)
    if is_same:
        assert said == {0: ["done", 6], 1: ["done", 4]}  # shards of 3, the last of 1
        jobs_case.teach(*case.load(), prompts, tmp_path / "one")
        one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
        assert one == two
    else:
        assert all(text.startswith("prompts or labels differ between processes") for _, text in said.values())
        assert not (tmp_path / "two" / "teacher_data.json").exists()


def test_the_public_name() -> None:
    assert hf_gr.recommend is recommend
    assert ConstraintIndex.__module__.startswith("hf_gr")


def test_texts_are_prompts_with_a_tokenizer(tmp_path: Path, case: Case) -> None:
    tokenizer = label_tokenizers.tokenizer_of("bpe")
    model = hf_gr.enable(families.build("llama", config={"vocab_size": 512}))
    texts = ["a", "what else", "tea and jam", "b"]
    pq.write_table(pa.table({"ask": texts}), tmp_path / "u.parquet")
    index = ConstraintIndex.from_pretrained(case.index)
    options = {"constraint_index": index, "text": "ask", "tokenizer": tokenizer, "top_k": 3, "num_beams": 4}
    made = recommend(model, tmp_path / "u.parquet", tmp_path / "recs.parquet", **options)
    for text, row in zip(texts, read(made.output), strict=True):
        prompt = torch.tensor([tokenizer(text)["input_ids"]])
        out = model.generate(prompt, constraint_index=index, num_beams=4, num_return_sequences=3)
        expected = [item for items in index.items(out[:, prompt.shape[1] :]) for item in items]
        assert row["items"] == expected[:3]
    with pytest.raises(ValueError, match="text= with a loaded model and tokenizer=None"):
        recommend(model, tmp_path / "u.parquet", tmp_path / "r.parquet", **(options | {"tokenizer": None}))
