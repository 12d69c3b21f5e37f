# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr env`: versions and devices, for a bug report. No tokens, keys or paths: it may be pasted."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import typer

PACKAGES = (
    *("torch", "transformers", "huggingface_hub", "safetensors", "numpy", "accelerate", "peft", "pyarrow"),
    *("jax", "flax", "fastapi", "ray"),
)


def env(*, as_json: bool = False) -> None:
    """Print versions and devices: what a bug report needs.

    Prints no tokens, keys or folders.
    """
    from hf_gr import __version__

    facts: dict[str, Any] = {
        "hf_gr": __version__,
        "python": f"{platform.python_version()}, {platform.platform()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: metadata.version(name) for name in PACKAGES if find_spec(name)},
        "torch": _torch() if find_spec("torch") else [],
        "jax": _jax() if find_spec("jax") else [],
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    facts["packages"] = [f"{name} {version}" for name, version in facts["packages"].items()]
    for name, value in facts.items():
        typer.echo(f"{name:10}{', '.join(value) if isinstance(value, list) else value}")


def _torch() -> list[str]:
    """The devices and the build of PyTorch."""
    import torch

    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    devices = [f"{one.name} ({one.total_memory / 2**30:.0f} GiB, {one.major}.{one.minor})" for one in seen]
    mps = ["mps"] * torch.backends.mps.is_available()
    build = f"built with CUDA {torch.version.cuda} and ROCm {torch.version.hip}"
    return [f"cpu with {torch.get_num_threads()} threads", *devices, *mps, build]


def _jax() -> list[str]:
    """The devices that JAX sees. Another process may hold a TPU, which then is the answer."""
    import jax

    try:
        return [str(device) for device in jax.devices()]
    except RuntimeError as error:
        return [str(error)]
