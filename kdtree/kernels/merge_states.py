"""merge_states: join two attention results over disjoint rows by their natural-log LSE.

Contract: `kdtree.ref.verify_attn.merge_states`. Per call: reads two outputs and writes one; bandwidth decides.

Ladder
    simt   one block a row, a thread a stride of columns.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.kernels.bits import decode, encode
from kdtree.kernels.launch import Kernel, Operand, Variant, word_of

f32, i64 = np.float32, np.int64

THREADS = 4 if SIMULATED else 128


@functools.cache
def simt(dtype: str, threads: int = THREADS) -> Kernel:
    """The readable version for outputs of `dtype`."""
    load, store = decode(dtype), encode(dtype)

    def merge_states_simt(
        out_a,  # [rows, C]
        lse_a,  # f32[rows]
        out_b,  # [rows, C]
        lse_b,  # f32[rows]
        width,
        out,  # [rows, C]
        lse,  # f32[rows]
    ):
        row = i64(cuda.blockIdx.x)
        a, b = lse_a[row], lse_b[row]
        empty = f32(-math.inf)
        peak = b if b > a or b != b else a  # NaN if either is
        # A part with lse -inf is empty: its weight is 0 and its values are not read, NaN or not.
        weight_a, weight_b, total = f32(0.0), f32(0.0), empty
        if peak != empty:
            weight_a, weight_b = f32(math.exp(a - peak)), f32(math.exp(b - peak))
            total = peak if peak == f32(math.inf) else peak + f32(math.log(weight_a + weight_b))
            norm = f32(1.0) / (weight_a + weight_b)
            weight_a *= norm
            weight_b *= norm
        for c in range(cuda.threadIdx.x, width, threads):
            value = f32(0.0)
            if a != empty:
                value += weight_a * load(out_a[row * width + c])
            if b != empty:
                value += weight_b * load(out_b[row * width + c])
            out[row * width + c] = store(value)
        cuda.syncthreads()  # out and lse may be the inputs: every thread has read before lse is written
        if cuda.threadIdx.x == 0:
            lse[row] = total

    return Kernel(merge_states_simt, name=f"merge_states.simt[{dtype}]", threads=threads)


def merge_states(
    dtype: str, inputs: dict[str, Operand], shape: dict[str, int], outs: dict[str, Operand], *, stream: int
) -> None:
    """Launch on `shape` = {rows, C}."""
    args: tuple[Any, ...] = (
        inputs["out_a"],
        inputs["lse_a"],
        inputs["out_b"],
        inputs["lse_b"],
        ("i32", shape["C"]),
        outs["out"],
        outs["lse"],
    )
    simt(dtype).launch((shape["rows"],), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped."""
    found = []
    for d in ("bfloat16", "float16", "float32"):
        w = word_of(d)
        found.append(Variant("merge_states", simt(d), (w, "*f32", w, "*f32", "i32", w, "*f32"), f"simt[{d}]", 0))
    return found
