# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Which method when: every way to draft and verify, by the same model over the same catalogues, beside plain search.

Plain constrained beam search takes one forward per level after the prefill. `drafting="trie"` also scores the whole
legal subtree below the beams, wherever it fits the budget; a draft model or a draft head guesses what the beams will
be, alone or with the trie; `drafting="auto"` takes what two timed forwards say. The model
verifies all of these: results stay. Two ways change results: the head alone decides without the model, and relaxed
verification samples. Answers of the others are compared before any time is printed, and times are paired: the
contenders take turns.

- forwards: of the target and of the draft model after the prefill of the target;
- "weights": what a call reads of both models' weights, prefill included, by what plain search reads: forwards times
  parameters. Where a forward takes the time of reading its weights, whatever its tokens (few rows on an accelerator),
  this is the ratio of times to expect; it is counted, not measured;
- "/ plain": seconds by plain search's, measured: where the cost of a forward grows with its tokens (a CPU);
- "memory": the most that one call allocates, by what plain search allocates;
- "/ fastest": `auto` by the fastest of the fixed choices that leave results as they are.

Weights are random, so beams fit no user; the number of plain and trie forwards depends on the catalogue, their time on
the machine. The draft model is made of the target's first layers, and the target's later ones change little, so that
it is often right, as a trained one would be; the head is random, so that the model rejects most of what it drafts.

    python examples/benchmark/drafting.py         # three catalogues; Beauty is skipped without the data
    python examples/benchmark/drafting.py --device cuda --dtype bfloat16 --layers 28 --hidden 1024
    python examples/benchmark/drafting.py --cpu-time --layers 28 --hidden 1024 --settings 1,32,1 1,32,20
    python examples/benchmark/drafting.py --fast  # a tiny model, a few seconds
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from beauty_data import DEFAULT_DATA, FILES, is_there
from generate import METAVAR, SCORE_TOL, Answer, Bench, Setting, difference, make_catalogue, make_model, make_prompt
from generate import measure as timed
from report import print_json_line, print_table
from transformers import Qwen3ForCausalLM
from xgr import peak_allocated

from hf_gr import ConstraintIndex, enable

SETTINGS = ("1,256,5", "1,256,20", "1,256,128", "8,256,20")
FAST_SETTINGS = ("1,16,8", "2,16,20")
CATALOGUES = {  # name: --catalogue, items, tokens of an item
    "Beauty": ("beauty", 0, 4),
    "1 M items of 8 tokens": ("random", 1_000_000, 8),
    "1 M items of 6 tokens, skewed": ("skewed", 1_000_000, 6),
}
FAST_CATALOGUES = {"3,000 items of 6 tokens": ("random", 3000, 6)}
PLAIN, MODEL = "plain", "draft model"
AUTOS = AUTO, AUTO_WITH_MODEL = "auto", "auto, draft model"
HEAD, RELAXED = "head alone", "draft model, relaxed"
CHANGED = (HEAD, RELAXED)  # results differ from plain search's
LATER = 0.1  # what the target's later layers add, by what they would


def contenders(draft: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is passed to `generate` besides the rest."""
    budgets = {f"trie, {budget}": {"drafting": "trie", "draft_token_budget": budget} for budget in options.budgets}
    model = {"drafting": "assistant", "assistant_model": draft}
    alone = model | {"draft_token_budget": 1}  # room for no subtree: the trie drafts nothing
    return {
        PLAIN: {},
        **budgets,
        "head, strict": {"drafting": "head", "verification": "strict"},
        MODEL: alone,
        "draft model and trie": model,
        HEAD: {"drafting": "head"},
        RELAXED: alone | {"verification": "relaxed", "temperature": 1.0, "seed": options.seed},
        AUTO: {"drafting": "auto"},
        AUTO_WITH_MODEL: {"drafting": "auto", "assistant_model": draft},
    }


def make_bench(catalogue: tuple[str, int, int], options: argparse.Namespace) -> Bench:
    """The model with a head, and a catalogue, without the dictionary that only transformers' own search needs."""
    options.catalogue, options.items, options.length = catalogue
    torch.manual_seed(options.seed)
    rows = make_catalogue(options)
    options.vocab = int(rows.max()) + 1
    plain = make_model(options)
    with torch.no_grad():
        for layer in plain.model.layers[options.draft_layers :]:
            layer.self_attn.o_proj.weight *= LATER
            layer.mlp.down_proj.weight *= LATER
    enabled, index = enable(copy.copy(plain)), ConstraintIndex.from_sequences(rows)
    enabled.add_draft_head(index)
    return Bench(plain, enabled, index, rows, allowed={})


def make_draft(bench: Bench, options: argparse.Namespace) -> Any:
    """The target without its later layers."""
    config = copy.deepcopy(bench.enabled.config)
    config.num_hidden_layers = options.draft_layers
    config.layer_types = config.layer_types[: options.draft_layers]
    draft: Any = Qwen3ForCausalLM(config)
    draft = draft.to(device=options.device, dtype=bench.plain.dtype).eval()
    draft.load_state_dict(bench.enabled.state_dict(), strict=False)
    return draft


def run_setting(bench: Bench, setting: Setting, draft: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per contender: forwards, nodes scored ahead, seconds, and ratios of alternating times."""
    prompt = make_prompt(bench, setting, options.seed)

    def ask(extra: dict[str, Any], *, scores: bool = False) -> Any:
        return bench.enabled.generate(
            **prompt,
            constraint_index=bench.index,
            num_beams=setting.beams,
            num_return_sequences=setting.beams,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=scores,
            **extra,
        )

    every = contenders(draft, options)
    asked = {name: every[name] for name in every if name == PLAIN or name in (options.contenders or every)}
    happened = {name: out.speculation for name, out in compared(bench, setting, asked, ask)}
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for repeat in range(options.repeats + 1):
        turn = list(asked)
        for name in turn if repeat % 2 else reversed(turn):
            start = time.process_time()
            taken = timed(lambda extra=asked[name]: ask(extra), bench.device)[1]
            if repeat:  # the first round warms up
                seconds[name].append(time.process_time() - start if options.cpu_time else taken)
    memory = {name: peak(lambda extra=extra: ask(extra), bench.device) for name, extra in asked.items()}
    share = draft.num_parameters() / bench.enabled.num_parameters()
    reads = {name: 1 + now.target_forwards + share * now.draft_forwards for name, now in happened.items()}
    return [
        {
            **asdict(setting),
            "contender": name,
            "chosen": happened[name].chosen,
            "target_forwards": happened[name].target_forwards,
            "draft_forwards": happened[name].draft_forwards,
            "drafted_nodes": float(happened[name].drafted_nodes.float().mean()),
            "accepted_steps": float(happened[name].accepted_steps.float().mean()),
            "weights": reads[name] / reads[PLAIN],
            "memory": memory[name] / memory[PLAIN],
            "seconds": statistics.median(seconds[name]),
            "of_plain": paired(seconds[name], seconds[PLAIN]),
            "of_fastest": paired(seconds[name], seconds[fastest_for(name, asked, seconds)]) if name in AUTOS else None,
        }
        for name in asked
    ]


def compared(
    bench: Bench, setting: Setting, asked: dict[str, dict[str, Any]], ask: Callable[..., Any]
) -> Iterator[tuple[str, Any]]:
    """A first call of every contender; exits where one that must not change results changes them."""
    shape, prompt_length = (setting.batch, setting.beams), setting.prompt
    wanted: Answer | None = None
    for name, extra in asked.items():
        out = ask(extra, scores=name not in CHANGED)
        yield name, out
        if name in CHANGED:
            continue
        sequences = out.sequences[:, prompt_length:].view(*shape, bench.length)
        scores = out.sequences_scores if setting.beams > 1 else torch.zeros(shape)  # one beam has none
        answer = Answer(sequences, scores.view(shape))
        wanted = wanted or answer  # plain search is the first
        exact = bench.plain.dtype is torch.float32
        wrong = difference(answer, wanted, SCORE_TOL[bench.plain.dtype], exact=exact)
        if wrong is not None:
            raise SystemExit(f"({setting}): {name} does not answer what plain search answers: {wrong}")


def fastest_for(auto: str, asked: dict[str, dict[str, Any]], seconds: dict[str, list[float]]) -> str:
    """The fastest of what `auto` may choose, or that with a draft model."""
    fixed = [name for name in asked if name not in (*AUTOS, *CHANGED)]
    if auto == AUTO:
        fixed = [name for name in fixed if "assistant_model" not in asked[name]]
    return min(fixed, key=lambda name: statistics.median(seconds[name]))


def peak(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that one call allocates."""
    return timed(call, device)[2] or peak_allocated(call)


def paired(ours: list[float], theirs: list[float]) -> float:
    """The median ratio of calls that took turns."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help=f"folder with {' and '.join(FILES)}")
    parser.add_argument("--settings", type=Setting.parse, nargs="+", metavar=METAVAR, default=None)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512], help="budget of drafting='trie', in nodes")
    parser.add_argument("--contenders", nargs="+", help="some of them, beside plain search (all)")
    parser.add_argument("--catalogues", nargs="+", choices=[*CATALOGUES, *FAST_CATALOGUES], help="some of them (all)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for a shared machine and one thread")
    parser.add_argument("--hidden", type=int, default=None, help="512; 64 with --fast")
    parser.add_argument("--layers", type=int, default=None, help="6; 2 with --fast")
    parser.add_argument("--draft-layers", type=int, default=1, help="layers of the draft model, the target's first")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=None, help="timed calls of each; 15, or 2 with --fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    defaults = (("hidden", 512, 64), ("layers", 6, 2), ("repeats", 15, 2))
    for name, full, fast in defaults:
        if getattr(options, name) is None:
            setattr(options, name, fast if options.fast else full)
    if options.settings is None:
        options.settings = [Setting.parse(text) for text in (FAST_SETTINGS if options.fast else SETTINGS)]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.device = torch.device(options.device)
    results = []
    for name, catalogue in (FAST_CATALOGUES if options.fast else CATALOGUES).items():
        if (
            name not in (options.catalogues or [name])
            or catalogue[0] == "beauty"
            and not is_there(options.data, fast=True)
        ):
            continue
        bench = make_bench(catalogue, options)
        draft = make_draft(bench, options)
        rows = [row for setting in options.settings for row in run_setting(bench, setting, draft, options)]
        million = bench.plain.num_parameters() / 1e6
        print(f"{name}; {million:.1f} M parameters, {options.dtype}, {bench.length - 1} forwards after the prefill")
        print_table(
            [METAVAR.lower(), "drafting", "forwards", "draft's", "nodes ahead", "steps"]
            + ["weights", "memory", "seconds", "/ plain", "/ fastest"],
            [
                [
                    f"{row['batch']}, {row['prompt']}, {row['beams']}",
                    row["contender"] + (f": {row['chosen']}" if row["chosen"] else ""),
                    str(row["target_forwards"]),
                    str(row["draft_forwards"]),
                    f"{row['drafted_nodes']:.0f}",
                    f"{row['accepted_steps']:.1f}",
                    f"{row['weights']:.2f}",
                    f"{row['memory']:.2f}",
                    f"{row['seconds']:.4f}",
                    f"{row['of_plain']:.2f}",
                    f"{row['of_fastest']:.2f}" if row["of_fastest"] else "",
                ]
                for row in rows
            ],
        )
        results.append({"catalogue": name, "parameters": bench.plain.num_parameters(), "rows": rows})
    settings = {"dtype": options.dtype, "repeats": options.repeats, "seed": options.seed}
    print_json_line("drafting", options.device, {**settings, "results": results})


if __name__ == "__main__":
    main()
