# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What the trainers here share: a custom loss, their data, batches by length. Knows no loss and no data."""

import copy
import json
import logging
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_gr.catalogue import SemanticIds
from hf_gr.catalogue.code_book import compare
from hf_gr.catalogue.snapshot import Snapshot
from hf_gr.generation.configuration import extend
from hf_gr.torch.processes import look_after_group

logger = logging.getLogger("hf_gr.training")

Data = TypeVar("Data")


class LossTrainer(Trainer):
    """transformers' Trainer with a mean loss: the model's own, or that of a subclass; its datasets have `lengths`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        look_after_group(self.args.world_size)
        if self.args.fsdp and not self.is_fsdp_enabled:
            raise ValueError(
                f"args.fsdp={self.args.fsdp!r} in {self.args.world_size} processes on {self.args.device.type}, "
                "expected none: Accelerate shards models over accelerators only, and would silently train whole "
                "copies here"
            )
        if self.args.fp16 and self.args.device.type == "cpu":
            raise ValueError(
                "fp16=True without a GPU, expected bf16=True or neither: on CPUs fp16 overflows, and is slow"
            )
        self.model_accepts_loss_kwargs = False  # losses are means over a batch, not sums over its tokens

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """transformers' own; True resumes from the last checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_whole_checkpoint(Path(self.args.output_dir or "."))
        return super().train(resume_from_checkpoint, **kwargs)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return model(**inputs, use_cache=False).loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch from the collator."""
        loss = self._loss(model, inputs)
        return (loss, {}) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss, without outputs."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """transformers' own; sampling by length takes lengths without reading the data."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy == "group_by_length" and dataset is not None:
            batch_size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return SamplerByLength(batch_size, dataset, seed=seed)
        return super()._get_train_sampler(train_dataset)


class SamplerByLength(LengthGroupedSampler):
    """transformers' own, in an order that follows from seed and epoch: the same in all processes and when resumed."""

    def __init__(self, batch_size: int, dataset: Any, *, seed: int) -> None:
        super().__init__(batch_size, lengths=lengths_of(dataset).tolist())
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Another order; the Trainer calls it."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):  # Accelerate tells the sampler or the dataset, not always both
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Any:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


def _last_whole_checkpoint(folder: Path) -> str:
    """The last checkpoint whose save was not interrupted; transformers writes the state last."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdecimal()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_bytes())
            return str(path)
        except (OSError, ValueError):
            logger.warning("%s is of an interrupted save: training resumes from the one before", path)
    raise ValueError(
        f"resume_from_checkpoint=True and {folder} has no whole checkpoint, expected one: omit it to begin anew"
    )


def learn_code_book(model: Any, catalogue: SemanticIds | Snapshot | None, *, argument: str) -> None:
    """Note in a model's config what tokens mean; None if nothing says so. Refuses what means something else to it."""
    config: Any = extend(model.generation_config)
    model.generation_config = config
    if catalogue is None:
        config.code_book = None
        return
    if config.code_book and (doubt := compare(config.code_book, catalogue, whose="the model", argument=argument)):
        logger.warning(doubt)
    config.code_book = catalogue.code_book()


def own_arguments(args: TrainingArguments | None) -> TrainingArguments:
    """A copy that keeps all columns: the Trainer would remove those that the model's forward does not take."""
    args = TrainingArguments("tmp_trainer") if args is None else copy.copy(args)
    args.remove_unused_columns = False
    if not torch.accelerator.is_available():
        args.dataloader_pin_memory = False  # PyTorch warns that nothing can be pinned
    return args


def named_datasets(train: Any, evaluation: Any) -> dict[str, Any]:
    """The given datasets, by argument name."""
    given = {"train_dataset": train}
    if isinstance(evaluation, dict):
        given |= {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    else:
        given["eval_dataset"] = evaluation
    return {name: dataset for name, dataset in given.items() if dataset is not None}


def inner_data(name: str, dataset: Any, kind: type[Data]) -> Data:
    """The data of this kind inside a dataset, which may be a subset of a subset."""
    inner = dataset
    while not isinstance(inner, kind):
        if not (hasattr(inner, "dataset") and hasattr(inner, "indices")):
            raise ValueError(
                f"{name} is a {type(dataset).__name__}, expected a dataset of type {kind.__name__}, or a "
                "torch.utils.data.Subset of one"
            )
        inner = inner.dataset
    return inner


def lengths_of(dataset: Any) -> np.ndarray:
    """The prompts' lengths, also for subsets of subsets."""
    if hasattr(dataset, "lengths"):
        return np.asarray(dataset.lengths)
    return lengths_of(dataset.dataset)[np.asarray(dataset.indices)]
