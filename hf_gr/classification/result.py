# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `classify` returns: ranked labels, how they were found, and measures against the right ones. Scores nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["exact", "bounded", "beams"]
Score = Literal["renormalized", "sum", "mean", "pmi"]  # by which labels are ranked: see `classify`
TEXTS_SHOWN, LABELS_SHOWN = 5, 3
Ranked = list[tuple[Any, float]]
PathOf = Callable[[str], Sequence[str]]  # from a label to its parents, the topmost first, and itself


@dataclass(frozen=True)
class LevelMetrics:
    """Measures of one level of a hierarchy, or of whole labels.

    Attributes:
        level: 1 for the topmost; None for whole labels.
        num_texts: texts whose right label has this level.
        num_classes: right classes among those.
        accuracy: the share whose first label is right up to this level.
        accuracy_at_k: the share with a right one among all labels of the result.
        macro_f1: the mean F1 of the classes that are right for some text or answered for one, each weighing the same.
    """

    level: int | None
    num_texts: int
    num_classes: int
    accuracy: float
    accuracy_at_k: float
    macro_f1: float


class RankedLabels(list[Ranked]):
    """For every text its labels with their probabilities, the most probable first: a list of lists of pairs.

    Attributes:
        method: `"exact"` if all labels were scored; `"bounded"` if the most probable ones were; `"beams"` if a beam
            search found answers of several labels.
        score: by what they are ranked, see `classify`.
        mass_left: for every text, the largest share of all probability that labels which were not visited may have.
        num_labels: of the label set.
        num_nodes: of the label set: distinct proper prefixes of its labels, of `"renormalized"` those after which they
            differ.
        num_scored: for every text, the nodes that were scored.
        parents: for every text and level of the hierarchy but the deepest, the topmost first, the parents with the
            probability of all labels below them together; a label that ends there is one. None without `hierarchy=`.
        each: for every text, every label with the probability that the answer has it; None without `separator=`.

    Example:
        >>> found = RankedLabels([[("Art > Music", 0.9), ("Sport", 0.1)]], method="exact", num_labels=2,
        ...                        num_nodes=3, num_scored=[3], path_of=lambda label: label.split(" > "))
        >>> found
        RankedLabels of 1 text by 2 labels (3 nodes): exact
          'Art > Music' 0.9, 'Sport' 0.1
        >>> [(level.level, level.accuracy) for level in found.metrics(["Art > Film"])]
        [(1, 1.0), (2, 0.0)]
    """

    def __init__(
        self,
        ranked: Iterable[Ranked],
        *,
        method: Method,
        num_labels: int,
        num_nodes: int,
        num_scored: Sequence[int],
        score: Score = "sum",
        mass_left: Sequence[float] = (),
        parents: list[list[Ranked]] | None = None,
        each: list[Ranked] | None = None,
        path_of: PathOf | None = None,
    ) -> None:
        super().__init__(ranked)
        self.method = method
        self.num_labels = num_labels
        self.num_nodes = num_nodes
        self.num_scored = list(num_scored)
        self.score = score
        self.mass_left = list(mass_left) or [0.0] * len(self)
        self.parents = parents
        self.each = each
        self.path_of = path_of

    def __repr__(self) -> str:
        texts = f"{len(self)} text{'s' * (len(self) != 1)}"
        shown = [f"RankedLabels of {texts} by {self.num_labels:,} labels ({self.num_nodes:,} nodes): {self.method}"]
        if (left := max(self.mass_left, default=0.0)) > 0:
            shown[0] += f", at most {left:.2g} left"
        for labels in self[:TEXTS_SHOWN]:
            named = [f"{label!r} {probability:.3g}" for label, probability in labels[:LABELS_SHOWN]]
            shown.append("  " + ", ".join([*named, "..."] if len(labels) > LABELS_SHOWN else named or ["none"]))
        return "\n".join([*shown, "  ..."] if len(self) > TEXTS_SHOWN else shown)

    def to_pandas(self) -> Any:
        """A row for every label of a text: `text` (its number), `rank` (from 1), `label`, `probability`."""
        import pandas as pd

        rows = [(text, rank, *one) for text, labels in enumerate(self) for rank, one in enumerate(labels, start=1)]
        return pd.DataFrame(rows, columns=["text", "rank", "label", "probability"])

    def metrics(self, expected: Sequence[str]) -> list[LevelMetrics]:
        """Accuracy and F1 against the right labels.

        Args:
            expected: the right label of every text.

        Returns:
            One entry for every level of the hierarchy, the topmost first; without `hierarchy=` one for whole labels. A
            level is measured on the texts whose right label has it. An answer that ends above it is wrong there; no
            answer is wrong everywhere.

        Raises:
            ValueError: another number of labels than of texts, one that is not a string, or answers of several labels.
        """
        right = list(expected)
        if len(right) != len(self):
            raise ValueError(f"expected has {len(right)} labels, expected one for each of the {len(self)} texts")
        for number, label in enumerate(right):
            if not isinstance(label, str):
                raise ValueError(f"expected[{number}] is {label!r}, expected a label")
        if any(isinstance(label, tuple) for labels in self for label, _ in labels):
            raise ValueError("answers have several labels each, expected one: classify without separator=")
        path_of = self.path_of
        answers = [[label for label, _ in labels] for labels in self]
        if path_of is None:
            alone = [[(label,) for label in of_text] for of_text in answers]
            return [_level_metrics(None, alone, [(label,) for label in right])]
        paths = [tuple(path_of(label)) for label in right]
        found = [[tuple(path_of(label)) for label in of_text] for of_text in answers]
        levels: list[LevelMetrics] = []
        for level in range(1, max(map(len, paths), default=0) + 1):
            texts = [number for number, path in enumerate(paths) if len(path) >= level]
            cut = [[path[:level] for path in found[number]] for number in texts]
            levels.append(_level_metrics(level, cut, [paths[number][:level] for number in texts]))
        return levels


def _level_metrics(
    level: int | None, answers: Sequence[Sequence[tuple[str, ...]]], right: Sequence[tuple[str, ...]]
) -> LevelMetrics:
    first = [of_text[0] if of_text else None for of_text in answers]
    classes = {*right, *(answer for answer in first if answer is not None)}
    hits = Counter(wanted for answer, wanted in zip(first, right, strict=True) if answer == wanted)
    answered, wanted_by = Counter(first), Counter(right)
    # F1 is twice the hits by all that is either answered or right.
    f1 = [2 * hits[one] / (answered[one] + wanted_by[one]) for one in classes]
    among = [wanted in of_text for of_text, wanted in zip(answers, right, strict=True)]
    number = len(right)
    return LevelMetrics(
        level=level,
        num_texts=number,
        num_classes=len(set(right)),
        accuracy=sum(hits.values()) / number if number else float("nan"),
        accuracy_at_k=sum(among) / number if number else float("nan"),
        macro_f1=sum(f1) / len(f1) if f1 else float("nan"),
    )


@dataclass(frozen=True)
class Hierarchy:
    """From a label to its path: by what is between its levels, or by a mapping to its parents, the topmost first."""

    of: str | Mapping[str, Sequence[str]]
    depth: int = 0  # levels of the deepest label of the set

    def __call__(self, label: str) -> list[str]:
        """The parents of a label, the topmost first, and itself."""
        return label.split(self.of) if isinstance(self.of, str) else [*self.of.get(label, ()), label]

    def parents(self, labels: Iterable[tuple[str, float]]) -> list[Ranked]:
        """What labels are of on every level but the deepest, with their sums, the most probable first."""
        levels = [Counter[tuple[str, ...]]() for _ in range(1, self.depth)]
        for label, probability in labels:
            path = tuple(self(label))
            for level, sums in enumerate(levels[: len(path)], start=1):
                sums[path[:level]] += probability  # pyright: ignore[reportArgumentType]
        return [
            [
                (self.of.join(path) if isinstance(self.of, str) else path[-1], total)
                for path, total in sums.most_common()
            ]
            for sums in levels
        ]


def read_hierarchy(hierarchy: Any, labels: Iterable[str]) -> Hierarchy | None:
    """How labels lead to their parents; refuses what is none, or a label without an entry."""
    if hierarchy is None:
        return None
    if isinstance(hierarchy, str) and hierarchy:
        return Hierarchy(hierarchy, max((label.count(hierarchy) + 1 for label in labels), default=0))
    if not isinstance(hierarchy, Mapping):
        raise ValueError(
            f"hierarchy={hierarchy!r}, expected what is between the levels of a label, such as ' > ', or a mapping "
            "from every label to the list of its parents"
        )
    depth = 0
    for label in labels:
        parents = hierarchy.get(label)
        if isinstance(parents, str) or not isinstance(parents, Sequence):
            raise ValueError(
                f"hierarchy[{label!r}] is {parents!r}, expected the list of its parents, the topmost first; [] for "
                "none"
            )
        depth = max(depth, len(parents) + 1)
    return Hierarchy({label: [*hierarchy[label]] for label in labels}, depth)
