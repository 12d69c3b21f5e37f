# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What `test_log_probs.py` runs in processes of their own, where Triton is told before its import what to be.

    TRITON_INTERPRET=1 python log_probs_by_triton.py interpret [FILE]  # largest error by case, as JSON
    TRITON_INTERPRET=1 python log_probs_by_triton.py far [FILE]        # the same, rows beyond 2^31 logits
    python log_probs_by_triton.py compile                              # for sm_90: facts by dtype, as JSON

FILE is another kernel than ours, with a planted error.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import sys
from types import ModuleType

import torch

from hf_gr.torch import log_probs, log_probs_triton

NORESERVE = 0x4000  # MAP_NORESERVE of Linux
Case = tuple[torch.Tensor, torch.Tensor]


def cases() -> dict[str, Case]:
    """Logits and tokens that a kernel may get wrong."""
    generator = torch.Generator().manual_seed(0)

    def case(num_rows: int, vocab_size: int, num_children: int, dtype: torch.dtype = torch.float32) -> Case:
        logits = torch.randn((num_rows, vocab_size), generator=generator) * 4
        return logits.to(dtype), torch.randint(vocab_size, (num_rows, num_children), generator=generator)

    found = {
        "less than a block": case(3, 100, 7),
        "blocks and no power of two": case(3, 20_011, 5),
        "whole blocks": case(2, 2 * log_probs_triton.BLOCK, 1),
        "one row, one token": case(1, 1, 1),
        "more children than tokens": case(2, 64, 2 * log_probs_triton.CHILDREN + 3),
        "bf16": case(4, 9_001, 33, torch.bfloat16),
        "fp16": case(4, 9_001, 33, torch.float16),
        "no rows": case(0, 50, 4),
        "no children": case(2, 50, 0),
    }
    logits, tokens = case(4, 30_000, 9)
    logits[0, : 2 * log_probs_triton.BLOCK] = -torch.inf  # a processor's; whole blocks of it
    logits[1, 5:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, :] = -torch.inf
    logits[3, 29_999] = 3.0
    tokens[1, :5] = torch.arange(5)
    tokens[3, 0] = 29_999
    found["-inf"] = logits, tokens
    found["rising"] = torch.linspace(-3, 3, 30_000).expand(4, -1), tokens
    logits, tokens = case(3, 9_000, 4)
    found["large"] = logits * 1e4 + 3e5, tokens
    logits, tokens = case(6, 9_010, 8)
    found["strides"] = logits[::2, 5:9_005], tokens.clamp(max=8_999)[::2, 1::2]
    found["columns first"] = case(9_000, 5, 1)[0].T, tokens[:5]
    found["one list of tokens for all rows"] = logits, torch.arange(40, 70).expand(6, -1)
    return found


def far_case() -> Case:
    """Rows so far apart that the offset of the last one needs 64 bits; memory that is not touched costs nothing."""
    num_rows, distance, vocab_size = 6, 2**29, 9_001
    size = ((num_rows - 1) * distance + vocab_size) * 2
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((num_rows, vocab_size), (distance, 1))
    logits.copy_(torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)))
    return logits, torch.arange(12).view(6, 2)


def error_of(kernel: ModuleType, logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """The largest difference to the slow twin in double precision; infinite where only one is a number."""
    found = kernel.token_log_probs(logits, tokens)
    expected = logits.double().log_softmax(-1).gather(-1, tokens)
    assert found.dtype == torch.float32
    same = (found == expected) | (found.isnan() & expected.isnan())
    scale = logits[logits.isfinite()].abs().max().clamp(min=1).double() if logits.numel() else 1.0
    errors = torch.where(same, 0.0, (found - expected).abs() / scale).nan_to_num(torch.inf)
    return float(errors.max()) if errors.numel() else 0.0


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled() -> dict[str, dict[str, int]]:
    """By dtype: what the compiler makes of the kernel for a vocabulary of 151,936."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = log_probs_triton.token_log_probs_kernel
    constants = {"tokens_stride": 1, "BLOCK": log_probs_triton.BLOCK, "CHILDREN": log_probs_triton.CHILDREN}
    found = {}
    for dtype in ("bf16", "fp16", "fp32"):
        types = {"logits": f"*{dtype}", "tokens": "*i64", "out": "*fp32"}
        types = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        # What a launch sees at this size: addresses, the vocabulary and the distance of rows are multiples of 16.
        whole = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("logits", "vocab_size")}
        whole[(kernel.arg_names.index("logits_row_stride"),)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=whole)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": log_probs_triton.WARPS})
        found[dtype] = {
            "cubin_bytes": len(made.asm["cubin"]),
            "shared_bytes": made.metadata.shared,
            "loads_of_16_bytes": made.asm["ptx"].count("ld.global.v4"),
        }
    return found


def main() -> None:
    what, *files = sys.argv[1:]
    kernel = load(files[0]) if files else log_probs_triton
    if what == "compile":
        print(json.dumps(compiled()))
    elif what == "far":
        print(json.dumps({"far": error_of(kernel, *far_case())}))
    else:
        assert log_probs._works == {}
        print(json.dumps({name: error_of(kernel, *case) for name, case in cases().items()}))


if __name__ == "__main__":
    main()
