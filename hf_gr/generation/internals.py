# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The private names of transformers that hf_gr uses, all of them, as they are in 5.17 to 5.23. Knows no framework.

A newer transformers may rename any of these. tests/test_internals.py says which ones it lacks, and that none is used
elsewhere. Public names are imported where they are used.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

# On the config of a call that is prepared already: its (num_beams, num_return_sequences), as they were asked for.
PATHS = "_hf_gr_paths"
# Fields by which transformers chooses another loop for a single path.
OTHER_LOOPS = ("penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "dola_layers")


def attention_of(config: Any) -> str:
    """The attention implementation in use, such as "sdpa"."""
    return config._attn_implementation


def has_dynamic_cache(model: Any) -> bool:
    """Whether a model's own cache is transformers' `DynamicCache`."""
    return model._supports_default_dynamic_cache()


def hands_on_arguments(model: Any) -> bool:
    """Whether a model hands the arguments of a forward on to its attention functions."""
    return bool(getattr(model, "_supports_attention_backend", False))


def prepare_config(model: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config of a call, defaults filled in, and the arguments that are not fields of it."""
    return model._prepare_generation_config(config, **kwargs)


def prefill(model: Any, input_ids: Any, config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The outputs of a prompt, by transformers' own code, in chunks if the config says so."""
    return model._prefill(input_ids, config, model_kwargs)


def is_synced(model: Any, synced_gpus: bool | None) -> bool:
    """Whether all processes must run equally many forwards; by default under FSDP and ZeRO-3, as in transformers."""
    return bool(model._extract_generation_mode_kwargs(None, {}, synced_gpus, None, None).get("synced_gpus"))


def next_inputs(
    model: Any, input_ids: Any, outputs: Any, model_kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of transformers' own next forward, which reads the last token, and those of the call after it."""
    is_encoder_decoder = model.config.is_encoder_decoder
    kwargs = model._update_model_kwargs_for_generation(outputs, dict(model_kwargs), is_encoder_decoder)
    return model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **kwargs), kwargs


def relative_buckets(attention: Any, distances: Any) -> Any:
    """The bucket of each distance (key less query) in a T5 decoder's attention."""
    return attention._relative_position_bucket(
        distances,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )


def prefix_function(processor: Any) -> Any:
    """The function of a `PrefixConstrainedLogitsProcessor`."""
    return processor._prefix_allowed_tokens_fn


def num_known_tokens(config: Any, default: int) -> int:
    """Tokens of a prompt whose mask transformers has dropped, those in the cache included."""
    return getattr(config, "_mask_length", default)


def ignore_on_save(model: Any, names: Iterable[str]) -> None:
    """Keep parameters out of the model's own file."""
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *names}


def default_generation_fields(config: Any) -> dict[str, Any]:
    """transformers' defaults for unset fields of a generation config."""
    return config._get_default_generation_params()


def without_bookkeeping(fields: dict[str, Any]) -> dict[str, Any]:
    """A generation config's fields less the mark of a model's copy: with it transformers reads only its own."""
    return {name: value for name, value in fields.items() if name != "_from_model_config"}


@cache
def _fields_of(kind: type[Any]) -> frozenset[str]:
    """The fields of a kind of generation config, less those that transformers also hands to every forward."""
    return frozenset(vars(kind())) - {"output_attentions", "output_hidden_states"}


class Overrides:
    """What transformers calls back while it prepares a call and pushes a checkpoint: methods that it keeps private.

    The config of a call is prepared before transformers sees it, and is then taken as it is. It asks for one path a
    prompt, so that nothing is repeated for every beam; what was asked for stands in `PATHS`, and logits processors are
    made for that many.
    """

    def _prepare_generation_config(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(generation_config, PATHS):
            # A model's own `generate` may add fields, such as the length (Kyutai): the call has set them already.
            fields = _fields_of(type(generation_config))
            return generation_config, {name: value for name, value in kwargs.items() if name not in fields}
        super_: Any = super()
        return super_._prepare_generation_config(generation_config, *args, **kwargs)

    def _get_logits_processor(
        self: Any, generation_config: Any, *args: Any, model_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        config, super_ = generation_config, super()
        paths = getattr(config, PATHS, None)
        if paths is not None and paths != (config.num_beams, config.num_return_sequences):
            config.num_beams, config.num_return_sequences = paths
            model_kwargs = dict(model_kwargs or {})
            for name in ("attention_mask", "decoder_attention_mask"):
                if model_kwargs.get(name) is not None:  # of processors that keep it: one row a path, as of the scores
                    model_kwargs[name] = model_kwargs[name].repeat_interleave(max(paths), dim=0)
        made = super_._get_logits_processor(config, *args, model_kwargs=model_kwargs, **kwargs)  # pyright: ignore
        return made if paths is None else self._own_processors(made)

    def _upload_modified_files(
        self: Any, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        super_: Any = super()
        files_timestamps = self._before_upload(working_dir, repo_id, files_timestamps)
        return super_._upload_modified_files(working_dir, repo_id, files_timestamps, *args, **kwargs)


def for_one_path(model: Any, config: Any) -> Any:
    """Have transformers take a prepared config as it is, and prepare one row a prompt; the config is changed.

    Before that, transformers' own check refuses a generation mode that a model does not support.
    """
    model._validate_generation_mode(config.get_generation_mode(None), config, {})
    setattr(config, PATHS, (config.num_beams, config.num_return_sequences))
    config.num_beams = config.num_return_sequences = 1
    for name in OTHER_LOOPS:  # of a single path: a beam search ignores them
        if hasattr(config, name):
            setattr(config, name, None)
    return config


def as_it_is(config: Any) -> Any:
    """Have transformers take a prepared config as it is; the config is changed."""
    setattr(config, PATHS, (config.num_beams, config.num_return_sequences))
    return config
