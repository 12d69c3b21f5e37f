# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate(constraint_index=...)` against transformers' beam search and against its own raw forwards.

Three baselines, paired in one run: transformers' constrained beam search (`prefix_allowed_tokens_fn` over a dict),
transformers' unconstrained beam search, and the raw forwards of our own layout: one prefill and L - 1 forwards of K
tokens over the same cache, with precomputed masks and positions, and nothing else. No time is printed before the
answers agree; if they do not, the exit status is 1.

    python examples/benchmark/generate.py                      # about ten minutes on 2 cores, mostly transformers'
    python examples/benchmark/generate.py --skip-transformers  # against the raw forwards only
    python examples/benchmark/generate.py --backend flax       # our Flax path against our PyTorch path
    python examples/benchmark/generate.py --fast               # a tiny model, a few seconds

Axes: B batch, K beams, L tokens of an item, P prompt.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beauty import DEFAULT_DATA, read_items
from report import print_json_line, print_table
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from hf_gr import ConstraintIndex, enable

PAD = 0
CODES = 256  # codes per level, as in the papers' catalogues
# Scores are sums of L log-probabilities, each with the rounding of all layers: fp32 must agree to 1e-4.
SCORE_TOL = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 4e-1}
FAST = {"layers": 2, "hidden": 64, "vocab": 1040, "items": 600, "repeats": 2}
FAST_SETTINGS = ("1,16,1", "1,16,8", "2,16,20")
SETTINGS = ("1,64,1", "1,256,1", "8,256,1", "1,256,10", "1,256,50", "4,256,50", "1,512,128")
SHAPE, METAVAR = "batch, prompt, beams", "BATCH,PROMPT,BEAMS"
OURS, OURS_SCORES = "ours", "ours with output_scores"
CONSTRAINED, UNCONSTRAINED, RAW = "transformers, constrained", "transformers, unconstrained", "raw forwards"


@dataclass(frozen=True)
class Setting:
    """One shape of a call."""

    batch: int
    prompt: int
    beams: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From `batch,prompt,beams`."""
        try:
            setting = cls(*(int(number) for number in text.split(",")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(f"{text!r}, expected batch,prompt,beams such as 1,256,50") from None
        if min(asdict(setting).values()) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}, expected three numbers of 1 or more")
        return setting

    def __str__(self) -> str:
        return f"{self.batch}, {self.prompt}, {self.beams}"


@dataclass(frozen=True)
class Bench:
    """A model, with and without the mixin over the same weights, and a catalogue, compiled and as a dict."""

    plain: Any
    enabled: Any
    index: ConstraintIndex
    rows: np.ndarray
    allowed: dict[tuple[int, ...], list[int]]

    @property
    def device(self) -> torch.device:
        return self.plain.device

    @property
    def length(self) -> int:
        """L."""
        return self.rows.shape[1]


@dataclass(frozen=True)
class Answer:
    """Sequences `[B, K, L]`, best first, with the sums of their log-probabilities `[B, K]`."""

    sequences: Tensor
    scores: Tensor


def make_bench(options: argparse.Namespace) -> Bench:
    torch.manual_seed(options.seed)
    rows = make_catalogue(options)
    if rows.max() >= options.vocab:
        raise SystemExit(f"--vocab {options.vocab}, expected more than {rows.max()}: the catalogue's tokens must fit")
    plain = make_model(options)
    return Bench(
        plain=plain,
        enabled=enable(copy.copy(plain)),
        index=ConstraintIndex.from_sequences(rows),
        rows=rows,
        allowed=dict_trie(rows),
    )


def make_model(options: argparse.Namespace) -> Any:
    """A random model of Qwen3's architecture, by default 25.7 M parameters, with weights that make scores differ."""
    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32 if options.hidden < 128 else options.hidden // 64,
        num_key_value_heads=1 if options.hidden < 128 else options.hidden // 128,
        head_dim=32 if options.hidden < 128 else 64,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(device=options.device, dtype=getattr(torch, options.dtype)).eval()


def make_catalogue(options: argparse.Namespace) -> np.ndarray:
    """`[N, L]` tokens, every level in its own range after the padding token."""
    if options.catalogue == "beauty":
        codes = read_items(options.data)[1]
    else:
        random = np.random.default_rng(options.seed)
        codes = np.empty((0, options.length), dtype=np.int64)
        while len(codes) < options.items:
            codes = np.unique(np.vstack([codes, draw_codes(options, random)]), axis=0)
        codes = random.permutation(codes)[: options.items]
    return codes + 1 + CODES * np.arange(codes.shape[1])


def draw_codes(options: argparse.Namespace, random: np.random.Generator) -> np.ndarray:
    """As many items as asked for, some of them equal: "random", or "skewed" by Zipf's law (exponent 1.3)."""
    shape = (options.items, options.length)
    if options.catalogue == "skewed":
        return np.minimum(random.zipf(1.3, shape), CODES) - 1
    return random.integers(CODES, size=shape)


def dict_trie(rows: np.ndarray) -> dict[tuple[int, ...], list[int]]:
    """The tokens allowed after every prefix: what a user of `prefix_allowed_tokens_fn` would write."""
    allowed: dict[tuple[int, ...], set[int]] = {}
    for row in rows.tolist():
        for length, token in enumerate(row):
            allowed.setdefault(tuple(row[:length]), set()).add(token)
    return {prefix: sorted(tokens) for prefix, tokens in allowed.items()}


def make_prompt(bench: Bench, setting: Setting, seed: int) -> dict[str, Tensor]:
    """Histories of random items, truncated to the prompt's length."""
    random = np.random.default_rng(seed)
    items = random.integers(len(bench.rows), size=(setting.batch, -(-setting.prompt // bench.length)))
    tokens = torch.from_numpy(bench.rows[items].reshape(setting.batch, -1)[:, : setting.prompt]).to(bench.device)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def beam_options(setting: Setting, *, scores: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"num_beams": setting.beams, "num_return_sequences": setting.beams, "do_sample": False}
    if setting.beams > 1:
        options["length_penalty"] = 0.0  # sequences_scores are sums, not means
    return {**options, "return_dict_in_generate": scores, "output_scores": scores}


def ours(bench: Bench, prompt: dict[str, Tensor], setting: Setting, *, scores: bool = False) -> Any:
    return bench.enabled.generate(**prompt, constraint_index=bench.index, **beam_options(setting, scores=scores))


def constrained(bench: Bench, prompt: dict[str, Tensor], setting: Setting, *, scores: bool = False) -> Any:
    length = prompt["input_ids"].shape[1]

    def allowed(batch: int, tokens: Tensor) -> list[int]:
        # transformers also asks about beams that do not exist; an empty list would be an error.
        return bench.allowed.get(tuple(tokens[length:].tolist()), [PAD])

    options = beam_options(setting, scores=scores)
    return bench.plain.generate(**prompt, prefix_allowed_tokens_fn=allowed, max_new_tokens=bench.length, **options)


def unconstrained(bench: Bench, prompt: dict[str, Tensor], setting: Setting) -> Any:
    return bench.plain.generate(**prompt, max_new_tokens=bench.length, **beam_options(setting))


def raw_steps(bench: Bench, setting: Setting, sequences: Tensor) -> list[dict[str, Tensor]]:
    """The arguments of L - 1 forwards that score given sequences `[B, K, L]`: every beam continues itself."""
    steps = []
    for depth in range(bench.length - 1):
        position = torch.full((setting.batch, setting.beams), setting.prompt + depth, device=bench.device)
        keys = torch.ones((setting.batch, setting.prompt + depth + 1), dtype=torch.long, device=bench.device)
        if setting.beams > 1:
            own = torch.eye(setting.beams, dtype=torch.bool, device=bench.device).repeat(1, depth + 1)
            shared = torch.ones((setting.beams, setting.prompt), dtype=torch.bool, device=bench.device)
            keys = torch.cat([shared, own], dim=1).expand(setting.batch, 1, -1, -1).contiguous()
        tokens = sequences[..., depth].contiguous()
        steps.append({"input_ids": tokens, "position_ids": position, "attention_mask": keys})
    return steps


@torch.no_grad()
def raw_forwards(bench: Bench, prompt: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> Iterator[Tensor]:
    """Logits after the prompt `[B, 1, V]`, then those of every step `[B, K, V]`."""
    cache = DynamicCache(config=bench.plain.config)
    yield bench.plain(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for step in steps:
        yield bench.plain(**step, past_key_values=cache, use_cache=True).logits


def raw_answer(bench: Bench, prompt: dict[str, Tensor], setting: Setting, sequences: Tensor) -> Answer:
    """The same sequences with the scores that the raw forwards give them."""
    scores = torch.zeros(sequences.shape[:2], device=bench.device)
    for level, logits in enumerate(raw_forwards(bench, prompt, raw_steps(bench, setting, sequences))):
        log_probs = logits.float().log_softmax(-1).expand(-1, setting.beams, -1)
        scores += log_probs.gather(-1, sequences[..., level, None])[..., 0]
    return Answer(sequences, scores)


def as_answer(bench: Bench, prompt: dict[str, Tensor], setting: Setting, output: Any) -> Answer:
    """A generated output; a single beam has no scores, so the raw forwards give them."""
    sequences = generated(bench, setting, output.sequences)
    if setting.beams == 1:
        return raw_answer(bench, prompt, setting, sequences)
    return Answer(sequences, output.sequences_scores.view(sequences.shape[:2]))


def generated(bench: Bench, setting: Setting, sequences: Tensor) -> Tensor:
    return sequences[:, setting.prompt :].view(setting.batch, setting.beams, bench.length)


def difference(found: Answer, expected: Answer, tolerance: float, *, exact: bool) -> str | None:
    """How two answers differ beyond rounding, or None.

    Scores must agree rank by rank. So must sequences, except among scores that differ by no more than the tolerance:
    those may swap, and at the end of the list another one may be missing. In half precision (not `exact`), rounding
    decides which beams survive long before the end, so only scores are compared.
    """
    gap = float((found.scores - expected.scores).abs().max())
    if not gap <= tolerance:
        return f"scores differ by {gap:.2e}, expected at most {tolerance:.0e}"
    if not exact:
        return None
    for row in range(len(found.scores)):
        first, second = (
            dict(zip(map(tuple, answer.sequences[row].tolist()), answer.scores[row].tolist(), strict=True))
            for answer in (found, expected)
        )
        if len(first) < len(found.sequences[row]):
            return f"row {row} has a sequence twice"
        last = min(second.values())
        for sequence in first.keys() | second.keys():
            one, other = first.get(sequence, last), second.get(sequence, last)
            if not abs(one - other) <= tolerance:
                return f"row {row}, sequence {list(sequence)}: {one:.6f} and {other:.6f}"
    return None


def check_answers(bench: Bench, prompt: dict[str, Tensor], setting: Setting, *, transformers: bool) -> float:
    """Compare our answer with the raw forwards' scores and transformers' answer; exit if they differ.

    Returns:
        Seconds that transformers' constrained search took, 0 if it did not run.
    """
    dtype = bench.plain.dtype
    tolerance, exact = SCORE_TOL[dtype], dtype is torch.float32
    found = as_answer(bench, prompt, setting, ours(bench, prompt, setting, scores=True))
    problems = {RAW: difference(found, raw_answer(bench, prompt, setting, found.sequences), tolerance, exact=exact)}
    known = {tuple(row) for row in bench.rows.tolist()}
    invalid = sum(tuple(row) not in known for row in found.sequences.flatten(0, 1).tolist())
    problems["catalogue"] = f"{invalid} sequences are no items" if invalid else None
    plain = generated(bench, setting, ours(bench, prompt, setting))
    problems[OURS_SCORES] = None if plain.equal(found.sequences) else "output_scores changes the sequences"
    seconds = 0.0
    if transformers:
        output, seconds, _ = measure(lambda: constrained(bench, prompt, setting, scores=True), bench.device)
        problems[CONSTRAINED] = difference(found, as_answer(bench, prompt, setting, output), tolerance, exact=exact)
    for name, problem in problems.items():
        if problem is not None:
            raise SystemExit(f"MISMATCH at (batch, prompt, beams) = ({setting}), ours against {name}: {problem}")
    return seconds


def measure(call: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """The result, seconds and, on CUDA, the peak of allocated bytes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return result, seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def run_setting(bench: Bench, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Check one setting, then time its contenders in turn."""
    prompt = make_prompt(bench, setting, options.seed)
    log(f"({setting}): comparing answers")
    with_transformers = not options.skip_transformers
    slow_seconds = check_answers(bench, prompt, setting, transformers=with_transformers)
    steps = raw_steps(bench, setting, generated(bench, setting, ours(bench, prompt, setting)))
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: ours(bench, prompt, setting),
        RAW: lambda: [None for _ in raw_forwards(bench, prompt, steps)],
        OURS_SCORES: lambda: ours(bench, prompt, setting, scores=True),
    }
    planned = dict.fromkeys(calls, options.repeats)
    if with_transformers:
        # The comparison has warmed up the contenders; its time sets the number of repetitions of a slow call.
        for name, call in ((CONSTRAINED, constrained), (UNCONSTRAINED, unconstrained)):
            calls[name] = lambda call=call: call(bench, prompt, setting)
            planned[name] = max(1, min(options.repeats, int(options.seconds / slow_seconds)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    if slow_seconds > options.seconds:
        # Its only repetition is the call whose answer was compared.
        times[CONSTRAINED], planned[CONSTRAINED] = [slow_seconds], 0
    peaks: dict[str, int | None] = dict.fromkeys(calls)
    for name in (RAW, OURS, OURS_SCORES):
        calls[name]()  # a slow call just before may have emptied every processor cache
    for repetition in range(options.repeats):
        log(f"({setting}): repetition {repetition + 1} of {options.repeats}")
        names = [name for name in calls if repetition < planned[name]]
        for name in names if repetition % 2 == 0 else reversed(names):
            _, seconds, peaks[name] = measure(calls[name], bench.device)
            times[name].append(seconds)
    return {**asdict(setting), "seconds": times, "peak_bytes": peaks}


def print_times(results: list[dict[str, Any]]) -> None:
    header = [SHAPE, "baseline", "baseline s", "ours s", "baseline / ours", "ours / baseline", "repetitions"]
    rows = []
    for result in results:
        medians = {name: statistics.median(times) for name, times in result["seconds"].items()}
        result["median_seconds"] = medians
        for name in (CONSTRAINED, UNCONSTRAINED, RAW):
            if name not in medians:
                continue
            counts = f"{len(result['seconds'][name])} and {len(result['seconds'][OURS])}"
            shape = str(Setting(result["batch"], result["prompt"], result["beams"]))
            # Raw forwards keep no scores and choose nothing: the extra cost of scores is a row of its own.
            pairs = [(name, OURS)] + ([(f"{name}; ours with output_scores", OURS_SCORES)] if name == RAW else [])
            for label, own in pairs:
                ratio = medians[name] / medians[own]
                cells = [f"{medians[name]:.4f}", f"{medians[own]:.4f}", f"{ratio:.2f}", f"{1 / ratio:.2f}", counts]
                rows.append([shape, label, *cells])
    print_table(header, rows)
    peaks = [
        [str(Setting(r["batch"], r["prompt"], r["beams"])), name, f"{peak / 2**20:.1f}"]
        for r in results
        for name, peak in r["peak_bytes"].items()
        if peak is not None
    ]
    if peaks:
        print()
        print_table([SHAPE, "contender", "peak MiB"], peaks)


def run_torch(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    results = [run_setting(bench, setting, options) for setting in options.settings]
    print_times(results)
    return {"results": results}


def run_flax(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """The other backend, loaded only here."""
    import flax_backend

    results = flax_backend.run_settings(bench, options)
    flax_backend.print_times(results, SHAPE)
    return {"results": results}


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", type=Setting.parse, metavar=METAVAR, help=" ".join(SETTINGS))
    parser.add_argument("--catalogue", choices=("random", "skewed", "beauty"), default="random")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the Beauty catalogue")
    parser.add_argument("--items", type=int, help="items of a made-up catalogue (12000)")
    parser.add_argument("--length", type=int, default=4, help="tokens of an item of a made-up catalogue")
    parser.add_argument("--layers", type=int, help="layers of the model (6)")
    parser.add_argument("--hidden", type=int, help="width of the model (512)")
    parser.add_argument("--vocab", type=int, help="vocabulary of the model (13312)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, help="timed repetitions of every contender (7)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for a slow baseline's repetitions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip-transformers", action="store_true", help="raw forwards are the only baseline")
    parser.add_argument("--fast", action="store_true", help="a tiny model and tiny settings, for CI")
    parser.add_argument("--backend", choices=("torch", "flax"), default="torch", help="flax: against our PyTorch path")
    parser.add_argument("--drafts", action="store_true", help="with --backend flax: drafting='trie', too")
    options = parser.parse_args(arguments)
    if options.backend == "flax" and options.device != "cpu":
        parser.error("--backend flax compares two backends on a CPU")
    if options.backend != "flax" and options.drafts:
        parser.error("--drafts measures programs, expected --backend flax with it")
    defaults = {"layers": 6, "hidden": 512, "vocab": 13312, "items": 12000, "repeats": 7}
    for name, value in (FAST if options.fast else defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    fast = FAST_SETTINGS[1:2] if options.backend == "flax" else FAST_SETTINGS
    options.settings = options.settings or [Setting.parse(s) for s in (fast if options.fast else SETTINGS)]
    return options


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    described = {name: getattr(options, name) for name in ("layers", "hidden", "vocab", "dtype", "catalogue", "seed")}
    bench = make_bench(options)
    described["parameters"] = bench.plain.num_parameters()
    print(
        f"Qwen3 architecture, {described['parameters'] / 1e6:.1f} M parameters, {options.dtype}, {bench.device}; "
        f"{len(bench.index):,} items of {bench.length} tokens ({options.catalogue}); medians",
        flush=True,
    )
    results = run_flax(bench, options) if options.backend == "flax" else run_torch(bench, options)
    packages = ("jax", "jaxlib", "flax") if options.backend == "flax" else ()
    described = {"model": described, "backend": options.backend}
    print_json_line("generate", torch.device(options.device), {**described, **results}, packages=packages)


if __name__ == "__main__":
    transformers_logging.set_verbosity_error()
    main()
