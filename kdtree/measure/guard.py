"""Outputs with poison in them and guard bands around them: unwritten elements and stray writes show without a tool.

compute-sanitizer sees any stray access, but slowly; the bands see the near ones in every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtree.arrays import ITEM_SIZE, from_numpy_to_torch, numpy_dtype

BAND = 512  # bytes in front of and behind an output
PATTERN = 0xA5


class GuardedOutputs:
    """Output arrays cut from larger buffers, filled with NaN (floats) or -1 (integers).

    Args:
        wanted: name -> (dtype, shape).
        device: "cpu" for NumPy arrays, else a torch device such as "cuda".
    """

    def __init__(self, wanted: dict[str, tuple[str, tuple[int, ...]]], device: str):
        self.arrays: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}
        for name, (dtype, shape) in wanted.items():
            size = int(np.prod(shape, dtype=np.int64)) * ITEM_SIZE[dtype]
            buffer = np.full(size + 2 * BAND, PATTERN, dtype=np.uint8)
            buffer[BAND : BAND + size] = poison(dtype, size)
            if device == "cpu":
                array = buffer[BAND : BAND + size].view(numpy_dtype(dtype)).reshape(shape)
            else:
                import torch

                buffer = torch.from_numpy(buffer).to(device)
                array = buffer[BAND : BAND + size].view(getattr(torch, dtype)).reshape(shape)
            self.arrays[name], self._buffers[name] = array, buffer

    def fill(self, name: str, values: np.ndarray) -> None:
        """Start an output that is changed in place from `values`."""
        target = self.arrays[name]
        if isinstance(target, np.ndarray):
            target[...] = values
        else:
            target.copy_(from_numpy_to_torch(values))

    def stray_writes(self) -> str | None:
        """Which output's guard bands were written to, or None."""
        for name, buffer in self._buffers.items():
            band = buffer[:BAND], buffer[-BAND:]
            for side, part in zip(("in front of", "behind"), band, strict=True):
                changed = int((part != PATTERN).sum())
                if changed:
                    return f"{changed} bytes written {side} {name}: outside the array"
        return None


def poison(dtype: str, size: int) -> np.ndarray:
    """uint8[size]: NaN in every float, -1 in every integer of `dtype`."""
    value = np.nan if "float" in dtype else -1
    one = np.array([value]).astype(numpy_dtype(dtype) if value != -1 or dtype[0] != "u" else np.int64)
    unit = one.view(np.uint8)[: ITEM_SIZE[dtype]]
    return np.tile(unit, -(-size // len(unit)))[:size] if size else np.zeros(0, np.uint8)
