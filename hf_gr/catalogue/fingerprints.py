# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of catalogues. The values are on users' disks: those of existing data never change.

A run of `recommend` resumes only with the same items; teacher data depends on the sequences alone.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from .index import ConstraintIndex
from .snapshot import Snapshot


def fingerprint_index(index: ConstraintIndex) -> str:
    """A digest of a catalogue: what was compiled, and which items are alive."""
    digest = hashlib.sha256(str(index.eos_token_id).encode())
    items, alive = index.snapshot.items, index.snapshot.alive
    for name, array in sorted(items.arrays().items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(array.data)
    if alive is not None:
        digest.update(alive.items.data)
    return digest.hexdigest()


def fingerprint_sequences(snapshot: Snapshot) -> str:
    """A digest of a catalogue's sequences, whatever their item ids."""
    rows = np.ascontiguousarray(snapshot.rows(), dtype="<i8")
    header = json.dumps([snapshot.eos_token_id, list(rows.shape)]).encode()
    return hashlib.sha256(header + rows.tobytes()).hexdigest()
