# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: texts to ranked labels. Checks what it is given; scores nothing itself.

A call turns texts into padded prompts (`prompts`), prompts into log-probabilities of label sequences (of all or of
those that matter by `label_search`, of the best that beams find by `beam_search`), and those into ranked labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import check_is_tokenizer
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.sequences import check_is_unicode, is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.catalogue.trie import build_trie
from hf_gr.files.progress import progress_bar
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.defaults import LOGITS_AT_ONCE
from hf_gr.generation.messages import say_once
from hf_gr.generation.prompts import padding_side

from .prompts import PromptEncoder, prompt_room
from .result import Ranked, RankedLabels, read_hierarchy

DEFAULT_PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"


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
    hierarchy: str | Mapping[str, Sequence[str]] | None = None,
    separator: Sequence[int] | str | None = None,
    max_labels: int | None = None,
    batch_size: int = 8,
    max_tree_nodes: int = 8192,
    tolerance: float = 0.001,
    num_beams: int = 32,
    max_length: int | None = None,
    progress: bool = True,
) -> RankedLabels:
    """Rank the labels of an index for every text.

    A label's probability is that of the model writing it after the prompt, end token included: a product over the full
    vocabulary, as all scores are. It is then divided by the sum over all labels of the index (its living ones:
    `index.where` narrows it down), so that the probabilities of a text sum to one. Labels that tokenize alike are one
    sequence, and share its probability equally.

    How labels are found depends on the inner nodes of the label set (distinct proper prefixes of its labels; a phrase
    adds about four), and the result's `method` says it:

    - `"exact"`: every node is scored: one prefill and one forward over those nodes, or several where the logits of one
      would take more than 256 MB. Small sets, `top_k=None`, `tolerance=0`, a neutral text.
    - `"bounded"`: the nodes are scored from the most probable one on, until all labels that are left are together at
      most `tolerance` times as probable as those found. Labels of at least that probability are all there, in the
      exact order, and no probability is too large by more than that share. Sets of more nodes than one forward scores.
    - `"beams"`: sets of more than `max_tree_nodes` nodes are searched by a constrained beam search. It may miss
      labels; those that it does not return count as impossible, so its probabilities are divided by the sum over what
      was *found*, and are upper bounds of the exact ones. Answers of several labels are always found so.

    Args:
        model: a language model of transformers in PyTorch, decoder-only or encoder-decoder; it need not be enabled. It
            is used in evaluation mode. One that cannot score the nodes of a tree (Mamba, RWKV, BLOOM) is refused.
        tokenizer: the model's, with which the index was built.
        texts: what to classify.
        index: of `ConstraintIndex.from_labels`, or any index whose item ids are strings.
        top_k: the most labels of one text; None for all that were scored.
        prompt: what the model reads, with `{text}` in the text's place, to be followed by a label. For a chat model:
            `tokenizer.apply_chat_template(..., tokenize=False, add_generation_prompt=True)`. Other braces are literal.
        threshold: labels with a smaller probability are omitted. No label at all means "none of them".
        neutral_text: a text without content, such as "N/A". Every label's probability is first divided by the one
            that it has after this text, so that labels that the model tends to write anyway, such as short ones, have
            no advantage (contextual calibration). With beams, only the labels that they found are ranked again.
        hierarchy: for labels that are paths, such as "Technology > AI", the text between their levels; or for every
            label the list of its parents, the topmost first. The result then has the probabilities of `parents`, and
            its `metrics` are by level.
        separator: for answers of several labels, none twice: the text or token ids between two of them. Every
            "label" of the result is then a tuple of labels. Labels include the space before them: ",", not ", ".
        max_labels: the most labels of one answer; expected with `separator`.
        batch_size: texts of one forward; they are sorted by length and padded, for a decoder on the left.
        max_tree_nodes: the largest label set that is not searched by beams; 0 for beams in any case.
        tolerance: the largest relative error of a bounded search, 0 to 1; 0 scores every label.
        num_beams: of the search in larger sets, which finds as many labels; `top_k` of them, if that is more.
        max_length: the longest prompt in tokens, by default what model and tokenizer allow. A longer one loses the end
            of its text, never of the template.
        progress: show a bar on a terminal or in a notebook; elsewhere the logger `hf_gr.progress` has a line a minute.

    Returns:
        For every text its labels with their probabilities, the most probable first: a list of lists, which also says
        how they were found, and has `metrics(expected)`.

    Raises:
        ValueError: before any work: no text, or one that is not a string; a prompt without `{text}`, too long by
            itself, or ending with a space although labels begin with theirs; an index without labels, without living
            ones, or of another tokenizer or vocabulary; numbers out of range; a hierarchy without some label; a
            separator that is also inside a label, or without `max_labels`. And during the work: a model whose logits
            are not numbers.

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
        >>> found = classify(model, tokenizer, ["The match ended in a shootout."], index)
        >>> found.method, found.num_labels, found.num_nodes
        ('exact', 2, 13)
        >>> ((first, second),) = found
        >>> sorted([first[0], second[0]]), first[1] >= second[1], round(first[1] + second[1], 6)
        (['Science', 'Sports'], True, 1.0)

    Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", which decodes one label of one text; the
    neutral text is that of Zhao et al., "Calibrate Before Use: Improving Few-Shot Performance of Language Models".
    """
    from hf_gr.generation.torch.logits_process import read_several

    from .beam_search import BeamSearch
    from .label_search import Prior, TreeSearch, num_inner_nodes
    from .model import LabelModel

    read_texts = _check_texts(texts)
    snapshot = _check_index(index, tokenizer)
    asked = LabelModel(model)
    config, vocab_size = asked.config, asked.vocab_size
    check_tokens_of_catalogue(snapshot, vocab_size, name="index")
    counts = {"top_k": 1 if top_k is None else top_k, "batch_size": batch_size, "num_beams": num_beams}
    _check_numbers(counts, max_tree_nodes, threshold, tolerance)
    if neutral_text is not None and not isinstance(neutral_text, str):
        raise ValueError(f"neutral_text={neutral_text!r}, expected None or a string")
    if (separator is None) != (max_labels is None):
        raise ValueError(
            f"separator={separator!r} and max_labels={max_labels!r}, expected both, for answers of several labels, or "
            "neither"
        )
    answers = None
    if separator is not None:
        answers = read_several(combine_rules([snapshot]), separator, max_labels, tokenizer)
        if hierarchy is not None:
            raise ValueError("hierarchy and separator are given, expected one of them: an answer has several parents")
        check_tokens_of_catalogue(answers, vocab_size, name="separator")
    path_of = read_hierarchy(hierarchy, index.item_ids if isinstance(hierarchy, Mapping) else ())
    room = prompt_room(config, tokenizer, (answers and answers.longest_answer) or snapshot.max_length, max_length)
    side = padding_side(is_encoder_decoder=config.is_encoder_decoder)
    encoder = PromptEncoder.of(prompt, tokenizer, snapshot, room, side)
    trie = snapshot.trie if snapshot.alive is None else build_trie(snapshot.rows())[0]
    num_nodes, num_beams = num_inner_nodes(trie), max(num_beams, top_k or 1)

    prompts = encoder.encode(read_texts)
    # Longest first: what does not fit fails at once, and neighbours need little padding.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batch_size = min(batch_size, len(prompts))
    if answers is not None or num_nodes > max_tree_nodes:
        if answers is None and max_tree_nodes:
            say_once(
                f"{len(index):,} labels have {num_nodes:,} nodes, more than max_tree_nodes={max_tree_nodes:,}: "
                f"searching them by {num_beams} beams, which may miss labels"
            )
        search = BeamSearch(asked, snapshot, num_beams=num_beams, answers=answers)
    else:
        # If one forward can score all nodes, no search is needed; calibration may favour the least probable label.
        is_large = num_nodes > 2 * LOGITS_AT_ONCE // (batch_size * vocab_size)
        is_bounded = is_large and top_k is not None and neutral_text is None
        search = TreeSearch(
            asked, trie, snapshot.items_of, tolerance=tolerance if is_bounded else 0.0, at_least=top_k or 1
        )
    prior = None if neutral_text is None else Prior(asked, encoder.pad(encoder.encode([neutral_text])))
    ranked: list[Ranked] = [[] for _ in prompts]
    num_scored = [0] * len(prompts)
    parents: list[list[Ranked]] = [[] for _ in prompts]
    with (
        asked.evaluation(),
        progress_bar("Classifying", lambda: len(prompts), unit="texts", shown=progress) as advance,
    ):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = search.find(encoder.pad([prompts[row] for row in rows]))
            for row, found in zip(rows, batch, strict=True):
                log_probs = found.log_probs.astype(np.float64)
                if prior is not None:
                    log_probs = log_probs - prior.of(found.rows)
                every = _rank(log_probs, found.labels, asked.dtype)
                ranked[row] = [one for one in every if one[1] >= (threshold or 0.0)][:top_k]
                num_scored[row] = found.num_scored
                if path_of is not None:
                    parents[row] = [level[:top_k] for level in path_of.parents(every)]
            advance(len(rows))
    return RankedLabels(
        ranked,
        method=search.method,
        num_labels=snapshot.num_items,
        num_nodes=num_nodes,
        num_scored=num_scored,
        parents=None if path_of is None else parents,
        path_of=path_of,
    )


def _rank(log_probs: NDArray[np.float64], labels: Sequence[Sequence[Any]], dtype: Any) -> Ranked:
    """All labels, the most probable first, each with its share of its sequence's probability."""
    shares = np.array([max(len(alike), 1) for alike in labels], dtype=np.float64)
    if not len(labels) or np.isnan(log_probs).any() or not np.isfinite(log_probs.max()):
        raise ValueError(
            f"model gives logits that are no numbers, in {dtype}, expected finite ones: try bfloat16 or float32"
        )
    weights = np.exp(log_probs - log_probs.max())
    probabilities = weights / weights.sum() / shares
    best = np.argsort(-probabilities, kind="stable")
    return [
        (label, probability)
        for probability, number in zip(probabilities[best].tolist(), best.tolist(), strict=True)
        for label in labels[number]
    ]


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


def _check_numbers(counts: dict[str, Any], max_tree_nodes: Any, threshold: Any, tolerance: Any) -> None:
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}={value!r}, expected 1 or more")
    if not is_integer(max_tree_nodes) or max_tree_nodes < 0:
        raise ValueError(f"max_tree_nodes={max_tree_nodes!r}, expected 0, for beams in any case, or more")
    if threshold is not None and (not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1):
        raise ValueError(f"threshold={threshold!r}, expected a probability from 0 to 1, or None")
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance={tolerance!r}, expected a relative error from 0, for all labels, to 1")
