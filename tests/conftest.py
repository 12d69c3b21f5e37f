# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from hypothesis import settings

from hf_gr.commands.programs import folder_name

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models run faster on one thread
# Programs of tiny models compile in half the time without LLVM's optimisations, and in half of that with XLA's old
# code for fusions.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))

# The machine is shared: a time limit would be noise.
settings.register_profile("hf_gr", deadline=None, max_examples=30)
settings.load_profile("hf_gr")


def pytest_configure(config: pytest.Config) -> None:
    """Programs of JAX that a run has compiled are loaded by later ones; the environment is for processes of tests.

    With a size there is a lock, and workers may share a program.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or not hasattr(config, "cache"):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir(folder_name()))
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**28)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


CAN_TELL = hasattr(os, "sched_getaffinity")
MOST_WORKERS = 8  # each holds PyTorch and JAX: about a gigabyte
# Files of many seconds, the longest first: one that begins last keeps one core busy while the others are idle.
LONGEST = "jobs_run pretend_cuda captured flax_decode training flax_model".split()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first."""
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process a core; only this one for a file or two, which gain nothing, and for tests of a GPU."""
    paths = [Path(argument.split("::")[0]) for argument in config.args]
    few = len(paths) <= 2 and all(path.is_file() for path in paths)
    on_gpu = "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr
    return 0 if few or on_gpu else min(len(os.sched_getaffinity(0)) if CAN_TELL else os.cpu_count() or 1, MOST_WORKERS)


# Tests of the engine in one process: elsewhere answers are compared with those of other processes, to the bit.
IN_PARTS = "attention auto caches captured draft_head drafting generate parity samples".split()


@pytest.fixture(autouse=True)
def two_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models attend in two parts there, as large ones do; in all other tests few nodes attend at once."""
    if request.path.stem.removeprefix("test_") in IN_PARTS:
        from hf_gr.torch import tree_attention

        monkeypatch.setattr(tree_attention, "SLOTS_AT_ONCE", 0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub, and this process as one that was started by a user of it: the client reads its environment once."""
    import huggingface_hub
    import transformers
    from huggingface_hub import constants

    with HubServer() as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        spec: Any = importlib.util.spec_from_file_location("fresh_constants", constants.__file__)
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
        for name, value in vars(fresh).items():
            if name.isupper() and value != getattr(constants, name):
                monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # knows the endpoint of when it was made
        monkeypatch.chdir(tmp_path)
        huggingface_hub.close_session()
        huggingface_hub.utils.disable_progress_bars()
        yield server
        huggingface_hub.utils.enable_progress_bars()
        huggingface_hub.close_session()
    assert server.problems == []


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small recommender in a folder, which tests of tables only read."""
    from jobs_case import make_case

    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def users(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, case: Any) -> Path:
    """As many users of `case` as the module says, in a file."""
    from jobs_case import make_users, write_users

    return write_users(tmp_path_factory.mktemp("users") / "users.parquet", make_users(case, request.module.NUM_USERS))


@pytest.fixture
def one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so large that all catalogues of `random_catalogues` fit the first: one program serves them."""
    from hf_gr.flax import device_trie, transition

    monkeypatch.setattr(device_trie, "SMALLEST", 4096)
    monkeypatch.setattr(device_trie, "CHILDREN", 8)
    monkeypatch.setattr(transition, "HIDDEN_NODES", 64)
