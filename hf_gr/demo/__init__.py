# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr demo`: a generative recommender of films, trained and used on this machine. An example of the library, not a part.

The way of the data: `data` (films and histories) -> `semantic_ids` (films as codes) -> `train` (a small Qwen3) -> `cache` (both
on disk) -> `evaluate` (recommend and measure) -> `show` (print). `run` goes that way. `defaults` of the training are tuned for
two CPU cores and at most four minutes.
"""
