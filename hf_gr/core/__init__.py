# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What both backends share. Knows no framework: arrays are handled by the `ops` of the backend that made them."""
