# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What commands need of the machine: packages, and a cache of programs that JAX compiles. Imports no framework."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.util import find_spec
from pathlib import Path

from hf_gr.files.cache import cache_folder

LARGEST = 2**30  # bytes; the least recently used goes first


def keep_programs() -> None:
    """Have JAX keep what it compiles, so that a command's next run loads it: in the user's cache, at most a gigabyte.

    Set as environment variables, which JAX reads when it is imported, here or in a process of ours. Does nothing if
    the user's own JAX_COMPILATION_CACHE_DIR is set; JAX_ENABLE_COMPILATION_CACHE=false turns all of it off.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder(folder_name()))
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(LARGEST))


def folder_name() -> str:
    """A name that tells processors apart: a program for CPUs is machine code of one, and homes may be shared."""
    processor = Path("/proc/cpuinfo")
    flags = [line for line in processor.read_text().splitlines() if "flags" in line] if processor.is_file() else []
    digest = hashlib.sha256("".join([platform.machine(), platform.processor(), *flags[:1]]).encode()).hexdigest()
    return f"jax-{digest[:16]}"


def require(what: str, extra: str, packages: dict[str, str]) -> None:
    """End the program with the command that installs what is missing; `packages` maps modules to distributions."""
    missing = [distribution for module, distribution in packages.items() if find_spec(module) is None]
    if missing:
        raise SystemExit(f'{what} needs {", ".join(missing)}: pip install "hf-gr[{extra}]"')
