# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to ranked labels of a catalogue: all of them scored exactly, or the best that beams find."""
