# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` in PyTorch. The only package that knows the internals of transformers."""
