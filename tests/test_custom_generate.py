# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with `custom_generate/generate.py`: made here, and used by a process that knows transformers alone."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from hub_server import HubServer
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import hf_gr.generation.custom_generate as custom
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationMixin, enable

ROOT = Path(__file__).parent.parent
ROWS = [[3 + a, 11 + b, 19 + (a * b) % 8] for a in range(8) for b in range(0, 8, 2)]
PROMPT = [[3, 11, 20], [7, 15, 21]]
BEAMS = {"num_beams": 4, "num_return_sequences": 4}
FILE = "custom_generate/generate.py"


def call(**arguments: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, **BEAMS, **arguments}


def answers(model: Any, calls: list[dict[str, Any]]) -> list[Any]:
    """The results of calls, as JSON has them."""
    made: list[Any] = []
    for arguments in calls:
        arguments = dict(arguments)
        out = model.generate(torch.tensor(arguments.pop("prompt")), **arguments)
        is_output = hasattr(out, "sequences")
        made.append([out.sequences.tolist(), out.sequences_scores.tolist()] if is_output else out.tolist())
    return made


# Reads what to do, and writes what came of it. It must not name the library.
COLLEAGUE = f"""
from __future__ import annotations
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

{inspect.getsource(answers)}

library = "hf" + "_gr"
results = []
for job in json.load(open(sys.argv[1])):
    if job["missing"]:
        sys.modules[library] = None  # as if it were not installed
    elif sys.modules.get(library, library) is None:
        del sys.modules[library]
    try:
        auto = AutoModelForSeq2SeqLM if job["kind"] == "t5" else AutoModelForCausalLM
        found = answers(auto.from_pretrained(job["repo"], **job["load"]), job["calls"])
        results.append({{"answers": found, "knows": library in sys.modules}})
    except Exception as error:
        results.append({{"error": f"{{type(error).__name__}}: {{error}}"}})
json.dump(results, open(sys.argv[2], "w"))
"""


def ask_colleague(folder: Path, jobs: list[dict[str, Any]], **environment: str) -> list[dict[str, Any]]:
    for name, text in {"colleague.py": COLLEAGUE, "jobs.json": json.dumps(jobs)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    assert "hf_gr" not in COLLEAGUE
    done = subprocess.run(
        [sys.executable, "-W", "error", "colleague.py", "jobs.json", "results.json"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HF_HOME": str(folder / "home"),
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_MODULES_CACHE": str(folder / "modules"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def job(repo: Path | str, calls: list[dict[str, Any]], *, kind: str = "decoder", **options: Any) -> dict[str, Any]:
    load = {"trust_remote_code": True, **options.pop("load", {})}
    return {"repo": str(repo), "kind": kind, "calls": calls, "load": load, "missing": False, **options}


@dataclass
class Made:
    folder: Path  # of checkpoints
    jobs: dict[str, dict[str, Any]]  # what the colleague was asked to do with them
    results: dict[str, dict[str, Any]]  # what came of it


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("custom_generate")
    index, few = ConstraintIndex.from_sequences(ROWS), ConstraintIndex.from_sequences(ROWS[5:9])
    few.save_pretrained(folder / "few")

    def save(model: Any, name: str, catalogue: ConstraintIndex | None) -> None:
        model.generation_config.constraint_index = catalogue and "."
        model.save_pretrained(folder / name, custom_generate=True)
        if catalogue is not None:
            catalogue.save_pretrained(folder / name)

    model = enable(build("qwen3"))
    save(model, "bare", None)
    model.add_draft_head(index)
    save(model, "decoder", index)
    save(enable(build("t5")), "t5", index)
    # A repository with two revisions: the older one has another catalogue and another head.
    model.add_draft_head(few)
    save(model, "old", few)
    repository = folder / "cache" / "models--me--recommender"
    (repository / "refs").mkdir(parents=True)
    for revision, commit, name in (("v1", "a" * 40, "old"), ("main", "b" * 40, "decoder")):
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(folder / name, repository / "snapshots" / commit)

    rich = {"return_dict_in_generate": True, "output_scores": True}
    own = [call(), call(drafting="head"), call(drafting="head", verification="strict"), call(**rich)]
    rules = [call(exclude_items=[list(range(16)), []]), call(constraint_index=str(folder / "few"))]
    plain = [call(max_new_tokens=3, do_sample=False)]
    jobs = {
        "not trusted": job(folder / "decoder", plain, load={"trust_remote_code": False}),
        "missing": job(folder / "decoder", plain, missing=True),
        "decoder": job(folder / "decoder", [*own, *rules]),
        "t5": job(folder / "t5", [call(), *rules, call(**rich)], kind="t5"),
        "bare": job(folder / "bare", plain),
        "hub": job("me/recommender", own[:3]),
        "hub v1": job("me/recommender", own[:3], load={"revision": "v1"}),
    }
    results = ask_colleague(folder, list(jobs.values()), HF_HUB_OFFLINE="1")
    return Made(folder, jobs, dict(zip(jobs, results, strict=True)))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers puts the code of repositories, in this process."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return tmp_path / "modules"


@pytest.mark.parametrize("name", ["not trusted", "bare"])
def test_without_trust_or_catalogue_it_is_plain_transformers(name: str, made: Made) -> None:
    job, result = made.jobs[name], made.results[name]
    assert result["answers"] == answers(AutoModelForCausalLM.from_pretrained(job["repo"]), job["calls"])
    assert result["knows"] == (name == "bare")
    assert result["answers"][0][0][3:] not in ROWS


@pytest.mark.parametrize(("name", "trusts"), [("decoder", False), ("decoder", True), ("t5", True)])
def test_answers_are_those_of_the_auto_class(name: str, trusts: bool, made: Made, modules: Path) -> None:
    model = AutoModelForGenerativeRetrieval.from_pretrained(made.folder / name, trust_remote_code=trusts)
    assert made.results[name]["answers"] == answers(model, made.jobs[name]["calls"])
    # Equal answers would hide that an argument was dropped.
    start = 1 if name == "t5" else 3
    plain, *_ = found = made.results[name]["answers"]
    assert len({str(one) for one in found}) == len(found) - (name == "decoder")  # one of them is strict
    assert all(row[start:] in ROWS for row in plain)
    excluded, few = found[-2:] if name == "decoder" else found[1:3]
    assert excluded[4:] == plain[4:]
    assert not [row for row in excluded[:4] if row[start:] in ROWS[:16]]
    assert sorted(row[start:] for row in few[:4]) == sorted(ROWS[5:9])


def test_without_the_library_the_error_names_it(made: Made) -> None:
    message = "ImportError: this checkpoint's generate needs hf_gr.*pip install hf-gr.* without trust_remote_code"
    assert re.search(message, made.results["missing"]["error"], re.DOTALL)


@pytest.mark.parametrize(("name", "arguments"), [("hub", {}), ("hub v1", {"revision": "v1"})])
def test_catalogue_and_head_are_of_the_models_revision(name: str, arguments: dict[str, str], made: Made) -> None:
    where = {"cache_dir": made.folder / "cache", "local_files_only": True, **arguments}
    model = AutoModelForGenerativeRetrieval.from_pretrained("me/recommender", **where)
    assert made.results[name]["answers"] == answers(model, made.jobs[name]["calls"])
    assert made.results["hub"]["answers"] != made.results["hub v1"]["answers"]


def test_the_file_is_written_where_it_is_asked_for(made: Made, tmp_path: Path) -> None:
    assert [path.name for path in (made.folder / "t5" / "custom_generate").iterdir()] == ["generate.py"]
    model, files = enable(build("qwen3")), {"config.json", "generation_config.json", "model.safetensors"}
    model.save_pretrained(tmp_path / "none")
    assert {path.name for path in (tmp_path / "none").iterdir()} == files
    model.save_pretrained(tmp_path / "worker", is_main_process=False, custom_generate=True)
    assert not (tmp_path / "worker" / FILE).exists()


def test_any_model_may_borrow_the_function(made: Made, modules: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_pretrained(made.folder / "t5")
    model.generation_config.constraint_index = None
    borrowed = {"custom_generate": str(made.folder / "t5"), "trust_remote_code": True}
    out = model.generate(torch.tensor(PROMPT), constraint_index=str(made.folder / "few"), **BEAMS, **borrowed)
    assert sorted(row[1:] for row in out.tolist()[:4]) == sorted(ROWS[5:9])
    assert isinstance(model, GRGenerationMixin)


def test_a_broken_head_stays_an_error(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.folder / "decoder", tmp_path / "broken")
    (tmp_path / "broken" / "draft_head.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "broken")
    model.generate = None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has draft_head_config.json and no draft_head.safetensors"):
            custom.enable_loaded(model, "generate.py")
        assert not isinstance(model, GRGenerationMixin)


def test_pushed_and_loaded_over_http(hub: HubServer, made: Made, modules: Path) -> None:
    model = AutoModelForGenerativeRetrieval.from_pretrained(made.folder / "decoder")
    model.push_to_hub("me/recommender", private=True, custom_generate=True)
    ConstraintIndex.from_pretrained(made.folder / "decoder").push_to_hub("me/recommender")
    files = hub.files("me/recommender")
    assert files[FILE] == (Path(custom.__file__).parent / "generate.py").read_bytes()
    assert b"- custom_generate\n" in files["README.md"]
    assert b'AutoModelForCausalLM.from_pretrained("me/recommender", trust_remote_code=True)' in files["README.md"]
    loaded = AutoModelForCausalLM.from_pretrained("me/recommender", trust_remote_code=True)
    assert Path(inspect.getfile(loaded.generate.func)).is_relative_to(modules)
    assert answers(loaded, made.jobs["decoder"]["calls"][:2]) == made.results["decoder"]["answers"][:2]


def test_a_file_that_was_in_the_folder_before_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    model = enable(build("qwen3"))
    model.save_pretrained(tmp_path / "model", custom_generate=True)
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/recommender", custom_generate=True)
    assert FILE in hub.files("me/recommender")
    model.push_to_hub("me/other")
    assert FILE not in hub.files("me/other")
