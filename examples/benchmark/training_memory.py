# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory that training takes: alone, in two processes with whole copies (DDP), in two with pieces (FSDP2).

    python examples/benchmark/training_memory.py          # some minutes on two cores, CPUs only
    python examples/benchmark/training_memory.py --fast   # a tiny model, one process

Prints the peak of a process (the largest of several) above what it had after making the model, in MiB. Accelerate
leaves FSDP out on CPUs: where it decides that, these processes pretend to be those of another device.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import print_json_line, print_table

WAYS = {"alone": 1, "ddp": 2, "fsdp": 2}
TRAINERS = ("train_recommender", "AtSpeedTrainer")
RESULT = "result: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a tiny model, one process")
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "TRAINER", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        train(*args.one, hidden_size=args.hidden_size, layers=args.layers, steps=args.steps)
        return
    if args.fast:
        args.hidden_size, args.layers = 32, 1
    ways = ["alone"] if args.fast else list(WAYS)
    rows, parameters = [], 0
    for trainer in TRAINERS[: 1 if args.fast else None]:
        peaks = {}
        for way in ways:
            found = measure(way, trainer, args)
            peaks[way] = max(one["peak_mib"] for one in found)
            parameters = found[0]["parameters"]
        rows.append([trainer, *(f"{peak:,}" for peak in peaks.values())])
    print(f"{parameters / 1e6:.1f} M parameters, fp32, batch 1 a process, {args.steps} steps; MiB above the model")
    print_table(["", *(f"{way}, {WAYS[way]} process{'es' * (WAYS[way] > 1)}" for way in ways)], rows)
    print_json_line("training_memory", torch.device("cpu"), {"parameters": parameters, "ways": ways, "rows": rows})


def measure(way: str, trainer: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process of a run printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WAYS[way])] * (WAYS[way] > 1)
    sizes = ["--hidden-size", args.hidden_size, "--layers", args.layers, "--steps", args.steps]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, __file__, *map(str, sizes), "--one", way, trainer, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Two processes may write into one line.
    found = [json.JSONDecoder().raw_decode(result)[0] for result in done.stdout.split(RESULT)[1:]]
    if done.returncode or len(found) != WAYS[way] or any(one["is_fsdp"] != (way == "fsdp") for one in found):
        raise SystemExit(f"{way}, {trainer}: exit code {done.returncode}, {found}\n{done.stderr[-2000:]}")
    return found


def train(way: str, trainer: str, folder: str, *, hidden_size: int, layers: int, steps: int) -> None:
    """One process: make a model, train it some steps, and print the peak in between."""
    import numpy as np
    from transformers import TrainerCallback, TrainingArguments

    from hf_gr import SemanticIds
    from hf_gr.training import AtSpeedTrainer, TeacherDataset, small_recommender, train_recommender, write_teacher_data

    if way == "fsdp":
        pretend()

    class Seen(TrainerCallback):
        is_fsdp = False

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.is_fsdp = type(model).__name__.startswith("FSDP")

    draw, seen = np.random.default_rng(0), Seen()
    ids = SemanticIds(draw.integers(0, 256, (2_000, 4)), level_sizes=[256] * 4)
    histories = [draw.integers(0, 2_000, 11).tolist() for _ in range(64)]
    model = small_recommender(ids, hidden_size=hidden_size, num_hidden_layers=layers)
    parameters = sum(weight.numel() for weight in model.parameters())
    how: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    if way == "fsdp":
        how |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}
    before = peak_mib()
    if trainer == "train_recommender":
        train_recommender(histories, ids, model=model, output_dir=folder, callbacks=[seen], progress=False, **how)
    else:
        index, teacher = ids.constraint_index(), Path(folder, "teacher")
        target = small_recommender(ids, hidden_size=32, num_hidden_layers=1).eval()
        prompts, labels = ([ids.encode(row[part]) for row in histories] for part in (slice(-1), slice(-1, None)))
        write_teacher_data(target, prompts, index, teacher, num_beams=4, labels=labels)
        AtSpeedTrainer(
            model=model,
            args=TrainingArguments(str(Path(folder, "draft")), **how),
            train_dataset=TeacherDataset(teacher),
            constraint_index=index,
            callbacks=[seen],
        ).train()
    found = {"peak_mib": peak_mib() - before, "parameters": parameters, "is_fsdp": seen.is_fsdp}
    print(RESULT + json.dumps(found), flush=True)


def pretend() -> None:
    """Where Accelerate decides whether to use FSDP, these are processes of another device."""
    import accelerate.state
    from accelerate.utils import DistributedType

    original = accelerate.state.PartialState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    accelerate.state.PartialState.__init__ = init


def peak_mib() -> int:
    """The largest resident set of this process so far; kilobytes on Linux, bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**10 if sys.platform == "linux" else 2**20)


if __name__ == "__main__":
    main()
