# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`recommend`: its arguments. Imports nothing slow: the command's `--help` is made from this; `run` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .settings import TOKEN_BUDGET, WINDOW_ROWS, Settings

if TYPE_CHECKING:
    from hf_gr.catalogue import ConstraintIndex


def recommend(
    model: Any,
    users: Any,
    output: str | PathLike[str] | None = None,
    *,
    constraint_index: ConstraintIndex | str | Path | None = None,
    history: str | None = None,
    tokens: str | None = None,
    text: str | None = None,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    quantity: str | None = None,
    exclude: str | None = None,
    filter: str | None = None,
    unknown_items: Literal["refuse", "drop"] = "refuse",
    fallback: Any = None,
    remove_items: Sequence[Any] | None = None,
    top_k: int = 10,
    num_beams: int | None = None,
    exact: bool | None = None,
    assistant_model: Any = None,
    max_prompt_tokens: int | None = None,
    prefix_tokens: Sequence[int] = (),
    suffix_tokens: Sequence[int] = (),
    backend: Literal["auto", "torch", "flax"] = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | Any = "auto",
    revision: str | None = None,
    device: Any = None,
    device_map: Any = None,
    mesh: Sequence[int] | Any = None,
    tokenizer: Any = None,
    token_budget: int = TOKEN_BUDGET,
    window_rows: int = WINDOW_ROWS,
    on_error: Literal["stop", "skip"] = "stop",
    overwrite: bool = False,
    format: Literal["parquet", "csv", "jsonl"] | None = None,
    delimiter: str | None = None,
    progress: bool = True,
    **options: Any,
) -> Any:
    """Recommend items to every user of a table, in the order of the table.

    A table in memory gives a table of the same kind. With `output`, rows are written to a Parquet file instead: after
    an interruption or a kill, the same call continues where it stopped. Finished windows are in `OUTPUT.parts` until
    all are finished; a process holds one window at a time.

    Runs on one device, or under `accelerate launch` on many (on CPUs `torch.distributed.run`, since `accelerate launch
    --cpu` starts one process): call it in every process, with the same users. Each process loads the model and the
    catalogue and answers every N-th window of users; the first one merges the results. All must see the same folders.

    Args:
        model: a loaded model, or the folder or repository of one.
        users: a pandas or Polars data frame, an Arrow table, a `datasets.Dataset`, or a list of histories, each a list
            of item ids. With `output` also a file, several in order, or a folder of them: Parquet, CSV or JSON lines.
            In CSV, lists are texts such as `5 7` or `[5, 7]`. JSON lines have all keys in the first line.
        output: the `.parquet` file to write.
        constraint_index: the catalogue, or its folder or repository; by default the one that the checkpoint names, or
            has in its folder.
        history: column of lists of item ids, oldest first: this, `tokens` or `text`. The prompt is their tokens
            (without end tokens), of as many of the latest as the model has room for.
        tokens: column of lists of token ids: the prompt itself.
        text: column of texts, for the tokenizer.
        user: column of user ids, of any type, copied to the output; by default row numbers.
        item: column of item ids, one a row: `users` is a table of purchases. The rows of a user, also needed, are the
            history; a row of the output is a user, in the order of their first rows. All purchases are held in memory.
            Rows with a missing cell are dropped, and with `time` duplicates (same user, item and time), as by `train`;
            a line of the log counts them. `exclude="history"` excludes what a user has bought.
        time: column of times of purchases, by which a user's rows are sorted: numbers, dates, or texts such as
            2026-11-22; by default rows are in order. Purchases of one moment are in a random order, always the same.
        quantity: column of quantities of purchases: rows of 0 or less, such as returns, are dropped.
        exclude: column of lists of item ids that are not recommended to the user; may be the column of the history.
            Ids that the catalogue does not have are allowed, and so is null.
        filter: column of lists of the only item ids to recommend to the user; null allows all, an empty list none.
        unknown_items: what to do with items of a history, or of `filter`, that the catalogue does not have: `"refuse"`
            the row, or `"drop"` them, answer from the rest, and count them in the column `num_dropped`.
        fallback: the answer to users whose history is null, empty, or with `unknown_items="drop"` has no known item:
            item ids, the best first, such as the most popular ones, or a file of them; or a table, in a file or in
            memory, with `item_id` and `similar_items`, lists of what is bought with it, the best first, in CSV as
            JSON; a row without `item_id` has the most popular ones. `hf-gr train` writes one, `fallback.parquet`. Each
            list of an item of the history gives 1 to its first item, 1/2 to the second, and so on; those with the
            largest sums come first, popular ones follow, and none is excluded or not in the catalogue. Such rows have
            null for `scores`, and the column `is_fallback` marks them.
        remove_items: ids of items that must never be recommended, such as those delisted since the catalogue was
            saved. They are removed from the loaded one in memory, so that histories may still name them; a catalogue
            that was saved after `index.remove` no longer knows them. Ids that it does not have are ignored, with a
            warning.
        top_k: items per user.
        num_beams: beams of the search, 2 or more and at least `top_k`; by default the checkpoint's own, if any, else
            20, or `top_k` if that is more.
        exact: the best items of the whole catalogue, proven, instead of a search with beams; `num_beams` is then how
            many prefixes are scored at once, 64 by default. The column `num_proven` says how many items are proven. By
            default what the checkpoint says, else beams.
        assistant_model: a draft model for `generate`, loaded or by name.
        max_prompt_tokens: the most tokens of a prompt; the latest are kept.
        prefix_tokens: token ids before every history, such as a start token.
        suffix_tokens: token ids after every history.
        backend: what runs a model loaded by name: `"torch"`, `"flax"`, or `"auto"`. See
            `AutoModelForGenerativeRetrieval.from_pretrained`.
        dtype: of the weights of a model loaded by name; by default the checkpoint's.
        revision: branch, tag or commit of a model loaded by name from the Hub; also of its tokenizer, and of the
            catalogue in its repository.
        device: where a model loaded by name runs: `"cpu"`, `"cuda:1"`, ...; by default a GPU if there is one, and of
            several processes each its own.
        device_map: of a model loaded by name, such as `"auto"` for one larger than a device; in one process only.
        mesh: of a model in Flax, the numbers of devices that divide rows and weights, such as `(4, 2)`, or a
            `jax.sharding.Mesh`; by default all local devices divide rows.
        tokenizer: for `text`, or its name; by default the checkpoint's.
        token_budget: the most tokens of a batch, including padding and beams; reduce it if memory runs out. Affects
            only the last digits of scores; a run may resume with another one.
        window_rows: users that are sorted by length, decoded and written together: what a process holds in memory, and
            loses if it dies. Also affects the last digits of scores.
        on_error: `"stop"` at the first row that cannot be answered, or `"skip"` it: write an empty row that says why.
            A stopped run may be resumed with `"skip"`. A damaged file always stops the run.
        overwrite: replace the output or the parts of another run. A run always resumes from its own.
        format: of `users`; by default from the suffix.
        delimiter: between the columns of CSV; by default a tab in `.tsv` and `.inter`, a comma elsewhere.
        progress: show a bar on a terminal or in a notebook, in the first process. Elsewhere it is a line for each
            window to the logger `hf_gr.progress`, at level INFO.
        options: further arguments of `generate`: `drafting="trie"`, `length_penalty`, ... Sampling is refused, since
            rows would not be reproducible.

    Returns:
        Without `output`, a table of the kind of `users` (a data frame of pandas with the same index), in every
        process; with it, a summary of the run. The columns, here and in the file, are that of `user` (or `row`,
        from 0), `items` (ids, best first), `scores` (as `sequences_scores`), with `fallback` also `is_fallback`
        (with a table also `similar_to`: what of the history some of the row's items are bought with, the latest
        first), with `unknown_items="drop"` also `num_dropped`, with `exact` also `num_proven`, and with
        `on_error="skip"` also `error`.
        There are at most `top_k` items, fewer if fewer are allowed. Items of one sequence have one score. A list of
        histories gives a list of lists of items.

    Raises:
        ValueError: before any work, for invalid arguments or columns; later for a row that cannot be answered (with
            its file, and its number from 0 there) or a damaged file. Finished parts are kept.
        OSError: the disk is full; finished parts are kept.
        RuntimeError: another process died or failed.

    Example:
        >>> import hf_gr  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", [["B01", "B02"], ["B07"]], exclude="history")  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", frame, user="user", history="items")  # doctest: +SKIP
        >>> hf_gr.recommend("me/recommender", "users.parquet", "recs.parquet", history="items")  # doctest: +SKIP
    """
    settings = Settings.of(locals())
    from .run import run_table

    return run_table(model, users, output, settings)
