# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The drop-in surface of transformers, of which only this package knows the internals; supported are 5.17 to 5.23.

The modules here know no framework: which backend a model is for, the configuration, named catalogues, checks and facts
for both. `torch` and `flax` are the two sides, whose modules have the same names where they do the same.
"""
