# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Files on disk and on the Hub: pairs of JSON and safetensors, cards, tables. Knows no catalogue, no framework."""
