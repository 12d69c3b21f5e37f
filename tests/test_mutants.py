# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of planted errors is up to date, and what is not caught is said. `python tests/mutants.py` tries all."""

from dataclasses import replace

import pytest
from mutants import failures, missing, read

pytestmark = pytest.mark.slow


def test_every_error_finds_its_place() -> None:
    assert missing(read()) == []


def test_what_is_not_caught_is_said() -> None:
    one = next(mutant for mutant in read() if mutant.tests == ("test_losses.py",))
    equal = replace(one, name="no error", new=one.old)
    lost = replace(one, name="gone", old="no such text")
    elsewhere = replace(one, name="no tests", tests=("test_imports.py", "no_file.py"))
    same, gone, nothing = failures([one, equal, lost, elsewhere])
    assert "no error: is not caught by test_losses.py" in same
    assert "gone: the text is in no file, expected once in hf_gr/" in gone
    assert "no tests: cannot be tried" in nothing
