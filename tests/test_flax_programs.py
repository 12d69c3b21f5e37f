# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Programs that commands keep for their next run."""

import os
import subprocess
import sys
from pathlib import Path

# A command, then a program: how many of its programs were loaded instead of compiled.
PROCESS = """
import sys
from hf_gr.commands.app import main
sys.argv = ["hf-gr", "--help"]
try:
    main()
except SystemExit:
    pass
assert "jax" not in sys.modules
import jax
loaded = []
jax.monitoring.register_event_listener(lambda event, **_: loaded.append(event == "/jax/compilation_cache/cache_hits"))
jax.jit(lambda numbers: numbers * 2 + 1)(jax.numpy.arange(8)).block_until_ready()
print("loaded:", sum(loaded))
"""


def programs_loaded(folder: Path, **variables: str) -> int:
    """In a new process, which keeps even programs that compile quickly."""
    environment = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    environment |= {"HF_GR_CACHE": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **variables}
    told = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True)
    return int(told.stdout.rpartition("loaded: ")[2])


def test_a_second_process_loads_what_a_first_compiled(tmp_path: Path) -> None:
    assert programs_loaded(tmp_path) == 0
    (own,) = tmp_path.iterdir()
    assert own.name.startswith("jax-")
    assert programs_loaded(tmp_path) > 0
    elsewhere = tmp_path / "elsewhere"
    assert programs_loaded(tmp_path, JAX_COMPILATION_CACHE_DIR=str(elsewhere)) == 0
    assert any(elsewhere.iterdir())
