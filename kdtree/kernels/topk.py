"""topk: the K most probable tokens of each row of logits, fused with the row's log-sum-exp.

Contract: `kdtree.ref.topk`. Order: logit descending, token id ascending; NaN ranks last.
Per call: reads B·D·V logits (the floor, once), writes 8·B·D·K bytes.

Ladder
    simt   one block a row. The row is read twice for the log-sum-exp and once for each byte of the key that the
           radix selection needs (usually 3 or 4): from L2 after the first pass.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.kernels.bits import _device, decode, f32_bits
from kdtree.kernels.launch import Kernel, Operand, Variant, word_of
from kdtree.spec import MAX_TOPK

f32, i32, i64 = np.float32, np.int32, np.int64

# A logit's key: its 32 order-preserving bits above 24 bits of inverted token id, so that no two keys are equal
# and a larger key comes first. 56 bits, so it stays a positive int64.
TOKEN_BITS = 24
MAX_VOCAB = 1 << TOKEN_BITS
KEY_BYTES = 7

THREADS = 8 if SIMULATED else 512


@_device
def order_key(value, token):
    """int64 key of a logit: larger for a larger value, then for a smaller token. NaN below everything."""
    ordered = i64(0)
    if value == value:
        bits = f32_bits(value + f32(0.0))  # -0 becomes +0: equal values must tie
        if bits & i64(0x80000000):
            ordered = i64(0xFFFFFFFF) - bits
        else:
            ordered = bits | i64(0x80000000)
    return (ordered << i64(TOKEN_BITS)) | (i64(MAX_VOCAB - 1) - i64(token))


@functools.cache
def simt(dtype: str, threads: int = THREADS) -> Kernel:
    """The readable version for logits of `dtype`."""
    load = decode(dtype)

    def topk_simt(
        logits,  # [rows, V]
        vocab,
        k,
        log_probs,  # f32[rows, K]
        token_ids,  # i32[rows, K]
    ):
        row = i64(cuda.blockIdx.x) * vocab
        tid = cuda.threadIdx.x
        partial = cuda.shared.array(threads, np.float32)
        broken = cuda.shared.array(1, np.int32)
        histogram = cuda.shared.array(256, np.int32)
        state = cuda.shared.array(2, np.int64)  # the key's known leading bytes; how many are still to be found
        chosen = cuda.shared.array(MAX_TOPK, np.int64)
        count = cuda.shared.array(1, np.int32)

        # 1. The row's maximum; a NaN or +inf anywhere means the row is no distribution.
        if tid == 0:
            broken[0] = 0
            count[0] = 0
        cuda.syncthreads()
        peak = f32(-math.inf)
        for v in range(tid, vocab, threads):
            x = load(logits[row + v])
            if x != x or x == f32(math.inf):
                broken[0] = 1
            elif x > peak:
                peak = x
        partial[tid] = peak
        cuda.syncthreads()
        for t in range(threads):
            if partial[t] > peak:
                peak = partial[t]
        cuda.syncthreads()
        regular = broken[0] == 0 and peak > f32(-math.inf)

        # 2. ln Σ exp(x - peak), each thread its share, added up in thread order.
        total = f32(0.0)
        if regular:
            for v in range(tid, vocab, threads):
                total += f32(math.exp(load(logits[row + v]) - peak))
        partial[tid] = total
        cuda.syncthreads()
        total = f32(0.0)
        for t in range(threads):
            total += partial[t]
        log_total = f32(math.log(total)) if regular else f32(0.0)

        # 3. Radix selection: find the K-th largest key byte by byte.
        if tid == 0:
            state[0] = 0
            state[1] = k
        shift = 8 * KEY_BYTES
        searching = True
        while searching:
            shift -= 8
            for bin_ in range(tid, 256, threads):
                histogram[bin_] = 0
            cuda.syncthreads()
            known = state[0]
            for v in range(tid, vocab, threads):
                key = order_key(load(logits[row + v]), v)
                if key >> i64(shift + 8) == known:
                    cuda.atomic.add(histogram, int((key >> i64(shift)) & i64(255)), 1)
            cuda.syncthreads()
            if tid == 0:
                missing, bin_ = state[1], 255
                while histogram[bin_] < missing:
                    missing -= histogram[bin_]
                    bin_ -= 1
                state[0] = (known << i64(8)) | i64(bin_)
                # The whole bin is wanted: its keys need not be told apart.
                state[1] = i64(0) if histogram[bin_] == missing else missing
            cuda.syncthreads()
            searching = state[1] > 0 and shift > 0

        # 4. Collect the keys at or above the threshold: exactly K, since keys are unique.
        threshold = state[0]
        for v in range(tid, vocab, threads):
            key = order_key(load(logits[row + v]), v)
            if key >> i64(shift) >= threshold:
                chosen[cuda.atomic.add(count, 0, 1)] = key
        cuda.syncthreads()

        # 5. A key's rank is the number of larger ones.
        for i in range(tid, k, threads):
            key, rank = chosen[i], 0
            for j in range(k):
                if chosen[j] > key:
                    rank += 1
            token = i64(MAX_VOCAB - 1) - (key & i64(MAX_VOCAB - 1))
            place = i64(cuda.blockIdx.x) * k + rank
            token_ids[place] = i32(token)
            if regular:
                log_probs[place] = min((load(logits[row + token]) - peak) - log_total, f32(0.0))
            else:
                log_probs[place] = f32(math.nan)

    return Kernel(topk_simt, name=f"topk.simt[{dtype}]", threads=threads)


def topk(logits: Operand, dtype: str, shape: dict[str, int], outs: dict[str, Operand], *, stream: int) -> None:
    """Launch on `shape` = {rows, V, K}; `outs` = {log_probs, token_ids}."""
    args: tuple[Any, ...] = (
        logits,
        ("i64", shape["V"]),
        ("i32", shape["K"]),
        outs["log_probs"],
        outs["token_ids"],
    )
    simt(dtype).launch((shape["rows"],), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped."""
    return [
        Variant("topk", simt(d), (word_of(d), "i64", "i32", "*f32", "*i32"), f"simt[{d}]", 16 * 1024)
        for d in ("bfloat16", "float16", "float32")
    ]
