# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr index`: build, show, check and push catalogues; the library does the work.

The library is imported when a command runs: `hf-gr index --help` answers at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import typer

from hf_gr.files.text import counted

if TYPE_CHECKING:
    from hf_gr.catalogue import ConstraintIndex


def build(
    input: list[Path],
    *,
    output: Path,
    format: Literal["parquet", "csv", "tsv", "jsonl", "json", "npy", "txt"] | None = None,
    eos_token_id: int | None = None,
    sequence: list[str] | None = None,
    codes: list[str] | None = None,
    item_id: str | None = None,
    no_item_id: bool = False,
    delimiter: str | None = None,
    tokenizer: str | None = None,
    offset: int | None = None,
    level_sizes: Sequence[int] | None = None,
    template: str | None = None,
    labels: bool = False,
    prefix: str | None = None,
    as_json: bool = False,
) -> None:
    """Compile a catalogue from a file, and save it as an index.

    Tokens are numbers that the model knows; codes are those of semantic IDs, which --offset or --tokenizer turns into
    tokens. Writes constraint_index.json, constraint_index.safetensors and, unless there is one, a model card to one
    folder.

    Args:
        input: a table of tokens or codes (.parquet, .csv, .tsv, .jsonl; several files, or a folder of them, make one),
            the semantic IDs of a public recipe (.json), an array of tokens, one row per item (.npy), or, with
            --labels, a text file of one label a line (.txt), or a table of them, of Excel, too (.xlsx).
        output: folder of the index, created if necessary; an existing index is replaced.
        format: the format of INPUT. Default: from its suffix.
        eos_token_id: the token that ends every sequence; needed if they differ in length. Default: none.
        sequence: the column that holds lists of tokens, which the model knows as they are; or, given several times,
            columns of one token each. Default: sequence.
        codes: the column that holds codes of semantic IDs (lists of integers or of texts such as <a_12>, or 12-5-9),
            which --offset or --tokenizer turns into tokens; or, given several times, columns of one code each.
        item_id: the column of item ids, with --labels of labels. Default: item_id, or label.
        no_item_id: items are known by their row numbers.
        tokenizer: a folder or repository with a tokenizer that has a token for every code: this or --offset; with
            --labels, that of the model that answers with them.
        offset: the token of the first level's code 0, if the codes of all levels are consecutive tokens: the number of
            tokens before them; this or --tokenizer.
        level_sizes: codebook sizes. Default: the largest code of each level plus one.
        template: how INPUT and the tokenizer write a code, {LEVEL} being a capital; by default <{level}_{code}>, such
            as <a_12>.
        labels: INPUT has labels, for a language model that classifies: a text file with one a line, or a column of a
            table, where each may come more than once; needs --tokenizer.
        prefix: what stands between the prompt and a label, "" where prompts end with a space. Default: a space.
    """
    arguments = locals()
    from .index_input import OPTIONS, compile_index

    there = next(path for path in (output, *output.absolute().parents) if path.exists())  # before minutes of work
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"output={str(output)!r}: {there} is no folder that may be written to: name another")
    if item_id is not None and no_item_id:
        raise ValueError("item_id= and no_item_id= are given, expected one of them")
    given = {name: arguments[name] for names in OPTIONS.values() for name in names if arguments[name] is not None}
    given |= {"item_id": None} if no_item_id else {}
    start = perf_counter()
    index = compile_index(input, format=format, labels=labels, given=given)
    seconds = perf_counter() - start
    index.save_pretrained(output)

    from hf_gr.catalogue.code_book import doubts_of

    from .index_report import print_built, print_doubts

    sizes = [last - first + 1 for first, last in index.snapshot.levels or ()]
    doubts = doubts_of(index.snapshot) + ([] if level_sizes or offset is None else list(_doubt_sizes(sizes)))
    if as_json:
        names = ("num_items", "max_length", "eos_token_id", "max_token_id", "nbytes")
        facts = {"output": str(output), "seconds": round(seconds, 3), "num_sequences": len(index)}
        facts |= {name: getattr(index, name) for name in names} | {"level_sizes": sizes, "warnings": doubts}
        typer.echo(json.dumps(facts))
    else:
        print_built(index, output, seconds, sizes)
    print_doubts(doubts)


def _doubt_sizes(sizes: Sequence[int]) -> Iterator[str]:
    """Levels, but for the last one, that seem to lack codes which no item has: all later tokens would be too small."""
    for level, size in enumerate(sizes[:-1]):
        wanted = next((each for each in (2 ** size.bit_length(), *sizes) if 0 < each - size <= 2 and size > 8), None)
        if wanted is not None:
            yield (
                f"level {level + 1} has {size} codes, and not {wanted}: if no item has the others, all later tokens "
                f"are wrong by {wanted - size}; pass --level-sizes, the codebook sizes of the model"
            )


def show(index: str, *, as_json: bool = False, revision: str | None = None) -> None:
    """Show what an index holds: its levels, its collisions and its memory.

    A step of beam search descends one level. Fewer children make it cheaper; a forced level leaves no choice.
    """
    from hf_gr.catalogue import ConstraintIndex
    from hf_gr.catalogue.summary import summarise

    from .index_report import print_summary

    summary = summarise(ConstraintIndex.from_pretrained(index, revision=revision).snapshot)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        print_summary(summary, index)


def check(index: str, *, model: str | None = None, as_json: bool = False, revision: str | None = None) -> None:
    """Verify an index from end to end: all digests, and that both files are of one catalogue.

    Names what is damaged, with exit code 2. Warns if a sound index seems to have codes compiled as tokens.

    Args:
        model: a model's folder or repository: does the catalogue fit its vocabulary and its code book? Reads its
            configs only.
    """
    from safetensors import safe_open

    from hf_gr.catalogue import ConstraintIndex, storage
    from hf_gr.catalogue.code_book import compare, doubts_of
    from hf_gr.files.hub import Source

    from .index_report import print_checked, print_doubts

    folder = Source(index, revision=revision).resolve_folder(storage.FILES)
    loaded = ConstraintIndex.from_pretrained(folder, verify=True)
    # Loading uses only the description in the arrays' file; people read the other one.
    shown: dict[str, Any] = json.loads((folder / storage.JSON_FILE).read_bytes())
    with safe_open(folder / storage.ARRAYS_FILE, "np") as file:
        inside: dict[str, Any] = json.loads(file.metadata()["constraint_index"])
    if shown != inside:
        differ = ", ".join(sorted(name for name in shown | inside if shown.get(name) != inside.get(name)))
        raise ValueError(
            f"{folder}: {storage.JSON_FILE} and {storage.ARRAYS_FILE} are of different saves ({differ} differ): "
            "a file was swapped or a save interrupted; download both or save it again"
        )
    checked = {
        "files": f"whole, of format version {inside['format_version']}, and of one catalogue",
        "digests": f"of the description and of {loaded.nbytes:,} bytes of arrays",
        "catalogue": f"{counted(len(loaded), 'sequence')}, {counted(loaded.max_length, 'level')}, "
        f"{counted(loaded.num_items, 'item')}",
    }
    vocabulary, doubts = None, list[str]()
    if model is not None:
        vocabulary = _check_vocabulary(loaded, model)
        checked["vocabulary"] = f"{vocabulary:,} tokens of {model}; the largest here is {loaded.max_token_id:,}"
        if book := _code_book_of(model):
            found = compare(book, loaded.snapshot, whose=model, argument="the index")
            doubts += [] if found is None else [found]
        checked["code book"] = f"{len(book)} items that {model} learned" if book else f"unknown: {model} has none"
    doubts += doubts_of(loaded.snapshot, vocabulary=vocabulary)
    if as_json:
        typer.echo(json.dumps({"index": index, "checked": checked, "warnings": doubts}))
    else:
        print_checked(index, checked)
    print_doubts(doubts)


def _check_vocabulary(index: ConstraintIndex, model: str) -> int:
    """The vocabulary that a model's config names; a `ValueError` if it is too small for an index, or unknown."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"the config of {model} cannot be read ({error}): check --model") from error
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if vocabulary is None:
        raise ValueError(f"the config of {model} has no vocab_size, expected that of a language model")
    if index.max_token_id >= vocabulary:
        raise ValueError(
            f"the catalogue has token {index.max_token_id}, expected less than the vocabulary of {model}, "
            f"{vocabulary}: is it another model's catalogue, or were the model's embeddings not resized?"
        )
    return vocabulary


def _code_book_of(model: str) -> Mapping[str, str]:
    from hf_gr.generation.configuration import GRGenerationConfig

    with suppress(OSError):  # there may be no such file
        return vars(GRGenerationConfig.from_pretrained(model))["code_book"] or {}
    return {}


def push(
    index: str,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload constraint index",
    as_json: bool = False,
) -> None:
    """Verify an index, upload it to the Hub, and print the commit's URL.

    A repository without a model card gets one; an existing card is kept. Log in first: `hf auth login`.

    Args:
        repo_id: the repository, such as me/catalogue; created if necessary.
        private: create a private repository; an existing one keeps its visibility.
        revision: the branch to push to, created if necessary. Default: the main branch.
        create_pr: open a pull request instead.
        message: the commit message.
    """
    from huggingface_hub import errors

    from hf_gr.catalogue import ConstraintIndex

    loaded = ConstraintIndex.from_pretrained(index, verify=True)
    try:
        address = loaded.push_to_hub(
            repo_id, private=private or None, revision=revision, commit_message=message, create_pr=create_pr
        )
    except errors.HTTPError as error:  # of httpx or httpx2, depending on huggingface_hub's version, and no OSError
        raise OSError(
            f"the Hub did not take {repo_id} ({error}): check the name, the connection and the login"
        ) from error
    typer.echo(json.dumps({"repo_id": repo_id, "url": address}) if as_json else address)


COMMANDS = (build, show, check, push)
