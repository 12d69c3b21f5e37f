# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""From a table of purchases to a recommender, its draft model (AtSpeed) and its draft head (NEZHA).

`import hf_gr` does not load it.
"""

from .atspeed_trainer import AtSpeedTrainer
from .draft_head_trainer import DraftHeadTrainer
from .histories import read_histories
from .interactions import InteractionDataset
from .item_codes import semantic_ids_from_features, semantic_ids_from_histories
from .packing import score_paths
from .recommender import small_recommender, train_recommender
from .teacher import write_teacher_data
from .teacher_dataset import TeacherDataset

__all__ = [
    "AtSpeedTrainer",
    "DraftHeadTrainer",
    "InteractionDataset",
    "TeacherDataset",
    "read_histories",
    "score_paths",
    "semantic_ids_from_features",
    "semantic_ids_from_histories",
    "small_recommender",
    "train_recommender",
    "write_teacher_data",
]
