# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`FlaxGenerationMixin`: `generate` with a catalogue, for models in Flax. Knows no PyTorch.

The path of a call: `Call.read` (arguments, checks), `hf_gr.flax.decode.decode_program`, one compiled program, and
`Call.answer`, back on the host once.

Axes: B batch, P prompt, R returned sequences a row, T generated tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy.typing as npt
from jax.sharding import Mesh
from jaxtyping import Array
from transformers import GenerationConfig

from hf_gr.catalogue import ConstraintIndex
from hf_gr.catalogue.item_ids import ItemId
from hf_gr.flax.best_first import best_first_program
from hf_gr.flax.decode import decode_program
from hf_gr.flax.devices import decode_on_mesh, replicated, settings_of_ours
from hf_gr.flax.transition import device_catalogue
from hf_gr.generation.named_catalogues import index_of_call

from .call import Call
from .prompts import to_bucket


class FlaxGenerationMixin:
    """Adds `generate` to a `FlaxModel`; `AutoModelForGenerativeRetrieval` and `hf_gr.enable` apply it."""

    __slots__ = ()

    def generate(  # noqa: D417
        self: Any,
        inputs: npt.ArrayLike | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Callable[[Array, Array], Array]] | None = None,
        stopping_criteria: Sequence[Callable[[Array, None], Array]] | None = None,
        *,
        constraint_index: ConstraintIndex | str | Sequence[ConstraintIndex | str] | Literal[False] | None = None,
        exclude_items: Sequence[Iterable[ItemId]] | None = None,
        item_bias: Any = None,
        item_groups: Any = None,
        assistant_model: Any = None,
        seed: int | Sequence[int] | npt.ArrayLike | None = None,
        key: Array | int | None = None,
        mesh: Mesh | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate sequences of a catalogue: `GRGenerationMixin.generate`, in one program.

        Args:
            inputs: `[B, P]` tokens, in NumPy, JAX or nested lists (also as `input_ids`); a decoder's are padded on
                the left.
            logits_processor: functions `(tokens, scores) -> scores` in JAX, called where transformers calls a user's
                own: after the catalogue's constraint and `suppress_tokens`, before the warpers. `tokens` are
                `[paths, length]` integers: the last column is the last token, the prompt (an encoder-decoder's first
                tokens) comes before the generated ones, and -1, in front, is no token (padding, too). The length is
                the same at every step: that of the prompt's bucket and the most new tokens' together. `scores` are
                `[paths, vocab]` in fp32: log-probabilities of beams, else logits; `-inf` for forbidden tokens.
                Functions are traced into the program: no prints, no side effects, arrays of fixed shapes; a new
                function object, such as a lambda written in the call, is a new program.
            stopping_criteria: functions `(tokens, None) -> booleans [paths]`, likewise: which paths are complete.
                Those of beams see all candidates.
            constraint_index: the catalogue, as for `GRGenerationMixin.generate`; by default the one that
                `generation_config.constraint_index` names. Without one, or with False, only PyTorch generates.
            assistant_model: a draft model, as for `GRGenerationMixin.generate`: another `FlaxModel`.
            seed: of the samples, as for `GRGenerationMixin.generate`, which draws the same for the same seed.
            key: a key of `jax.random`, or a seed of one: draws one integer as the `seed`. By default every call draws
                a new one.
            mesh: devices along the axes "data" (rows of the batch) and "model" (weights), such as
                `jax.make_mesh((2, 4), ("data", "model"))`; by default all local devices along "data". A batch that
                the devices do not divide is filled up with copies of its first row, which are dropped afterwards.
            all others: as for `GRGenerationMixin.generate`, with all fields of a generation config; unsupported ones
                are refused by name. Drafts are those of `GRGenerationConfig`, in shapes that are fixed when a program
                is compiled: a forward scores room for four times the average number of nodes below the beams, up to
                `draft_token_budget`, and all nodes of a draft model's search. With `exact=True` only the catalogue
                drafts, and only with the prompt. Of the verifications `"last_level"` and `"none"` are PyTorch's alone.

        Returns:
            What `GRGenerationMixin.generate` returns, in JAX: `[B * R, P + T]` tokens, or with
            `return_dict_in_generate` a `FlaxGenerateOutput`.

        Raises:
            ValueError: before any work, for arguments that cannot lead to the catalogue's sequences, or that Flax does
                not support.

        The first call of a bucket compiles; later ones do not, whatever the prompts, filters, exclusions, length
        penalties and temperatures, and even after small changes of the catalogue. A program is specific to: the
        model's shape; the buckets of prompt (32, 48, 64, 96, 128, ... tokens) and batch (powers of two, for each
        device along "data"); the options but `length_penalty` and the numbers of warpers; the draft model; functions;
        the length of `decoder_input_ids`; the number of different catalogues in a batch, up to a power of two; and
        the most prefixes that exclusions hide from one row: none, up to 16, up to 64, ... A catalogue that outgrows
        its arrays, whose spare room is at most an eighth, needs another program, too.

        To compile before the first request, call `generate` once for every bucket; with
        `jax.config.update("jax_compilation_cache_dir", folder)` later processes load what earlier ones compiled, as
        those of the command line do.

        Example:
            >>> from transformers import Qwen3Config
            >>> from hf_gr import ConstraintIndex, enable
            >>> from hf_gr.flax.model import FlaxModel
            >>> config = Qwen3Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, head_dim=8, eos_token_id=None)
            >>> model = enable(FlaxModel(config))
            >>> index = ConstraintIndex.from_sequences([[3, 4], [3, 5], [6, 7]], item_ids=["ham", "jam", "yam"])
            >>> out = model.generate([[1, 2]], constraint_index=index, num_beams=3, num_return_sequences=3)
            >>> sorted(index.items(out[:, 2:]))
            [['ham'], ['jam'], ['yam']]

        Source: STATIC, algorithm 1; xGR, sections 4 and 5.
        """
        indexes = index_of_call(self, generation_config, constraint_index)
        if indexes is None:
            raise ValueError(
                f"constraint_index={constraint_index}, expected a catalogue: Flax generates nothing without one; "
                "load the model with backend='torch'"
            )
        call = Call.read(
            self,
            inputs,
            generation_config,
            kwargs,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            key=key,
            mesh=mesh,
            indexes=indexes,
            exclude_items=exclude_items,
            item_bias=item_bias,
            item_groups=item_groups,
            assistant=assistant_model,
            seed=seed,
        )
        mesh = call.mesh
        program: Any = best_first_program if call.plan.max_nodes else decode_program
        if mesh is not None:
            program = partial(decode_on_mesh, mesh)
        with settings_of_ours(mesh):
            catalogue = device_catalogue(call.rules, replicated(mesh), num_rows=call.num_rows)
            scorer, params = call.draft.scorer(call.plan, mesh)
            draft_params, of_call = call.draft.draft_params(mesh), call.prompt
            prompt = to_bucket(of_call.inputs, of_call.mask, of_call.start, call.num_rows)
            decoded = program(scorer, params, catalogue, prompt, call.plan, call.noise, draft_params)
            return call.answer(decoded, is_ragged=catalogue.is_ragged or call.plan.has_criteria)
