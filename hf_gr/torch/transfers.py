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
    """An array as a tensor, on a CUDA device without waiting for it; integers of a list become 64-bit ones.

    Args:
        numbers: the array; a tensor of the CPU may share its memory.
        device: where to.

    Example:
        >>> to_device([3, 4], torch.device("cpu"))
        tensor([3, 4])
    """
    array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, dtype=np.int64)
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)
