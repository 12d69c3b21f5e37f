# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a call: each is logged once a process."""

import logging

logger = logging.getLogger("hf_gr.generation")
_SAID: set[str] = set()


def say_once(message: str) -> None:
    """Log a message, unless it was logged before."""
    if message not in _SAID:
        _SAID.add(message)
        logger.warning(message)
