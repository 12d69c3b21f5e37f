# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Many users at once: `Engine`, and the servers around it.

`engine` needs what hf_gr needs; `app` needs `pip install "hf-gr[serve]"`, and `ray` `pip install "hf-gr[ray]"`.
"""
