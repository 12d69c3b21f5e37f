# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr demo`: a generative recommender of films, trained and used on this machine.

The data flow in `run`: `data` (films and histories) -> `semantic_ids` (films as codes) -> `hf_gr.training` (a small
Qwen3) -> `cache` (both on disk) -> `evaluate` (recommend and measure) -> `show` (print).
"""
