# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models run faster on one thread

collect_ignore_glob = [] if find_spec("pyarrow") else ["test_offline_*"]  # they write tables of users
