"""verify_attn on Hopper for short caches: a few blocks share one row tile, and no partial result leaves the chip.

A cluster of n blocks, 8 or 4, works on 64 query rows (row = slot·H + head). In a *round* of up to 2·n KV tiles

    scores   block r computes S = Q·Kᵀ of tiles r and n + r, a warpgroup each, and their softmax
    values   block r computes 512 / n columns of O += P·V for all tiles, with P of the others in their shared memory

so the tiles are shared out twice, by rows and then by columns, and what crosses between blocks is P: 8 KiB a tile,
where a split of the KV range would exchange 128 KiB of partial outputs. P of a tile is relative to that tile's maxima;
its product is brought to the scale of all tiles in float32, when it is added.

Shared memory: Q, 9 chunks of 64 rows x 128 bytes, and two buffers of 9 chunks, one a warpgroup. A buffer holds a K
tile; then P of that tile in its first chunk and the block's columns of n V tiles in the others.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels.latent_maps import LATENT, cache_map, page_mode, rows_map
from kdtree.kernels.launch import Kernel, Operand, Variant, sm_count, word_of
from kdtree.kernels.verify_ring import CHUNK, WIDTH

f32, i32, i64 = np.float32, np.int32, np.int64

SIZES = (8, 4)  # blocks a row tile
MOST = 16  # KV tiles a round, one for each warpgroup of a cluster
THREADS = 256  # two warpgroups
NEG = f32(-math.inf)
LN2 = f32(math.log(2.0))

# Bytes from the base of shared memory
Q = 0
BUFFERS = LATENT * CHUNK
BUFFER = LATENT * CHUNK
STATS = BUFFERS + 2 * BUFFER  # of a round's tiles: {maximum, sum} of 64 rows each
BAD = STATS + MOST * 64 * 8  # of each warpgroup's tile: a page that is none
BARS = BAD + 16
SHARED_BYTES = BARS + 128
Q_FULL, K_FULL, V_FULL = BARS, BARS + 24, BARS + 72  # by thirds of the columns; and by warpgroup; by buffer


@functools.cache
def cluster(dtype: str, mode: str, size: int) -> Kernel:
    """The kernel for q, kv and out of `dtype`, `size` blocks a row tile. For `mode` see `latent_maps.page_mode`."""
    from kdtree.kernels import ptx, verify_plan
    from kdtree.kernels.hopper import described, operand, wait

    extent, _, window, _ = verify_plan.device_functions()
    qk = ptx.wgmma_ss(64, dtype)
    pv = ptx.wgmma_rs(WIDTH // size, dtype, transposed_b=True)
    pack = ptx.cvt_bf16x2 if dtype == "bfloat16" else ptx.cvt_f16x2
    q_map, kv_map, chunk_map = (ptx.tensor_map_address(i) for i in range(3))
    paged, parts = mode != "rows", mode == "part"
    wide = 8 // size  # chunks of V a block
    a_round = 2 * size  # KV tiles
    groups = 8 * wide  # of 8 columns, four accumulators a thread each
    accumulators = 4 * groups
    turns = size // 2  # tiles that a warpgroup multiplies with one buffer of V
    fragments = 16 * turns  # words of P
    told_by = size // 4  # blocks that one of a row's four lanes tells of its maximum

    @cuda.jit(device=True, inline="always")
    def pages_of(at, lane, b, start, end, page_table, page_size, max_pages, n_pages):
        """Where the tile of cache rows `at` … lies: (row, page or request, first and end of its pages, bad).

        Of small pages a lane has one: `page` is that of lane i for rows `at` + i · page_size. Pages without a row of
        the request's are not looked up: they may not exist.
        """
        row, page, low, high, bad = at, i32(b), i32(0), i32(1), i32(0)
        if paged:
            height = i32(page_size) if parts else i32(64)
            low = ptx.div_u32(max(start - at, 0), height)
            high = ptx.div_u32(max(min(end - at, 64) + height - 1, 0), height)
            index = ptx.div_u32(at, page_size)
            if parts:
                if low <= lane and lane < high:
                    page = i32(page_table[i64(b) * max_pages + i32(index + lane)])
                    bad = i32(page < 0 or page >= n_pages)
                    page = i32(0) if bad != 0 else page
                bad = ptx.vote_ballot(bad)
            else:
                page = i32(page_table[i64(b) * max_pages + index])
                row = i32(at - index * page_size)
                bad = i32(page < 0 or page >= n_pages)
                page = i32(0) if bad != 0 else page
        return row, page, low, high, bad

    @cuda.jit(device=True, inline="always")
    def load_keys(base, g, at, lane, b, start, end, page_table, page_size, max_pages, n_pages):
        """One warp copies the tile of cache rows `at` … to buffer g, in thirds."""
        row, page, low, high, bad = pages_of(at, lane, b, start, end, page_table, page_size, max_pages, n_pages)
        into, full = i32(base + BUFFERS + g * BUFFER), i32(base + K_FULL + g * 24)
        if ptx.elect_one() != 0:
            ptx.st_shared_b32(base + BAD + g * 4, bad)
            for third in range(3):
                if parts:
                    ptx.mbarrier_expect_tx(full + third * 8, (high - low) * page_size * 384)
                else:
                    ptx.mbarrier_expect_tx(full + third * 8, 3 * CHUNK)
                    ptx.cp_async_bulk_tensor_4d(
                        into + third * 3 * CHUNK, kv_map(), 0, row, third * 3, page, full + third * 8
                    )
        ptx.warp_sync()
        if parts:
            if low <= lane and lane < high:
                c = i32(0)
                while c < LATENT:
                    to = i32(into + c * CHUNK + lane * page_size * 128)
                    ptx.cp_async_bulk_tensor_4d(to, chunk_map(), 0, 0, c, page, i32(full + ptx.div_u32(c, 3) * 8))
                    c = i32(c + 1)
            ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def load_values(base, g, rank, first, count, lane, b, start, end, page_table, page_size, max_pages, n_pages):
        """One warp copies the block's columns of `count` tiles from cache row `first` on to buffer g, behind its P."""
        full = i32(base + V_FULL + g * 8)
        into = i32(base + BUFFERS + g * BUFFER + CHUNK)
        i = i32(0)
        while i < count:
            at = i32(first + i * 64)
            row, page, low, high, _ = pages_of(at, lane, b, start, end, page_table, page_size, max_pages, n_pages)
            if ptx.elect_one() != 0:
                if parts:
                    ptx.mbarrier_expect_tx(full, (high - low) * page_size * 128 * wide)
                else:
                    ptx.mbarrier_expect_tx(full, CHUNK * wide)
                    for w in range(wide):
                        to = i32(into + (i * wide + w) * CHUNK)
                        ptx.cp_async_bulk_tensor_4d(to, chunk_map(), 0, row, rank * wide + w, page, full)
            ptx.warp_sync()
            if parts:
                if low <= lane and lane < high:
                    for w in range(wide):
                        to = i32(into + (i * wide + w) * CHUNK + lane * page_size * 128)
                        ptx.cp_async_bulk_tensor_4d(to, chunk_map(), 0, 0, rank * wide + w, page, full)
                ptx.warp_sync()
            i = i32(i + 1)
        while i < size:  # so many arrivals has a phase
            if ptx.elect_one() != 0:
                ptx.mbarrier_arrive(full)
            i = i32(i + 1)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def hide(s, half, side, seen):
        """Scores of one of the thread's two rows, 32 columns: what is not seen is -inf."""
        for j in range(4):
            for e in range(2):
                if (seen >> (j * 8 + e)) & 1 == 0:
                    s[(side * 4 + j) * 4 + half * 2 + e] = NEG

    @cuda.jit(device=True, inline="always")
    def fetch(p, n, weights):
        """This thread's fragments of P of one tile to registers 16·n …"""
        for j in range(4):
            w0, w1, w2, w3 = ptx.ld_cluster_v4_b32(i32(weights + j * 2048))
            p[n * 16 + j * 4], p[n * 16 + j * 4 + 1], p[n * 16 + j * 4 + 2], p[n * 16 + j * 4 + 3] = w0, w1, w2, w3

    @cuda.jit(device=True, inline="always")
    def multiply(d, p, n, values):
        """D = P·V of one tile."""
        for j in range(4):
            i = n * 16 + j * 4
            pv(d, p[i], p[i + 1], p[i + 2], p[i + 3], described(values + np.uint32(j * 128), 1024), i32(j))

    def verify_attn_cluster(
        q_map_,  # CUtensorMap of q as [B, 9 chunks, N·H rows, 64], box 3 chunks x 64 rows
        kv_map_,  # CUtensorMap of the cache as [B or pages, 9, rows, 64], box 3 x 64
        chunk_map_,  # the same, box 1 x min(page_size, 64)
        page_table,  # int[B,max_pages] or empty
        prefix_lens,  # int[B]
        n_nodes,  # i32[B]
        visibility,  # u32[B,N,W]
        heads,
        n_slots,
        n_rows,  # N·H
        row_tiles,  # of 64
        page_size,
        max_pages,
        n_pages,
        capacity,  # rows a request may have
        with_prefix,
        scale_log2,  # softmax scale · log2(e), positive
        out,  # [B,N,H,512]
        lse,  # f32[B,N,H]
    ):
        base = ptx.shared_base()
        tid = ptx.thread_id()
        lane = ptx.lane_id()
        g = ptx.shfl_idx(i32(tid >> 7), 0)  # warpgroup; uniform, or ptxas serialises every wgmma
        warp = ptx.shfl_idx(i32((tid >> 5) & 3), 0)  # of its warpgroup
        rank = ptx.cluster_rank()
        item = ptx.div_u32(i32(cuda.blockIdx.x), size)
        b = ptx.div_u32(item, row_tiles)
        m0 = i32((item - b * row_tiles) * 64)
        ptx.cluster_arrive()  # whoever waits for it knows that all blocks have begun
        if g == 0 and warp == 0:
            if ptx.elect_one() != 0:
                for i in range(9):
                    ptx.mbarrier_init(base + Q_FULL + i * 8, 1)  # Q_FULL, K_FULL
                for i in range(2):
                    ptx.mbarrier_init(base + V_FULL + i * 8, size)
                ptx.fence_mbarrier_init()
                for third in range(3):
                    ptx.mbarrier_expect_tx(base + Q_FULL + third * 8, 3 * CHUNK)
                    ptx.cp_async_bulk_tensor_4d(
                        base + Q + third * 3 * CHUNK, q_map(), 0, m0, third * 3, b, base + Q_FULL + third * 8
                    )
            ptx.warp_sync()
        prefix, used, broken, start, end = extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix)
        first = i32(start >> 6)
        tiles = i32(0)
        if end > start:
            tiles = i32(((end + 63) >> 6) - first)
        cuda.syncthreads()  # barriers are there
        row0 = i32(warp * 16 + (lane >> 2))  # of the thread's two rows; the other is + 8
        t = i32(tid & 127)
        buffer = i32(base + BUFFERS + g * BUFFER)
        s = cuda.local.array(32, f32)
        o = cuda.local.array(accumulators, f32)
        d = cuda.local.array(accumulators, f32)
        p = cuda.local.array(fragments, i32)
        for i in range(accumulators):
            o[i] = f32(0.0)
        top_a, top_b, sum_a, sum_b = NEG, NEG, f32(0.0), f32(0.0)
        began = False
        done = i32(0)  # tiles of earlier rounds
        turn = i32(0)
        while done < tiles:
            mine = i32(done + g * size + rank)
            # ---- scores of one tile
            if mine < tiles:
                at = i32((first + mine) * 64)
                if warp == 0:
                    load_keys(base, g, at, lane, b, start, end, page_table, page_size, max_pages, n_pages)
                for third in range(3):
                    wait(base + Q_FULL + third * 8, 0)
                    wait(base + K_FULL + g * 24 + third * 8, turn & 1)
                    ptx.wgmma_fence()
                    queries = operand(i32(base + Q + third * 3 * CHUNK), 16)
                    keys = operand(i32(buffer + third * 3 * CHUNK), 16)
                    for c in range(3):
                        for j in range(4):
                            qk(
                                s,
                                described(queries + np.uint32(c * 512 + j * 2), 1024),
                                described(keys + np.uint32(c * 512 + j * 2), 1024),
                                i32(third | c | j),
                            )
                    ptx.wgmma_commit()
                ptx.wgmma_wait_0()
            here = i32(min(i32(tiles - done), a_round))
            # ---- this block's columns of V: the first tiles to buffer 1, free when there are no more, others to 0
            if warp == 0:
                count = min(here, i32(size)) if g == 1 else max(i32(here - size), i32(0))
                begin = i32((first + done + (0 if g == 1 else size)) * 64)
                load_values(base, g, rank, begin, count, lane, b, start, end, page_table, page_size, max_pages, n_pages)
            if mine < tiles:
                at = i32((first + mine) * 64)
                if i32(at + 64) > min(prefix, end) or at < start:
                    for half in range(2):
                        row = min(i32(m0 + row0 + half * 8), i32(n_rows - 1))
                        of = i64(b) * n_slots + ptx.div_u32(row, heads)
                        for side in range(2):
                            seen = window(visibility, of, n_slots, i32(at + side * 32), prefix, start, end)
                            hide(s, half, side, i32(seen >> ((lane & 3) * 2)))
                high_a, high_b = NEG, NEG
                for j in range(8):
                    high_a = max(high_a, max(s[j * 4], s[j * 4 + 1]))
                    high_b = max(high_b, max(s[j * 4 + 2], s[j * 4 + 3]))
                high_a = max(high_a, ptx.shfl_bfly_f32(high_a, 1))
                high_b = max(high_b, ptx.shfl_bfly_f32(high_b, 1))
                high_a = max(high_a, ptx.shfl_bfly_f32(high_a, 2))
                high_b = max(high_b, ptx.shfl_bfly_f32(high_b, 2))
                high_a, high_b = high_a * scale_log2, high_b * scale_log2
                base_a = f32(0.0) if high_a == NEG else high_a
                base_b = f32(0.0) if high_b == NEG else high_b
                add_a, add_b = f32(0.0), f32(0.0)
                for j in range(8):
                    s[j * 4] = ptx.ex2_approx(s[j * 4] * scale_log2 - base_a)
                    s[j * 4 + 1] = ptx.ex2_approx(s[j * 4 + 1] * scale_log2 - base_a)
                    s[j * 4 + 2] = ptx.ex2_approx(s[j * 4 + 2] * scale_log2 - base_b)
                    s[j * 4 + 3] = ptx.ex2_approx(s[j * 4 + 3] * scale_log2 - base_b)
                    add_a += s[j * 4] + s[j * 4 + 1]
                    add_b += s[j * 4 + 2] + s[j * 4 + 3]
                # P as the fragments that the second product takes, a thread's words where the same thread of another
                # block finds them
                for j in range(4):
                    ptx.st_shared_v4_b32(
                        i32(buffer + j * 2048 + t * 16),
                        pack(s[j * 8], s[j * 8 + 1]),
                        pack(s[j * 8 + 2], s[j * 8 + 3]),
                        pack(s[j * 8 + 4], s[j * 8 + 5]),
                        pack(s[j * 8 + 6], s[j * 8 + 7]),
                    )
                add_a += ptx.shfl_bfly_f32(add_a, 1)
                add_b += ptx.shfl_bfly_f32(add_b, 1)
                add_a += ptx.shfl_bfly_f32(add_a, 2)
                add_b += ptx.shfl_bfly_f32(add_b, 2)
                if paged:
                    if ptx.ld_shared_b32(base + BAD + g * 4) != 0:
                        add_a, add_b = f32(math.nan), f32(math.nan)
                if not began:
                    ptx.cluster_wait()
                # Each lane of a row's four tells some blocks of its maximum and sum.
                told = i32(base + STATS + (g * size + rank) * 512 + row0 * 8)
                for i in range(told_by):
                    to = ptx.map_shared(told, i32((lane & 3) * told_by + i))
                    ptx.st_cluster_v2_f32(to, high_a, add_a)
                    ptx.st_cluster_v2_f32(i32(to + 64), high_b, add_b)
            elif not began:
                ptx.cluster_wait()
            began = True
            ptx.cluster_arrive()
            ptx.cluster_wait()
            # ---- one scale for all tiles so far
            before_a, before_b = top_a, top_b
            stats = i32(base + STATS + row0 * 8)
            for i in range(here):
                m_a, _ = ptx.ld_shared_v2_f32(i32(stats + i * 512))
                m_b, _ = ptx.ld_shared_v2_f32(i32(stats + i * 512 + 64))
                top_a, top_b = max(top_a, m_a), max(top_b, m_b)
            zero_a = f32(0.0) if top_a == NEG else top_a
            zero_b = f32(0.0) if top_b == NEG else top_b
            shrink_a, shrink_b = ptx.ex2_approx(before_a - zero_a), ptx.ex2_approx(before_b - zero_b)
            sum_a, sum_b = sum_a * shrink_a, sum_b * shrink_b
            for j in range(groups):
                o[j * 4] *= shrink_a
                o[j * 4 + 1] *= shrink_a
                o[j * 4 + 2] *= shrink_b
                o[j * 4 + 3] *= shrink_b
            for i in range(here):
                m_a, l_a = ptx.ld_shared_v2_f32(i32(stats + i * 512))
                m_b, l_b = ptx.ld_shared_v2_f32(i32(stats + i * 512 + 64))
                sum_a += ptx.ex2_approx(m_a - zero_a) * l_a
                sum_b += ptx.ex2_approx(m_b - zero_b) * l_b
            # ---- O += P·V, every other tile a warpgroup: P of some tiles is fetched, then they are multiplied
            of = i32(0)
            while of * size < here:
                for n in range(turns):
                    i = i32(of * size + g + 2 * n)
                    if i < here:
                        weights = i32(base + BUFFERS + of * BUFFER + t * 16)
                        fetch(p, n, ptx.map_shared(weights, i32(g + 2 * n)))
                wait(base + V_FULL + (1 - of) * 8, turn & 1)
                for n in range(turns):
                    i = i32(of * size + g + 2 * n)
                    if i < here:
                        at = i32((first + done + i) * 64)
                        values = i32(base + BUFFERS + (1 - of) * BUFFER + CHUNK + (g + 2 * n) * wide * CHUNK)
                        if at < start or i32(at + 64) > end:
                            # A weight of 0 does not silence NaN: rows that are not the request's become 0.
                            r = i32(t >> 3)
                            while r < 64:
                                if i32(at + r) < start or i32(at + r) >= end:
                                    for w in range(wide):
                                        to = i32(values + w * CHUNK + r * 128 + (t & 7) * 16)
                                        ptx.st_shared_v4_b32(to, 0, 0, 0, 0)
                                r = i32(r + 16)
                            ptx.fence_proxy_async()
                            ptx.bar_sync(i32(1 + g), 128)
                        ptx.wgmma_fence()
                        multiply(d, p, n, operand(values, CHUNK))
                        ptx.wgmma_commit()
                        m_a, _ = ptx.ld_shared_v2_f32(i32(stats + i * 512))
                        m_b, _ = ptx.ld_shared_v2_f32(i32(stats + i * 512 + 64))
                        f_a, f_b = ptx.ex2_approx(m_a - zero_a), ptx.ex2_approx(m_b - zero_b)
                        ptx.wgmma_wait_0()
                        for j in range(groups):
                            o[j * 4] += f_a * d[j * 4]
                            o[j * 4 + 1] += f_a * d[j * 4 + 1]
                            o[j * 4 + 2] += f_b * d[j * 4 + 2]
                            o[j * 4 + 3] += f_b * d[j * 4 + 3]
                of = i32(of + 1)
            done = i32(done + a_round)
            turn = i32(turn + 1)
            # Nobody reads this block's P any more, and what comes next may be copied over it.
            ptx.fence_proxy_async()
            ptx.cluster_arrive()
            if done < tiles:
                ptx.cluster_wait()
        if not began:
            ptx.cluster_wait()
            ptx.cluster_arrive()
        # ---- both warpgroups' sums, normalised
        if g == 1:
            for third in range(3):  # this is Q's place, and in a block without a tile nobody has waited for Q yet
                wait(base + Q_FULL + third * 8, 0)
            for j in range(groups):
                ptx.st_shared_v4_f32(
                    i32(base + Q + j * 2048 + t * 16), o[j * 4], o[j * 4 + 1], o[j * 4 + 2], o[j * 4 + 3]
                )
        cuda.syncthreads()
        if g == 0:
            for half in range(2):
                total = sum_a if half == 0 else sum_b
                top = top_a if half == 0 else top_b
                row = i32(m0 + row0 + half * 8)
                factor, log = f32(0.0), NEG
                if total != f32(0.0):
                    factor = f32(1.0) / total
                    log = (top + ptx.lg2_approx(total)) * LN2
                if ptx.div_u32(min(row, i32(n_rows - 1)), heads) >= used:
                    factor, log = f32(0.0), NEG
                if broken:
                    factor, log = f32(math.nan), f32(math.nan)
                if row < n_rows:
                    place = i64(b) * n_rows + row
                    if rank == 0 and (lane & 3) == 0:
                        lse[place] = log
                    to = ptx.address(out) + 2 * (place * WIDTH + rank * 64 * wide + (lane & 3) * 2)
                    for j in range(groups):
                        other = i32(base + Q + j * 2048 + t * 16 + half * 8)
                        x, y = ptx.ld_shared_v2_f32(other)
                        x, y = x + o[j * 4 + half * 2], y + o[j * 4 + half * 2 + 1]
                        # A factor of 0 marks a row that is not computed, whatever was added up.
                        x = x * factor if factor != f32(0.0) else f32(0.0)
                        y = y * factor if factor != f32(0.0) else f32(0.0)
                        ptx.st_global_b32(to + j * 16, pack(x, y))
        ptx.cluster_wait()  # until everyone has read this block's P

    return Kernel(
        verify_attn_cluster,
        name=f"verify_attn.cluster[{dtype},{mode},{size}]",
        threads=THREADS,
        min_blocks=1,
        dynamic_shared=SHARED_BYTES,
        targets=("sm_90a",),
        cluster=size,
    )


def plan(batch: int, n_rows: int, sm_count: int) -> int:
    """Blocks a row tile: the larger cluster as long as all of them run at once."""
    items = batch * -(-n_rows // 64)
    return SIZES[0] if items * SIZES[0] <= sm_count else SIZES[1]


def workspace_bytes(params: dict[str, Any], sms: int) -> int:
    """Bytes of scratch memory: none."""
    return 0


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
    """Launch on `shape` = {B,N,H,page_size,max_pages,n_pages,capacity,with_prefix}; E is 576 and C is 512."""
    batch, n_rows = shape["B"], shape["N"] * shape["H"]
    if not batch * n_rows:
        return
    row_tiles = -(-n_rows // 64)
    args: tuple[Any, ...] = (
        rows_map(inputs["q"], dtype, shape, LATENT, 3),
        cache_map(inputs["kv"], dtype, shape, 3),
        cache_map(inputs["kv"], dtype, shape, 1),
        inputs["page_table"],
        inputs["prefix_lens"],
        inputs["n_nodes"],
        inputs["visibility"],
        ("i32", shape["H"]),
        ("i32", shape["N"]),
        ("i32", n_rows),
        ("i32", row_tiles),
        ("i32", shape["page_size"]),  # Lmax of a contiguous cache
        ("i32", shape["max_pages"]),
        ("i32", shape["n_pages"]),
        ("i32", shape["capacity"]),
        ("i32", shape["with_prefix"]),
        ("f32", scale * math.log2(math.e)),
        outs["out"],
        outs["lse"],
    )
    size = plan(batch, n_rows, sm_count())
    kernel = cluster(dtype, page_mode(shape), size)
    kernel.launch((batch * row_tiles * size,), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped: both dtypes, three ways for the cache to lie, two sizes of cluster."""
    if SIMULATED:
        return []
    found = []
    for d, mode, size in itertools.product(("bfloat16", "float16"), ("rows", "page", "part"), SIZES):
        words = (*["tmap"] * 3, "*i32", "*i32", "*i32", "*u32", *["i32"] * 9, "f32", word_of(d), "*f32")
        found.append(Variant("verify_attn", cluster(d, mode, size), words, f"cluster[{d},{mode},{size}]", SHARED_BYTES))
    return found
