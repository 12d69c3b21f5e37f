# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`AtSpeedTrainer`: transformers' Trainer with the losses that align a draft model. Knows no target model.

The teacher data holds everything from the target; checkpoints, mixed precision, several processes, logging and
resuming are transformers' own. Source: AtSpeed, section 3 and appendix A.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainingArguments

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.fingerprints import fingerprint_sequences
from hf_gr.generation.torch.models import base_model

from . import losses
from .base import LossTrainer, inner_data, named_datasets, own_arguments
from .losses import LevelLogProbs
from .packing import PathScores, pad_token, score_paths
from .paths import PathLevel, training_catalogue, training_snapshot, walk
from .teacher_dataset import TeacherCollator, TeacherDataset

Loss = Literal["atspeed-s", "atspeed-r", "beamkd", "sft", "wordkd", "tvdkd", "seqkd"]
DEFAULT_ALPHA: dict[str, float | None] = {"beamkd": 1.0, "seqkd": None}  # of the others: 0.5
ALIGNMENTS = ("atspeed-s", "atspeed-r", "beamkd")
# Which losses read an option, and what it is if it is not given.
READ_BY: dict[str, tuple[tuple[str, ...], Any]] = {
    "alpha": ((*ALIGNMENTS, "seqkd"), None),
    "num_tokens": (("atspeed-s", "atspeed-r"), None),
    "top_of": (("atspeed-r",), "draft"),
    "density_weight": (("atspeed-s",), 1.0),
    "reduction": (ALIGNMENTS, "mean"),
    "num_sequences": (ALIGNMENTS, None),
    "constrained": (ALIGNMENTS, True),
}


@dataclass(frozen=True)
class _Needs:
    """The parts of the teacher data that a loss needs."""

    sequences: bool = False
    log_probs: bool = False
    labels: bool = True
    label_log_probs: bool = False


NEEDS: dict[str, _Needs] = {
    "atspeed-s": _Needs(sequences=True, log_probs=True),
    "atspeed-r": _Needs(sequences=True, log_probs=True),
    "beamkd": _Needs(sequences=True, log_probs=True),
    "seqkd": _Needs(sequences=True),
    "sft": _Needs(),
    "tvdkd": _Needs(label_log_probs=True),
    "wordkd": _Needs(label_log_probs=True),
}


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
            verification; or one of its baselines `"sft"`, `"wordkd"`, `"tvdkd"`, `"seqkd"` (`hf_gr.training.losses`).
            `examples/benchmark/atspeed.py` compares them.
        alpha: the weight of the alignment in the first three, and of the target's sequences in `"seqkd"`; the rest
            weighs the cross entropy on the label. By default 0.5, as in the paper; 1 for `"beamkd"`, which then needs
            no labels; and in `"seqkd"` the label counts as one sequence more.
        num_tokens: how many legal tokens of each distribution AtSpeed's losses compare; by default the data's
            `num_beams`, and all of them with `"all"`.
        top_of: whose best legal tokens `"atspeed-r"` compares, `"draft"` or `"target"`.
        density_weight: the weight of the density term of `"atspeed-s"`; 0 is the paper's ablation without it.
        reduction: `"sum"` adds the alignment up over a prompt's sequences, as the paper writes AtSpeed-S;
            `"mean"` takes their mean, as it writes AtSpeed-R, so that one alpha means the same for both.
        num_sequences: how many of the target's sequences the first three learn from, the best first; 1 is the
            paper's ablation without top-K. y_K stays the last of all.
        constrained: False compares tokens of the whole vocabulary, the paper's ablation without constrained
            alignment. Data must hold their probabilities: `write_teacher_data(full_vocabulary="sequences")`.
        kwargs: transformers' own: `callbacks`, `optimizers`, ...

    Raises:
        ValueError: before any work: the loss is unknown, or ignores a given option; the data lacks what the loss
            needs, or is of another catalogue; the draft model's vocabulary is too small, or not the target's for a
            loss over whole distributions.

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
        num_tokens: int | Literal["all"] | None = None,
        top_of: Literal["draft", "target"] = "draft",
        density_weight: float = 1.0,
        reduction: losses.Reduction = "mean",
        num_sequences: int | None = None,
        constrained: bool = True,
        **kwargs: Any,
    ) -> None:
        given_options = {"alpha": alpha, "num_tokens": num_tokens, "top_of": top_of, "density_weight": density_weight}
        given_options |= {"reduction": reduction, "num_sequences": num_sequences, "constrained": constrained}
        _check_options(loss, given_options)
        alpha = DEFAULT_ALPHA.get(loss, 0.5) if alpha is None else alpha
        needs = _needs(loss, alpha)
        snapshot = training_snapshot(constraint_index)
        given = named_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        datasets = {name: _teacher_data(name, dataset) for name, dataset in given.items()}
        digest = fingerprint_sequences(snapshot)
        for name, dataset in datasets.items():
            _check_data(name, dataset, digest, loss, needs, constrained)
        if model is not None:  # with model_init= transformers creates it later
            is_whole = needs.label_log_probs or (needs.log_probs and not constrained)
            _check_model(model, datasets, constraint_index, is_whole)
        self.loss = loss
        self.alpha = alpha
        self.top_of: Literal["draft", "target"] = top_of
        self.density_weight = density_weight
        self.reduction: losses.Reduction = reduction
        self.num_sequences = num_sequences
        self.constrained = constrained
        self.num_tokens = None if num_tokens == "all" else num_tokens
        if num_tokens is None and datasets:
            self.num_tokens = next(iter(datasets.values())).settings["num_beams"]
        self._vocab_size = _whole_vocabulary(datasets)
        self._snapshot = snapshot
        kwargs.setdefault("data_collator", TeacherCollator(0 if model is None else pad_token(model), **vars(needs)))
        super().__init__(model=model, args=own_arguments(args), **kwargs)

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        needs = NEEDS[self.loss]
        groups = [inputs["sequences"][:, : self.num_sequences]] if needs.sequences else []  # None: all
        if "labels" in inputs:
            groups.append(inputs["labels"].clamp(min=-1)[:, None])
        paths = _stack(groups)
        scores = score_paths(model, inputs["input_ids"], inputs["attention_mask"], paths).log_softmax()
        if self.loss in ("wordkd", "tvdkd"):
            compare = losses.wordkd if self.loss == "wordkd" else losses.tvdkd
            target = inputs["label_log_probs"].float().log_softmax(-1)  # in half precision the sum is not quite 1
            return compare(scores.of_path(-1), target, inputs["labels"] >= 0)
        log_probs = scores.of_tokens(paths)
        if self.loss == "sft" or (self.loss == "seqkd" and self.alpha is None):
            return losses.seqkd(log_probs, paths >= 0)
        recommendation = log_probs.new_zeros(())
        if "labels" in inputs:
            recommendation = losses.sft(log_probs[:, -1], paths[:, -1] >= 0)
        if self.loss == "seqkd" and self.alpha is not None:
            number = inputs["sequences"].shape[1]
            sequences = losses.seqkd(log_probs[:, :number], paths[:, :number] >= 0)
            return self.alpha * sequences + (1 - self.alpha) * recommendation
        return self._alignment(scores, inputs, recommendation)

    def _alignment(self, scores: PathScores, inputs: dict[str, Any], recommendation: Tensor) -> Tensor:
        """The losses along the target's sequences, which come before the label."""
        sequences = inputs["sequences"]
        target, chosen = self._target(sequences, inputs["log_probs"])
        threshold = losses.kth_log_probs(chosen, sequences >= 0)
        sequences = sequences[:, : self.num_sequences]
        mask = sequences >= 0
        pairs = compare_levels(self._walk(sequences), scores, target, constrained=self.constrained)
        options: dict[str, Any] = {"alpha": self.alpha, "reduction": self.reduction}
        if self.loss == "beamkd":
            return losses.beamkd(pairs, mask, recommendation, **options)
        options["num_tokens"] = self.num_tokens
        if self.loss == "atspeed-r":
            return losses.atspeed_r(pairs, mask, recommendation, top_of=self.top_of, **options)
        return losses.atspeed_s(pairs, threshold, mask, recommendation, density_weight=self.density_weight, **options)

    def _walk(self, sequences: Tensor) -> list[PathLevel]:
        return walk(sequences, training_catalogue(self._snapshot, sequences.device))

    def _target(self, sequences: Tensor, log_probs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """By level log p over what is compared after every prefix; and `[B, K, L]` of the sequences' own tokens."""
        compared, chosen = [], []
        for level, values in zip(self._walk(sequences), log_probs, strict=True):
            if self._vocab_size is None:
                legal = everything = level.restore(values.float())
            else:
                everything = level.restore_whole(values.float(), self._vocab_size)
                legal = level.gather(everything)
            chosen.append(level.of_chosen(legal))
            compared.append(legal if self.constrained else everything)
        return compared, torch.stack(chosen, dim=-1)


def compare_levels(
    walked: list[PathLevel], scores: PathScores, target: list[Tensor], *, constrained: bool = True
) -> list[LevelLogProbs]:
    """Both models at every position of some sequences, over the legal tokens, or all of them.

    Args:
        walked: the sequences in the trie.
        scores: the draft's log-probabilities after their prefixes; further sequences may follow.
        target: the target's, by level; further sequences may follow there, too.
        constrained: whether they are of the legal tokens.
    """
    pairs = []
    for level, draft, dense in zip(walked, scores.levels()[: len(walked)], target, strict=True):
        num_prefixes = level.below.legal.shape[1]
        draft, dense = draft[:, :num_prefixes], dense[:, :num_prefixes]
        if constrained:
            pairs.append(LevelLogProbs(level.gather(draft), dense, level.below.legal))
        else:
            pairs.append(LevelLogProbs(draft, dense, torch.ones_like(dense, dtype=torch.bool)))
    return pairs


def _stack(groups: list[Tensor]) -> Tensor:
    """Sequences of several lengths as one `[B, S, L]`."""
    length = max(group.shape[-1] for group in groups)
    return torch.cat([torch.nn.functional.pad(group, (0, length - group.shape[-1]), value=-1) for group in groups], 1)


def _needs(loss: str, alpha: float | None) -> _Needs:
    needs = NEEDS[loss]
    is_aligned_alone = loss in (*ALIGNMENTS, "seqkd") and alpha == 1
    return _Needs(**{**vars(needs), "labels": needs.labels and not is_aligned_alone})


def _check_options(loss: str, given: dict[str, Any]) -> None:
    if loss not in NEEDS:
        raise ValueError(f"loss={loss!r}, expected one of {', '.join(map(repr, sorted(NEEDS)))}")
    if given["alpha"] is not None and not (_is_number(given["alpha"]) and 0 <= given["alpha"] <= 1):
        raise ValueError(f"alpha={given['alpha']!r}, expected 0 to 1: the weight of the alignment")
    if not (_is_number(given["density_weight"]) and 0 <= given["density_weight"] < float("inf")):
        raise ValueError(f"density_weight={given['density_weight']!r}, expected 0 or more")
    if given["num_tokens"] != "all" and not _is_count_or_none(given["num_tokens"]):
        raise ValueError(
            f"num_tokens={given['num_tokens']!r}, expected a positive integer, 'all', or None for the data's num_beams"
        )
    if not _is_count_or_none(given["num_sequences"]):
        raise ValueError(f"num_sequences={given['num_sequences']!r}, expected a positive integer, or None for all")
    choices: dict[str, tuple[Any, ...]] = {
        "top_of": ("draft", "target"),
        "reduction": ("mean", "sum"),
        "constrained": (True, False),
    }
    for name, known in choices.items():
        if given[name] not in known:
            raise ValueError(f"{name}={given[name]!r}, expected {' or '.join(map(repr, known))}")
    for name, value in given.items():
        readers, default = READ_BY[name]
        if value != default and loss not in readers:
            raise ValueError(
                f"{name}={value!r} with loss={loss!r}, which ignores it, expected none: omit it, or take one of "
                f"{', '.join(map(repr, readers))}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _teacher_data(name: str, dataset: Any) -> TeacherDataset:
    data = inner_data(dataset, TeacherDataset, "dataset")
    if data is None:
        raise ValueError(
            f"{name} is a {type(dataset).__name__}, expected a TeacherDataset, or a torch.utils.data.Subset of one"
        )
    return data


def _whole_vocabulary(datasets: dict[str, TeacherDataset]) -> int | None:
    """The target's vocabulary if the data hold its probabilities over all of it; None if over legal tokens."""
    is_whole = {data.settings["full_vocabulary"] == "sequences" for data in datasets.values()}
    if len(is_whole) > 1:
        raise ValueError(
            "train_dataset and eval_dataset hold probabilities over different tokens, expected the same: write both "
            "with one full_vocabulary"
        )
    return next(iter(datasets.values())).settings["vocab_size"] if True in is_whole else None


def _check_data(name: str, data: TeacherDataset, digest: str, loss: str, needs: _Needs, constrained: bool) -> None:
    if data.settings["index"] != digest:
        raise ValueError(
            f"constraint_index is not the catalogue of {name} ({data.directory}), expected the one that it was "
            "written with: load that one, or write the data again"
        )
    if needs.labels and not data.settings["has_labels"]:
        fix = ", or train with alpha=1" if loss in READ_BY["alpha"][0] else ""
        raise ValueError(
            f"{name} has no labels, expected them for loss={loss!r}: write_teacher_data(labels=...)" + fix
        )
    if needs.label_log_probs and not data.settings["full_vocabulary"]:
        raise ValueError(
            f"{name} has no distributions over the vocabulary, expected them for loss={loss!r}: "
            "write_teacher_data(full_vocabulary=True)"
        )
    if needs.log_probs and not constrained and data.settings["full_vocabulary"] != "sequences":
        raise ValueError(
            f"{name} has the probabilities of legal tokens, expected those of all for constrained=False: "
            'write_teacher_data(full_vocabulary="sequences")'
        )


def _check_model(model: Any, datasets: dict[str, TeacherDataset], index: ConstraintIndex, is_whole: bool) -> None:
    inner = base_model(model)
    if inner.config.is_encoder_decoder:
        raise ValueError(f"model is a {type(inner).__name__}, expected a decoder: a draft model continues prompts")
    vocab_size = inner.config.get_text_config(decoder=True).vocab_size
    if vocab_size <= index.max_token_id:
        raise ValueError(
            f"model has a vocabulary of {vocab_size} tokens, expected more than the catalogue's largest, "
            f"{index.max_token_id}: build it with the target's tokenizer"
        )
    for name, data in datasets.items():
        if vocab_size <= data.max_token_id:
            raise ValueError(
                f"model has a vocabulary of {vocab_size} tokens, expected more than the largest of {name}, "
                f"{data.max_token_id}: build it with the target's tokenizer"
            )
        if is_whole and vocab_size != data.settings["vocab_size"]:
            raise ValueError(
                f"model has a vocabulary of {vocab_size} tokens, expected the target's {data.settings['vocab_size']}: "
                "whole distributions are compared; a loss along the beams compares legal tokens alone, with "
                "constrained=True"
            )
