# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What tells one catalogue from another. The values are on users' disks: for what was there before, they never change.

There are two: a run of `recommend` goes on only with the very same index, item ids and what is alive among it, and is
told so without building anything; teacher data is of sequences, however the items on them are named.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from .index import ConstraintIndex
from .snapshot import Snapshot


def fingerprint_index(index: ConstraintIndex) -> str:
    """A digest of a catalogue: what was compiled, and what of it is alive."""
    digest = hashlib.sha256(str(index.eos_token_id).encode())
    for part in index.snapshot.parts:
        for name, array in sorted(part.segment.arrays().items()):
            digest.update(f"{name} {array.shape} {array.dtype}".encode())
            view: Any = array.reshape(-1).view("uint8")  # no copy of what is mapped
            digest.update(view)
        if part.alive is not None:
            digest.update(part.alive.items.tobytes())
    return digest.hexdigest()


def fingerprint_sequences(snapshot: Snapshot) -> str:
    """A digest of the sequences of a catalogue; items may be named otherwise."""
    rows = np.ascontiguousarray(snapshot.rows(), dtype="<i8")
    header = json.dumps([snapshot.eos_token_id, list(rows.shape)]).encode()
    return hashlib.sha256(header + rows.tobytes()).hexdigest()
