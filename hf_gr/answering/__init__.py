# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Requests for items and their answers: what a table and a server do alike. Knows neither files nor queues."""
