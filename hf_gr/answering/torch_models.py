# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Models in PyTorch that answer: loaded, told apart, and given prompts. Knows no users. `flax_models` is its twin."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_gr.files.hub import check_revision, naming_model
from hf_gr.generation.torch.fingerprints import fingerprint_model
from hf_gr.generation.torch.loading import enable, load
from hf_gr.generation.torch.models import embeddings_of, is_sharded

from . import batching
from .backends import Alone
from .loading import check_name, padded

DTYPES = ("auto", "float32", "bfloat16", "float16")

name = "torch"  # as `backend=` has it
is_compiled = False  # whether every shape has a program, so that its first call is slower
fingerprint = fingerprint_model  # a digest of a model's config and weights
num_embeddings = embeddings_of  # the tokens that a model can read; None if unknown
foreign = {"mesh": "pass device= or device_map=, start several processes, or load the model with backend='flax'"}


def processes() -> Any:
    """This process and its peers: see `hf_gr.torch.processes.Processes`."""
    from hf_gr.torch.processes import Processes

    return Processes()


def load_model(
    model: Any,
    *,
    dtype: str | torch.dtype = "auto",
    device: Any = None,
    device_map: Any = None,
    revision: str | None = None,
    processes: Any = None,
) -> Any:
    """A model with `GRGenerationMixin`, in evaluation mode, by name; or a loaded one, which stays on its device.

    `device_map` spreads it over several devices; `processes` load one each. Others as in `recommend`.
    """
    own = Alone() if processes is None else processes
    for option, value in (("device_map", device_map), ("device", device)):
        if value is not None and own.count > 1:
            why = "every process has a device, and a model, of its own"
            raise ValueError(f"{option}={value!r} with {own.count} processes, expected one of both: {why}")
    if isinstance(model, (str, Path)):
        return _load_by_name(model, dtype, device_map, device, revision, own.device)
    given = {"dtype": None if dtype == "auto" else dtype, "device": device, "device_map": device_map}
    given = [option for option, value in (given | {"revision": revision}).items() if value is not None]
    if given:
        raise ValueError(f"{given[0]}= with a loaded model, expected none: load it with that, or pass its name")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if is_sharded(model):
        raise ValueError(
            "model is in pieces (FSDP or tensor parallelism), expected whole weights in every process: here users are "
            "divided among processes, not weights, and processes do not take equally many steps. Save it and pass the "
            "folder's name, with device_map='auto' in one process if it is larger than a device"
        )
    model = enable(model)
    if model.training:
        raise ValueError("model is in training mode, expected evaluation: model.eval()")
    return model


def _load_by_name(
    model: str | Path, dtype: Any, device_map: Any, device: Any, revision: str | None, own_device: Any
) -> Any:
    check_name(model)
    check_revision(model, revision)
    kind = dtype if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if kind != "auto" and not getattr(kind, "is_floating_point", False):
        raise ValueError(f"dtype={dtype!r}, expected one of {', '.join(DTYPES)}")
    place = check_device(device) if device is not None else own_device
    if place is None:
        place = "cuda" if torch.cuda.is_available() else "cpu"
    given = {} if device_map is None else {"device_map": device_map}
    given |= {} if revision is None else {"revision": revision}
    with naming_model(model, "model"):
        loaded = load(model, dtype=kind, **given)
    return (loaded if device_map is not None else loaded.to(place)).eval()


def check_device(device: Any) -> torch.device:
    """Check, before anything is loaded, that a device exists."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason, kind = str(error).strip().partition("\n")[0], torch.accelerator.current_accelerator()
        there = ["cpu", *(f"{kind}:{number}" for number in range(torch.accelerator.device_count()))]
        raise ValueError(
            f"device={str(device)!r}, expected one of this machine's, {', '.join(there)} ({reason[:120]})"
        ) from error
    return found


def load_draft_model(draft_model: Any, model: Any) -> Any:
    """A draft model for a model, on its device; a loaded one stays on its device."""
    if isinstance(draft_model, (str, Path)):
        check_name(draft_model, argument="assistant_model")
        loaded = load(draft_model, dtype=model.dtype)
        return loaded.to(input_device(model)).eval()
    return draft_model


def input_device(model: Any) -> torch.device:
    """The device of a model's prompts: its weights may be on disk until they are needed."""
    return model.device if model.device.type != "meta" else torch.device(model._hf_hook.execution_device)


def hardware(model: Any, *, num_processes: int, mesh: Any) -> str:
    """A description of the hardware that a model runs on."""
    device = input_device(model)
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    return f"{num_processes} x {on}, {str(model.dtype).removeprefix('torch.')}, torch {torch.__version__}"


def to_mesh(mesh: Any) -> None:
    """PyTorch's `generate` takes no `mesh`: None, whatever users pass."""


def prompts(model: Any, batch: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` `[B, P]` on the model's device."""
    device = input_device(model)
    return {option: torch.from_numpy(array).to(device) for option, array in padded(model, batch).items()}


def draw_seeds(number: int) -> list[int]:
    """Seeds of samples for which none was given: from PyTorch's generator, which `torch.manual_seed` sets."""
    return torch.randint(2**63 - 1, (number,)).tolist()


def make_batches(lengths: Sequence[int], *, token_budget: int, tokens_ahead: int, mesh: Any) -> list[list[int]]:
    """Rows of `lengths` to answer together: see `batching`. Every row is in a batch; one may be there twice."""
    return batching.make_batches(lengths, token_budget=token_budget, tokens_ahead=tokens_ahead)
