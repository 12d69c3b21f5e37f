# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""`hf-gr env`: what a bug report needs: versions, devices and extras. No tokens, keys or paths: it may be pasted."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import typer
from packaging.requirements import Requirement  # of huggingface_hub and transformers

DISTRIBUTION = "hf-gr"


def env(*, as_json: bool = False) -> None:
    """Print versions, devices and extras: all that a bug report needs.

    Prints no tokens, keys or folders.
    """
    facts = environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    rows = {name: facts[name] for name in ("hf_gr", "python", "machine")}
    rows["packages"] = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    for extra, missing in facts["extras"].items():
        if missing:
            rows[f"without {extra}"] = f'{", ".join(missing)} missing: pip install "{DISTRIBUTION}[{extra}]"'
    rows |= {name: ", ".join(facts[name]) for name in ("torch", "jax") if facts[name] is not None}
    for name, value in rows.items():
        typer.echo(f"{name.ljust(max(map(len, rows)))}  {value or 'unknown: hf-gr is not installed'}")


def environment() -> dict[str, Any]:
    """Versions, machine, devices and extras of this process, as plain values."""
    from hf_gr import __version__

    asked = _requirements()
    extras = sorted({extra for one in asked for extra in _extras_of(one)} - {"dev"})
    return {
        "hf_gr": __version__,
        "python": f"{platform.python_version()}, {platform.platform()}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: _version(name) for name in sorted({one.name for one in asked} - {DISTRIBUTION})},
        "extras": {extra: _missing(extra, asked) for extra in extras},
        "torch": _torch(),
        "jax": _jax(),
    }


def _requirements() -> list[Requirement]:
    """What hf_gr and its extras ask for; nothing for a bare checkout."""
    try:
        return [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []


def _extras_of(requirement: Requirement) -> list[str]:
    every = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return [extra for extra in every if requirement.marker and requirement.marker.evaluate({"extra": extra})]


def _missing(extra: str, asked: list[Requirement]) -> list[str]:
    """What an extra needs, with the extras that it names, that is not installed, or too old."""
    missing: list[str] = []
    for one in asked:
        if one.marker is None or one.marker.evaluate({"extra": ""}) or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == DISTRIBUTION:
            missing += [each for other in sorted(one.extras) for each in _missing(other, asked)]
        elif (version := _version(one.name)) is None or not one.specifier.contains(version, prereleases=True):
            missing.append(f"{one.name}{one.specifier}")
    return sorted(set(missing))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> list[str] | None:
    """The devices and builds that PyTorch sees; None without PyTorch."""
    if find_spec("torch") is None:
        return None
    import torch

    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    devices = [f"{one.name} ({one.total_memory / 2**30:.0f} GiB, {one.major}.{one.minor})" for one in seen]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = build if torch.version.cuda or torch.version.hip else "no CUDA"
    mps = ["mps"] * torch.backends.mps.is_available()
    return [f"cpu with {torch.get_num_threads()} threads", *devices, *mps, f"built with {build}"]


def _jax() -> list[str] | None:
    """The devices that JAX sees; None without JAX. Another process may hold a TPU, which then is the answer."""
    if find_spec("jax") is None:
        return None
    import jax

    try:
        return [str(device) for device in jax.devices()]
    except RuntimeError as error:
        return [str(error)]
