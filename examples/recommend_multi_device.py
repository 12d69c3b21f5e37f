# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations for a table of users on all devices of a machine. Copy the lines of `main`.

    accelerate launch examples/recommend_multi_device.py --model me/recommender --index me/catalogue \
        --users users.parquet --history items --output recs.parquet

    python examples/recommend_multi_device.py --fast    # one process and two on the CPU, with a tiny random model

Every process has the model and takes every N-th window of users; the first one merges what all have written. After a
kill, the same command resumes where it stopped. `--device-map auto` instead spreads one model that is larger than a
device over all of them: start it with `python`, as one process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from accelerate import PartialState

import hf_gr


def main(arguments: argparse.Namespace) -> None:
    made = hf_gr.recommend(
        arguments.model,
        arguments.users,
        arguments.output,
        constraint_index=arguments.index,
        history=arguments.history,
        exclude=arguments.history,  # nothing that the user already has
        top_k=10,
        num_beams=20,
        device_map=arguments.device_map,
    )
    state = PartialState()
    if state.is_main_process:
        print(f"{made.num_rows:,} users in {made.output}, number of processes: {state.num_processes}")


def run_fast() -> None:
    """One process and two write the same file."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import Qwen3Config, Qwen3ForCausalLM

    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = hf_gr.SemanticIds(draw.integers(0, 16, size=(500, 3)), level_sizes=[16] * 3, offset=3)
        ids.constraint_index().save_pretrained(folder / "catalogue")
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        config = Qwen3Config(vocab_size=ids.vocab_size, **size, **heads)
        Qwen3ForCausalLM(config).save_pretrained(folder / "recommender")
        histories = [draw.integers(0, 500, size=draw.integers(1, 20)).tolist() for _ in range(3_000)]
        pq.write_table(pa.table({"items": histories}), folder / "users.parquet")
        outputs = [folder / "one.parquet", folder / "two.parquet"]
        # On CPUs `accelerate launch --cpu --num_processes N script.py` runs the script once, whatever N is (Accelerate
        # 1.15, `simple_launcher`): it leaves N processes to mpirun, and the flag of its own multi-process launcher,
        # --multi_gpu, excludes --cpu. So here it launches torch's launcher, which it also uses itself.
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        for number, output, command in zip((1, 2), outputs, ([sys.executable], launch), strict=True):
            options = {
                "model": folder / "recommender",
                "index": folder / "catalogue",
                "users": folder / "users.parquet",
            }
            options |= {"history": "items", "output": output}
            given = [text for option, value in options.items() for text in (f"--{option}", str(value))]
            settings = {**os.environ, "OMP_NUM_THREADS": "1"}
            whole = [*command, __file__, *given]
            done = subprocess.run(whole, check=True, env=settings, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="")
            assert f"number of processes: {number}" in done.stdout, "the number of processes is wrong"
        assert outputs[0].read_bytes() == outputs[1].read_bytes(), "two processes wrote a different file than one"
        print("one process and two wrote the same file")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help="try it on the CPU, with a tiny random model")
    for option in ("model", "index", "users", "history", "output", "device-map"):
        parser.add_argument(f"--{option}")
    given = parser.parse_args()
    if given.fast:
        run_fast()
    else:
        main(given)
