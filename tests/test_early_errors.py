# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is mistyped is refused before PyTorch is imported, and in the words of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offline_case import Case, command, make_case, make_users, options_of, write_users

from hf_gr import AutoModelForGenerativeRetrieval, recommend
from hf_gr.commands.text import in_flags

# The command in a process in which PyTorch cannot be imported; it says so if it is asked for.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from hf_gr.commands.app import main
main()
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def users(case: Case) -> Path:
    return write_users(case.folder / "users.parquet", make_users(case, 5))


def in_one_process(lines: list[list[str]]) -> list[str]:
    """What several commands say, one after the other, without PyTorch."""
    code = WITHOUT_TORCH.replace(
        "main()\n",
        f"for line in {lines!r}:\n"
        "    sys.argv = ['hf-gr', *line]\n"
        "    try:\n        main()\n"
        "    except SystemExit as error:\n        print(f'exit {error.code}', file=sys.stderr, flush=True)\n",
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said, texts = [], done.stderr.splitlines(keepends=True)
    while texts:
        end = next(number for number, text in enumerate(texts) if text.startswith("exit "))
        said.append("".join(texts[: end + 1]))
        texts = texts[end + 1 :]
    return said


def test_mistakes_are_found_without_torch(case: Case, users: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "popular.txt").write_text("7\n8\n")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": tmp_path / "empty"}, f"--model {tmp_path / 'empty'} has no config.json, expected the folder of a"),
        ({"model": "no/model"}, "--model no/model is no folder here"),
        ({"index": "no/index"}, "--index no/index is no folder here"),
        ({"input": "gone.parquet"}, "gone.parquet is not there"),
        (
            {"history": "gone"},
            "has no column 'gone', expected one of 'who', 'seen', 'not', 'only': name it",
        ),
        ({"output": "recs.csv"}, "--output recs.csv, expected a name that ends in .parquet"),
        ({"num-beams": 3}, "--num-beams 3, expected at least --top-k 6"),
        (
            {"tokens": "seen"},
            "--history seen and --tokens seen is given, expected one of --history, --tokens and",
        ),
        ({"option": "temperature=2"}, "--option temperature=2 has no effect without sampling"),
        (
            {"option": "numbeams=5"},
            "of generate: did you mean --num-beams?",
        ),
        ({"prefix-tokens": "1,x"}, "--prefix-tokens '1,x', expected integers such as 5,10"),
        ({"device": "cpu", "device-map": "auto"}, "--device cpu and --device-map auto, expected one of both"),
        ({"revision": "v1"}, "--revision v1 with the folder"),
        ({"fallback": tmp_path / "popular.txt"}, f"--fallback {tmp_path / 'popular.txt'} with 7, 8, expected items"),
    ]
    # Of options given twice, the last counts.
    right = options_of(case, users, tmp_path / "r.parquet")
    lines = [
        ["recommend", *right, *(str(text) for name, value in more.items() for text in (f"--{name}", value))]
        for more, _ in wrong
    ]
    for text, (_, message) in zip(in_one_process(lines), wrong, strict=True):
        assert text.startswith("hf-gr recommend: ")
        assert message in text
        assert text.endswith("\nexit 2\n")
        assert text.count("\n") == 2
    # And a right one is not refused: it asks for what is not there.
    (told,) = in_one_process([["recommend", *right]])
    assert "torch" in told or "transformers" in told


def test_a_catalogue_beside_the_model_decides_the_kind_of_ids(case: Case, tmp_path: Path) -> None:
    model, index = case.load()
    model.save_pretrained(tmp_path / "model")
    index.save_pretrained(tmp_path / "model")
    users = write_users(tmp_path / "users.parquet", [{"seen": ["B01"]}])
    flags = ["--model", tmp_path / "model", "--input", users, "--history", "seen", "--output", tmp_path / "r.parquet"]
    (told,) = in_one_process([["recommend", *map(str, flags)]])
    assert "column 'seen' has type list<element: string>, expected lists of integers" in told
    found = recommend(tmp_path / "model", [[100]], progress=False)  # the catalogue need not be named
    assert len(found[0]) == 10


def test_a_run_as_json(case: Case, users: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.parquet"
    done = command("recommend", *options_of(case, users, output), "--json")
    found = json.loads(done.stdout)
    assert found.pop("seconds") > 0
    counts = {"num_rows": 5, "num_skipped": 0, "num_resumed": 0, "num_fallback": 0, "num_dropped": 0}
    assert found == {"output": str(output), **counts, "already_finished": False}
    again = command("recommend", *options_of(case, users, output), "--json")
    assert json.loads(again.stdout)["already_finished"]
    assert "nothing to do" in command("recommend", *options_of(case, users, output), progress=True).stderr
    wrong = command("recommend", *options_of(case, users, output), "--json", "--option", "numbeams=5")
    assert wrong.exit_code == 2
    assert json.loads(wrong.stdout) == {"error": wrong.stderr.removeprefix("hf-gr recommend: ").rstrip()}


def test_the_exit_code_says_whether_repeating_may_help(
    case: Case, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = options_of(case, users, tmp_path / "r.parquet")
    for error, code in ((OSError("full"), 1), (RuntimeError("process 1 has stopped"), 1), (ValueError("row 3"), 2)):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("hf_gr.offline.run.recommend", fail)
        assert command("recommend", *flags).exit_code == code


@pytest.mark.parametrize("name", ["recomender", "me/recomender"])
def test_a_model_that_is_nowhere_is_named(case: Case, name: str) -> None:
    for load, argument in (
        (lambda: AutoModelForGenerativeRetrieval.from_pretrained(name, backend="torch"), "repo_or_dir"),
        (lambda: recommend(name, [[100]], constraint_index=case.index), "model"),
    ):
        with pytest.raises(OSError, match=f"^{argument}='{name}' is neither a folder here nor reachable") as found:
            load()
        assert isinstance(found.value.__cause__, OSError)  # transformers' own


FLAGS = {"top_k": "--top-k", "history": "--history", "constraint_index": "--index", "overwrite": "--overwrite"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("top_k=0, expected 1: pass top_k=", "--top-k 0, expected 1: pass --top-k"),
        ("history='a b' is there", "--history 'a b' is there"),
        ("history='a' is there", "--history a is there"),
        ("history= and top_k=.", "--history and --top-k."),
        ("pass overwrite=True (--overwrite)", "pass --overwrite"),
        ("constraint_index=None and none: pass it (--index)", "no --index and none: pass it"),
        ("expected one (--history, --tokens, --text): it", "expected one: it"),
        ("--option 'top_k=3', my_top_k=3", "--option 'top_k=3', my_top_k=3"),
        ("rows (12 of them) are bad", "rows (12 of them) are bad"),
    ],
)
def test_messages_name_flags(message: str, expected: str) -> None:
    assert in_flags(message, FLAGS) == expected
