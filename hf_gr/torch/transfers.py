# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of the host on a device. Knows nothing of what they mean.

A plain copy to a CUDA device waits until the device has done all it was given. One from pinned memory joins the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(numbers: npt.NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """An array as a tensor, on a CPU maybe of one memory; CUDA is not waited for. Lists become 64-bit integers."""
    array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, dtype=np.int64)
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
