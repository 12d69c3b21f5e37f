# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is mistyped is told on one line, with an exit code that says whether repeating may help."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs_case import Case, command, options_of

from hf_gr import AutoModelForGenerativeRetrieval, recommend

NUM_USERS = 5


def test_mistakes_are_told_on_one_line(case: Case, users: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, file in (("bare", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / name).mkdir()
        base = '{"peft_type": "LORA", "base_model_name_or_path": "gone/base"}'
        (tmp_path / name / file).write_text(base if name == "adapter" else (case.model / file).read_text())
    shutil.copytree(case.model, tmp_path / "torn")
    (tmp_path / "torn/model.safetensors").write_bytes((case.model / "model.safetensors").read_bytes()[:-8])
    lacks = "lacks a part of a model ("
    compared = {"model": case.model, "index": case.index, "input": users, "history": "seen", "cutoffs": "1,5"}
    right = {"recommend": options_of(case, users, tmp_path / "r.parquet"), "evaluate": flags_of(compared)}
    for name, more, code, message in (
        ("recommend", {"model": tmp_path / "empty"}, 2, f"{tmp_path / 'empty'}"),
        ("recommend", {"model": tmp_path / "bare"}, 2, lacks),
        ("recommend", {"model": tmp_path / "adapter"}, 2, lacks),
        ("recommend", {"model": tmp_path / "torn"}, 2, "torn/model.safetensors is cut short or damaged"),
        ("recommend", {"model": "no/model"}, 2, "--model 'no/model' is neither a folder here nor reachable"),
        ("recommend", {"option": "length_penalty"}, 2, "--option length_penalty, expected NAME=VALUE"),
        ("recommend", {"option": "top_k=3"}, 2, "--option 'top_k=3', expected an argument of generate that"),
        ("recommend", {"prefix-tokens": "1,x"}, 2, "--prefix-tokens '1,x', expected integers such as 5,10"),
        ("evaluate", {"num-beams": "x"}, 2, "--num-beams x, expected integers such as 5,10"),
        ("evaluate", {"plot": "gone/m.png"}, 2, "--plot 'gone/m.png', expected an existing folder: gone is none"),
        ("evaluate", {"plot": "m.gif"}, 2, "--plot 'm.gif', expected a name that ends in one of .png, .svg, .pdf"),
        ("evaluate", {"index": ["a", "b"], "model": "m"}, 2, "--index is given 3 times and --model 2 times"),
        ("evaluate", {"model": ["a=gone", "a=lost"]}, 2, "--model a is given twice, expected different names"),
    ):
        done = command(name, *right[name], *flags_of(more))  # of options given twice, most count by their last
        assert (done.exit_code, done.stdout) == (code, ""), (more, done.output)
        assert done.stderr.startswith(f"hf-gr {name}: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "r.parquet").exists()


def flags_of(options: dict[str, Any]) -> list[str]:
    pairs = [
        (name, each) for name, value in options.items() for each in (value if isinstance(value, list) else [value])
    ]
    return [text for name, value in pairs for text in (f"--{name}", str(value))]


def test_a_catalogue_beside_the_model_decides_the_kind_of_ids(case: Case, tmp_path: Path) -> None:
    for part in case.load():
        part.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="expected lists of integers"):
        recommend(tmp_path / "model", [["B01"]], progress=False)
    assert len(recommend(tmp_path / "model", [[100]], progress=False)[0]) == 10  # the catalogue need not be named


def test_a_run_as_json(case: Case, users: Path, tmp_path: Path) -> None:
    flags = options_of(case, users, tmp_path / "r.parquet")
    found = json.loads(command("recommend", *flags, "--json").stdout)
    assert found.pop("seconds") > 0
    counts = {"num_rows": 5, "num_skipped": 0, "num_resumed": 0, "num_fallback": 0, "num_dropped": 0}
    assert found == {"output": str(tmp_path / "r.parquet"), **counts, "already_finished": False}
    assert json.loads(command("recommend", *flags, "--json").stdout)["already_finished"]
    assert "nothing to do" in command("recommend", *flags, progress=True).stderr
    wrong = command("recommend", *flags, "--json", "--option", "numbeams=5")
    assert wrong.exit_code == 2
    assert json.loads(wrong.stdout) == {"error": wrong.stderr.removeprefix("hf-gr recommend: ").rstrip()}


def test_the_exit_code_says_whether_repeating_may_help(
    case: Case, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = options_of(case, users, tmp_path / "r.parquet")
    for error, code in ((OSError("full"), 1), (RuntimeError("process 1 has stopped"), 1), (ValueError("row 3"), 2)):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("hf_gr.jobs.run.run_table", fail)
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
