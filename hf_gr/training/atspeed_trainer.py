# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`AtSpeedTrainer`: transformers' Trainer with the losses that align a draft model. Knows no target model.

The teacher data holds everything from the target; checkpoints, mixed precision, several processes, logging and
resuming are transformers' own. Source: AtSpeed, section 3 and appendix A.3.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainingArguments

from hf_gr.catalogue import ConstraintIndex
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.torch.models import base_model

from . import losses
from .base import LossTrainer, inner_data, learn_code_book, named_datasets, own_arguments
from .losses import LevelLogProbs
from .packing import PathScores, pad_token, score_paths
from .paths import training_catalogue, walk
from .teacher_dataset import TeacherCollator, TeacherDataset

Loss = Literal["beamkd", "atspeed-s", "atspeed-r", "seqkd", "sft"]
LOSSES = get_args(Loss)
DEFAULT_ALPHA: dict[str, float | None] = {"beamkd": 1.0, "seqkd": None}  # of the others: 0.5


class AtSpeedTrainer(LossTrainer):
    """Trains a draft model to draft what the target's beam search will choose.

    The paper's recipe, for its own losses: AdamW, learning rate 1e-3, batches of 64 prompts, 200 steps of warm-up and
    then a cosine, 20 epochs, weight decay 0.01 or 0.1, alpha 0.5:

        TrainingArguments(
            "draft", learning_rate=1e-3, per_device_train_batch_size=64, num_train_epochs=20, weight_decay=0.1,
            lr_scheduler_type="cosine", warmup_steps=200, train_sampling_strategy="group_by_length",
        )

    (Sampling by length is our addition: it saves padding.)

    Args:
        model: the draft model, a decoder of transformers.
        args: transformers' own.
        train_dataset: a `TeacherDataset`, or a `torch.utils.data.Subset` of one.
        eval_dataset: likewise; `eval_loss` is the same loss.
        constraint_index: the catalogue that the data was written with.
        loss: `"beamkd"`, ours (`losses.align_f`); the paper's `"atspeed-s"` for strict and `"atspeed-r"` for relaxed
            verification; or one of its baselines `"sft"` and `"seqkd"` (`hf_gr.training.losses`).
            AtSpeed's compare as many legal tokens of each distribution as the data has beams.
            `examples/benchmark/atspeed.py` compares them, and has the paper's other baselines.
        alpha: the weight of the alignment in the first three, and of the target's sequences in `"seqkd"`; the rest
            weighs the cross entropy on the label. By default 0.5, as in the paper; 1 for `"beamkd"`, which then needs
            no labels; and in `"seqkd"` the label counts as one sequence more.
        kwargs: transformers' own: `callbacks`, `optimizers`, ...

    Raises:
        ValueError: before any work: the loss is unknown, or ignores a given option; the data lacks what the loss
            needs, or is of another catalogue; the draft model's vocabulary is too small, or it learned other tokens of
            these items.

    Example:
        >>> import tempfile
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> import hf_gr
        >>> from hf_gr.training import write_teacher_data
        >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
        >>> target, draft = hf_gr.enable(Qwen3ForCausalLM(config)), Qwen3ForCausalLM(config)
        >>> index = hf_gr.ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]])
        >>> data, labels = [[1, 2], [2]], [[3, 4], [6, 7]]
        >>> folder = write_teacher_data(target, data, index, tempfile.mkdtemp(), num_beams=2, labels=labels)
        >>> options = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        >>> trainer = AtSpeedTrainer(
        ...     model=draft,
        ...     args=TrainingArguments(tempfile.mkdtemp(), **options),
        ...     train_dataset=TeacherDataset(folder),
        ...     constraint_index=index,
        ... )
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {...
        1

    Source: AtSpeed, equations 4, 5, 8 and 9, appendix A.3.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        constraint_index: ConstraintIndex,
        loss: Loss = "beamkd",
        alpha: float | None = None,
        **kwargs: Any,
    ) -> None:
        _check_options(loss, alpha)
        self.alpha = DEFAULT_ALPHA.get(loss, 0.5) if alpha is None else alpha
        self.needs_labels = loss == "sft" or self.alpha != 1
        given = named_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        datasets = {name: inner_data(name, dataset, TeacherDataset) for name, dataset in given.items()}
        self._snapshot = constraint_index.snapshot.compact()
        digest = self._snapshot.fingerprint_of_sequences()
        for name, dataset in datasets.items():
            _check_data(name, dataset, digest, loss, needs_labels=self.needs_labels)
        if model is not None:  # with model_init= transformers creates it later
            _check_model(model, datasets, constraint_index)
            learn_code_book(base_model(model), constraint_index.snapshot, argument="constraint_index")
        self.loss = loss
        self.num_tokens = next((dataset.settings["num_beams"] for dataset in datasets.values()), None)
        kwargs.setdefault("data_collator", TeacherCollator(0 if model is None else pad_token(model)))
        super().__init__(model=model, args=own_arguments(args), **kwargs)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        groups = [inputs["sequences"]] if self.loss != "sft" else []
        if self.needs_labels:
            groups.append(inputs["labels"].clamp(min=-1)[:, None])
        length = max(group.shape[-1] for group in groups)
        paths = torch.cat([pad(group, (0, length - group.shape[-1]), value=-1) for group in groups], dim=1)
        scores = score_paths(model, inputs["input_ids"], inputs["attention_mask"], paths).log_softmax()
        log_probs = scores.of_tokens(paths)
        if self.loss == "sft" or self.alpha is None:
            return losses.seqkd(log_probs, paths >= 0)
        if self.loss == "seqkd":
            number = inputs["sequences"].shape[1]
            learned = losses.seqkd(log_probs[:, :number], paths[:, :number] >= 0)
        else:
            learned = self._alignment(scores, inputs)
        if not self.needs_labels:
            return self.alpha * learned
        return self.alpha * learned + (1 - self.alpha) * losses.seqkd(log_probs[:, -1:], paths[:, -1:] >= 0)

    def _alignment(self, scores: PathScores, inputs: dict[str, Any]) -> Tensor:
        """The loss along the target's sequences, which come before the label."""
        sequences = inputs["sequences"]
        mask = sequences >= 0
        walked = walk(sequences, training_catalogue(self._snapshot, sequences.device))
        target = [level.restore(values.float()) for level, values in zip(walked, inputs["log_probs"], strict=True)]
        pairs = []
        for level, draft, dense in zip(walked, scores.levels()[: len(walked)], target, strict=True):
            legal = level.below.legal
            pairs.append(LevelLogProbs(level.gather(draft[:, : legal.shape[1]]), dense, legal))  # a label may follow
        if self.loss == "beamkd":
            return losses.align_f(pairs, mask)
        if self.loss == "atspeed-r":
            return losses.align_r(pairs, mask, num_tokens=self.num_tokens)
        chosen = torch.stack([level.of_chosen(dense) for level, dense in zip(walked, target, strict=True)], dim=-1)
        return losses.align_s(pairs, losses.kth_log_probs(chosen, mask), mask, num_tokens=self.num_tokens)


def _check_options(loss: str, alpha: Any) -> None:
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r}, expected one of {', '.join(map(repr, sorted(LOSSES)))}")
    if alpha is not None and not (isinstance(alpha, (int, float)) and alpha is not True and 0 <= alpha <= 1):
        raise ValueError(f"alpha={alpha!r}, expected 0 to 1: the weight of the alignment")
    if alpha is not None and loss == "sft":
        raise ValueError(f"alpha={alpha!r} with loss='sft', which ignores it, expected None: omit it")


def _check_data(name: str, data: TeacherDataset, digest: str, loss: str, *, needs_labels: bool) -> None:
    if data.settings["index"] != digest:
        raise ValueError(
            f"constraint_index is not the catalogue of {name} ({data.directory}), expected the one that it was "
            "written with: load that one, or write the data again"
        )
    if needs_labels and not data.settings["has_labels"]:
        fix = "" if loss == "sft" else ", or train with alpha=1"
        raise ValueError(
            f"{name} has no labels, expected them for loss={loss!r}: write_teacher_data(labels=...)" + fix
        )


def _check_model(model: Any, datasets: dict[str, TeacherDataset], index: ConstraintIndex) -> None:
    inner = base_model(model)
    if inner.config.is_encoder_decoder:
        raise ValueError(f"model is a {type(inner).__name__}, expected a decoder: a draft model continues prompts")
    vocab_size = inner.config.get_text_config(decoder=True).vocab_size
    for name, one in {"constraint_index": index, **datasets}.items():
        check_tokens_of_catalogue(one, vocab_size, name=name)
