"""Float formats as bits: bfloat16 and float16 loads and stores, order-preserving keys, pointer tables.

NumPy and Numba's simulator know no bfloat16, so 16-bit floats travel as uint16. On a GPU the conversions are
LLVM intrinsics, in the simulator they are NumPy views; kernels see one set of names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda

if SIMULATED:

    def f32_bits(value):  # noqa: ANN001, ANN201 (device code)
        """uint32 bits of a float32, as int64."""
        return int(np.float32(value).view(np.uint32))

    def bits_f32(bits):
        """float32 of uint32 bits."""
        return np.uint32(bits).view(np.float32)

    def f16_f32(bits):
        """float32 of float16 bits."""
        return np.float32(np.uint16(bits).view(np.float16))

    def f32_f16(value):
        """float16 bits of a float32, rounded to nearest even."""
        with np.errstate(over="ignore"):
            return int(np.float16(value).view(np.uint16))

    def pointer_at(table, index, like):
        """Array `index` of a table of arrays."""
        return table[index]

else:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def f32_bits(typingctx, value):
        """uint32 bits of a float32, as int64 (llvm bitcast)."""

        def codegen(context, builder, sig, args):
            return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

        return types.int64(types.float32), codegen

    @intrinsic
    def bits_f32(typingctx, bits):
        """float32 of the low 32 bits of an int64 (llvm bitcast)."""

        def codegen(context, builder, sig, args):
            return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

        return types.float32(types.int64), codegen

    @intrinsic
    def f16_f32(typingctx, bits):
        """float32 of float16 bits (cvt.f32.f16)."""

        def codegen(context, builder, sig, args):
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), codegen

    @intrinsic
    def f32_f16(typingctx, value):
        """float16 bits of a float32, rounded to nearest even (cvt.rn.f16.f32)."""

        def codegen(context, builder, sig, args):
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.uint16(types.float32), codegen

    @intrinsic
    def pointer_at(typingctx, table, index, like):
        """Pointer `index` of a table of addresses, typed like `like`."""

        def codegen(context, builder, sig, args):
            slot = builder.gep(args[0], [args[1]])
            return builder.inttoptr(builder.load(slot), context.get_value_type(sig.return_type))

        return like(table, types.int64, like), codegen


def _device(function: Callable) -> Any:
    """`function` as a device function; in the simulator a plain call is one."""
    return function if SIMULATED else cuda.jit(device=True)(function)


@_device
def bf16_f32(bits):
    """float32 of bfloat16 bits: its upper half."""
    return bits_f32(np.int64(bits) << 16)


@_device
def f32_bf16(value):
    """bfloat16 bits of a float32, rounded to nearest even; NaN stays NaN."""
    bits = f32_bits(value)
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return np.uint16(0x7FFF)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@_device
def same_f32(value):
    """The value itself: loads and stores of float32 arrays."""
    return np.float32(value)


def decode(dtype: str) -> Any:
    """Device function: a stored element of `dtype` -> float32."""
    return {"bfloat16": bf16_f32, "float16": f16_f32, "float32": same_f32}[dtype]


def encode(dtype: str) -> Any:
    """Device function: float32 -> what is stored for `dtype`."""
    return {"bfloat16": f32_bf16, "float16": f32_f16, "float32": same_f32}[dtype]
