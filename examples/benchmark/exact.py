# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`exact=True` beside beam search: who finds the true list of the catalogue, for how many nodes, forwards and seconds?

Two backbones each of Amazon Beauty and MovieLens (`backbone_data`): as large as that of `backbone.py` and smaller,
trained for a quarter of its steps. A call has one user's history, the same users for all. Contenders take turns; times
are medians of ratios of CPU seconds, by 50 beams that return ten items.

- forwards: of the model, with the prompt's own; nodes: prefixes that were scored, drafted ones and the root included;
- true: percent of lists of 1, 10, 50 items that are the best of the catalogue, up to items of equal scores;
- proven: percent of lists of ten that a search proves (`num_proven`).

Also a million random items of the same tokens, for fewer users; and the worst case: random weights, flat scores. True
lists come from an exact search with many nodes; of some users of every trained model they are compared with brute
force, transformers' own forward over all items. A proven list that is not the true one ends the program.

    python examples/benchmark/exact.py            # trains what is not there: 6 minutes of one core; then 10
    python examples/benchmark/exact.py --fast     # seconds: the method, not the numbers
"""

import argparse
import copy
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import STUDIES, Study, has_study, read_study
from backbone_models import backbone_folder, load, max_items, recipe_of, train, trained_once
from report import print_json_line, print_table

from hf_gr import ConstraintIndex
from hf_gr.files.cache import cache_folder
from hf_gr.training import small_recommender

SIZES = {"small": {"hidden_size": 64, "num_hidden_layers": 2}, "large": {"hidden_size": 128, "num_hidden_layers": 3}}
TRAINING = {"max_steps": 400, "eval_steps": 200, "learning_rate": 2e-3}
BEAMS = (10, 20, 50, 100, 128, 256, 512)
LISTS = (1, 10, 50)
WIDTHS = {1: (32,), 10: (16, 32, 64), 50: (64,)}  # nodes a forward of exact search
REFERENCE = "50 beams, ten items"  # by whose seconds all others are divided
EXACT = "exact 10, 32 and drafts"
ENOUGH, OF_RANDOM = 8_000, 1_000  # nodes for the true list, and of random items
SCORE_TOL = 1e-3  # fp32 sums of 4 log-probabilities; attention may add in another order


@dataclass(frozen=True)
class Bench:
    """A model, its catalogue, and the users who are asked for."""

    name: str
    model: Any
    index: ConstraintIndex
    tokens: np.ndarray  # `[N, L]`, of the catalogue's items
    prompts: list[torch.Tensor]
    targets: list[tuple[int, ...]]  # what each user took next; nobody's of random items

    def ask(self, prompt: torch.Tensor, **options: Any) -> Any:
        """One answer, with scores."""
        how: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 0.0}  # sums
        return self.model.generate(prompt, constraint_index=self.index, **how, **options)


def contenders() -> dict[str, dict[str, Any]]:
    """What is passed to `generate` besides the rest."""
    asked: dict[str, dict[str, Any]] = {REFERENCE: {"num_beams": 50, "num_return_sequences": LISTS[1]}}
    asked |= {f"{n} beams": {"num_beams": n, "num_return_sequences": min(n, LISTS[-1])} for n in BEAMS}
    for number in LISTS:
        for width in WIDTHS[number]:
            how = {"exact": True, "num_beams": width, "num_return_sequences": number}
            asked[f"exact {number}, {width} a forward"] = how
            asked[f"exact {number}, {width} and drafts"] = how | {"drafting": "trie"}
    return asked


def trained(study: Study, size: str, options: argparse.Namespace) -> Path:
    """The folder of a model, trained if it is not there."""
    if options.fast:
        return backbone_folder(study, options.work, fast=True)
    training = TRAINING | {"per_device_train_batch_size": recipe_of(study)["training"]["per_device_train_batch_size"]}
    recipe = {"max_items": max_items(study), "model": SIZES[size], "training": training}
    name = f"exact-{study.name}"
    return trained_once(name, study, recipe, options.work, lambda folder: train(study, recipe, folder))


def bench_of(study: Study, size: str, options: argparse.Namespace) -> Bench:
    """A trained backbone, with users drawn from all."""
    model = load(trained(study, size, options))
    rows = [study.test[n] for n in np.random.default_rng(1).permutation(len(study.test))[: options.users]]
    histories = [row.history[-max_items(study, options.fast) :] for row in rows]
    prompts = [torch.tensor(study.tokens[history].reshape(1, -1)) for history in histories]
    targets = [tuple(study.tokens[row.item].tolist()) for row in rows]
    name = f"{study.name}, {model.num_parameters() / 1e6:.2f} M"
    return Bench(name, model, study.index, study.tokens, prompts, targets)


def with_random_items(bench: Bench, number: int, users: int) -> Bench:
    """The same model over a catalogue of random items of the same tokens."""
    first, last = bench.tokens.min(axis=0), bench.tokens.max(axis=0) + 1
    rows = np.unique(np.random.default_rng(0).integers(first, last, size=(number, len(first))), axis=0)
    name = f"{len(rows) / 1e6:.2g} M random items"
    return Bench(name, bench.model, ConstraintIndex.from_sequences(rows), rows, bench.prompts[:users], [()] * users)


@torch.no_grad()
def brute_force(bench: Bench, prompt: torch.Tensor, *, chunk: int = 512) -> np.ndarray:
    """The scores of all items, by transformers' forward alone; no trie and no search of ours."""
    plain: Any = super(type(bench.model), bench.model)
    forward = plain.forward
    given = forward(input_ids=prompt, use_cache=True, logits_to_keep=1)
    first, found = given.logits[0, -1:].log_softmax(-1), []
    beginnings, which = np.unique(bench.tokens[:, :-1], axis=0, return_inverse=True)
    tokens, places = torch.tensor(beginnings), torch.tensor(which).flatten()
    for part in torch.arange(len(tokens)).split(chunk):
        cache = copy.deepcopy(given.past_key_values)
        cache.batch_repeat_interleave(len(part))
        logits = forward(input_ids=tokens[part], past_key_values=cache, use_cache=True).logits.log_softmax(-1)
        steps = torch.cat([first.expand(len(part), 1, -1), logits[:, :-1]], dim=1)
        known = steps.gather(-1, tokens[part][..., None])[..., 0].sum(-1, keepdim=True)
        found.append(known + logits[:, -1])
    return torch.cat(found)[places, torch.tensor(bench.tokens[:, -1])].numpy()


def same(scores: np.ndarray, true: np.ndarray) -> bool:
    """Whether these are the scores of the true list."""
    return len(scores) == len(true) and bool(np.allclose(scores, true, atol=SCORE_TOL, rtol=0))


def true_lists(bench: Bench, *, checked: int) -> list[np.ndarray]:
    """The proven scores of every user's best items; of the first users, compared with brute force."""
    found, enough = [], {"num_beams": 64, "max_nodes": ENOUGH if checked else OF_RANDOM}
    for number, prompt in enumerate(bench.prompts):
        out = bench.ask(prompt, exact=True, num_return_sequences=max(LISTS), **enough)
        found.append(out.sequences_scores.numpy()[: int(out.num_proven)])
        if number < checked:
            every, rows = brute_force(bench, prompt), out.sequences[:, prompt.shape[1] :].numpy()
            own = every[[(bench.tokens == row).all(axis=1).argmax() for row in rows]]
            if not (same(found[-1], own) and same(found[-1], np.sort(every)[::-1][: len(rows)])):
                raise SystemExit(f"{bench.name}, user {number}: exact search does not find what brute force finds")
    return found


def measure(bench: Bench, *, checked: int) -> dict[str, Any]:
    """Means over users of every contender; ends the program where a proven list is not the true one."""
    true = true_lists(bench, checked=checked)
    asked = contenders()
    widths = [len(np.unique(bench.tokens[:, :level], axis=0)) for level in range(1, bench.tokens.shape[1])]
    seen: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in asked}
    bench.ask(bench.prompts[0], **asked[REFERENCE])
    for number, (prompt, target) in enumerate(zip(bench.prompts, bench.targets, strict=True)):
        order = list(asked)[number % len(asked) :] + list(asked)[: number % len(asked)]
        for name in order if number % 2 else reversed(order):
            how = asked[name]
            start = time.process_time()
            out = bench.ask(prompt, **how)
            seen[name]["seconds"].append(time.process_time() - start)
            rows, scores = out.sequences[:, prompt.shape[1] :].tolist(), out.sequences_scores.numpy()
            proven, counts, known = int(out.num_proven), out.speculation, true[number]
            if not same(scores[:proven][: len(known)], known[:proven]):
                raise SystemExit(f"{bench.name}, user {number}: {name} calls a list proven that is not the true one")
            of_beams = sum(min(how["num_beams"], width) for width in widths)
            nodes = of_beams if counts.num_nodes is None else int(counts.num_nodes + counts.drafted_nodes)
            seen[name]["nodes"].append(1 + nodes)
            seen[name]["forwards"].append(1 + counts.target_forwards)
            rank = next((place for place, row in enumerate(rows) if tuple(row) == target), np.inf)
            for size in (size for size in LISTS if size <= len(rows)):
                if size <= len(known):
                    seen[name][f"true {size}"].append(same(scores[:size], known[:size]))
                seen[name][f"proven {size}"].append(proven >= size)
                seen[name][f"recall {size}"].append(rank < size)
            seen[name]["ndcg 10"].append(1 / np.log2(rank + 2) if rank < 10 else 0.0)
    found: dict[str, Any] = {"bench": bench.name, "users": len(true), "widths": [*widths, len(bench.tokens)]}
    found["known"] = sum(len(known) == LISTS[-1] for known in true)  # lists whose truth is known
    for name, values in seen.items():
        means = {key: float(np.mean(value)) for key, value in values.items() if key != "seconds"}
        found[name] = means | {"ms": 1e3 * statistics.median(values["seconds"])}
        found[name]["ratio"] = statistics.median(np.divide(values["seconds"], seen[REFERENCE]["seconds"]).tolist())
    return found


def run(task: tuple[str, str, int], options: argparse.Namespace) -> dict[str, Any]:
    """One model with its catalogue, or with random items."""
    torch.set_num_threads(1)  # a second thread hardly helps models this small
    name, size, random_items = task
    bench = bench_of(read_study(name, options.fast), size, options)
    if random_items:
        return measure(with_random_items(bench, random_items, max(options.users // 4, 1)), checked=0)
    return measure(bench, checked=options.checked)


def worst_case(study: Study, options: argparse.Namespace) -> dict[str, float]:
    """Random weights: what the default budget of nodes proves, and whose list of ten is better by its mean score."""
    bench = Bench("worst case", small_recommender(study.ids).eval(), study.index, study.tokens, [], [])
    found = []
    for row in study.test[: options.users]:
        prompt = torch.tensor(study.tokens[row.history[-8:]].reshape(1, -1))
        exact = bench.ask(prompt, exact=True, num_return_sequences=LISTS[1])
        beams = bench.ask(prompt, num_beams=50, num_return_sequences=LISTS[1])
        more = (exact.sequences_scores - beams.sequences_scores).mean()
        counts = exact.speculation.num_nodes, 1 + exact.speculation.target_forwards
        found.append([float(value) for value in (*counts, exact.num_proven, beams.num_proven, more)])
    names = ("nodes", "forwards", "of ten proven", "by 50 beams", "in mean score above 50 beams")
    return dict(zip(names, np.mean(found, axis=0).tolist(), strict=True))


def show(results: list[dict[str, Any]], names: list[str]) -> None:
    """A table of costs and true lists, and one of what the lists are worth."""

    def cell(values: dict[str, float]) -> str:
        true = "/".join(f"{100 * values[key]:.0f}" for key in (f"true {n}" for n in LISTS) if key in values)
        true = f"{true}%" if true else "unknown"
        return f"{values['forwards']:.1f}  {values['nodes']:.0f}  {values['ratio']:.2f}  {true}"

    def worth(values: dict[str, float]) -> str:
        return ", ".join(f"{100 * values[key]:.1f}" for key in ("proven 10", "recall 10", "ndcg 10"))

    benches = [found["bench"] for found in results]
    shown = [name for name in names if name != REFERENCE]
    rows = [[name, *(cell(found[name]) for found in results)] for name in shown]
    print_table(["forwards, nodes, / 50 beams, true", *benches], rows)
    shown = [name for name in shown if name in ("10 beams", "20 beams", "50 beams", "512 beams", EXACT)]
    rows = [[name, *(worth(found[name]) for found in results)] for name in shown]
    print_table(["percent: proven, recall@10, NDCG@10", *benches], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, each in a process of one thread")
    parser.add_argument("--users", type=int, help="100; 2 with --fast")
    parser.add_argument("--checked", type=int, help="users whose lists are held to brute force: 20; 1 with --fast")
    parser.add_argument("--random-items", type=int, help="1,000,000; 5,000 with --fast; 0 for none")
    parser.add_argument("--work", type=Path, default=cache_folder("experiments"), help="where models are")
    parser.add_argument("--fast", action="store_true", help="few users and items, hardly trained")
    options = parser.parse_args(arguments)
    for name, full, fast in (("users", 100, 2), ("checked", 20, 1), ("random_items", 1_000_000, 5_000)):
        if getattr(options, name) is None:
            setattr(options, name, fast if options.fast else full)
    known = [name for name in STUDIES if has_study(name)]  # MovieLens always is
    tasks = [(name, size, 0) for name in known for size in list(SIZES)[options.fast :]]
    tasks += [(known[0], "large", options.random_items)] if options.random_items else []
    for name, size, _ in tasks:
        trained(read_study(name, options.fast), size, options)  # here: two processes may want the same model
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        results = list(pool.map(run, tasks, [options] * len(tasks)))
    show(results, list(contenders()))
    worst = worst_case(read_study(known[0], options.fast), options)
    print(f"random weights, {known[0]}: {', '.join(f'{value:.3g} {name}' for name, value in worst.items())}")
    print_json_line("exact", torch.device("cpu"), {"checked": options.checked, "results": results, "worst": worst})


if __name__ == "__main__":
    main()
