# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding in PyTorch: trie step, tree, beams, scorers and the one loop. Knows no transformers and no Flax."""
