# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations inside a pipeline of Ray Data. Copy the class.

    python examples/ray_data.py --model me/recommender --index me/catalogue --users users.parquet --output recs
    python examples/ray_data.py --fast    # a tiny random model; compares with hf_gr.recommend

Where the users are a file and the answers too, `hf_gr.recommend` does the same with an exact resume after a kill, the
rows in order, and errors by row. Ray Data is for pipelines that have other steps before and after.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hf_gr
from hf_gr.answering.loading import load_index
from hf_gr.answering.recommender import Recommender
from hf_gr.answering.torch_models import load_model

try:
    import ray
except ImportError:
    print('skipped: this example needs Ray: pip install "hf-gr[ray]"')
    raise SystemExit(0) from None


class Recommend:
    """For `map_batches`: from a column of histories to the columns `items` and `scores`, as `hf_gr.recommend`."""

    def __init__(
        self, model: str, index: str, *, history: str = "items", num_results: int = 10, num_beams: int = 20
    ) -> None:
        loaded = load_model(model)
        catalogue = load_index(hf_gr.ConstraintIndex.from_pretrained(index), loaded)
        self.recommender = Recommender(
            loaded, catalogue, num_results=num_results, num_beams=num_beams, unknown_items="refuse"
        )
        self.history = history

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        requests = [self.recommender.read(history=items, exclude=items) for items in batch[self.history]]
        answers = self.recommender.answer_all(requests)
        return batch | {"items": [one.items for one in answers], "scores": [one.scores for one in answers]}


def main(arguments: argparse.Namespace) -> None:
    users = ray.data.read_parquet(arguments.users)
    recommended = users.map_batches(
        Recommend,
        fn_constructor_args=(str(arguments.model), str(arguments.index)),
        fn_constructor_kwargs={"history": arguments.history},
        batch_size=1_024,  # users; the decoder divides them by length
        compute=ray.data.ActorPoolStrategy(size=arguments.workers),
        num_cpus=0 if arguments.gpus else 1,
        num_gpus=arguments.gpus or None,
    )
    recommended.write_parquet(str(arguments.output))


def run_fast() -> None:
    """The same answers as by `hf_gr.recommend`."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import Qwen3Config, Qwen3ForCausalLM

    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = hf_gr.SemanticIds(draw.integers(0, 16, size=(500, 3)), level_sizes=[16] * 3, offset=3)
        ids.constraint_index().save_pretrained(folder / "catalogue")
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        Qwen3ForCausalLM(Qwen3Config(vocab_size=ids.vocab_size, **size, **heads)).save_pretrained(folder / "model")
        histories = [draw.integers(0, 500, size=draw.integers(1, 20)).tolist() for _ in range(200)]
        table = pa.table({"user": list(range(200)), "history": histories})
        pq.write_table(table, folder / "users.parquet")
        paths = {"model": folder / "model", "index": folder / "catalogue", "users": folder / "users.parquet"}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        main(argparse.Namespace(**paths, output=folder / "recs", history="history", workers=1, gpus=0))
        ray.shutdown()
        expected = hf_gr.recommend(
            folder / "model",
            folder / "users.parquet",
            folder / "expected.parquet",
            constraint_index=folder / "catalogue",
            history="history",
            exclude="history",
            user="user",
            num_beams=20,
            top_k=10,
        )
        made = pq.read_table(folder / "recs").sort_by("user")
        wanted = pq.read_table(expected.output)
        if made["items"].to_pylist() != wanted["items"].to_pylist():
            raise SystemExit("Ray Data's items differ from recommend's")
        difference = np.abs(np.array(made["scores"].to_pylist()) - np.array(wanted["scores"].to_pylist())).max()
        if difference > 1e-4:  # other batches, other padding
            raise SystemExit(f"Ray Data's scores differ by {difference:.1e} from recommend's")
        print(f"{len(made)} users: the same items as hf_gr.recommend, scores within {difference:.1e}")


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--index")
    parser.add_argument("--users")
    parser.add_argument("--output", default="recs")
    parser.add_argument("--history", default="items")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each worker; 0.5: two share one")
    parser.add_argument("--fast", action="store_true")
    given = parser.parse_args()
    if given.fast:
        run_fast()
    elif None in (given.model, given.index, given.users):
        parser.error("--model, --index and --users, or --fast")
    else:
        main(given)
