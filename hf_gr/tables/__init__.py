# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The one reader of tables: `table` opens files and tables in memory, `sequences`, `items` and others read from it."""
