# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`classify`: texts to ranked labels. Checks what it is given; scores nothing itself.

A call turns texts into padded prompts (`prompts`), prompts into log-probabilities of label sequences (`label_search`;
of several labels `beam_search`), and those into scores and ranked labels.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.labels import check_is_tokenizer
from hf_gr.catalogue.rules import combine_rules
from hf_gr.catalogue.sequences import check_is_unicode, is_integer
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.files.progress import progress_bar
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.defaults import LOGITS_AT_ONCE
from hf_gr.generation.prompts import padding_side

from .prompts import PromptEncoder, prompt_room
from .result import Ranked, RankedLabels, Score, read_hierarchy

DEFAULT_PROMPT = "Classify the text into one category.\nText: {text}\nCategory:"
NEUTRAL_TEXT = "N/A"


def classify(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str],
    index: ConstraintIndex,
    *,
    top_k: int | None = 5,
    prompt: str = DEFAULT_PROMPT,
    score: Score = "renormalized",
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

    `score` says by what. With the tokens `y_1 ... y_T` of a label, its end token included, after the prompt of a text
    `x`, and `P` the model's probabilities over its full vocabulary:

    - `"renormalized"`: `sum_t log(P(y_t | x, y_<t) / sum_v P(v | x, y_<t))`, with `v` all tokens by which some label
      continues `y_<t`. Tokens without an alternative are read together with what comes before, where a label needs
      them, and not at all where it does not.
    - `"sum"`: `log P(y | x) = sum_t log P(y_t | x, y_<t)`, that the model writes the label. It favours short ones.
    - `"mean"`: `log P(y | x) / T`.
    - `"pmi"`: `log P(y | x) - log P(y | n)`, with the prompt of `neutral_text` for `n`: what the text adds to it.
      Labels that the model tends to write anyway, such as short ones, have no advantage. `P(y | n)` is computed once
      for a model, as long as its weights stay.

    A label's probability is the softmax of the scores over all labels of the index (its living ones: `index.where`
    narrows it down). Labels that tokenize alike are one sequence, and share its probability equally.

    Not all labels need be visited. Every answer says in `mass_left` the largest share that all others can have (of the
    sum of `P(y | x)`, or of that renormalized). Probabilities count it, and add up to `1 - mass_left`: those of
    `"renormalized"` are exact all the same, those of `"sum"` lower bounds, too small by a factor of `1 - mass_left` at
    most. `"mean"` and `"pmi"` rank what was visited, the most probable labels by `"sum"`, and are no bounds then.

    How labels are found depends on the nodes of the label set (distinct proper prefixes of its labels, of which a
    phrase adds about four; for `"renormalized"` those after which labels differ, about one), and the result's `method`
    says it:

    - `"exact"`: every node is scored: one prefill and one forward over those nodes, or several where the logits of one
      would take more than 256 MB; `mass_left` is 0. Small sets; also `top_k=None`, `tolerance=0`, means and PMI, for
      sets of at most `max_tree_nodes`.
    - `"bounded"`: the nodes are scored from the most probable one on. `"renormalized"`, without `hierarchy`, ends when
      no other label is as probable as the `top_k` found. Else all labels that are left are together at most
      `tolerance` times as probable as those found: labels of at least that probability are all there, in exact order.
      Or `max_tree_nodes` of a text are scored: `mass_left` says what that is worth.
    - `"beams"`: answers of several labels, by a constrained beam search.

    Args:
        model: a language model of transformers in PyTorch, decoder-only or encoder-decoder; it need not be enabled. It
            is used in evaluation mode. One that cannot score the nodes of a tree (Mamba, RWKV, BLOOM) is refused.
        tokenizer: the model's, with which the index was built.
        texts: what to classify.
        index: of `ConstraintIndex.from_labels`, or any index whose item ids are strings.
        top_k: the most labels of one text; None for all that were found.
        prompt: what the model reads, with `{text}` in the text's place, to be followed by a label. For a chat model:
            `tokenizer.apply_chat_template(..., tokenize=False, add_generation_prompt=True)`. Other braces are literal.
        score: by what labels are ranked, see above.
        threshold: labels and parents with a smaller probability are omitted. No label at all means "none of them". Not
            with means and PMI of sets that are not scored in full: nothing bounds their probabilities.
        neutral_text: a text without content, of PMI; by default "N/A".
        hierarchy: for labels that are paths, such as "Technology > AI", the text between their levels; or for every
            label the list of its parents, the topmost first. The result then has the probabilities of `parents`, and
            its `metrics` are by level.
        separator: for answers of several labels, none twice: the text or token ids between two of them. Every
            "label" of the result is then a tuple of labels, which has the probability of all its orders that were
            found; `each` has that of every label. Labels include the space before them: ",", not ", ".
        max_labels: the most labels of one answer; expected with `separator`.
        batch_size: texts of one forward; they are sorted by length and padded, for a decoder on the left. Fewer where
            the keys of all nodes would take more than 4 GB.
        max_tree_nodes: the most nodes that are scored for a text.
        tolerance: what a bounded search may leave, 0 to 1, where it is not to prove `top_k`; 0 scores every label.
        num_beams: of answers of several labels; `top_k` of them, if that is more.
        max_length: the longest prompt in tokens, by default what model and tokenizer allow. A longer one loses the end
            of its text, never of the template.
        progress: show a bar on a terminal or in a notebook; elsewhere the logger `hf_gr.progress` has a line a minute.

    Returns:
        For every text its labels with their probabilities, the best first: a list of lists, which also says how they
        were found and what was left, and has `metrics(expected)` and `to_pandas()`.

    Raises:
        ValueError: before any work: no text, or one that is not a string; a prompt without `{text}`, too long by
            itself, or ending with a space although labels begin with theirs; an index without labels, without living
            ones, or of another tokenizer or vocabulary; numbers out of range; a hierarchy without some label; a
            separator that is also inside a label, or without `max_labels`; prompts at whose end the model's rotary
            angles change (LongRoPE). And during the work: a model whose logits are not numbers.

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
        ('exact', 2, 1)
        >>> ((first, second),) = found
        >>> sorted([first[0], second[0]]), first[1] >= second[1], round(first[1] + second[1], 6)
        (['Science', 'Sports'], True, 1.0)

    Source: "Constrained Decoding: Forcing LLMs to Respect Your Taxonomy", which decodes one label of one text. PMI:
    Holtzman et al. 2021, "Surface Form Competition" (PMI-DC, section 3), and as contextual calibration, with "N/A" for
    the text, Zhao et al. 2021, "Calibrate Before Use". Neither helps all models: Wiegreffe et al. 2023, "Increasing
    Probability Mass on Answer Choices Does Not Always Improve Accuracy".
    """
    import torch

    from hf_gr.generation.torch.logits_process import read_several
    from hf_gr.generation.torch.models import evaluation

    from .beam_search import BeamSearch
    from .label_search import KEYS_AT_ONCE, LabelTree, Prior, TreeSearch
    from .model import LabelModel

    read_texts = _check_texts(texts)
    snapshot = _check_index(index, tokenizer)
    asked = LabelModel(model)
    config, vocab_size = asked.config, asked.vocab_size
    check_tokens_of_catalogue(snapshot, vocab_size, name="index")
    counts = {"top_k": 1 if top_k is None else top_k, "batch_size": batch_size, "num_beams": num_beams}
    _check_numbers({**counts, "max_tree_nodes": max_tree_nodes}, threshold, tolerance)
    _check_score(score, neutral_text)
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
    path_of = read_hierarchy(hierarchy, index.item_ids)
    longest = (answers and answers.longest_answer) or snapshot.max_length
    room = prompt_room(config, tokenizer, longest, max_length)
    side = padding_side(is_encoder_decoder=config.is_encoder_decoder)
    encoder = PromptEncoder(prompt, tokenizer, snapshot, room, side)
    tree = LabelTree.of_labels(snapshot, is_short=score == "renormalized")
    by_mass = score in ("renormalized", "sum")  # what is not visited is bounded

    prompts = encoder.encode(read_texts)
    # Longest first: what does not fit fails at once, and neighbours need little padding.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    share = min(max_tree_nodes / max(tree.num_nodes, 1), 1.0)  # of the set that may be scored
    most = KEYS_AT_ONCE // (int(tree.num_tokens * share) * asked.bytes_of_keys + 1)
    batch_size = max(min(batch_size, len(prompts), most), 1)
    batches = asked.batches(order, [len(one) for one in prompts], longest, batch_size)
    if answers is not None:
        beams = max(num_beams, top_k or 1)
        search = BeamSearch(asked, snapshot, answers, num_beams=beams, renormalizes=score == "renormalized")
    else:
        # If one forward can score all nodes, no search is needed; means and PMI may favour the least probable label.
        is_large = tree.num_tokens > 2 * LOGITS_AT_ONCE // (batch_size * vocab_size)
        is_bounded = is_large and top_k is not None and by_mass or tree.num_nodes > max_tree_nodes
        how: dict[str, Any] = {"tolerance": tolerance if is_bounded else 0.0, "at_least": top_k or 1}
        renormalizes = score == "renormalized"
        # A label's probability is known without the others'; not a parent's, and labels may share one.
        is_alone = path_of is None and top_k is not None and len(tree.rows) == snapshot.num_items
        how["proves"] = renormalizes and is_alone
        search = TreeSearch(asked, tree, renormalizes=renormalizes, max_nodes=max_tree_nodes, **how)
    if threshold is not None and not by_mass and search.method != "exact":
        raise ValueError(
            f"threshold={threshold} with score={score!r}, of a set of {tree.num_nodes:,} nodes that is not scored in "
            "full, expected None, since nothing bounds its probabilities: raise max_tree_nodes, or pass score='sum'"
        )
    ranked: list[Ranked] = [[] for _ in prompts]
    each: list[Ranked] = [[] for _ in prompts]
    parents: list[list[Ranked]] = [[] for _ in prompts]
    mass_left, num_scored = [0.0] * len(prompts), [0] * len(prompts)
    with (
        torch.no_grad(),
        evaluation(asked.model),
        progress_bar("Classifying", lambda: len(prompts), unit="texts", shown=progress) as advance,
    ):
        prior = None
        if score == "pmi":
            prior = Prior(asked, encoder.pad(encoder.encode([NEUTRAL_TEXT if neutral_text is None else neutral_text])))
        for rows in batches:
            batch = search.find(encoder.pad([prompts[row] for row in rows]))
            for row, found in zip(rows, batch, strict=True):
                if not len(found.rows):
                    raise ValueError(asked.broken)
                log_probs, priors = found.log_probs, None if prior is None else prior.of(found.rows)
                labels, lengths = found.labels, (found.rows >= 0).sum(axis=1)
                if answers is not None:
                    labels, numbers = _as_sets(labels)
                    log_probs, lengths = _summed(log_probs, numbers), lengths[np.unique(numbers, return_index=True)[1]]
                    priors = None if priors is None else _summed(priors, numbers)
                scores = log_probs if priors is None else log_probs - priors
                scores = scores / lengths if score == "mean" else scores
                every = _rank(scores, labels, 1.0 - found.mass_left)
                ranked[row] = _best(every, threshold, top_k)
                mass_left[row], num_scored[row] = found.mass_left, found.num_scored
                if path_of is not None:
                    parents[row] = [_best(level, threshold, top_k) for level in path_of.parents(every)]
                if answers is not None:
                    each[row] = _best(_of_each(every), threshold, top_k)
            advance(len(rows))
    return RankedLabels(
        ranked,
        method=search.method,
        score=score,
        num_labels=snapshot.num_items,
        num_nodes=tree.num_nodes,
        num_scored=num_scored,
        mass_left=mass_left,
        parents=None if path_of is None else parents,
        each=None if answers is None else each,
        path_of=path_of,
    )


def _rank(scores: NDArray[np.float64], labels: Sequence[Sequence[Any]], total: float) -> Ranked:
    """All labels, the best first, each with its share of its sequence's probability; together they have a total."""
    shares = np.array([max(len(alike), 1) for alike in labels], dtype=np.float64)
    weights = np.exp(scores - scores.max())
    probabilities = total * weights / weights.sum() / shares
    best = np.argsort(-probabilities, kind="stable")
    return [
        (label, probability)
        for probability, number in zip(probabilities[best].tolist(), best.tolist(), strict=True)
        for label in labels[number]
    ]


def _best(ranked: Ranked, threshold: float | None, top_k: int | None) -> Ranked:
    """The first ones that are probable enough."""
    return [one for one in ranked if one[1] >= (threshold or 0.0)][:top_k]


def _as_sets(answers: Sequence[Sequence[Any]]) -> tuple[list[Sequence[Any]], list[int]]:
    """Answers in the order that comes first, and for every answer the number of its set of labels."""
    sets: dict[frozenset[str], Sequence[Any]] = {}
    for answer in answers:
        sets.setdefault(frozenset(answer[0]), answer)
    numbers = {labels: number for number, labels in enumerate(sets)}
    return list(sets.values()), [numbers[frozenset(answer[0])] for answer in answers]


def _summed(log_probs: NDArray[np.float64], numbers: Sequence[int]) -> NDArray[np.float64]:
    """The logarithms of sums of probabilities, by number."""
    sums = np.full(max(numbers) + 1, -np.inf)
    np.logaddexp.at(sums, numbers, log_probs)
    return sums


def _of_each(answers: Ranked) -> Ranked:
    """The probability of every label to be in the answer, the largest first."""
    sums = Counter[str]()
    for labels, probability in answers:
        sums.update(dict.fromkeys(labels, probability))  # pyright: ignore[reportArgumentType]
    return sums.most_common()  # pyright: ignore[reportReturnType]


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


def _check_score(score: Any, neutral_text: Any) -> None:
    if score not in get_args(Score):
        raise ValueError(f"score={score!r}, expected one of {', '.join(map(repr, get_args(Score)))}")
    if neutral_text is not None and (score != "pmi" or not isinstance(neutral_text, str)):
        raise ValueError(f"neutral_text={neutral_text!r} with score={score!r}, expected a string with score='pmi'")


def _check_numbers(counts: dict[str, Any], threshold: Any, tolerance: Any) -> None:
    for name, value in counts.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name}={value!r}, expected 1 or more")
    if threshold is not None and (not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1):
        raise ValueError(f"threshold={threshold!r}, expected a probability from 0 to 1, or None")
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance={tolerance!r}, expected the share that may be left, from 0, for all labels, to 1")
