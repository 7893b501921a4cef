"""CUtensorMap: how the copy engine (TMA) of Hopper and later sees a tensor in global memory.

128 bytes that only the driver may write; it does so on the CPU, without a context. One layout is made here, the one
that `ldmatrix` and `wgmma` read without bank conflicts: 128-byte swizzle, zeros where a box reaches outside.
"""

from __future__ import annotations

import ctypes
import math

from kdtree.arrays import ITEM_SIZE
from kdtree.kernels import driver

BYTES = 128
SWIZZLE_BYTES = 128  # the innermost extent of a box, at most
KEPT = 4096  # maps that are kept: a model's layers, each with its own cache

_TYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "int64": 5, "float16": 6, "float32": 7, "bfloat16": 9}
_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _OUTSIDE_IS_ZERO = 0, 3, 3, 0

_kept: dict[tuple, bytes] = {}


def encode(
    ptr: int,
    dtype: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> bytes:
    """The map of a tensor at `ptr`, as 128 bytes.

    Args:
        ptr: device address, a multiple of 16.
        dtype: of the elements, see `_TYPES`.
        shape: extents as NumPy has them, outermost first, 1 to 5 of them. An instruction that uses the map takes its
            coordinates the other way round.
        box: what one instruction copies, in the same order; 1 to 256 elements an axis, a row of it at most 128 bytes.
        strides: elements from one index to the next, an axis; None for a C-contiguous tensor.

    Raises:
        ValueError: for what the copy engine cannot do.
        DriverError: if the driver refuses.
    """
    key = (ptr, dtype, shape, box, strides)
    found = _kept.get(key)
    if found is None:
        _check(ptr, dtype, shape, box, strides)
        if len(_kept) >= KEPT:
            _kept.clear()
        found = _kept[key] = _encode(ptr, dtype, shape, box, strides)
    return found


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _check(ptr: int, dtype: str, shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    if dtype not in _TYPES:
        raise ValueError(f"dtype: got {dtype}, expected one of {', '.join(_TYPES)}")
    item = ITEM_SIZE[dtype]
    if not ptr or ptr % 16:
        raise ValueError(f"ptr: got {ptr:#x}, expected a device address that is a multiple of 16")
    if not 1 <= len(shape) <= 5 or not all(1 <= extent <= 2**32 for extent in shape):
        raise ValueError(f"shape: got {shape}, expected 1 to 5 extents of 1..2**32")
    if len(box) != len(shape) or not all(1 <= extent <= 256 for extent in box):
        raise ValueError(f"box: got {box}, expected {len(shape)} extents of 1..256, one an axis of {shape}")
    if box[-1] * item > SWIZZLE_BYTES or box[-1] * item % 16:
        raise ValueError(
            f"box: got a row of {box[-1]} {dtype}, {box[-1] * item} bytes, expected a multiple of 16 up to "
            f"{SWIZZLE_BYTES} bytes"
        )
    if strides is not None and (len(strides) != len(shape) or strides[-1] != 1):
        raise ValueError(f"strides: got {strides}, expected {len(shape)}, the last of them 1")
    for axis, stride in enumerate((strides or _contiguous(shape))[:-1]):
        if stride * item % 16 or not 0 < stride * item < 2**40:
            raise ValueError(
                f"strides: got {stride} {dtype} along axis {axis}, {stride * item} bytes, expected a multiple of 16 "
                "below 2**40"
            )


def _encode(
    ptr: int, dtype: str, shape: tuple[int, ...], box: tuple[int, ...], strides: tuple[int, ...] | None
) -> bytes:
    rank, item = len(shape), ITEM_SIZE[dtype]
    room = ctypes.create_string_buffer(2 * BYTES)
    place = -(-ctypes.addressof(room) // BYTES) * BYTES  # the driver wants it aligned
    outer = [stride * item for stride in (strides or _contiguous(shape))[:-1]]
    status = driver.load().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _TYPES[dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(ptr),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * max(rank - 1, 1))(*reversed(outer)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _L2_PROMOTION_256B,
        _OUTSIDE_IS_ZERO,
    )
    driver.check(status, f"cuTensorMapEncodeTiled of {dtype}{list(shape)} in boxes of {list(box)}")
    return ctypes.string_at(place, BYTES)
