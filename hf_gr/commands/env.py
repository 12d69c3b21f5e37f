# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr env`: what a bug report needs: versions, devices, extras, and how a model is decoded.

Knows no tokens, keys or paths, so that its output can be pasted in public.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement  # of huggingface_hub and transformers
from packaging.utils import canonicalize_name
from rich.console import Console

from .flags import DEVICE, REVISION
from .text import shown

DISTRIBUTION = "hf-gr"
# What changes answers, times or devices. HF_TOKEN and folders are nobody's business, also within a value.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "JAX_PLATFORMS", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", "XLA_FLAGS",
)  # fmt: skip
LAYOUTS = {
    True: "one shared prompt, beams on the sequence axis",
    False: "transformers' own loop, with a logits processor",
}


def env(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A model's folder or repository: how it is decoded.",
            show_default=False,
        ),
    ] = None,
    device: DEVICE = None,
    revision: REVISION = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Print versions, devices and extras, and with --model how a model decodes: all that a bug report needs.

    Prints no tokens, keys or folders. --model loads the weights.
    """  # fmt: skip
    for flag, value in (("--device", device), ("--revision", revision)):
        if value is not None and model is None:
            raise typer.BadParameter("it belongs to --model, which is missing", param_hint=flag)
    facts = environment()
    if model is not None:
        from transformers.utils import logging

        from .recommend import errors_on_one_line

        logging.disable_progress_bar()
        with errors_on_one_line("env", as_json=as_json):
            facts["model"] = describe_model(model, device=device, revision=revision)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)


def environment() -> dict[str, Any]:
    """Versions, machine, devices and extras of this process, as plain values."""
    from hf_gr import __version__

    return {
        "hf_gr": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: _version(name) for name in _packages()},
        "extras": {extra: _missing(extra) for extra in _extras()},
        "torch": _torch_devices(),
        "jax": _jax_devices(),
        "variables": {name: _without_folders(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def _without_folders(value: str) -> str:
    """A variable's value, in which `...` stands for what may be a path.

    Example:
        >>> _without_folders("--xla_dump_to=/home/me/dump --xla_cpu_max_isa=AVX2")
        '--xla_dump_to=... --xla_cpu_max_isa=AVX2'
    """
    try:
        parts = shlex.split(value.replace("\\", "/"))
    except ValueError:  # an open quote
        return "..."
    shortened: list[str] = []
    for part in parts:
        name, equals, rest = part.partition("=")
        is_path = any(mark in (rest if equals else name) for mark in "/~")
        shortened.append(f"{name}{equals}..." if is_path and equals else "..." if is_path else part)
    return " ".join(shortened)


def describe_model(name: str, *, device: str | None = None, revision: str | None = None) -> dict[str, Any]:
    """How hf_gr decodes a checkpoint; loads its weights.

    Args:
        name: a folder or repository id.
        device: where it runs; a GPU if there is one.
        revision: a branch, tag or commit.

    Raises:
        OSError: it cannot be loaded.
        ValueError: `name` is neither, or there is no model for generation in it.
    """
    from hf_gr.answering.torch_models import load_model
    from hf_gr.generation.internals import attention_of
    from hf_gr.generation.models import position_limit
    from hf_gr.generation.torch.layouts import attends_in_parts, takes_tree

    model = load_model(name, device=device, revision=revision)
    config = model.config.get_text_config(decoder=True)
    head = getattr(model, "draft_head", None)
    return {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "parameters": model.num_parameters(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocabulary": config.vocab_size,
        "positions": position_limit(model.config),
        "attention": attention_of(config),
        "takes trees": takes_tree(model),
        "decoded with": LAYOUTS[takes_tree(model)],
        "attends in parts": attends_in_parts(model),
        "draft head": None if head is None else head.config.transition,
        "catalogue": model.generation_config.constraint_index is not None,
    }


def _requirements(distribution: str) -> list[Requirement]:
    """What an installed distribution asks for; nothing for one that is not installed, such as a bare checkout."""
    try:
        return [Requirement(line) for line in metadata.requires(distribution) or ()]
    except metadata.PackageNotFoundError:
        return []


def _extras() -> list[str]:
    try:
        return sorted(set(metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or ()) - {"dev"})
    except metadata.PackageNotFoundError:
        return []


def _needed(extra: str, distribution: str = DISTRIBUTION) -> list[Requirement]:
    """What an extra adds on this platform, with what the extras that it names add."""
    needed = []
    for requirement in _requirements(distribution):
        if _holds(requirement, "") or not _holds(requirement, extra):
            continue
        name = canonicalize_name(requirement.name)
        needed += [requirement] * (name != DISTRIBUTION)
        needed += [one for other in sorted(requirement.extras) for one in _needed(other, name)]
    return needed


def _packages() -> list[str]:
    """The packages that hf_gr and its extras ask for themselves, those of other platforms left out."""
    asked = _requirements(DISTRIBUTION)
    wanted = [one for one in asked if any(_holds(one, extra) for extra in ("", *_extras()))]
    return sorted({one.name for one in wanted} - {DISTRIBUTION})


def _holds(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _missing(extra: str) -> list[str]:
    """What an extra needs that is not installed, or too old."""
    wanted = {one.name: one for one in _needed(extra)}
    found = {name: _version(name) for name in wanted}
    return [
        str(Requirement(f"{name}{one.specifier}"))
        for name, one in sorted(wanted.items())
        if (version := found[name]) is None or not one.specifier.contains(version, prereleases=True)
    ]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_devices() -> dict[str, Any] | None:
    """Threads and accelerators that PyTorch sees; None without PyTorch."""
    if find_spec("torch") is None:
        return None
    import torch

    devices = []
    for number in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(number)
        memory = f"{seen.total_memory / 2**30:.0f} GiB"
        devices.append(f"cuda:{number} {seen.name}, {memory}, capability {seen.major}.{seen.minor}")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "devices": devices,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _jax_devices() -> dict[str, Any] | None:
    """The devices that JAX sees; None without JAX. Another process may hold a TPU, which then is the answer."""
    if find_spec("jax") is None:
        return None
    import jax

    try:
        return {"devices": [str(device) for device in jax.devices()]}
    except RuntimeError as error:
        return {"devices": [], "error": str(error)}


def _print(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    complete = [extra for extra, missing in facts["extras"].items() if not missing]
    rows = {
        "hf_gr": facts["hf_gr"],
        "Python": f"{facts['python']}, {facts['system']}, {facts['machine']}",
        "packages": ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
        or "unknown: hf-gr is not installed",
        "extras": ", ".join(complete) or "none",
    }
    for extra, missing in facts["extras"].items():
        if missing:
            rows[f"  without {extra}"] = f'{", ".join(missing)} missing: pip install "{DISTRIBUTION}[{extra}]"'
    if facts["torch"] is not None:
        seen = facts["torch"]
        build = f"CUDA {seen['cuda']}" if seen["cuda"] else f"ROCm {seen['hip']}" if seen["hip"] else "no CUDA"
        rows["PyTorch"] = f"{', '.join(['cpu', *seen['devices']])}; {seen['threads']} threads; built with {build}"
    if facts["jax"] is not None:
        rows["JAX"] = facts["jax"].get("error") or ", ".join(facts["jax"]["devices"])
    if facts["variables"]:
        rows["variables"] = ", ".join(f"{name}={value}" for name, value in facts["variables"].items())
    rows |= {f"model: {name}": str(value) for name, value in facts.get("model", {}).items()}
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"[bold]{shown(name.ljust(width))}[/]  {shown(str(value))}")
