# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `hf-gr recommend` prints. Counts nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from .text import shown

if TYPE_CHECKING:
    from hf_gr.offline.run import Recommended


def to_json(made: Recommended, seconds: float) -> str:
    """All numbers as one JSON object."""
    return json.dumps(asdict(made) | {"output": str(made.output), "seconds": round(seconds, 3)})


def print_recommended(made: Recommended, seconds: float) -> None:
    """Print what was written, and what was skipped."""
    console = Console()
    answered = made.num_rows - made.num_skipped
    console.print(
        f"[bold]{answered:,} of {made.num_rows:,} users[/] have recommendations; {seconds:.1f} s with loading."
    )
    if made.already_finished:
        console.print("It was already finished: nothing to do.")
    if made.num_resumed:
        console.print(f"{made.num_resumed:,} windows were finished by an earlier run.")
    if made.num_fallback:
        console.print(f"{made.num_fallback:,} users without a history got the fallback list: column is_fallback.")
    if made.num_dropped:
        console.print(f"{made.num_dropped:,} items were dropped, which the catalogue does not have: num_dropped.")
    if made.num_skipped:
        console.print(f"[yellow]{made.num_skipped:,} rows were skipped[/]: column error says why.")
    console.print(f"Saved to {shown(str(made.output))}", soft_wrap=True)
