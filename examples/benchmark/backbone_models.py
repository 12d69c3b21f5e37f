# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The recommender that the papers' experiments start from, and TIGER's T5 beside it. Measures nothing.

Both are trained on the same histories, with the same catalogue, noise and processor time, and the weights with the
least validation loss are kept. Trained once; a changed recipe trains again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbone_data import Study
from torch.utils.data import Dataset
from transformers import T5Config, T5ForConditionalGeneration

from hf_gr import AutoModelForGenerativeRetrieval, enable
from hf_gr.files.atomic import replaced_folder
from hf_gr.files.cache import cache_folder
from hf_gr.training import small_recommender, train_recommender
from hf_gr.training.recommender import HistoryWindows

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
