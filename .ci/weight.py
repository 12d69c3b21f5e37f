#!/usr/bin/env python
# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""The weight of the package: lines of Python by folder, and how many of our functions a plain call enters.

    python .ci/weight.py            # lines; an error where pyproject.toml's budget, [tool.weight], is exceeded
    python .ci/weight.py --calls    # and the functions of a second, warm call, in PyTorch and in Flax

A function counts once, however often it is called; so do comprehensions and lambdas, by their line.
Depth counts our functions alone: one of ours that transformers calls for one of ours is one deeper.
"""

import argparse
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("core", "catalogue", "torch", "flax", "generation")


def lines() -> Counter[str]:
    """Lines of Python by folder of the package, and of tests and examples."""
    found: Counter[str] = Counter()
    command = ["git", "ls-files", "hf_gr", "tests", "examples"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
        path = ROOT / name
        if path.suffix == ".py" and path.exists():
            parts = Path(name).parts
            folder = "/".join(parts[:2]) if parts[0] == "hf_gr" and len(parts) > 2 else parts[0]
            found[folder] += len(path.read_text().splitlines())
    return found


def entered(call: Callable[[], Any]) -> tuple[set[tuple[str, str]], int]:
    """Our functions that a call enters, by file and name, and how deep."""
    package = str(ROOT / "hf_gr") + "/"
    found: set[tuple[str, str]] = set()
    depth = deepest = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(package):
            return
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            found.add((code.co_filename.removeprefix(package), f"{code.co_qualname}:{code.co_firstlineno}"))
        elif event == "return":
            depth -= 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found, deepest


def circles() -> list[list[str]]:
    """Modules of the package that import each other, also inside functions; imports for annotations do not count."""
    import grimp
    import networkx

    graph = grimp.build_graph("hf_gr", exclude_type_checking_imports=True, cache_dir=None)
    imports = networkx.DiGraph()
    for module in graph.modules:
        imports.add_edges_from((module, other) for other in graph.find_modules_directly_imported_by(module))
    return [sorted(found) for found in networkx.strongly_connected_components(imports) if len(found) > 1]


def calls() -> dict[str, Callable[[], Any]]:
    """A plain call a backend: `generate(ids, constraint_index=index, num_beams=50)`."""
    import tempfile

    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from hf_gr import AutoModelForGenerativeRetrieval, ConstraintIndex, enable

    codes = np.random.default_rng(0).integers(0, 64, (2000, 4)) + 64 * np.arange(4) + 3
    index = ConstraintIndex.from_sequences(codes)
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=None,
    )
    model = enable(Qwen3ForCausalLM(config)).eval()
    prompt = torch.arange(3, 35)[None]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        in_flax = AutoModelForGenerativeRetrieval.from_pretrained(folder, backend="flax")
    return {
        "PyTorch": lambda: model.generate(prompt, constraint_index=index, num_beams=50),
        "Flax": lambda: in_flax.generate(prompt.numpy(), constraint_index=index, num_beams=50),
    }


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="also count the functions of a plain call")
    parser.add_argument("--names", action="store_true", help="and print their names")
    arguments = parser.parse_args()
    found = lines()
    for folder, number in sorted(found.items(), key=lambda one: -one[1]):
        print(f"{number:7,d}  {folder}")
    package = sum(number for folder, number in found.items() if folder.startswith("hf_gr"))
    engine = sum(found[f"hf_gr/{name}"] for name in ENGINE)
    print(f"{package:7,d}  the package\n{engine:7,d}  its engine: {', '.join(ENGINE)}")
    results = ROOT / "examples/benchmark/RESULTS.md"
    weights = {"engine": engine, "surface": package - engine, "tests": found["tests"], "examples": found["examples"]}
    weights["results"] = len(results.read_text().splitlines())
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weight"]
    too_heavy = [
        f"{name} has {weights[name]:,d} lines, expected at most {budget:,d}: take something away, or raise the budget "
        "in pyproject.toml and say why"
        for name, budget in budgets.items()
        if weights[name] > budget
    ]
    if too_heavy:
        sys.exit("\n".join(too_heavy))
    if not (arguments.calls or arguments.names):
        return
    print(f"import circles: {circles() or 'none'}")
    for backend, call in calls().items():
        call()
        functions, deepest = entered(call)
        files = {file for file, _ in functions}
        print(f"{backend}: a plain call enters {len(functions)} functions in {len(files)} files, {deepest} deep")
        if arguments.names:
            print(*(f"    {file}: {name}" for file, name in sorted(functions)), sep="\n")


if __name__ == "__main__":
    main()
