# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Trainers for draft models (AtSpeed's losses, and data from a target model) and for draft heads (NEZHA).

`import hf_gr` does not load it.
"""

from .atspeed_trainer import AtSpeedTrainer
from .draft_head_trainer import DraftHeadTrainer
from .interactions import DraftHeadCollator, InteractionDataset
from .packing import score_paths
from .teacher import write_teacher_data
from .teacher_dataset import TeacherCollator, TeacherDataset

__all__ = [
    "AtSpeedTrainer",
    "DraftHeadCollator",
    "DraftHeadTrainer",
    "InteractionDataset",
    "TeacherCollator",
    "TeacherDataset",
    "score_paths",
    "write_teacher_data",
]
