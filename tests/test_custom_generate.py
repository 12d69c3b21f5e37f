# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with `custom_generate/generate.py`, as a colleague uses them who never imports hf_gr by name.

One process makes the checkpoints and asks `AutoModelForGenerativeRetrieval`; another, which knows transformers alone,
loads them with and without `trust_remote_code`.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_gr.generation.custom_generate as custom
from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, GRGenerationMixin, enable

ROOT = Path(__file__).parent.parent
ROWS = [[3 + a, 11 + b, 19 + (a * b) % 8] for a in range(8) for b in range(0, 8, 2)]
PROMPT = [[3, 11, 20], [7, 15, 21]]
BEAMS = {"num_beams": 4, "num_return_sequences": 4}
FILE = "custom_generate/generate.py"

# Reads what to do, and writes what came of it. It must not name the library.
COLLEAGUE = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

library = "hf" + "_gr"
results = []
for job in json.load(open(sys.argv[1])):
    if job["missing"]:
        sys.modules[library] = None  # as if it were not installed
    elif sys.modules.get(library, library) is None:
        del sys.modules[library]
    try:
        auto = {"decoder": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}[job["kind"]]
        model = auto.from_pretrained(job["repo"], **job["load"])
        answers = []
        for call in job["calls"]:
            out = model.generate(torch.tensor(call.pop("prompt")), **call)
            if hasattr(out, "sequences"):
                answers.append([out.sequences.tolist(), out.sequences_scores.tolist()])
            else:
                answers.append(out.tolist())
        results.append({"answers": answers, "knows": library in sys.modules})
    except Exception as error:
        results.append({"error": f"{type(error).__name__}: {error}"})
json.dump(results, open(sys.argv[2], "w"))
"""


def decoder(**config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    made = Qwen3Config(
        vocab_size=27,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **sizes,
        **config,
    )
    return enable(Qwen3ForCausalLM(made).eval())


def t5() -> Any:
    torch.manual_seed(0)
    made = T5Config(
        vocab_size=27, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    return enable(T5ForConditionalGeneration(made).eval())


def call(**arguments: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, **BEAMS, **arguments}


def answers(model: Any, calls: list[dict[str, Any]]) -> list[Any]:
    """What the colleague's script writes, of a model in this process."""
    made: list[Any] = []
    for arguments in calls:
        arguments = dict(arguments)
        out = model.generate(torch.tensor(arguments.pop("prompt")), **arguments)
        is_output = hasattr(out, "sequences")
        made.append([out.sequences.tolist(), out.sequences_scores.tolist()] if is_output else out.tolist())
    return made


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A folder with checkpoints, what the colleague was asked to do with them, and what came of it, by name."""
    folder = tmp_path_factory.mktemp("custom_generate")
    index = ConstraintIndex.from_sequences(ROWS)
    few = ConstraintIndex.from_sequences(ROWS[5:9])
    few.save_pretrained(folder / "few")

    model = decoder()
    model.generation_config.constraint_index = "."
    model.save_pretrained(folder / "headless", custom_generate=True)
    index.save_pretrained(folder / "headless")
    model.generation_config.constraint_index = None
    model.save_pretrained(folder / "bare", custom_generate=True)
    torch.manual_seed(1)
    model.generation_config.constraint_index = "."
    model.add_draft_head(index)
    model.save_pretrained(folder / "decoder", custom_generate=True)
    index.save_pretrained(folder / "decoder")

    encoder_decoder = t5()
    encoder_decoder.generation_config.constraint_index = "."
    encoder_decoder.save_pretrained(folder / "t5", custom_generate=True)
    index.save_pretrained(folder / "t5")

    # A repository with two revisions: the older one has another catalogue and another head.
    repository = folder / "cache" / "models--me--recommender"
    torch.manual_seed(2)
    model.add_draft_head(few)
    for revision, commit in {"v1": "a" * 40, "main": "b" * 40}.items():
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
        snapshot = repository / "snapshots" / commit
        if revision == "v1":
            model.save_pretrained(snapshot, custom_generate=True)
            few.save_pretrained(snapshot)
        else:
            shutil.copytree(folder / "decoder", snapshot)

    rich = {"return_dict_in_generate": True, "output_scores": True}
    own = [call(), call(drafting="head"), call(drafting="head", verification="strict"), call(**rich)]
    rules = [call(exclude_items=[list(range(16)), []]), call(constraint_index=str(folder / "few"))]
    plain = [call(max_new_tokens=3, do_sample=False)]
    jobs = {
        "not trusted": job(folder / "decoder", plain, load={"trust_remote_code": False}),
        "missing": job(folder / "decoder", plain, missing=True),
        "decoder": job(folder / "decoder", [*own, *rules]),
        "headless": job(folder / "headless", [call(), call(drafting="trie"), call(drafting="head")]),
        "t5": job(folder / "t5", [call(), *rules, call(**rich)], kind="t5"),
        "bare": job(folder / "bare", [*plain, call(constraint_index=str(folder / "few"))]),
        "refused": job(folder / "bare", [call(exclude_items=[[], []])]),
        "hub": job("me/recommender", own[:3]),
        "hub v1": job("me/recommender", own[:3], load={"revision": "v1"}),
    }
    results = ask_colleague(folder, list(jobs.values()), HF_HUB_OFFLINE="1")
    return folder, list(jobs.values()), dict(zip(jobs, results, strict=True))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where transformers puts the code of repositories, in this process."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    return tmp_path / "modules"


def test_without_trust_it_is_plain_transformers(made: Any) -> None:
    folder, jobs, results = made
    result = results["not trusted"]
    assert result["answers"] == answers(AutoModelForCausalLM.from_pretrained(folder / "decoder"), jobs[0]["calls"])
    assert not result["knows"]
    assert result["answers"][0][0][3:] not in ROWS  # which is why this checkpoint has a catalogue


@pytest.mark.parametrize("name", ["decoder", "t5"])
def test_answers_are_those_of_the_auto_class(name: str, made: Any) -> None:
    folder, jobs, results = made
    calls = next(
        each["calls"]
        for each in jobs
        if each["repo"] == str(folder / name) and each["load"]["trust_remote_code"] and not each["missing"]
    )
    assert results[name]["answers"] == answers(AutoModelForGenerativeRetrieval.from_pretrained(folder / name), calls)
    start = 1 if name == "t5" else 3
    assert all(row[start:] in ROWS for row in results[name]["answers"][0])


def test_every_kind_of_call_says_something_of_its_own(made: Any) -> None:
    """Equal answers would hide that an argument was dropped."""
    _, _, results = made
    plain, head, strict, (sequences, scores), excluded, few = results["decoder"]["answers"]
    assert plain == strict == sequences != head
    assert scores == sorted(scores[:4], reverse=True) + sorted(scores[4:], reverse=True)
    assert excluded[4:] == plain[4:]
    assert not [row for row in excluded[:4] if row[3:] in ROWS[:16]]
    assert [row for row in plain[:4] if row[3:] in ROWS[:16]]
    assert sorted(row[3:] for row in few[:4]) == sorted(ROWS[5:9])


def test_without_a_catalogue_it_is_transformers_own(made: Any) -> None:
    folder, _, results = made
    plain, few = results["bare"]["answers"]
    model = AutoModelForCausalLM.from_pretrained(folder / "bare")
    assert [plain] == answers(model, [call(max_new_tokens=3, do_sample=False)])
    assert plain[0][3:] not in ROWS
    assert sorted(row[3:] for row in few[:4]) == sorted(ROWS[5:9])


def test_errors_name_the_fix(made: Any) -> None:
    _, _, results = made
    assert results["missing"]["error"].startswith("ImportError: this checkpoint's generate needs hf_gr")
    assert "pip install hf-gr" in results["missing"]["error"]
    assert "load it without trust_remote_code" in results["missing"]["error"]
    assert "exclude_items given without constraint_index" in results["refused"]["error"]
    assert "drafting='head'" in results["headless"]["error"]


@pytest.mark.parametrize(("name", "arguments"), [("hub", {}), ("hub v1", {"revision": "v1"})])
def test_catalogue_and_head_are_of_the_models_revision(name: str, arguments: dict[str, str], made: Any) -> None:
    folder, jobs, results = made
    model = AutoModelForGenerativeRetrieval.from_pretrained(
        "me/recommender", cache_dir=folder / "cache", local_files_only=True, **arguments
    )
    assert results[name]["answers"] == answers(model, jobs[-1]["calls"])
    assert results["hub"]["answers"] != results["hub v1"]["answers"]


def test_the_file_is_written_where_it_is_asked_for(made: Any, tmp_path: Path) -> None:
    folder, _, _ = made
    assert [path.name for path in (folder / "t5" / "custom_generate").iterdir()] == ["generate.py"]
    model = decoder()
    model.save_pretrained(tmp_path / "none")
    assert sorted(path.name for path in (tmp_path / "none").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    model.save_pretrained(tmp_path / "worker", is_main_process=False, custom_generate=True)
    assert not (tmp_path / "worker" / FILE).exists()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ValueError, match="is a file, expected a folder: name another one"):
        model.save_pretrained(tmp_path / "file", custom_generate=True)
    assert (tmp_path / "file").read_text() == "precious"


def test_the_auto_class_takes_such_a_checkpoint_too(made: Any, modules: Path) -> None:
    folder, jobs, results = made
    model = AutoModelForGenerativeRetrieval.from_pretrained(folder / "decoder", trust_remote_code=True)
    head = model.draft_head
    assert answers(model, jobs[2]["calls"]) == results["decoder"]["answers"]
    assert model.draft_head is head
    assert "generate" not in vars(model)


def test_any_model_may_borrow_the_function(made: Any, modules: Path) -> None:
    folder, _, _ = made
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5")
    model.generation_config.constraint_index = None
    borrowed = {"custom_generate": str(folder / "t5"), "trust_remote_code": True}
    out = model.generate(torch.tensor(PROMPT), constraint_index=str(folder / "few"), **BEAMS, **borrowed)
    assert sorted(row[1:] for row in out.tolist()[:4]) == sorted(ROWS[5:9])
    assert isinstance(model, GRGenerationMixin)


def test_a_broken_head_stays_an_error(made: Any, tmp_path: Path) -> None:
    folder, _, _ = made
    shutil.copytree(folder / "decoder", tmp_path / "broken")
    (tmp_path / "broken" / "draft_head.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "broken")
    model.generate = None
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has draft_head_config.json and no draft_head.safetensors"):
            custom.enable_loaded(model, "generate.py")
        assert not isinstance(model, GRGenerationMixin)


def test_pushed_and_loaded_over_http(hub: HubServer, made: Any, modules: Path) -> None:
    folder, jobs, results = made
    model = AutoModelForGenerativeRetrieval.from_pretrained(folder / "decoder")
    model.push_to_hub("me/recommender", private=True, custom_generate=True)
    ConstraintIndex.from_pretrained(folder / "decoder").push_to_hub("me/recommender")
    files = hub.files("me/recommender")
    assert files[FILE] == (Path(custom.__file__).parent / "generate.py").read_bytes()
    assert b"- custom_generate\n" in files["README.md"]
    assert b'AutoModelForCausalLM.from_pretrained("me/recommender", trust_remote_code=True)' in files["README.md"]
    first = hub.commit("me/recommender")
    few = ConstraintIndex.from_pretrained(folder / "few")
    few.push_to_hub("me/recommender")

    for revision, catalogue in ((first, ROWS), (None, ROWS[5:9])):
        loaded = AutoModelForCausalLM.from_pretrained("me/recommender", revision=revision, trust_remote_code=True)
        assert Path(inspect.getfile(loaded.generate.func)).is_relative_to(modules)
        found = answers(loaded, jobs[2]["calls"][:2])
        assert all(row[3:] in catalogue or not any(row[3:]) for rows in found for row in rows)
        if revision is not None:
            assert found == results["decoder"]["answers"][:2]


def test_a_file_that_was_in_the_folder_before_is_pushed(hub: HubServer, tmp_path: Path) -> None:
    model = decoder()
    model.save_pretrained(tmp_path / "model", custom_generate=True)
    model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="me/recommender", custom_generate=True)
    assert FILE in hub.files("me/recommender")
    model.push_to_hub("me/other")
    assert FILE not in hub.files("me/other")
