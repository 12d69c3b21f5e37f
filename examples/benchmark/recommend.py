# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches by token budget against fixed batches in file order, on the histories of Amazon Beauty; memory, and kills.

Both run the same decoder over the same users and differ only in who shares a batch. Answers are compared first. The
model is a small Qwen3 with random weights: time does not depend on what it has learnt.

    python examples/benchmark/recommend.py --users 2048
    python examples/benchmark/recommend.py --memory    # 10,000 and 200,000 users through hf_gr.recommend
    python examples/benchmark/recommend.py --check     # 10,000 users: 2 processes, killed and resumed, against 1
    python examples/benchmark/recommend.py --ends 100  # exit codes of 100 runs and 100 trainings of 2 processes
    python examples/benchmark/recommend.py --fast      # with --check or without
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from beauty_data import DEFAULT_DATA, is_there, read_items, read_users
from report import print_json_line, print_table
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

import hf_gr
from hf_gr import cli
from hf_gr.answering.recommender import Recommender
from hf_gr.offline.prompts import Request
from hf_gr.offline.settings import TOKEN_BUDGET, WINDOW_ROWS
from hf_gr.training import DraftHeadTrainer, InteractionDataset

SCORE_TOL = 1e-3  # fp32: sums of 4 log-probabilities, in batches of different sizes and paddings
FIXED_BATCHES = (16, 32, 64, 128)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ON_CPUS = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def make_model(ids: hf_gr.SemanticIds, *, hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    return hf_gr.enable(Qwen3ForCausalLM(Qwen3Config(vocab_size=ids.vocab_size, **sizes, **heads))).eval()


def compare(ids: hf_gr.SemanticIds, users: list[list[int]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both ways, by batch size."""
    model = make_model(ids, hidden=arguments.hidden, layers=arguments.layers).to(arguments.device)
    index = copy.copy(ids.constraint_index())
    decoder = Recommender(model, index, num_results=10, num_beams=20, token_budget=arguments.token_budget)
    requests = [Request(row, ids.encode(history)) for row, history in enumerate(users)]
    windows = [requests[start : start + WINDOW_ROWS] for start in range(0, len(requests), WINDOW_ROWS)]

    def by_budget() -> list[Any]:
        return [answer for window in windows for answer in decoder.answer_all(window)]

    def in_file_order(size: int) -> list[Any]:
        return [a for at in range(0, len(requests), size) for a in decoder.answer(requests[at : at + size])]

    ways: dict[str, Any] = {"token budget": by_budget}
    ways |= {f"fixed, {size}": lambda size=size: in_file_order(size) for size in FIXED_BATCHES}
    expected = by_budget()
    for size in FIXED_BATCHES:
        found = in_file_order(size)  # warms up, too
        for one, other in zip(expected, found, strict=True):
            assert np.allclose(one.scores, other.scores, atol=SCORE_TOL, rtol=0), "the two ways answer differently"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    lengths = [len(request.tokens) for request in requests]
    ahead = 20 * (index.max_length - 1)
    shares = {"token budget": 0.0}
    batches = {"token budget": [[w[i] for i in batch] for w in windows for batch in decoder.batches(w)]}
    for size in FIXED_BATCHES:
        batches[f"fixed, {size}"] = [requests[at : at + size] for at in range(0, len(requests), size)]
    for name, of_way in batches.items():
        cost = sum(len(batch) * (max(len(request.tokens) for request in batch) + ahead) for batch in of_way)
        shares[name] = 1 - (sum(lengths) + ahead * len(lengths)) / cost
    best = min(value for name, value in medians.items() if name != "token budget")
    mean = statistics.fmean(lengths)
    print(f"{len(users):,} users, prompts of {min(lengths)} to {max(lengths)} tokens, {mean:.0f} on average")
    rows = [
        [
            name,
            str(len(batches[name])),
            f"{shares[name]:.0%}",
            f"{value:.2f}",
            f"{value / medians['token budget']:.2f}",
        ]
        for name, value in medians.items()
    ]
    print_table(["batches", "number", "padding", "seconds", "/ token budget"], rows)
    print(f"the best fixed size takes {best / medians['token budget']:.2f} times as long as the token budget")
    return {"seconds": medians, "padding": shares, "ratio": best / medians["token budget"]}


def measure_memory(ids: hf_gr.SemanticIds, users: list[list[int]], sizes: list[int]) -> dict[str, Any]:
    """Peak memory of a process that recommends to this many users."""
    peaks: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_recommender(ids, folder)
        for size in sizes:
            write_users(users, size, folder)
            command = [sys.executable, __file__, "--one-run", str(folder / f"{size}.parquet")]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds, peak = map(float, done.stdout.split()[-2:])
            peaks[size] = peak
            print(f"{size:,} users: {seconds:.1f} s, peak {peak:.0f} MB", flush=True)
    first, last = peaks[sizes[0]], peaks[sizes[-1]]
    print(f"{sizes[-1] / sizes[0]:.0f} times as many users take {last / first - 1:+.1%} memory")
    return {"peak_mb": peaks, "growth": last / first - 1}


def save_recommender(ids: hf_gr.SemanticIds, folder: Path) -> None:
    make_model(ids, hidden=32, layers=1).save_pretrained(folder / "model")
    ids.constraint_index().save_pretrained(folder / "index")


def write_users(users: list[list[int]], size: int, folder: Path) -> None:
    """A table of this many users, repeated where there are fewer."""
    with pq.ParquetWriter(folder / "users.parquet", pa.schema([("items", pa.list_(pa.int64()))])) as writer:
        for start in range(0, size, 10_000):
            rows = [users[row % len(users)] for row in range(start, min(start + 10_000, size))]
            writer.write_table(pa.table({"items": rows}, schema=writer.schema))


def one_run(output: Path, window_rows: int) -> None:
    start = time.perf_counter()
    folder = output.parent
    names = {"constraint_index": folder / "index", "history": "items", "window_rows": window_rows}
    hf_gr.recommend(folder / "model", folder / "users.parquet", output, **names)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(time.perf_counter() - start, peak)


def check_kills(ids: hf_gr.SemanticIds, users: list[list[int]], size: int, *, seed: int) -> dict[str, Any]:
    """Fail unless one process, two, and two that are killed three times and resumed write the same file."""
    chance, window_rows = random.Random(seed), max(8, size // 50)
    environment = os.environ | ON_CPUS

    def start(output: Path, launcher: list[str]) -> subprocess.Popen[bytes]:
        mine = [__file__, "--one-run", str(output), "--window-rows", str(window_rows)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, *launcher, *mine], env=environment, **quiet)

    def finished(output: Path) -> int:
        return len(list(output.with_name(output.name + ".parts").glob("part-*.parquet")))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_recommender(ids, folder)
        write_users(users, size, folder)
        one, two, killed = (folder / f"{name}.parquet" for name in ("one", "two", "killed"))
        seconds = {}
        for output, launcher in ((one, []), (two, TORCHRUN)):
            begun = time.perf_counter()
            assert start(output, launcher).wait() == 0, f"{output.stem}: the run has failed"
            seconds[output.stem] = time.perf_counter() - begun
            print(f"{output.stem}: {size:,} users in {seconds[output.stem]:.1f} s with loading", flush=True)
        kept = []
        for _ in range(3):
            process = start(killed, TORCHRUN)
            enough = finished(killed) + chance.randint(1, size // window_rows // 4)
            while process.poll() is None and finished(killed) < enough:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.1))
            # Workers are in their own sessions and outlive their launcher.
            for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                member.kill()
            process.wait()
            kept.append(finished(killed))
            assert not killed.exists(), "the run was over before it was killed: take more users"
            print(f"killed with {kept[-1]} of {-(-size // window_rows)} windows finished", flush=True)
        assert start(killed, TORCHRUN).wait() == 0, "the run could not resume"
        assert one.read_bytes() == two.read_bytes(), "two processes wrote a different file than one"
        assert one.read_bytes() == killed.read_bytes(), "the killed run wrote a different file"
        rows = pq.read_table(killed).column("row").to_pylist()
        assert rows == list(range(size)), "rows are lost or duplicated"
        print(f"the same {one.stat().st_size:,} bytes from one process, two, and two killed three times", flush=True)
    return {"users": size, "seed": seed, "windows_kept": kept, "seconds_of_one_and_two": list(seconds.values())}


def check_ends(count: int, *, forked: bool) -> dict[str, Any]:
    """Fail unless all runs and all trainings of two processes exit with 0.

    Args:
        count: runs, and trainings.
        forked: fork both processes from this one, which has the libraries, instead of starting a launcher: seconds
            instead of a minute. They end as any other.
    """
    draw = np.random.default_rng(0)
    ids = hf_gr.SemanticIds(draw.integers(0, 16, size=(200, 3)), level_sizes=[16] * 3, offset=3)
    folder = Path(tempfile.mkdtemp())  # no context: a forked process would leave it, and remove the folder
    save_recommender(ids, folder)
    write_users(draw.integers(0, 200, size=(300, 5)).tolist(), 300, folder)
    names = {"model": "model", "index": "index", "input": "users.parquet", "output": "answers.parquet"}
    run = ["-m", "hf_gr.cli", "recommend", "--history", "items", "--window-rows", "32", "--overwrite"]
    run += [text for option, name in names.items() for text in (f"--{option}", str(folder / name))]
    commands = {"recommend": run, "training": [__file__, "--one-training", str(folder)]}
    codes = {kind: Counter[int]() for kind in commands}
    begun = time.perf_counter()
    for number in range(1, count + 1):
        for kind, command in commands.items():
            (folder / "answers.parquet").unlink(missing_ok=True)  # another run would have nothing to do
            with (folder / "said").open("w+") as said:
                if forked:
                    ended = fork_pair(command, said.fileno())
                else:
                    whole, pipes = [sys.executable, *TORCHRUN, *command], {"stdout": said, "stderr": said}
                    ended = [subprocess.run(whole, env=os.environ | ON_CPUS, **pipes).returncode]
                codes[kind].update(ended)
                if any(ended):
                    said.seek(0)
                    print(f"{kind} {number}: exit codes {ended}\n{said.read()}", flush=True)
        if number % 5 == 0:
            told = ", ".join(f"{kind} {dict(counted)}" for kind, counted in codes.items())
            print(f"{number} of each in {time.perf_counter() - begun:.0f} s, exit codes: {told}", flush=True)
    shutil.rmtree(folder)
    assert all(set(counted) == {0} for counted in codes.values()), f"a run has failed: {codes}"
    return {"forked": forked, "exit_codes": {kind: dict(counted) for kind, counted in codes.items()}}


def fork_pair(command: list[str], said: int) -> list[int]:
    """The exit codes of two processes that run a command as if a launcher had started them."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ |= ON_CPUS | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {
                f"{local}{name}": value
                for local in ("", "LOCAL_")
                for name, value in (("RANK", str(rank)), ("WORLD_SIZE", "2"))
            }
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.argv = command[1:] if command[0] == "-m" else command
            cli.main() if command[0] == "-m" else one_training(Path(command[-1]))
            sys.exit()  # all the way up: the interpreter ends as it does
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def one_training(folder: Path) -> None:
    """A few steps of a draft head, in each of several processes."""
    model = hf_gr.AutoModelForGenerativeRetrieval.from_pretrained(folder / "model")
    codebooks = [list(range(first, first + 16)) for first in (3, 19, 35)]
    torch.manual_seed(0)  # the same head in all processes
    model.add_draft_head(codebooks)
    labels = [[codes[row % 16] for codes in codebooks] for row in range(32)]
    arguments = {"max_steps": 3, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    trainer = DraftHeadTrainer(
        model=model,
        args=TrainingArguments(str(folder / "training"), save_strategy="no", disable_tqdm=True, **arguments),
        train_dataset=InteractionDataset(labels, labels=labels),
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the Beauty data")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--users", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=TOKEN_BUDGET)
    parser.add_argument("--memory", action="store_true", help="peak memory instead, of 10,000 and 200,000 users")
    parser.add_argument("--check", action="store_true", help="two processes, killed and resumed, against one instead")
    parser.add_argument("--ends", type=int, help="exit codes of so many runs and trainings of two processes instead")
    parser.add_argument("--forked", action="store_true", help="with --ends: fork them, which is quick")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of --check")
    parser.add_argument("--fast", action="store_true", help="seconds, not minutes: few users, no claim")
    parser.add_argument("--one-run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one-training", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--window-rows", type=int, default=WINDOW_ROWS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_run is not None:
        return one_run(arguments.one_run, arguments.window_rows)
    if arguments.one_training is not None:
        return one_training(arguments.one_training)
    if arguments.ends is not None:
        return print_json_line(
            "ends of processes", arguments.device, check_ends(arguments.ends, forked=arguments.forked)
        )
    if not is_there(arguments.data, fast=arguments.fast):
        return None
    item_ids, codes = read_items(arguments.data)
    ids = hf_gr.SemanticIds(codes, item_ids=item_ids, offset=3)
    users = [user["train"] for user in read_users(arguments.data) if user["train"]]
    if arguments.fast:
        arguments.users, arguments.repeats = 128, 1
    results: dict[str, Any] = {}
    if arguments.check:
        results |= check_kills(ids, users, 2_000 if arguments.fast else 10_000, seed=arguments.seed)
    elif arguments.memory or arguments.fast:
        results |= measure_memory(ids, users, [500, 2_000] if arguments.fast else [10_000, 200_000])
    if not (arguments.memory or arguments.check):
        results |= compare(ids, users[: arguments.users], arguments)
    print_json_line("recommend", arguments.device, results)
    return None


if __name__ == "__main__":
    main()
