# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty for the examples: semantic IDs of all items, and the histories of all users.

It is the Beauty that AtSpeed publishes, its items coded by the RQ-VAE of LC-Rec. To make its files, and compare their
checksums with those of RESULTS.md:

    git clone https://github.com/Linxyhaha/AtSpeed
    python examples/benchmark/beauty_data.py AtSpeed/data/beauty data/beauty
"""

import argparse
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hf_gr import SemanticIds
from hf_gr.training import read_histories

# $HF_GR_DATA holds the data sets that the package does not bring, each in a folder of its own.
DEFAULT_DATA = Path(os.environ.get("HF_GR_DATA") or "data") / "beauty"
SHA256 = {  # of the files that RESULTS.md was made with
    "items.tsv": "0e7dc1761ffc9c52fa6c6897a5688b420172e0891719a2d07fe0d83c7bb43d95",
    "users.jsonl": "88fc6b793d75c8d7b7340eb27995e846e4c671eccf589c7f225e96a93e41af19",
}
FILES = tuple(SHA256)
HOW_TO_GET_IT = (
    "To make it: git clone https://github.com/Linxyhaha/AtSpeed, then "
    "python examples/benchmark/beauty_data.py AtSpeed/data/beauty data/beauty"
)


def is_there(data: Path, *, fast: bool) -> bool:
    """Whether the files are there; if not, a fast run says so and goes without, and any other ends the program."""
    missing = [name for name in FILES if not (data / name).is_file()]
    if missing:
        message = (
            f"no {' and '.join(missing)} in {data}: pass the folder of the Beauty data with --data, or set "
            f"HF_GR_DATA to the folder that holds beauty/. {HOW_TO_GET_IT}"
        )
        if not fast:
            raise SystemExit(message)
        print(f"skipped: {message}")
    return not missing


def read_items(data: Path) -> tuple[list[int], np.ndarray]:
    """Item ids, and their `[N, L]` codes."""
    table = np.loadtxt(data / "items.tsv", dtype=np.int64, delimiter="\t", skiprows=1)
    return table[:, 0].tolist(), table[:, 1:]


def read_users(data: Path) -> list[dict[str, Any]]:
    """What each user bought: lists of items by period."""
    with (data / "users.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def convert(source: Path, output: Path) -> None:
    """Write both files from those that AtSpeed publishes, whose users and items begin at 1 but for semantic IDs."""
    ids = SemanticIds.from_json(source / "beauty.LCRec-1e-3lr.json", offset=0)
    rows = [[item, *codes] for item, codes in zip(ids.item_ids, ids.codes.tolist(), strict=True)]
    names = ["item_id", *(f"level_{level + 1}" for level in range(ids.num_levels))]
    parts = {part: read_histories(source / f"sequential_{part}.txt") for part in ("train", "valid", "test")}
    users = [
        {"user_id": int(user) - 1, **{part: [item - 1 for item in of.get(user, [])] for part, of in parts.items()}}
        for user in parts["train"]
    ]
    output.mkdir(parents=True, exist_ok=True)
    (output / "items.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in [names, *rows]))
    (output / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in users))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?", help="folder data/beauty of AtSpeed's repository")
    parser.add_argument("output", type=Path, nargs="?", default=DEFAULT_DATA, help="folder to write to")
    options = parser.parse_args(arguments)
    if options.source is not None:
        convert(options.source, options.output)
    elif not is_there(options.output, fast=True):
        return
    other = [name for name, sha in SHA256.items() if sha256((options.output / name).read_bytes()).hexdigest() != sha]
    if other:
        raise SystemExit(f"{options.output}: {' and '.join(other)} differ from those of RESULTS.md")
    print(f"{options.output}: the files of RESULTS.md")


if __name__ == "__main__":
    main()
