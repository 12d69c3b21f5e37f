# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What every benchmark prints: a plain table, and one JSON line of results, versions, commit, date and hardware.

`record.py` runs a script and writes what it prints into RESULTS.md.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "numpy")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell: the first two left-aligned, numbers right-aligned."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    for line in (header, ["-" * width for width in widths], *rows):
        padded = [f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(line)]
        print("  ".join(padded).rstrip(), flush=True)


def print_json_line(
    benchmark: str, device: torch.device, results: dict[str, Any], *, packages: Sequence[str] = ()
) -> None:
    """Results with versions (of further packages, too), commit and hardware, as the last line of the output."""
    print(json.dumps({"benchmark": benchmark, **results, **environment(device, packages)}), flush=True)


def environment(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, commit and hardware of this run."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *packages)}},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": [round(load, 2) for load in os.getloadavg()],
        },
    }


def commit() -> str:
    """The commit of the checkout, marked where code differs from it; "unknown" outside of one."""
    root = Path(__file__).resolve().parents[2]
    try:
        name = _git(root, "rev-parse", "--short=12", "HEAD")
        return f"{name}-dirty" if _git(root, "status", "--porcelain", "--", "hf_gr", "examples/**.py") else name
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    """The processor's name, if the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
