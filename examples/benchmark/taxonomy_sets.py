# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Label sets of `taxonomy.py`: flat, hierarchical and of several labels; texts to train on, and texts held out.

ICD-10-CM: inclusion terms, such as "Classical cholera". A code is held out with all of its terms, so that none of its
wordings is trained on; other codes of its category are. HS: goods of six digits; a good is held out, others of its
heading are not. Knows no model.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from classify_codes import Coded, hs_tree, icd_tree  # noqa: E402
from fine_tune_classifier import TICKETS, made_up_tickets  # noqa: E402

HELD_OUT = 0.1
SEPARATOR, MOST = ";", 3  # of answers of several labels
BETWEEN = " > "
NAME_ONLY = "Answer with the category's name only."
Pair = tuple[str, tuple[str, ...]]  # a text and its labels


@dataclass(frozen=True)
class LabelSet:
    """A label set and its texts.

    Attributes:
        name: such as "ICD chapters".
        kind: "flat", "hierarchical" or "several labels".
        labels: all labels.
        question: for a chat model.
        form: what a chat model is told of the form of its answer.
        prompt: that a model is trained on, with `{text}`.
        train: texts to train on, with their labels.
        test: texts held out, with their labels.
        hierarchy: see `hf_gr.classify`.
        codes: those of the texts held out; () if each has its own.
    """

    name: str
    kind: str
    labels: Sequence[str]
    question: str
    form: str
    prompt: str
    train: Sequence[Pair]
    test: Sequence[Pair]
    hierarchy: str | Mapping[str, Sequence[str]] | None = None
    codes: Sequence[str] = ()

    @property
    def several(self) -> bool:
        """Whether an answer has several labels."""
        return self.kind == "several labels"

    @property
    def parents(self) -> set[str]:
        """What names a class of the taxonomy that is no label: parts of paths, and parents."""
        if isinstance(self.hierarchy, Mapping):
            return {parent for parents in self.hierarchy.values() for parent in parents} - set(self.labels)
        if self.hierarchy is None:
            return set()
        parts = [label.split(self.hierarchy) for label in self.labels]
        begun = {self.hierarchy.join(path[:end]) for path in parts for end in range(1, len(path))}
        return (begun | {part for path in parts for part in path}) - set(self.labels)


def split(phrases: Sequence[Coded], seed: int) -> tuple[list[Coded], list[Coded]]:
    """Phrases to train on, and those of a tenth of the codes in random order; none of a text that is in both."""
    codes = sorted({phrase.code for phrase in phrases})
    draw = random.Random(seed)
    held_out = set(draw.sample(codes, round(HELD_OUT * len(codes))))
    train = [phrase for phrase in phrases if phrase.code not in held_out]
    known = {phrase.text.casefold() for phrase in train}
    test = {phrase.text.casefold(): phrase for phrase in phrases if phrase.code in held_out}
    left = [phrase for text, phrase in test.items() if text not in known]
    draw.shuffle(train)
    draw.shuffle(left)
    return train, left


def joined(pairs: Sequence[Pair], number: int, seed: int) -> list[Pair]:
    """Texts of one to three of others; their labels in order, none twice: two of a chapter have one label."""
    draw = random.Random(seed)
    found: list[Pair] = []
    for _ in range(number):
        drawn = draw.sample(pairs, draw.randint(1, MOST))
        labels = dict.fromkeys(label for _, of_text in drawn for label in of_text)
        found.append(("; ".join(text for text, _ in drawn), tuple(labels)))
    return found


def several_of(one: LabelSet, name: str, question: str, form: str, prompt: str, seed: int) -> LabelSet:
    """A set of texts with several labels, from one of texts with one."""
    train = joined(one.train, len(one.train), seed)
    return LabelSet(
        name, "several labels", one.labels, question, form, prompt, train, joined(one.test, len(one.test), seed + 1)
    )


def pairs(phrases: Sequence[Coded], level: int | None) -> list[Pair]:
    """Texts with the name at a level of their path, or with all of it."""
    return [(one.text, (BETWEEN.join(one.path) if level is None else one.path[level],)) for one in phrases]


def distinct(paths: Sequence[tuple[str, str, str]], level: int) -> list[str]:
    """The names at a level."""
    return list(dict.fromkeys(path[level] for path in paths))


def icd_sets(seed: int) -> tuple[LabelSet, LabelSet, LabelSet]:
    """Chapters of ICD-10-CM, paths to its categories, and several chapters."""
    paths, phrases = icd_tree()
    train, test = split(phrases, seed)
    codes = [one.code for one in test]
    chapters = LabelSet(
        "ICD chapters",
        "flat",
        distinct(paths, 0),
        "Which chapter does this diagnosis belong to?",
        NAME_ONLY,
        "Diagnosis: {text}\nChapter:",
        pairs(train, 0),
        pairs(test, 0),
        codes=codes,
    )
    to_categories = LabelSet(
        "ICD paths",
        "hierarchical",
        [BETWEEN.join(path) for path in paths],
        "Which chapter, block and category of ICD-10-CM does this diagnosis belong to?",
        f"Answer with their names only, such as: {BETWEEN.join(paths[0])}",
        "Diagnosis: {text}\nPath:",
        pairs(train, None),
        pairs(test, None),
        BETWEEN,
        codes,
    )
    several = several_of(
        chapters,
        "ICD, several",
        "Which chapters do these diagnoses belong to?",
        f'Answer with the names of one to three categories only, none twice, with "{SEPARATOR}" between them.',
        "Diagnoses: {text}\nChapters:",
        seed,
    )
    return chapters, to_categories, several


def hs_sets(seed: int) -> tuple[LabelSet, LabelSet]:
    """Chapters of HS, and its headings."""
    paths, phrases = hs_tree()
    train, test = split(phrases, seed)
    codes = [one.code for one in test]
    chapters = LabelSet(
        "HS chapters",
        "flat",
        distinct(paths, 1),
        "Which category do these trade goods belong to?",
        NAME_ONLY,
        "Goods: {text}\nChapter:",
        pairs(train, 1),
        pairs(test, 1),
        codes=codes,
    )
    headings = LabelSet(
        "HS headings",
        "hierarchical",
        distinct(paths, 2),
        "Which heading (four digits) of the Harmonized System do these goods belong to?",
        "Answer with the heading's name only.",
        "Goods: {text}\nHeading:",
        pairs(train, 2),
        pairs(test, 2),
        {path[2]: list(path[:2]) for path in paths},
        codes,
    )
    return chapters, headings


def code_sets(seed: int) -> list[LabelSet]:
    """ICD-10-CM and HS, each flat and with its hierarchy, and several chapters of ICD-10-CM."""
    icd_chapters, icd_paths, icd_several = icd_sets(seed)
    hs_chapters, hs_headings = hs_sets(seed)
    return [icd_chapters, hs_chapters, icd_paths, hs_headings, icd_several]


def ticket_sets(seed: int) -> list[LabelSet]:
    """Made-up tickets, for `--fast`: a path, its first part, and several of these."""
    drawn: list[Pair] = [(text, (label,)) for text, label in made_up_tickets(460, seed)]
    tops: list[Pair] = [(text, (label.split(BETWEEN)[0],)) for text, (label,) in drawn]
    top_labels = list(dict.fromkeys(label.split(BETWEEN)[0] for label in TICKETS))
    flat = LabelSet(
        "tickets", "flat", top_labels, "What is this about?", NAME_ONLY, "Text: {text}\nTopic:", tops[:400], tops[400:]
    )
    paths = LabelSet(
        "ticket paths",
        "hierarchical",
        list(TICKETS),
        "What is this about?",
        NAME_ONLY,
        "Text: {text}\nPath:",
        drawn[:400],
        drawn[400:],
        BETWEEN,
    )
    return [
        flat,
        paths,
        several_of(flat, "tickets, several", "What are these about?", NAME_ONLY, "Text: {text}\nTopics:", seed),
    ]
