# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafts: one module and one class each, with the same few methods. Decodes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from .assistant import AssistantDraft
from .auto import draft_of
from .base import Draft, Prepared, Search
from .head import HeadDraft
from .trie import TrieDraft

# By what `drafting` calls them; "auto" chooses among these.
KINDS: Mapping[str | None, type[Draft]] = {
    None: Draft,
    "trie": TrieDraft,
    "assistant": AssistantDraft,
    "head": HeadDraft,
}

__all__ = ["KINDS", "Draft", "Prepared", "Search", "draft_of"]
