"""verify_attn, the readable version: no tensor cores, no warp primitives, so the simulator runs it.

A block stages a tile of KV rows in shared memory once for ROWS rows (slots and heads alike), keeps their running
softmax there too, and their output in registers. The KV range is split over blocks where rows alone would not fill the
GPU; `combine` joins the splits by log-sum-exp. Contract: `kdtree.kernels.verify_attn`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels.bits import decode, encode
from kdtree.kernels.launch import Kernel, Operand, Variant, sm_count, word_of, workspace

f32, i32, i64, u32 = np.float32, np.int32, np.int64, np.uint32

THREADS = 4 if SIMULATED else 128
ROWS = 2 if SIMULATED else 8  # rows a block shares each KV tile among
TILE_BYTES = 18 * 1024  # of KV a tile: with Q it stays below 48 KiB of static shared memory
TARGET_BLOCKS_PER_SM = 4  # three fit by shared memory; a little more evens out the tail
MIN_TILES_PER_SPLIT = 4


def tile_rows(dtype: str) -> int:
    """KV rows a tile: 16 rows of 16-bit floats, 8 of float32; 4 where the simulator runs."""
    if SIMULATED:
        return 4
    return 16 if dtype in ("bfloat16", "float16") else 8


@functools.cache
def simt(
    dtype: str, out_dtype: str, head_dim: int, kv_lora_rank: int, threads: int = THREADS, rows: int = ROWS
) -> Kernel:
    """The readable version: q and kv of `dtype`, out of `out_dtype`, E = `head_dim`, C = `kv_lora_rank`."""
    load, store = decode(dtype), encode(out_dtype)
    tile = tile_rows(dtype)
    pad = 1 if dtype == "float32" else 2  # an odd number of 4-byte banks a row: a column read has no conflict
    stride = head_dim + pad
    columns = -(-kv_lora_rank // threads)  # of the output that a thread owns
    query_size, keys_size, pairs, owned = rows * head_dim, tile * stride, rows * tile, rows * columns
    staged = np.float32 if dtype == "float32" else np.uint16
    absent = staged(0)
    poison = np.float32(np.nan) if dtype == "float32" else np.uint16(0x7FFF)  # NaN in both 16-bit formats

    def verify_attn_simt(
        q,  # [B,N,H,E]
        kv,  # [B,Lmax,E] or [pages,page_size,E]
        page_table,  # int[B,max_pages] or empty
        prefix_lens,  # int[B]
        n_nodes,  # i32[B]
        visibility,  # u32[B,N,W]
        heads,
        n_slots,
        page_size,  # Lmax for a contiguous cache
        max_pages,  # 0 for a contiguous cache
        n_pages,
        with_prefix,
        scale,
        out,  # [B,splits,N,H,C]
        lse,  # f32[B,splits,N,H]
    ):
        tid = cuda.threadIdx.x
        b, split, splits = i64(cuda.blockIdx.z), cuda.blockIdx.y, cuda.gridDim.y
        first_row = cuda.blockIdx.x * rows
        all_rows = n_slots * heads
        words = (n_slots + 31) // 32

        query = cuda.shared.array(query_size, np.float32)
        keys = cuda.shared.array(keys_size, staged)
        weight = cuda.shared.array(pairs, np.float32)  # scores, then softmax weights
        peak = cuda.shared.array(rows, np.float32)
        total = cuda.shared.array(rows, np.float32)
        rescale = cuda.shared.array(rows, np.float32)
        acc = cuda.local.array(owned, np.float32)
        values = cuda.local.array(columns, np.float32)  # of one KV row

        prefix, used = i64(prefix_lens[b]), n_nodes[b]
        capacity = i64(page_size) * max_pages if max_pages > 0 else i64(page_size)
        # Lengths that do not fit the cache cannot be read: the request's rows become NaN, not a fault.
        broken = prefix < 0 or used < 0 or used > n_slots or prefix > capacity - used

        for r in range(rows):
            for c in range(columns):
                acc[r * columns + c] = f32(0.0)
        for r in range(tid, rows, threads):
            peak[r], total[r] = f32(-math.inf), f32(0.0)
        for i in range(tid, query_size, threads):
            row = first_row + i // head_dim
            value = f32(0.0)
            if row < all_rows:
                value = load(q[(b * all_rows + row) * head_dim + i % head_dim]) * f32(scale)
            query[i] = value

        start = i64(0) if with_prefix else prefix
        end = prefix + used
        if broken:
            start, end = i64(0), i64(0)
        tiles = (end - start + tile - 1) // tile
        share = (tiles + splits - 1) // splits
        position = start + split * share * tile
        stop = min(end, position + share * tile)
        while position < stop:
            cuda.syncthreads()  # the tile before is done with
            # Rows behind the request's own are zero here, whatever the cache holds there; a page outside the
            # cache gives NaN.
            for t in range(tile):
                token = position + t
                at = i64(-1)
                if token < end:
                    if max_pages > 0:
                        page = i64(page_table[b * max_pages + token // page_size])
                        at = page * page_size + token % page_size if 0 <= page < n_pages else i64(-2)
                    else:
                        at = b * page_size + token
                for e in range(tid, head_dim, threads):
                    if at >= 0:
                        keys[t * stride + e] = kv[at * head_dim + e]
                    else:
                        keys[t * stride + e] = absent if at == -1 else poison
            cuda.syncthreads()

            # Scores of rows × tile; a hidden slot scores -inf.
            for pair in range(tid, pairs, threads):
                r, t = pair // tile, pair % tile
                token = position + t
                row = first_row + r
                seen = row < all_rows and token < end
                if seen:
                    slot = row // heads
                    seen = slot < used
                    if seen and token >= prefix:
                        j = i32(token - prefix)
                        bits = visibility[(b * n_slots + slot) * words + j // 32]
                        seen = ((i64(bits) >> i64(j % 32)) & 1) == 1
                score = f32(-math.inf)
                if seen:
                    score = f32(0.0)
                    for e in range(head_dim):
                        score += query[r * head_dim + e] * load(keys[t * stride + e])
                weight[pair] = score
            cuda.syncthreads()

            # Running softmax, a row a thread.
            for r in range(tid, rows, threads):
                top = peak[r]
                for t in range(tile):
                    if weight[r * tile + t] > top or weight[r * tile + t] != weight[r * tile + t]:
                        top = weight[r * tile + t]
                shrink = f32(1.0)
                if peak[r] != top:
                    shrink = f32(math.exp(peak[r] - top))
                added = f32(0.0)
                for t in range(tile):
                    share_t = f32(0.0)
                    if weight[r * tile + t] != f32(-math.inf):
                        share_t = f32(math.exp(weight[r * tile + t] - top))
                    weight[r * tile + t] = share_t
                    added += share_t
                peak[r] = top
                total[r] = total[r] * shrink + added
                rescale[r] = shrink
            cuda.syncthreads()

            # Values: a thread owns columns tid, tid + threads, … of every row.
            for r in range(rows):
                for c in range(columns):
                    acc[r * columns + c] *= rescale[r]
            for t in range(tile):
                for c in range(columns):
                    column = tid + c * threads
                    values[c] = load(keys[t * stride + column]) if column < kv_lora_rank else f32(0.0)
                for r in range(rows):
                    share_t = weight[r * tile + t]
                    # Weight 0 is a hidden or absent row: NaN or inf in it must not spread.
                    if share_t != f32(0.0):
                        for c in range(columns):
                            acc[r * columns + c] += share_t * values[c]
            position += tile
        cuda.syncthreads()

        for r in range(rows):
            row = first_row + r
            if row < all_rows:
                place = (b * splits + split) * all_rows + row
                norm = f32(0.0)
                log_total = f32(-math.inf)
                if broken and row // heads < n_slots:
                    norm = log_total = f32(math.nan)
                elif total[r] != f32(0.0):
                    norm = f32(1.0) / total[r]
                    log_total = peak[r] + f32(math.log(total[r]))
                for c in range(columns):
                    column = tid + c * threads
                    if column < kv_lora_rank:
                        out[place * kv_lora_rank + column] = store(acc[r * columns + c] * norm)
                if tid == 0:
                    lse[place] = log_total

    name = f"verify_attn.simt[{dtype}->{out_dtype},{head_dim}/{kv_lora_rank}]"
    return Kernel(verify_attn_simt, name=name, threads=threads)


@functools.cache
def combine(out_dtype: str, threads: int = THREADS) -> Kernel:
    """Join the splits of each row by log-sum-exp: one block a row."""
    store = encode(out_dtype)

    def verify_attn_combine(
        part_out,  # f32[B,splits,rows,C]
        part_lse,  # f32[B,splits,rows]
        splits,
        width,
        out,  # [B,rows,C]
        lse,  # f32[B,rows]
    ):
        row, rows, b = i64(cuda.blockIdx.x), cuda.gridDim.x, i64(cuda.blockIdx.y)
        empty = f32(-math.inf)
        peak = empty
        for s in range(splits):
            value = part_lse[(b * splits + s) * rows + row]
            if value > peak or value != value:
                peak = value
        total = f32(0.0)
        if peak != empty:
            for s in range(splits):
                total += f32(math.exp(part_lse[(b * splits + s) * rows + row] - peak))
        for c in range(cuda.threadIdx.x, width, threads):
            value = f32(0.0)
            if peak != empty:
                for s in range(splits):
                    part = part_lse[(b * splits + s) * rows + row]
                    if part != empty:
                        share = f32(math.exp(part - peak)) / total
                        value += share * part_out[((b * splits + s) * rows + row) * width + c]
            out[(b * rows + row) * width + c] = store(value)
        if cuda.threadIdx.x == 0:
            lse[b * rows + row] = peak + f32(math.log(total)) if peak != empty else empty

    return Kernel(verify_attn_combine, name=f"verify_attn.combine[{out_dtype}]", threads=threads)


def plan_splits(batch: int, n_rows: int, capacity: int, dtype: str, sm_count: int) -> int:
    """Blocks that share one request's KV range, from shapes alone: the lengths stay on the GPU.

    Enough blocks for every SM, but no split shorter than MIN_TILES_PER_SPLIT tiles.
    """
    blocks = batch * -(-n_rows // ROWS)
    wanted = -(-TARGET_BLOCKS_PER_SM * sm_count // max(blocks, 1))
    possible = max(1, capacity // (tile_rows(dtype) * MIN_TILES_PER_SPLIT))
    return max(1, min(wanted, possible, 64))


def workspace_bytes(params: dict[str, int], sm_count: int) -> int:
    """Bytes of partial outputs and LSEs that a call needs; 0 without a split.

    `params` = {B, rows, capacity, C} and dtype.
    """
    splits = plan_splits(params["B"], params["rows"], params["capacity"], params["dtype"], sm_count)
    return 0 if splits == 1 else 4 * params["B"] * splits * params["rows"] * (params["C"] + 1)


def launch(
    inputs: dict[str, Operand],
    shape: dict[str, int],
    dtype: str,
    scale: float,
    outs: dict[str, Operand],
    *,
    stream: int,
    like: View,
) -> None:
    """Launch on `shape` = {B,N,H,E,C,page_size,max_pages,n_pages,capacity,with_prefix}, and join the splits."""
    rows, width = shape["N"] * shape["H"], shape["C"]
    splits = plan_splits(shape["B"], rows, shape["capacity"], dtype, sm_count())
    parts, into, into_dtype = None, outs, dtype
    if splits > 1:
        count = shape["B"] * splits * rows
        space = workspace(4 * count * (width + 1), stream, like)
        parts = {
            "out": space.part("*f32", 0, count * width),
            "lse": space.part("*f32", 4 * count * width, count),
        }
        into, into_dtype = parts, "float32"
    args: tuple[Any, ...] = (
        inputs["q"],
        inputs["kv"],
        inputs["page_table"],
        inputs["prefix_lens"],
        inputs["n_nodes"],
        inputs["visibility"],
        ("i32", shape["H"]),
        ("i32", shape["N"]),
        ("i32", shape["page_size"]),
        ("i32", shape["max_pages"]),
        ("i32", shape["n_pages"]),
        ("i32", shape["with_prefix"]),
        ("f32", scale),
        into["out"],
        into["lse"],
    )
    kernel = simt(dtype, into_dtype, shape["E"], width)
    kernel.launch((-(-rows // ROWS), splits, shape["B"]), args, stream=stream)
    if parts is not None:
        joined = (parts["out"], parts["lse"], ("i32", splits), ("i32", width), outs["out"], outs["lse"])
        combine(dtype).launch((rows, shape["B"]), joined, stream=stream)


def variants() -> list[Variant]:
    """What is shipped: K2.6's row width, each dtype alone and in front of `combine`."""
    found = []
    for d in ("bfloat16", "float16", "float32"):
        w = word_of(d)
        head = (w, w, "*i32", "*i32", "*i32", "*u32", *["i32"] * 6, "f32")
        for out in dict.fromkeys((d, "float32")):
            words = (*head, word_of(out), "*f32")
            found.append(Variant("verify_attn", simt(d, out, 576, 512), words, f"simt[{d}->{out}]"))
        joined = ("*f32", "*f32", "i32", "i32", w, "*f32")
        found.append(Variant("verify_attn", combine(d), joined, f"combine[{d}]", 0))
    return found
