# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend` and `evaluate` with a model in Flax, against the same checkpoint in PyTorch."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jobs_case import SCORE_TOL, Case, command, options_of, read, run
from transformers import FalconConfig

from hf_gr import AutoModelForGenerativeRetrieval, evaluate, recommend
from hf_gr.answering.backends import backend_for, backend_of
from hf_gr.flax.decode import decode_program
from hf_gr.flax.model import FlaxModel

NUM_USERS = 40


@pytest.fixture(scope="module")
def expected(case: Case, users: Path) -> list[dict[str, Any]]:
    """The rows by PyTorch."""
    return read(run(case, users, users.with_name("torch.parquet"), backend="torch").output)


@pytest.fixture(scope="module")
def model(case: Case) -> Any:
    return AutoModelForGenerativeRetrieval.from_pretrained(case.model, backend="flax")


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with jax.default_matmul_precision("highest"):
        yield


def num_programs() -> int:
    """Compiled so far, for one device."""
    program: Any = decode_program
    return program._cache_size()


def agree(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """The same users and items, and scores within `SCORE_TOL`."""
    pairs = list(zip(found, expected, strict=True))
    return all(
        one["who"] == other["who"]
        and one["items"] == other["items"]
        and np.allclose(one["scores"], other["scores"], atol=SCORE_TOL, rtol=0)
        for one, other in pairs
    )


def test_a_job_gives_the_rows_of_pytorch_with_few_programs(
    case: Case, users: Path, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Exclusions and filters, three windows, the last of which is half full, and loading by name in the command."""
    before, output = num_programs(), tmp_path / "recs.parquet"
    flags = [*options_of(case, users, output, backend="flax"), "--window-rows", "16"]
    done = command("recommend", *flags, "--mesh", "1,1")
    assert done.exit_code == 0, done.output
    assert agree(read(output), expected)
    assert not agree(read(output)[::-1], expected)  # the comparison can fail
    assert num_programs() - before <= 3  # prompts of two buckets; a window of other exclusions
    assert run(case, users, output, backend="flax").already_finished
    with pytest.raises(ValueError, match="of another run"):  # rows of two frameworks are never mixed
        run(case, users, output, backend="torch")


def test_both_frameworks_have_the_same_metrics(case: Case, users: Path, model: Any) -> None:
    torch_model, index = case.load()
    found = evaluate(
        {"torch": torch_model, "flax": model},
        users,
        constraint_index=index,
        history="seen",
        on_error="skip",
        cutoffs=(1, 6),
        num_beams=8,
        window_rows=16,
        sampled_users=2,
        progress=False,
    )
    ours, theirs = (next(one for one in found.results if one.name == name) for name in ("flax", "torch"))
    assert theirs.metrics["recall@6"] > 0
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-12)
    assert ours.latency_seconds is not None
    assert ours.invalid == theirs.invalid == 0
    assert theirs.unconstrained_invalid
    assert ours.unconstrained_invalid is None  # nothing is generated without a catalogue
    assert ours.num_skipped == theirs.num_skipped > 0
    assert found.hardware.endswith(f"float32, jax {jax.__version__}")


def test_options_of_the_other_framework_are_refused_with_their_remedy(case: Case, model: Any) -> None:
    for given, options, message in (
        (case.model, {"backend": "flax", "device": "cpu"}, "device='cpu' with backend='flax', expected none: pass me"),
        (case.model, {"backend": "flax", "device_map": "auto"}, "device_map='auto' with .* expected none: pass mesh="),
        (case.model, {"backend": "torch", "mesh": (2, 1)}, r"mesh=\(2, 1\) with backend='torch', .*: pass device="),
        (case.model, {"backend": "flax", "mesh": (64, 64)}, r"mesh=\(64, 64\) has 4096 devices, expected at most"),
        (case.model, {"backend": "flax", "mesh": 4}, "mesh=4, expected a jax.sharding.Mesh, or devices"),
        (case.model, {"backend": "jax"}, "backend='jax', expected one of"),
        (case.model, {"backend": "flax", "dtype": "int8"}, "dtype='int8', expected 'auto' or one of"),
        # A loaded model is taken as it is.
        (model, {"dtype": "float32"}, "dtype=.*expected"),
        (model, {"revision": "v1"}, "revision=.*expected"),
        (model, {"device": "cpu"}, "device=.*expected"),
        (model, {"backend": "torch"}, "backend=.*expected"),
    ):
        with pytest.raises(ValueError, match=message):
            recommend(given, [[100, 101]], constraint_index=case.index, progress=False, **options)


def test_a_launcher_of_several_processes_is_refused(case: Case, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, expected one for a model in Flax"):
        recommend(model, [[100, 101]], constraint_index=case.index, progress=False)


def test_a_fingerprint_is_of_all_bits_and_of_the_framework(case: Case, model: Any) -> None:
    torch_model, _ = case.load()
    before = backend_of(model).fingerprint(model)
    assert before != backend_of(torch_model).fingerprint(torch_model)
    other: Any = FlaxModel.from_pretrained(case.model)
    assert backend_of(other).fingerprint(other) == before
    weight = other.model.layers[0].self_attn.q_proj.weight
    weight[...] = weight[...].at[0, 0].set(np.nextafter(np.float32(weight[0, 0]), np.float32(9)))
    assert backend_of(other).fingerprint(other) != before


def test_auto_is_what_loading_says(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hf_gr.answering import backends

    for name in ("torch", "flax"):
        monkeypatch.setattr(backends, "choose_backend", lambda name=name: name)
        assert backend_for(case.model).name == name
    assert backend_for(case.model, given={"device": "cuda"}).name == "torch"  # what Flax lacks
    FalconConfig().save_pretrained(tmp_path)
    assert backend_for(tmp_path).name == "torch"
