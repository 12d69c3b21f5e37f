# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From a table of purchases to a measured recommender: `hf_gr.train`, which is `hf-gr train`."""
