# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models run faster on one thread
