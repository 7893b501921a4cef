"""Visibility of tree slots as kernels on tensor cores want it: 32 cache rows of a query at a time.

A request's cache rows are its prefix, which every slot sees, then its tree slots, of which `visibility` has a bit each.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kdtree._cuda import cuda

i32, i64 = np.int32, np.int64


@functools.cache
def window() -> Any:
    """``window(visibility, row, words, j, behind)`` for Numba kernels."""

    @cuda.jit(device=True, forceinline=True)
    def word(visibility, row, words, w):
        """Word w of a row of visibility, int64; the prefix in front is all ones, behind is nothing."""
        bits = i64(0)
        if w < 0:
            bits = i64(0xFFFFFFFF)
        elif w < words:
            bits = i64(visibility[row * words + w])
        return bits

    @cuda.jit(device=True, forceinline=True)
    def window(visibility, row, words, j, behind):
        """Bits of slots j … j+31 (below 0: prefix), `behind` at most, that row `row` of visibility [B·N, W] sees."""
        w = i32(j >> 5)
        both = word(visibility, row, words, w) | (word(visibility, row, words, i32(w + 1)) << 32)
        inside = i32(min(max(behind, 0), 32))
        return i32((both >> i64(j & 31)) & ((i64(1) << i64(inside)) - 1))

    return window


@functools.cache
def tile() -> Any:
    """``tile(visibility, row, n_slots, at, prefix, start, end)`` for Numba kernels."""

    @cuda.jit(device=True, forceinline=True)
    def word(visibility, row, words, w):
        """`word` of `window`, as int32 and without a branch: so several loads are under way at once."""
        bits = i32(visibility[row * words + min(max(w, 0), words - 1)])
        bits = i32(-1) if w < 0 else bits
        return i32(0) if w >= words else bits

    @cuda.jit(device=True, forceinline=True)
    def below(n):
        """The bits below bit n, of 32."""
        return i32((i64(1) << i64(min(max(n, 0), 32))) - 1)

    @cuda.jit(device=True, forceinline=True)
    def tile(visibility, row, n_slots, at, prefix, start, end):
        """Bits of the 64 cache rows from `at` on, of `start` … `end`, that row `row` of visibility sees: two int32."""
        words = i32((n_slots + 31) >> 5)
        w, by = i32((at - prefix) >> 5), i64((at - prefix) & 31)
        w0, w1, w2 = (
            i64(word(visibility, row, words, w)) & 0xFFFFFFFF,
            i64(word(visibility, row, words, i32(w + 1))) & 0xFFFFFFFF,
            i64(word(visibility, row, words, i32(w + 2))),
        )
        low = i32((w0 | (w1 << 32)) >> by) & below(end - at) & ~below(start - at)
        high = i32((w1 | (w2 << 32)) >> by) & below(end - at - 32) & ~below(start - at - 32)
        return i32(low), i32(high)

    return tile
