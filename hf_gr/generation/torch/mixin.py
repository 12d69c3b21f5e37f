# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`GRGenerationMixin`: `generate` with a catalogue, and a checkpoint's files that transformers does not know.

The path of a call: `Call.read` (arguments, checks), `Call.prepare` (transformers prepares the inputs), `Draft.start`
(the scorer, the drafter, the catalogue), `hf_gr.torch.decode.decode` (the loop, whose step is
`hf_gr.torch.transition.children`), `Call.answer`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import CONFIG_NAME

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.generation.checks import refuse_without_catalogue
from hf_gr.generation.configuration import GR_FIELDS
from hf_gr.generation.internals import Overrides
from hf_gr.generation.named_catalogues import index_of_call
from hf_gr.torch.best_first import best_first
from hf_gr.torch.decode import decode
from hf_gr.torch.draft_head import DraftHead

from .call import Call
from .captured import Capture, decode_captured, warm_up
from .checkpoints import prepare_upload, save_beside
from .drafts import draft_of
from .heads import add_draft_head, save_draft_head
from .logits_process import keep_dead
from .loop import generate_by_processor, generate_several

# Carries `push_to_hub(custom_generate=True)` through transformers' own method to `save_pretrained`.
_CUSTOM_GENERATE: ContextVar[bool] = ContextVar("custom_generate", default=False)


class GRGenerationMixin(Overrides, GenerationMixin):
    """Adds `constraint_index` to `generate`: only sequences of a catalogue, and the prompt computed once.

    Put it in front of a model class, or give it to a loaded model with `hf_gr.enable`:

        class Recommender(GRGenerationMixin, Qwen3ForCausalLM): ...
    """

    @torch.no_grad()
    def generate(  # noqa: D417
        self: Any,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool | None = None,
        *args: Any,
        constraint_index: ConstraintIndex | str | Sequence[ConstraintIndex | str] | Literal[False] | None = None,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        item_bias: Any = None,
        item_groups: Any = None,
        assistant_model: Any = None,
        separator: str | Sequence[int] | None = None,
        max_labels: int | None = None,
        seed: int | Sequence[int] | Tensor | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate sequences of a catalogue; without one this is transformers' `generate`, untouched.

        Args:
            constraint_index: the catalogue, or the name of one; by default the one that
                `generation_config.constraint_index` names, which `constraint_index=False` switches off. A list gives
                every prompt its own: views of one index (`index.where(...)`), or that index itself.
            exclude_items: for every prompt, the ids of items to exclude, such as those that the user already has; ids
                that the catalogue does not contain are ignored. If items share a sequence, it is excluded only if all
                of them are.
            item_bias: a number for each of `index.item_ids`, or a dictionary (or pandas Series) of numbers by item id,
                0 where it lacks one: popularity, margin, freshness. It is added to the final score, after the division
                by `length ** length_penalty`, and a prefix is as good as the best item below it may be, so that
                `exact=True` and `num_proven` hold for the sums. For beam search and `exact=True`; samples of the
                latter are drawn with probabilities in proportion to `exp(score)`, biases included.
            item_groups: the group of each item for `max_per_group` (category, artist, ...), likewise; None or NaN, or
                no entry, for an item that is a group of its own. By default the first token. Of items that share a
                sequence the largest bias counts, and the group of the first. Both may be the path of a table with
                columns `item_id` and `bias` or `group`.
            assistant_model: a draft model with the same vocabulary, which proposes nodes to score ahead; also with
                several beams (AtSpeed). See `GRGenerationConfig` for `num_draft_beams`, `draft_token_budget` and
                `verification`, and for drafts by the catalogue itself, which need no model: `drafting="trie"`. Logits
                processors also see the draft's scores: they must not keep state between calls.
            separator: for answers of several sequences of the catalogue, none twice, such as labels of a text: the
                separator as token ids, or as a text, which needs `tokenizer=`. Labels include the space before
                them: ",", not ", ". The catalogue needs an end token. Such calls run in transformers' own loop with
                the constraint on the host, without drafts, seeds and `warm_up`. The output's `item_ids` has the labels
                of every answer.
            max_labels: the most sequences of one answer; with `separator` this or `max_new_tokens` is needed.
            seed: of the samples: a 64-bit integer for each prompt, or one, from which every prompt gets its own (the
                first that integer itself). A prompt's samples depend only on the model, the catalogue, the settings,
                its tokens and its seed: not on the rest of the batch, the padding, drafts, the device or the backend,
                except through rounding of scores; nor on items added or removed elsewhere in the catalogue.
            generator: draws the seeds instead; by default the device's own does. The output's `seeds` lists them.
            num_beams: as in transformers, or a list: how many beams each level leaves, the last number for all that
                follow. Wide where it matters: `[8, 32, 64]`.
            all others: as in transformers. Decoding modes are greedy, sampling, beam search and beam sampling. With a
                catalogue the length may be omitted; `past_key_values` holds one row per prompt, for its first tokens
                or all of them, and is not changed; and `sequences_scores` sums log-probabilities over the full
                vocabulary, unless `renormalize_logits=True` renormalises over the legal tokens of each step.

        Returns:
            As in transformers: a tensor, or with `return_dict_in_generate` an output object. If fewer legal sequences
            exist than requested, the rest are rows of `pad_token_id` (after the prompt) with score `-inf`. The
            object's `num_proven` (`[B]`, integers) says how many of a prompt's first answers are certainly the best of
            its catalogue, rules and exclusions included: no item scores better than a prefix of it, and these score
            better than every prefix that was cut. A difference within rounding (1e-6 of a score, at least 1e-6, for
            every token) proves nothing; in bfloat16 the model's own scores depend on the batch by more than that, and
            the proof is about those of this call. It is None for samples and greedy decoding, `renormalize_logits`,
            logits processors (which may raise scores), stopping criteria, sequences of several lengths with a negative
            `length_penalty`, and in transformers' loop; `exact=True` gives the best items themselves. The
            object's `item_ids` are a list of items for every row, `index.items` of its generated tokens. Its
            `speculation` counts forwards and nodes scored ahead, and its `seeds` are those of the samples, one for
            each prompt (both None in transformers' loop). Its `past_key_values` is the prompt's cache, ready for
            another call (in transformers' loop, the answer's, too).

        Raises:
            ValueError: before any work, for arguments that cannot lead to the catalogue's sequences: a vocabulary
                that lacks its tokens, too small a length, right-padded prompts, a cache of another batch size or of
                more tokens, an unsupported mode, views of different indexes in one batch, excluded ids of another
                type, a seed that is no integer.

        Example:
            >>> from transformers import Qwen3Config, Qwen3ForCausalLM
            >>> from hf_gr import ConstraintIndex, enable
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(Qwen3ForCausalLM(config)).eval()
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> prompt = torch.tensor([[1, 2]])
            >>> out = model.generate(prompt, constraint_index=index, num_beams=3, num_return_sequences=3)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]
            >>> out = model.generate(prompt, constraint_index=index, num_beams=3, return_dict_in_generate=True)
            >>> out.item_ids == index.items(out.sequences[:, 2:])
            True

        Source: STATIC, algorithm 1; xGR, sections 4 and 5.
        """
        generate: Callable[..., Any] = super().generate  # pyright: ignore
        indexes = index_of_call(self, generation_config, constraint_index)
        passed_on: dict[str, Any] = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
        }
        if indexes is None:
            given = {"exclude_items": exclude_items, "separator": separator, "max_labels": max_labels, "seed": seed}
            given |= {"item_bias": item_bias, "item_groups": item_groups}
            fields = {name: kwargs.pop(name) for name in GR_FIELDS if name in kwargs}
            refuse_without_catalogue(fields | given | {"generator": generator})
            kwargs |= {} if assistant_model is None else {"assistant_model": assistant_model}
            return generate(inputs, generation_config, *passed_on.values(), *args, **kwargs)
        if args:
            raise ValueError(
                f"{6 + len(args)} positional arguments are given with constraint_index, expected 6 at most: pass the "
                "others by name"
            )
        call = Call.read(
            self,
            inputs,
            generation_config,
            kwargs,
            passed_on=passed_on,
            answers=(separator, max_labels),
            generator=generator,
            indexes=indexes,
            exclude_items=exclude_items,
            item_bias=item_bias,
            item_groups=item_groups,
            assistant=assistant_model,
            seed=seed,
        )
        if call.several is not None:
            return generate_several(generate, call, call.several)
        if not call.is_ours:
            return generate_by_processor(generate, call)
        prepared = call.prepare(generate)
        search = draft_of(call.drafts, prepared).start(prepared)
        decoded = decode_captured(self, prepared, search) if prepared.is_static else None
        if decoded is None:
            loop: Any = best_first if call.config.exact else decode
            decoded = loop(search.scorer, search.catalogue, prepared.plan, search.drafter)
        else:
            search = replace(search, drafter=None)  # a captured decode has none
        return call.answer(prepared, search, decoded)

    def warm_up(
        self: Any,
        constraint_index: Any = None,
        *,
        batch_sizes: int | Sequence[int] = 1,
        prompt_lengths: int | Sequence[int],
        num_beams: int | Sequence[int],
        **options: Any,
    ) -> list[Capture]:
        """Capture decodes ahead of time: later calls with `cache_implementation="static"` replay them.

        On a CUDA device each shape is one graph; prompts of other lengths share the next larger one. A later call may
        change tokens, padding, seeds, and weights in place; rules and removals if shapes stay the same; exclusions, if
        they hide no more nodes than `exclude_items=` did here. Everything else needs a warm-up of its own: other
        options, the first rule or removal, additions to the catalogue, weights at new addresses, another adapter or
        attention. Without one such a call is decoded without a graph, and a message says so once. Code that is patched
        afterwards is not noticed. Graphs live as long as the model and the catalogue.

        Args:
            constraint_index: the catalogue, as in `generate`.
            batch_sizes: prompts of a call, one or several numbers.
            prompt_lengths: tokens of the longest prompt of a call, likewise.
            num_beams: likewise.
            options: other arguments of the later calls, such as `num_return_sequences`, `do_sample`, `drafting`.

        Returns:
            The captured decodes, with bytes and seconds; one entry for all lengths that share a graph.

        Raises:
            ValueError: a number that is not positive; a prompt that leaves no positions for the catalogue's sequences;
                options of calls that cannot be captured.

        Example:
            >>> from transformers import Qwen3Config, Qwen3ForCausalLM
            >>> from hf_gr import ConstraintIndex, enable
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(Qwen3ForCausalLM(config)).eval()
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]])
            >>> captured = model.warm_up(index, prompt_lengths=[20, 24, 100], num_beams=3, num_return_sequences=3)
            >>> [one.prompt_length for one in captured]
            [20, 24, 112]
        """
        return warm_up(
            self,
            constraint_index,
            batch_sizes=batch_sizes,
            prompt_lengths=prompt_lengths,
            num_beams=num_beams,
            options=options,
        )

    def add_draft_head(self: Any, codebooks: Any, **options: Any) -> DraftHead:
        """Give the model a draft head for `drafting="head"`; it replaces an existing one.

        Args:
            codebooks: what the head chooses from, level by level: a `ConstraintIndex` (the tokens of its sequences,
                those of removed items and the end token included), `SemanticIds` (also codes that no item has), or a
                list of token ids for every level. Or a `DraftHead`, which brings all settings but `tokenizer`; its
                placeholders' embeddings are written into the model's, in the rows of their ids. Nothing checks that
                it was trained on these weights. A head that is part of another model is copied.
            options: the fields of `DraftHeadConfig` `transition`, `use_state`, `use_placeholders` and
                `placeholder_tokens`; and `tokenizer`, which gets the placeholders as special tokens, if it lacks
                them. Without one they are new ids after the model's embeddings, or those of the previous head. They
                are ordinary tokens, so adding them changes the model's scores slightly.

        Returns:
            The head, `model.draft_head`, on the device and in the dtype of the model's output embeddings; untrained,
            unless you passed one.

        Raises:
            ValueError: codebooks beyond the model's vocabulary; a head of another hidden size, or with placeholders
                that the tokenizer reads differently; options together with a head. Nothing is changed then.

        Example:
            >>> from transformers import Qwen3Config, Qwen3ForCausalLM
            >>> from hf_gr import ConstraintIndex, enable
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(Qwen3ForCausalLM(config)).eval()
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> head = model.add_draft_head(index)  # to be trained by hf_gr.training.DraftHeadTrainer
            >>> prompt = torch.tensor([[1, 2]])
            >>> how = {"num_beams": 3, "num_return_sequences": 3, "drafting": "head"}
            >>> out = model.generate(prompt, constraint_index=index, **how)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]
        """
        return add_draft_head(self, codebooks, **options)

    def compute_transition_scores(self: Any, sequences: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """transformers' own, but 0 where a sequence has ended and the model has no padding token: -1 is no token."""
        super_: Any = super()
        scores: Tensor = super_.compute_transition_scores(sequences.clamp(min=0), *args, **kwargs)
        return scores.masked_fill(sequences[:, sequences.shape[1] - scores.shape[1] :] < 0, 0)

    def save_pretrained(  # noqa: D417
        self: Any,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *args: Any,
        custom_generate: bool = False,
        **kwargs: Any,
    ) -> None:
        """transformers' own; a draft head adds two files of its own.

        Args:
            custom_generate: also write `custom_generate/generate.py`. Loading the checkpoint by
                `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)` (or `AutoModelForSeq2SeqLM`) then
                gives this `generate` without importing hf_gr, which must be installed; without `trust_remote_code`
                it is an ordinary checkpoint.
            all others: as in transformers.

        A checkpoint with a draft head, a named catalogue or `custom_generate` gets a model card unless it has one.

        Raises:
            ValueError: a file in the folder's place, or a draft head with layers of an adapter.
        """
        super_: Any = super()
        carries = _CUSTOM_GENERATE.set(custom_generate or _CUSTOM_GENERATE.get())
        try:
            if self.should_save_on_this_rank(is_main_process):
                save_beside(self, save_directory, custom_generate=_CUSTOM_GENERATE.get())
            super_.save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
            if self.should_save_on_this_rank(is_main_process):
                for path in Path(save_directory).glob("*.safetensors"):  # which safetensors lets only their owner read
                    path.chmod(Path(save_directory, CONFIG_NAME).stat().st_mode)
                save_draft_head(self, save_directory, state_dict=state_dict)  # which names the weights beside it
        finally:
            _CUSTOM_GENERATE.reset(carries)

    def push_to_hub(self: Any, repo_id: str, *, custom_generate: bool = False, **kwargs: Any) -> Any:
        """transformers' own, with the draft head's files, and a model card if the repository has none.

        An existing card gets tags and is otherwise unchanged. `custom_generate` is that of `save_pretrained`.
        """
        super_: Any = super()
        carries = _CUSTOM_GENERATE.set(custom_generate)
        try:
            return super_.push_to_hub(repo_id, **kwargs)
        finally:
            _CUSTOM_GENERATE.reset(carries)

    _own_processors = staticmethod(keep_dead)

    def _before_upload(self, working_dir: str | Path, repo_id: str, timestamps: dict[str, float]) -> dict[str, float]:
        """Our files, and a card that describes them; see `prepare_upload`."""
        return prepare_upload(self, working_dir, repo_id, timestamps, custom_generate=_CUSTOM_GENERATE.get())
