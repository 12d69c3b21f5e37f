# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`DraftHeadTrainer`: transformers' Trainer with the loss of a model's draft head. Knows no catalogue.

One forward of the model over prompt and placeholders, then the head on the label's tokens. Checkpoints, mixed
precision, several processes, logging and resuming are transformers' own. Source: NEZHA, algorithm 3.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from hf_gr.catalogue.code_book import compare
from hf_gr.files.hub import Source
from hf_gr.generation.checks import check_tokens_of_catalogue
from hf_gr.generation.configuration import code_book_of
from hf_gr.generation.models import position_limit
from hf_gr.generation.torch.heads import check_bare, load_draft_head, save_draft_head
from hf_gr.generation.torch.mixin import GRGenerationMixin
from hf_gr.generation.torch.models import base_model, takes_argument
from hf_gr.generation.torch.prompts import catch_hidden_states

from .base import LossTrainer, inner_data, lengths_of, named_datasets, own_arguments
from .interactions import DraftHeadCollator, InteractionDataset


class DraftHeadTrainer(LossTrainer):
    """Trains a model's draft head, and the model with it.

    The paper's recipe: AdamW, learning rate 1e-5, 1% of the steps warm-up and then a cosine; the head's own
    embeddings learn 100 times faster than the model, its transitions 10 times:

        model.add_draft_head(index, tokenizer=tokenizer)
        trainer = DraftHeadTrainer(
            model=model,
            args=TrainingArguments("out", learning_rate=1e-5, lr_scheduler_type="cosine", warmup_steps=0.01),
            train_dataset=InteractionDataset.from_histories(histories, semantic_ids, max_items=20),
        )
        trainer.train()

    All trained parameters take part in one forward. An untied output layer does not, and stays unchanged. While
    `train` runs, `requires_grad` says what is trained; afterwards it is restored.

    Joint training optimises the model for its head; answers without the head may get worse. Train the head alone if
    both are needed, as with `verification="strict"`.

    Args:
        model: a model with a draft head (`model.add_draft_head`), a decoder or an encoder-decoder; or one wrapped by
            PEFT, whose adapter is then trained with the head.
        args: transformers' own.
        train_dataset: an `InteractionDataset`, or a `torch.utils.data.Subset` of one.
        eval_dataset: likewise, or several by name; `eval_loss` is the same loss.
        train_backbone: also train the model; if not, only the head and the placeholders' rows of the input embeddings
            change. (The optimizer's state still covers all rows. If embeddings are tied, those rows also give the
            placeholders' logits, which enter the normalisation of all probabilities: the model's own scores change
            slightly.)
        embedding_lr: learning rate of the head's embeddings, as a multiple of `args.learning_rate`.
        transition_lr: the same for its transitions.
        logit_lr: the same for its logit heads.
        kwargs: transformers' own: `callbacks`, `optimizers` (used as given, without multiples), ...

    Raises:
        ValueError: before any work: the model has no draft head, or an adapter was put into it; the data is of another
            kind, has labels outside the head's codebooks or of other semantic IDs, or prompts too long for the model
            with placeholders; there are several GPUs in one process, FSDP or DeepSpeed.

    Example:
        >>> import tempfile
        >>> from transformers import Qwen3Config, Qwen3ForCausalLM
        >>> import hf_gr
        >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
        >>> model = hf_gr.enable(Qwen3ForCausalLM(config))
        >>> head = model.add_draft_head([[3, 4], [5, 6, 7]])
        >>> options = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        >>> trainer = DraftHeadTrainer(
        ...     model=model,
        ...     args=TrainingArguments(tempfile.mkdtemp(), **options),
        ...     train_dataset=InteractionDataset([[3, 5], [4, 7, 3, 6]], labels=[[3, 6], [4, 5]]),
        ... )
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {...
        1

    Source: NEZHA, algorithm 3 and equation 6; the multiples are those of its code.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        train_backbone: bool = True,
        embedding_lr: float = 100.0,
        transition_lr: float = 10.0,
        logit_lr: float = 1.0,
        **kwargs: Any,
    ) -> None:
        _check_model(model)
        for name, dataset in named_datasets(kwargs.get("train_dataset"), kwargs.get("eval_dataset")).items():
            _check_data(name, dataset, base_model(model))
        for name, rate in (("embedding_lr", embedding_lr), ("transition_lr", transition_lr), ("logit_lr", logit_lr)):
            if not 0 <= rate < math.inf:
                raise ValueError(f"{name}={rate!r}, expected a multiple of args.learning_rate, 0 or more")
        args = own_arguments(args)
        if args.ddp_find_unused_parameters:
            raise ValueError(
                "ddp_find_unused_parameters=True, expected False: the head runs after the model's forward, and would "
                "be taken for unused"
            )
        args.ddp_find_unused_parameters = False
        self.train_backbone = train_backbone
        self._rates = {"logit_heads": logit_lr, "embeddings": embedding_lr, "transitions": transition_lr}
        self._rows_alone = False
        kwargs.setdefault("data_collator", DraftHeadCollator(model))
        super().__init__(model=model, args=args, **kwargs)
        if self.args.n_gpu > 1 or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"args are for {self.args.n_gpu} GPUs in one process, FSDP or DeepSpeed, expected a process a GPU and "
                "no more: accelerate launch --multi_gpu"
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, with all untrained parts frozen."""
        inner: Any = base_model(self.model)
        is_frozen = not (self.train_backbone and inner.get_input_embeddings().weight.requires_grad)
        self._rows_alone = is_frozen and inner.draft_head.config.num_placeholders > 0
        with _trained_parts(inner, train_backbone=self.train_backbone, rows_alone=self._rows_alone):
            return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """transformers' own, its groups split by learning rate."""
        is_given = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_given:
            optimizer.param_groups = self._split(optimizer.param_groups)
        return optimizer

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        inner = base_model(model)
        given = {name: values for name, values in inputs.items() if name != "labels"}
        if takes_argument(inner, "logits_to_keep"):
            given["logits_to_keep"] = 1  # they are not used
        with catch_hidden_states(model) as caught:
            model(**given, use_cache=False)
        head = inner.draft_head
        hidden = caught[-1][:, -head.config.num_placeholders - 1 :]
        return head.loss(hidden.to(head.logit_heads[0].weight.dtype), inputs["labels"])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save and not isinstance(self.model, PreTrainedModel):
            # The model's own save_pretrained writes its head; an adapter's does not.
            save_draft_head(self.model, output_dir or self.args.output_dir or ".")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        _load_head(base_model(self.model), resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        assert self.state.best_model_checkpoint is not None, "the Trainer calls this where there is one"
        _load_head(base_model(self.model), self.state.best_model_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The head's weights have their own file.
        missing = [name for name in load_result.missing_keys if not name.startswith("draft_head.")]
        super()._issue_warnings_after_load(type(load_result)(missing, load_result.unexpected_keys))

    def _split(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same parameters, grouped by learning rate and weight decay."""
        inner: Any = base_model(self.model)
        rates = {
            id(parameter): rate
            for name, rate in self._rates.items()
            for parameter in getattr(inner.draft_head, name).parameters()
        }
        embedding = inner.get_input_embeddings().weight
        split = []
        for group in groups:
            parts: dict[tuple[float, float], list[Tensor]] = {}
            for parameter in group["params"]:
                # Decay would change the rows of other tokens than placeholders.
                decay = 0.0 if parameter is embedding and self._rows_alone else group["weight_decay"]
                parts.setdefault((rates.get(id(parameter), 1.0), decay), []).append(parameter)
            for (rate, decay), parameters in parts.items():
                split.append({**group, "params": parameters, "lr": group["lr"] * rate, "weight_decay": decay})
        return split


@contextmanager
def _trained_parts(model: Any, *, train_backbone: bool, rows_alone: bool) -> Iterator[None]:
    """Freeze what is not trained inside the block; `rows_alone` trains the placeholders' rows of the embeddings."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    handle = None
    try:
        if not train_backbone:
            model.requires_grad_(False)
        for parameter in () if output is None else output.parameters():
            if parameter is not embedding:  # it gets no gradient, and other processes would wait for one
                parameter.requires_grad_(False)
        model.draft_head.requires_grad_(True)
        if rows_alone:
            others = torch.ones(len(embedding), 1, dtype=torch.bool)
            others[list(model.draft_head.config.placeholder_token_ids)] = False
            embedding.requires_grad_(True)
            handle = embedding.register_hook(lambda gradient: gradient.masked_fill(others.to(gradient.device), 0.0))
        yield
    finally:
        if handle is not None:
            handle.remove()
        for parameter, is_trained in before:
            parameter.requires_grad_(is_trained)


def _check_model(model: Any) -> None:
    inner = base_model(model) if model is not None else None
    if not isinstance(inner, GRGenerationMixin):
        raise ValueError(
            f"model is a {type(inner).__name__}, expected one with GRGenerationMixin, which saves the head with it: "
            "hf_gr.enable(model) (model_init= is not supported)"
        )
    head = getattr(inner, "draft_head", None)
    if head is None:
        raise ValueError(
            "model has no draft head, expected one: model.add_draft_head(constraint_index, tokenizer=tokenizer)"
        )
    check_bare(head)


def _check_data(name: str, dataset: Any, model: Any) -> None:
    data, head = inner_data(name, dataset, InteractionDataset), model.draft_head
    try:
        data.check_labels([head.codebook(level).cpu().numpy() for level in range(head.config.num_levels)])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    books = {"the model": code_book_of(model), "the draft head": dict(head.config.code_book)}
    for whose, book in books.items():
        if data.items is not None:
            compare(book, data.items, whose=whose, argument=name)
    check_tokens_of_catalogue(data, model.get_input_embeddings().weight.shape[0], name=name)
    lengths = lengths_of(dataset)
    limit = position_limit(model.config)
    num = 0 if model.config.is_encoder_decoder else head.config.num_placeholders
    if limit is not None and lengths.max() + num > limit:
        raise ValueError(
            f"entry {int(lengths.argmax())} of {name} has a prompt of {lengths.max()} tokens and {num} placeholders, "
            f"expected at most {limit} together, the model's max_position_embeddings: shorten it (max_items=)"
        )


def _load_head(model: Any, directory: str) -> None:
    """Load the weights of a checkpoint's head into the model's."""
    own = model.draft_head
    if load_draft_head(model, Source(directory)) is not own:
        raise ValueError(
            f"{directory} has no draft head like the model's, expected the one that was trained: make the model's "
            "with the same codebooks and options, or start anew without resume_from_checkpoint"
        )
