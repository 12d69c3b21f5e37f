# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a call: each is logged once a process."""

from __future__ import annotations

import logging

logger = logging.getLogger("hf_gr.generation")
_SAID: set[str] = set()


def say_once(message: str, *, about: str | None = None) -> None:
    """Log a message, unless one about the same (by default: the same message) was logged before."""
    if (about or message) not in _SAID:
        _SAID.add(about or message)
        logger.warning(message)
