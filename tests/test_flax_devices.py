# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Several devices, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_four_devices(marked: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    worker = Path(__file__).with_name("flax_on_four_devices.py")
    command = [sys.executable, *"-m pytest -q -n0 -p no:cacheprovider -m".split(), marked, str(worker)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, env=environment | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
