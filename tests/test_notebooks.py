# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Notebooks are run: all cells in order, each notebook in a kernel of its own, in an empty folder."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
TIMEOUT = 120  # seconds for a cell


def answers_of(notebook: nbformat.NotebookNode) -> list[int]:
    """How many outputs each cell has; progress bars and warnings on stderr are not kept."""
    cells = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [sum(output.get("name") != "stderr" for output in outputs) for outputs in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run beside this one
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # What a reader sees on GitHub was made by these cells.
    saved = answers_of(notebook)  # running replaces them
    NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert answers_of(notebook) == saved
