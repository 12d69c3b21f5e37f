# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Draft models: data from a target model, the losses of AtSpeed, and a Trainer. `import hf_gr` does not load it."""

from .dataset import TeacherCollator, TeacherDataset
from .packing import score_paths
from .teacher import write_teacher_data
from .trainer import AtSpeedTrainer

__all__ = ["AtSpeedTrainer", "TeacherCollator", "TeacherDataset", "score_paths", "write_teacher_data"]
