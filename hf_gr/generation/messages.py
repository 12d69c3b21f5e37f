# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What a call tells its user without failing: each message once a process."""

from __future__ import annotations

import logging

logger = logging.getLogger("hf_gr.generation")
_SAID: set[str] = set()


def say_once(message: str, *, about: str | None = None) -> None:
    """Log a message, and none about the same (by default: the same message) again."""
    if (about or message) not in _SAID:
        _SAID.add(about or message)
        logger.warning(message)
