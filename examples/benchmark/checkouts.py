# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Two checkouts of hf_gr against each other: the same calls, in turns, one process each.

No ratio is printed unless both give the same items with the same scores. Each call is made by both, one after the
other and in changing order, so that a busy machine slows both alike; the figure is the median of their ratios.

    git worktree add /tmp/before COMMIT
    python examples/benchmark/checkouts.py /tmp/before                        # this checkout against that one
    python examples/benchmark/checkouts.py /tmp/before --settings 1,2048,128  # batch, prompt, beams
    python examples/benchmark/checkouts.py --fast                             # this one against itself, tiny
    python examples/benchmark/checkouts.py /tmp/before --cases 500            # answers alone, of random calls

The random calls are those of `tests/fuzz`: families, catalogues, rules, updates, drafts. A call that one of both
refuses is counted by its error. A ratio of 0.9 means that this checkout takes nine tenths of the other one's time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generate import FAST, FAST_SETTINGS, METAVAR, SHAPE, Setting, beam_options, make_bench, make_prompt
from report import print_json_line, print_table

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("1,512,128", "4,256,50", "1,2048,128", "1,1024,512")
SCORE_TOL = 1e-3  # fp32 sums of 4 log-probabilities; attention may add in another order


class Contender:
    """A process that imports hf_gr from a checkout and answers calls, one a line.

    Args:
        checkout: its folder.
        arguments: of this script, which the process gets, too.
    """

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        self.checkout = checkout
        command = [sys.executable, __file__, "--serve", *arguments]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        found = Path(self.ask("file"))
        if checkout.resolve() not in found.resolve().parents:
            raise SystemExit(f"hf_gr comes from {found}, expected {checkout}: is it a checkout of hf_gr?")

    def ask(self, *what: Any) -> Any:
        """One answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} ended with {self.process.wait()}: see its error above")
        return json.loads(line)

    def end(self) -> None:
        """No more calls."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(options: argparse.Namespace) -> None:
    """Answer calls until the input ends."""
    import hf_gr

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/fuzz")]  # for `answer_case`
    bench = None if options.cases else make_bench(options)
    for line in sys.stdin:
        kind, *rest = json.loads(line)
        answer: Any = hf_gr.__file__
        if kind == "case":
            answer = answer_case(*rest)
        elif kind == "call":
            setting, seed = Setting.parse(rest[0]), rest[1]
            prompt = make_prompt(bench, setting, seed)
            if not options.masked:
                del prompt["attention_mask"]
            start = time.perf_counter()
            out = bench.enabled.generate(**prompt, constraint_index=bench.index, **beam_options(setting, scores=True))
            seconds = time.perf_counter() - start
            scores = getattr(out, "sequences_scores", None)
            rows = out.sequences[:, setting.prompt :].tolist()
            answer = [seconds, rows, [] if scores is None else scores.tolist()]
        print(json.dumps(answer), flush=True)


def close(scores: list[float], others: list[float]) -> bool:
    return len(scores) == len(others) and np.allclose(scores, others, atol=SCORE_TOL, rtol=1e-4)


def answer_case(seed: int, number: int) -> list[Any]:
    """Rows and scores of one random call of `tests/fuzz`, or its error in the place of the rows."""
    import test_generation as fuzz

    rng = np.random.default_rng([seed, number])
    torch.manual_seed(number)  # what is sampled without a seed
    drawn = fuzz.draw_model(rng)
    model = fuzz.model_of(*drawn)
    catalogue = fuzz.Catalogue(rng)
    batch = fuzz.Batch.draw(rng, catalogue, sizes=(1, 2, 3, 5, 8))
    options = fuzz.Options.draw(rng, catalogue, model, drawn, num_prompts=len(batch.legal))
    call = f"case {number}: {drawn[0]}, {options.given}"
    try:
        out = model.generate(
            **batch.inputs, constraint_index=batch.index, exclude_items=batch.excluded, **options.given
        )
    except (ValueError, NotImplementedError, TypeError) as error:
        return [call, type(error).__name__, str(error)]
    scores = out.sequences_scores if options.given["num_beams"] > 1 else None
    return [call, out.sequences.tolist(), [] if scores is None else scores.tolist()]


def compare_cases(one: Contender, other: Contender, number: int, *, seed: int = 0) -> dict[str, Any]:
    """Counts of equal answers, of refused calls, and of calls that differ; those are printed."""
    found: Counter[str] = Counter()
    for case in range(number):
        (call, rows, scores), (_, other_rows, other_scores) = (each.ask("case", seed, case) for each in (one, other))
        errors = [answer for answer in ((rows, scores), (other_rows, other_scores)) if isinstance(answer[0], str)]
        if errors:
            who = "both" if len(errors) == 2 else "this" if isinstance(rows, str) else "the other"
            kind = f"refused by {who}"
        elif rows == other_rows and close(scores, other_scores):
            kind = "equal"
        elif scores and np.shape(rows) == np.shape(other_rows) and close(scores, other_scores):
            kind = "equal but for rounding"  # beams with nearly the same scores changed places
        else:
            kind = "different"
        found[kind] += 1
        if kind not in ("equal", "refused by both"):
            print(f"{kind}: {call}: {errors[0][1] if errors else ''}"[:400])
    return {"cases": number, **found}


def compare(one: Contender, other: Contender, setting: str, *, repeats: int) -> dict[str, Any]:
    """The median times of both and the median of their ratios; exits if their answers differ."""
    times: list[tuple[float, float]] = []
    for number in range(-1, repeats):  # the first one warms up
        order = (one, other) if number % 2 else (other, one)
        answers = {contender: contender.ask("call", setting, number + 1) for contender in order}
        (mine, rows, scores), (theirs, other_rows, other_scores) = answers[one], answers[other]
        if not close(scores, other_scores) or sorted(map(tuple, rows)) != sorted(map(tuple, other_rows)):
            raise SystemExit(f"{setting}, prompt {number + 1}: the two checkouts give different items or scores")
        if number >= 0:
            times.append((mine, theirs))
    ratios = sorted(mine / theirs for mine, theirs in times)
    return {
        "setting": setting,
        "seconds": statistics.median(mine for mine, _ in times),
        "other_seconds": statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
    }


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, nargs="?", default=ROOT, help="the other checkout (default: this one)")
    parser.add_argument("--settings", nargs="+", default=None, metavar=METAVAR, help=SHAPE)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--masked", action="store_true", help="give an attention mask, of ones, as tokenizers do")
    parser.add_argument("--cases", type=int, default=0, help="compare only answers, of so many random calls")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="a tiny model, a few seconds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = sys.argv[1:]
    options = parser.parse_args()
    model = {
        "layers": 6,
        "hidden": 512,
        "vocab": 13_312,
        "items": 12_000,
        "length": 4,
        "catalogue": "random",
        "seed": 0,
    }
    vars(options).update(model | {"device": "cpu", "dtype": "float32"})
    if options.fast:
        vars(options).update(FAST | {"repeats": min(options.repeats, 2)})
    torch.set_num_threads(options.threads)
    if options.serve:
        serve(options)
        return
    if not (options.other / "hf_gr").is_dir():
        parser.error(
            f"{options.other} has no folder hf_gr, expected a checkout: git worktree add {options.other} COMMIT"
        )
    passed_on = [argument for argument in given if argument != str(options.other)]
    contenders = [Contender(checkout, passed_on) for checkout in (ROOT, options.other)]
    if options.cases:
        found = compare_cases(*contenders, options.cases)
        for contender in contenders:
            contender.end()
        print(", ".join(f"{count:,} {kind}" for kind, count in found.items()))
        print_json_line("checkouts", torch.device("cpu"), found)
        return
    settings = options.settings or (FAST_SETTINGS if options.fast else SETTINGS)
    results = [compare(*contenders, setting, repeats=options.repeats) for setting in settings]
    for contender in contenders:
        contender.end()
    header = (SHAPE, "this checkout, ms", "the other, ms", "ratio", "its quartiles")
    rows = [
        (
            result["setting"],
            f"{result['seconds'] * 1e3:.1f}",
            f"{result['other_seconds'] * 1e3:.1f}",
            f"{result['ratio']:.3f}",
            " to ".join(f"{quartile:.3f}" for quartile in result["quartiles"]),
        )
        for result in results
    ]
    print_table(header, rows)
    print_json_line("checkouts", torch.device("cpu"), {"masked": options.masked, "results": results})


if __name__ == "__main__":
    main()
