# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_gr.cli`: what a launcher such as `accelerate launch` runs in each process."""

from __future__ import annotations

from .commands.app import main

if __name__ == "__main__":
    main()
