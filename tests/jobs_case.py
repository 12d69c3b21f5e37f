# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""A small recommender in folders, users in files, and the slow oracle: one user at a time through `model.generate`."""

import atexit
import multiprocessing
import os
import pkgutil
import resource
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable, recommend
from hf_gr.commands import app as cli
from hf_gr.jobs.intervals import UserValues
from hf_gr.jobs.job import Job
from hf_gr.jobs.metrics import metric_names, user_metrics
from hf_gr.jobs.parts import Parts
from hf_gr.training import write_teacher_data


def means_of(lists: Sequence[tuple[Any, Any]], cutoffs: tuple[int, ...]) -> dict[str, float]:
    """Means of the metrics of some lists, each with its targets."""
    values = UserValues()
    for items, targets in lists:
        values.add(user_metrics(items, targets, cutoffs))
    return dict(zip(metric_names(cutoffs), values.means(), strict=False))


SCORE_TOL = 1e-4  # fp32: sums of 3 log-probabilities, in batches of other sizes and paddings
NUM_ITEMS = 60


@dataclass(frozen=True)
class Case:
    """Folders of a model and a catalogue, and what is in them."""

    folder: Path
    model: Path
    index: Path
    tokens: dict[Any, list[int]]  # by item id

    def load(self) -> tuple[Any, ConstraintIndex]:
        return AutoModelForGenerativeRetrieval.from_pretrained(self.model), ConstraintIndex.from_pretrained(self.index)


def make_case(folder: Path, *, family: str = "llama", strings: bool = False, eos: int | None = None) -> Case:
    """Save a tiny random model and a catalogue of `NUM_ITEMS` items of 3 tokens; two items share a sequence."""
    draw = np.random.default_rng(0)
    rows = np.unique(draw.integers(3, families.VOCABULARY, size=(200, 3)), axis=0)[:NUM_ITEMS]
    rows = draw.permutation(rows)
    rows[1] = rows[0]
    ids = [f"item-{number}" for number in range(NUM_ITEMS)] if strings else list(range(100, 100 + NUM_ITEMS))
    enable(families.build(family)).save_pretrained(folder / "model")
    ConstraintIndex.from_sequences(rows, item_ids=ids, eos_token_id=eos).save_pretrained(folder / "index")
    tokens = dict(zip(ids, rows.tolist(), strict=True))
    return Case(folder, folder / "model", folder / "index", tokens)


def make_users(case: Case, num_users: int, *, seed: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    """Users with histories of 1 to `longest` items, some with exclusions, some with a filter."""
    draw = np.random.default_rng(seed)
    ids = list(case.tokens)
    users = []
    for number in range(num_users):
        history = [ids[i] for i in draw.integers(0, len(ids), size=draw.integers(1, longest + 1))]
        exclude = [ids[i] for i in draw.integers(0, len(ids), size=draw.integers(0, 5))]
        allowed = [ids[i] for i in range(len(ids)) if i % 3 == number % 3] if number % 4 == 0 else None
        users.append({"who": f"u{number}", "seen": history, "not": exclude, "only": allowed})
    return users


def make_measured(case: Case, num_users: int) -> list[dict[str, Any]]:
    """Users of two countries, whose last items are of few."""
    rows = make_users(case, num_users)
    for number, row in enumerate(rows):
        row |= {"seen": [*row["seen"], 100 + number % 7], "country": "fr" if number % 3 else "de"}
    return rows


def write_users(path: Path, users: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(users), path, **options)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def oracle(
    model: Any, index: ConstraintIndex, case: Case, user: dict[str, Any], *, top_k: int, num_beams: int
) -> tuple[list[Any], list[float]]:
    """One user, by nothing but `generate` and a catalogue without what the user must not get."""
    prompt = torch.tensor([[token for item in user["seen"] for token in case.tokens[item]]])
    allowed = [item for item in (case.tokens if user["only"] is None else user["only"]) if item not in user["not"]]
    out = model.generate(
        prompt,
        constraint_index=index.where(allowed),
        num_beams=num_beams,
        num_return_sequences=top_k,
        return_dict_in_generate=True,
        output_scores=True,
    )
    behind = 1 if model.config.is_encoder_decoder else prompt.shape[1]
    pairs = [
        (item, score)
        for tokens, score in zip(out.sequences[:, behind:].tolist(), out.sequences_scores.tolist(), strict=True)
        for item, sequence in case.tokens.items()
        if score > -torch.inf and item in allowed and tokens[: len(sequence)] == sequence
    ][:top_k]
    return [item for item, _ in pairs], [score for _, score in pairs]


def same(found: dict[str, Any], expected: tuple[list[Any], list[float]]) -> bool:
    """Whether an answer is the oracle's; items compare as sets within groups of equal scores."""
    items, scores = expected
    if len(found["items"]) != len(items) or not np.allclose(found["scores"], scores, atol=SCORE_TOL, rtol=0):
        return False
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or scores[end - 1] - scores[end] > SCORE_TOL:
            # what ties with the last may have lost its place to an item that is not listed
            if end < len(items) and sorted(found["items"][start:end]) != sorted(items[start:end]):
                return False
            start = end
    return True


def options_of(case: Case, users: Path, output: Path, **more: Any) -> list[str]:
    """The command's options for the columns that `make_users` writes."""
    options = {"model": case.model, "index": case.index, "input": users, "output": output, "history": "seen"}
    options |= {"user": "who", "exclude": "not", "filter": "only", "top-k": 6, "num-beams": 8}
    return [text for name, value in (options | more).items() for text in (f"--{name}", str(value))]


def command(*arguments: Any, progress: bool = False) -> Any:
    """What the command line says, by default without a log of progress."""
    given = [str(argument) for argument in arguments] + ([] if progress else ["--no-progress"])
    return CliRunner().invoke(cli.build_app(), given)


RUN = {"history": "seen", "user": "who", "exclude": "not", "filter": "only", "top_k": 6, "num_beams": 8}


def run(case: Case, users: Path, output: Path, **more: Any) -> Any:
    """`recommend` over the columns that `make_users` writes."""
    options = RUN | {"constraint_index": case.index, "window_rows": 16, "progress": False} | more
    return recommend(case.model, users, output, **options)


# What other processes do. They are forked from a server that has imported all this already.

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["jobs_case", "pytest", "transformers.models.llama.modeling_llama"])


def in_another_process(target: Any, *args: Any) -> Any:
    process = SERVER.Process(target=target, args=args)
    process.start()
    return process


def run_quietly(case: Case, users: Path, output: Path, more: dict[str, Any]) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    run(case, users, output, **more)


def run_until_call(number: int, name: str, case: Case, users: Path, output: Path) -> None:
    """Dies in the middle of the run, as by `kill -9`, when a function is called for the `number`-th time."""
    module, _, attribute = name.rpartition(".")
    owner = pkgutil.resolve_name(module)
    called, original = 0, getattr(owner, attribute)

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called += 1
        if called == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, attribute, dying)
    run_quietly(case, users, output, {})


def run_with_small_disk(num_bytes: int, messages: Any, case: Case, users: Path, output: Path) -> None:
    """No file may be larger, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    try:
        run_quietly(case, users, output, {})
        messages.put("done")
    except OSError as error:
        messages.put(str(error))


Scenes = dict[str, tuple[Any, Sequence[tuple[Any, ...]]]]  # by name a function, and its arguments in each process


def in_two_processes(scenes: Scenes, *, dying: int | None = None) -> list[dict[str, Any]]:
    """What became of each scene in each of two processes: what it returned, or the kind and the text of its error."""
    messages = SERVER.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [in_another_process(_play, rank, port, messages, scenes, rank == dying) for rank in (0, 1)]
    said = dict(messages.get(timeout=90) for rank in (0, 1) if rank != dying)
    for rank, process in enumerate(processes):
        process.join(60)
        assert process.exitcode == 0 or rank == dying
    return [said[rank] for rank in sorted(said)]


def _play(rank: int, port: int, messages: Any, scenes: Scenes, dies: bool) -> None:
    """One of two processes, as a launcher starts them; one that dies does so at its first window."""
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if dies:
        Parts.write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore
    said: dict[str, Any] = {}
    for name, (scene, arguments) in scenes.items():
        try:
            said[name] = scene(*arguments[rank])
        except Exception as error:
            said[name] = type(error).__name__, str(error)
    messages.put((rank, said))
    messages.close()
    messages.join_thread()
    atexit._run_exitfuncs()  # as an interpreter at its end; one of `multiprocessing` ends without


def run_with(case: Case, users: Any, output: Any, more: dict[str, Any]) -> tuple[Any, list[int]]:
    """`run`, and the rows if they stay in memory; also the windows that this process answered."""
    original, windows = Job.run, []
    Job.run = lambda job, window, *args: windows.append(window.number) or original(job, window, *args)
    try:
        made = run(case, users, output, **more)
    finally:
        Job.run = original
    return made if output is not None else made.to_pylist(), windows


def run_divided(case: Case, users: Path, output: Path) -> Any:
    """With a model that FSDP has divided."""
    model, index = case.load()
    return recommend(fully_shard(model), users, output, constraint_index=index, **RUN)


def teach(case: Case, prompts: list[list[int]], folder: Path) -> int:
    """Write teacher data; how many prompts this process has answered."""
    model, index = case.load()
    asked: list[int] = []
    generate = model.generate
    model.generate = lambda **kwargs: asked.append(len(kwargs["input_ids"])) or generate(**kwargs)
    write_teacher_data(model, prompts, index, folder, num_beams=4, shard_size=3, batch_size=2)
    return sum(asked)
