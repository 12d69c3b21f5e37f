# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: texts to ranked labels. Checks what it is given; scores nothing itself.

A call turns texts into padded prompts (`prompts`), prompts into log-probabilities of label sequences (`finders`: of
all, or of the best that beams find), and those into ranked labels.

Axes: S sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationMixin

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import check_is_tokenizer, check_is_unicode
from hf_gr.catalogue.sequences import is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.prompts import padding_side
from hf_gr.generation.torch.checks import check_vocabulary
from hf_gr.generation.torch.models import base_model, evaluation

from .finders import make_finder, sequences_if_small
from .prompts import PromptEncoder, prompt_room

DEFAULT_PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"


@torch.no_grad()
def classify(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    index: ConstraintIndex,
    *,
    top_k: int | None = 5,
    prompt: str = DEFAULT_PROMPT,
    threshold: float | None = None,
    neutral_text: str | None = None,
    batch_size: int = 8,
    max_tree_nodes: int = 8192,
    num_beams: int = 32,
    max_length: int | None = None,
    progress: bool | None = None,
) -> list[list[tuple[str, float]]]:
    """Rank the labels of an index for every text.

    A label's probability is that of the model writing it after the prompt, end token included: a product over the full
    vocabulary, as all scores are. It is then divided by the sum over all labels of the index (its living ones:
    `index.where` narrows it down), so that the probabilities of a text sum to one. Labels that tokenize alike are one
    sequence, and share its probability equally.

    Where the label set has at most `max_tree_nodes` inner nodes (distinct proper prefixes of its labels; a phrase adds
    about four), all of it is scored: one prefill and one forward over those nodes, or several where the logits of one
    would take more than 256 MB. Larger sets are searched by a constrained beam search instead. It may miss labels;
    those that it does not return count as impossible, so its probabilities are divided by the sum over what was
    *found*, and are upper bounds of the exact ones.

    Args:
        model: a language model of transformers, decoder-only or encoder-decoder; it need not be enabled. It is used
            in evaluation mode. One that takes neither layout (Mamba, RWKV) rereads every path: exact, but slow.
        tokenizer: the model's, with which the index was built.
        texts: what to classify.
        index: of `ConstraintIndex.from_labels`, or any index whose item ids are strings.
        top_k: the most labels of one text; None for all that were scored.
        prompt: what the model reads, with `{text}` in the text's place, to be followed by a label. For a chat model:
            `tokenizer.apply_chat_template(..., tokenize=False, add_generation_prompt=True)`. Other braces are literal.
        threshold: labels with a smaller probability are omitted. No label at all means "none of them".
        neutral_text: a text that says nothing, such as "N/A". Every label's probability is first divided by the one
            that it has after this text, so that labels that the model tends to write anyway, such as short ones, have
            no advantage (contextual calibration). Only for label sets that are scored as a whole.
        batch_size: texts of one forward; they are sorted by length and padded, for a decoder on the left.
        max_tree_nodes: the largest label set that is scored as a whole; 0 for beams in any case.
        num_beams: of the search in larger sets, which finds as many labels; `top_k` of them, if that is more.
        max_length: the longest prompt in tokens, by default what model and tokenizer allow. A longer one loses the end
            of its text, never of the template.
        progress: whether to show a progress bar; None for where stderr is a terminal.

    Returns:
        For every text its labels with their probabilities, the most probable first.

    Raises:
        ValueError: before any work: no text, or one that is not a string; a prompt without `{text}`, too long by
            itself, or ending with a space although labels begin with theirs; an index without labels, without living
            ones, or of another tokenizer or vocabulary; numbers out of range; a neutral text and a label set that is
            searched. And during the work: a model whose logits are not numbers.

    Example:
        A tokenizer of single bytes, and a model with random weights:

        >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> alphabet = ["</s>", *pre_tokenizers.ByteLevel.alphabet()]
        >>> made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
        >>> made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=1))
        >>> index = ConstraintIndex.from_labels(["Sports", "Science"], tokenizer)
        >>> ((first, second),) = classify(model, tokenizer, ["The match ended in a shootout."], index)
        >>> sorted([first[0], second[0]]), first[1] >= second[1], round(first[1] + second[1], 6)
        (['Science', 'Sports'], True, 1.0)

    Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", which decodes one label of one text; the
    neutral text is that of Zhao et al., "Calibrate Before Use: Improving Few-Shot Performance of Language Models".
    """
    read_texts = _check_texts(texts)
    snapshot = _check_index(index, tokenizer)
    inner = _check_model(model)
    check_vocabulary(inner, snapshot, name="index")
    counts = {"top_k": 1 if top_k is None else top_k, "batch_size": batch_size, "num_beams": num_beams}
    _check_numbers(counts, max_tree_nodes, threshold)
    room = prompt_room(inner, tokenizer, snapshot, max_length)
    side = padding_side(is_encoder_decoder=inner.config.is_encoder_decoder)
    encoder = PromptEncoder.of(prompt, tokenizer, snapshot, room, side)
    sequences = sequences_if_small(snapshot, max_tree_nodes)
    if neutral_text is not None and (not isinstance(neutral_text, str) or sequences is None):
        raise ValueError(
            f"neutral_text={neutral_text!r}, expected None or a string, and a label set that is scored as a whole: it "
            f"must have at most max_tree_nodes={max_tree_nodes} inner nodes"
        )

    prompts = encoder.encode(read_texts)
    # Longest first: what does not fit fails at once, and neighbours need little padding.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batch_size = min(batch_size, len(prompts))
    answers: list[list[tuple[str, float]]] = [[] for _ in prompts]
    with (
        evaluation(inner),
        tqdm(total=len(prompts), unit="text", disable=None if progress is None else not progress) as bar,
    ):
        find = make_finder(inner, snapshot, sequences, batch_size=batch_size, num_beams=max(num_beams, top_k or 1))
        prior: Any = 0.0
        if neutral_text is not None:
            ((prior, _),) = find(*encoder.pad(encoder.encode([neutral_text]), inner.device))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            found = find(*encoder.pad([prompts[row] for row in rows], inner.device))
            for row, (log_probs, labels) in zip(rows, found, strict=True):
                answers[row] = _rank(log_probs - prior, labels, top_k, threshold or 0.0, inner.dtype)
            bar.update(len(rows))
    return answers


def _rank(
    log_probs: Float[Tensor, " sequences"],
    labels: Sequence[Sequence[str]],
    top_k: int | None,
    threshold: float,
    dtype: Any,
) -> list[tuple[str, float]]:
    """The most probable labels, each with its share of its sequence's."""
    shares = torch.tensor([max(len(alike), 1) for alike in labels], dtype=torch.float64)
    probabilities = log_probs.double().softmax(dim=0) / shares
    if not len(labels) or bool(probabilities.isnan().any()):
        raise ValueError(
            f"model gives logits that are no numbers, in {dtype}, expected finite ones: try bfloat16 or float32"
        )
    best = probabilities.sort(descending=True, stable=True)
    ranked: list[tuple[str, float]] = [
        (label, float(probability))
        for probability, number in zip(best.values[:top_k].tolist(), best.indices[:top_k].tolist(), strict=True)
        for label in labels[int(number)]
        if probability >= threshold
    ]
    return ranked[:top_k]


def _check_texts(texts: Any) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise ValueError(f"texts is {texts!r}, expected a list of strings: put a single one into a list")
    found = list(texts)
    if not found:
        raise ValueError("texts is empty, expected at least one text")
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise ValueError(f"texts[{number}] is {text!r}, expected a string: str(...) makes it one")
        check_is_unicode(text, f"texts[{number}]")
    return [str(text) for text in found]


def _check_index(index: Any, tokenizer: Any) -> Snapshot:
    check_is_tokenizer(tokenizer)
    if not isinstance(index, ConstraintIndex):
        raise ValueError(
            f"index is a {type(index).__name__}, expected a ConstraintIndex: ConstraintIndex.from_labels(...)"
        )
    snapshot = index.snapshot
    if not snapshot.are_strings:
        raise ValueError("index has numbers for item ids, expected labels: build it by ConstraintIndex.from_labels")
    if not snapshot.num_items:
        raise ValueError("index has no living label, expected at least one: all of them were removed, or filtered out")
    index.check_tokenizer(tokenizer)
    return snapshot


def _check_model(model: Any) -> Any:
    """The transformers model inside; refuse one that cannot generate."""
    adapter: Any = getattr(model, "active_peft_config", None)
    inner = base_model(model) if isinstance(model, torch.nn.Module) else None
    if not isinstance(inner, GenerationMixin):
        raise ValueError(f"model is a {type(model).__name__}, expected a language model of transformers")
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"model has a {adapter.peft_type.value} adapter, expected one of weights such as LoRA: a learned prefix "
            "is not supported"
        )
    return inner


def _check_numbers(counts: dict[str, Any], max_tree_nodes: Any, threshold: Any) -> None:
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}={value!r}, expected 1 or more")
    if not is_integer(max_tree_nodes) or max_tree_nodes < 0:
        raise ValueError(f"max_tree_nodes={max_tree_nodes!r}, expected 0, for beams in any case, or more")
    if threshold is not None and (not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1):
        raise ValueError(f"threshold={threshold!r}, expected a probability from 0 to 1, or None")
