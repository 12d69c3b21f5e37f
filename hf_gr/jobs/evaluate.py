# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: its arguments. Imports nothing slow, as `recommend`; `evaluation` does the work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .recommend import recommend
from .settings import CUTOFFS, NUM_RESAMPLES, SAMPLED_USERS, Settings

if TYPE_CHECKING:
    from hf_gr.catalogue import ConstraintIndex

    from .results import Evaluation

NOT_TAKEN = ("output", "overwrite", "top_k", "remove_items")  # of the arguments of `recommend`
OF_RECOMMEND = signature(recommend).parameters.keys() - {*NOT_TAKEN, "options"}


def evaluate(
    model: Any,
    users: Any,
    *,
    constraint_index: ConstraintIndex | str | Path | Mapping[str, ConstraintIndex | str | Path] | None = None,
    user: str | None = None,
    target: str | None = None,
    group: str | None = None,
    is_new: str | None = None,
    new_items: Iterable[Any] | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
    num_beams: int | Sequence[int] | None = None,
    exact: bool | None = None,
    baselines: bool = True,
    omit_history: bool | None = None,
    num_resamples: int = NUM_RESAMPLES,
    bootstrap_seed: int = 0,
    sampled_users: int = SAMPLED_USERS,
    work_dir: str | Path | None = None,
    **arguments: Any,
) -> Evaluation:
    """Measure recommendations against what users chose next, and compare them: models, catalogues, beams, baselines.

    The default is leave-one-out: the last item of every history is the target, the others are the prompt; `tokens` and
    `text` need `target`. A target that `exclude` has is a
    miss, except as the last item of the history. Rows on which any model fails (`on_error="skip"`) are excluded
    for all, so that all are compared over the same users.

    Args:
        model: as in `recommend`, or a dictionary of several, by name: `{"old": "me/old", "new": "me/new"}`. They are
            loaded one after the other.
        users: a table of users in files or in memory, as in `recommend`.
        constraint_index: the catalogue, or its name; by default the one that the checkpoint names, or has in its
            folder. A dictionary, by name, has one for each model, or several for a single model.
        user: column of user ids, of any type, if users have several rows: intervals then resample users, each with all
            rows. By default every row is a user.
        target: column of the item that came next, or of lists of them; by default the last item of the history. A
            target that the catalogue does not have is a miss.
        group: column of the users' groups, each of which gets its own metrics.
        is_new: column of true and false (or 1 and 0): whether the target is new, instead of `new_items`.
        new_items: ids of new items; users whose first target is one of them get their own metrics.
        cutoffs: the K of Recall@K and NDCG@K; the largest is the number of items per user.
        num_beams: one number or several, each evaluated; by default the checkpoint's own, else 20.
        exact: evaluate the best items of the whole catalogue, instead of those that beams find: see `recommend`.
        baselines: also evaluate two recommenders without a model, for the same users: the most popular items, and the
            items that go with those of the history. They learn from the histories before the targets, and need
            `history`.
        omit_history: whether lists of the baselines omit the user's past items, whatever `exclude` says; by default if
            histories hardly repeat an item (under 5%), which a model learns. The result says which was done.
        num_resamples: resamples of the users, from which the intervals of metrics and differences are made; 0 for
            none.
        bootstrap_seed: of the resamples.
        sampled_users: users whose latency is measured, one at a time, and whose beams without the catalogue are
            looked up in it; 0 for neither.
        work_dir: a folder for intermediate rows, which all processes see; by default one of the system's.
        arguments: those of `recommend` (`history`, `exclude`, ...) but `output`, `overwrite`, `top_k` and
            `remove_items`; and further arguments of `generate`.

    Returns:
        The metrics, in every process.

    Raises:
        ValueError, OSError, RuntimeError: as `recommend`; or arguments contradict each other.

    Example:
        >>> import hf_gr  # doctest: +SKIP
        >>> found = hf_gr.evaluate("me/old", "users.parquet", history="items")  # doctest: +SKIP
        >>> found.plot("recall.png")  # doctest: +SKIP
    """
    options = {name: arguments.pop(name) for name in arguments.keys() - OF_RECOMMEND}
    settings = Settings.of({**locals(), **arguments})
    from .evaluation import run_evaluation

    return run_evaluation(model, users, settings)
