# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Recommendations for a whole table of users, and how good they are. Needs pyarrow: `pip install "hf-gr[tables]"`."""
