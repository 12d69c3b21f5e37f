# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recommender that the papers' experiments start from, and TIGER's T5 beside it. Measures nothing.

Both are trained on the same histories, with the same catalogue, noise and processor time, and the weights with the
least validation loss are kept. Trained once; a changed recipe trains again.
"""

from __future__ import annotations

from typing import Any

CHECK_ROWS = 2000  # of the validation rows, for the loss that picks the weights
EARLY = 0.1  # of the training: the weights in `early`
RECIPES: dict[str, dict[str, Any]] = {
    "beauty": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {"num_train_epochs": 30, "learning_rate": 2e-3, "dropout": 0.1, "jitter": 1.0},
    },
    "movielens": {
        "max_items": 20,
        "model": {"hidden_size": 128, "num_hidden_layers": 3},
        "training": {"num_train_epochs": 10, "learning_rate": 2e-3, "dropout": 0.1, "jitter": 1.0},
    },
}
FAST: dict[str, Any] = {
    "max_items": 8,
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "training": {"max_steps": 30, "dropout": 0.1, "jitter": 1.0},
}
T5 = {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 32}
FAST_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}
