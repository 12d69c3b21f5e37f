# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the engine, its command and Ray Serve take unless told otherwise. Imports nothing."""

TIMEOUT = 10.0  # seconds until a request's deadline
MAX_PROMPT_TOKENS = 4096  # longer prompts are cut: one request should not keep a worker for minutes
MAX_CONNECTIONS = 1000
