"""verify_attn on Hopper for short caches: a few blocks share one row tile, and no partial result leaves the chip.

A cluster of n blocks, 8 or 4, works on 64 query rows (row = slot·H + head). In a *round* of up to n KV tiles

    scores   block r computes S = Q·Kᵀ of tile r and P = 2**(S - maximum of the tile), and sends P with the tile's
             maxima and sums to all others
    values   block r computes 512 / n columns of O += P·V for all tiles, each brought to the scale of all of them in
             float32, when it is added

so the tiles are shared out twice, by rows and then by columns, and what crosses between blocks is P: 8 KiB a tile,
where a split of the KV range would exchange 128 KiB of partial outputs. One warpgroup computes, a fifth warp copies.

What such a call waits for is latency, not throughput, so nothing waits that need not: a tile's page is looked up beside
the lengths, V has memory of its own and comes with K, and the blocks meet while K is on its way. That they meet before
P is sent, not after S is computed, takes memory for P that is free then: `kept` chunks of Q lie in registers, and the
places of P over theirs.
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

SIZES = (8, 4)  # blocks a row tile, KV tiles a round
KEPT = {8: 7, 4: 3}  # chunks of Q in registers
THREADS = 160  # a warpgroup, and a warp that copies
COPIER = 4
NEG = f32(-math.inf)
LN2 = f32(math.log(2.0))

# Bytes from the base of shared memory
Q = 0
PLACE = CHUNK + 1024  # of P of a tile, and behind it STATS
STATS = CHUNK  # {maximum, sum} of 64 rows
SENT = STATS + 64 * 8  # bytes of a place that are used
PLACES = {size: Q + (LATENT - KEPT[size]) * CHUNK for size in SIZES}  # over Q's kept chunks, and on
KEYS = PLACES[8] + 8 * PLACE  # four places end earlier
VALUES = KEYS + LATENT * CHUNK
BARS = VALUES + 8 * CHUNK  # so many for both sizes: half the tiles have twice the columns
Q_FULL, K_FULL = BARS, BARS + 24  # by thirds of the columns
K_FREE, V_FULL, P_FULL = BARS + 48, BARS + 56, BARS + 64
BAD = BARS + 72  # the block's tile has a page that is none
SHARED_BYTES = BARS + 128


@functools.cache
def cluster(dtype: str, mode: str, size: int) -> Kernel:
    """The kernel for q, kv and out of `dtype`, `size` blocks a row tile. For `mode` see `latent_maps.page_mode`."""
    from kdtree.kernels import ptx, verify_plan
    from kdtree.kernels import visibility as visibility_of
    from kdtree.kernels.hopper import described, operand, wait

    extent, tile_seen = verify_plan.device_functions()[0], visibility_of.tile()
    qk = ptx.wgmma_rs(64, dtype)
    qk_rest = ptx.wgmma_ss(64, dtype)
    pv = ptx.wgmma_ss(64, dtype, transposed_b=True)
    pack = ptx.cvt_bf16x2 if dtype == "bfloat16" else ptx.cvt_f16x2
    q_map, kv_map, chunk_map = (ptx.tensor_map_address(i) for i in range(3))
    paged, parts = mode != "rows", mode == "part"
    kept = KEPT[size]
    rest = LATENT - kept  # Q's first chunks, which stay in shared memory
    places = PLACES[size]
    wide = 8 // size  # chunks of V a block
    groups = 8 * wide  # of 8 columns of O, four accumulators a thread each
    words, accumulators = 16 * kept, 4 * groups  # of Q and O, a thread
    shift = size.bit_length() - 1
    sends = size // 4  # blocks to which a warp sends P

    @cuda.jit(device=True, inline="always")
    def page_at(row, b, page_table, page_size, max_pages):
        """What the page table says of the page that holds cache row `row`.

        May be asked before the lengths are known: an entry outside of the table is not read.
        """
        if page_size == 64:  # a division takes as long as what comes after it
            index = i32(row >> 6)
        else:
            index = ptx.div_u32(row, page_size)
        return i32(page_table[i64(b) * max_pages + min(index, i32(max_pages - 1))])

    @cuda.jit(device=True, inline="always")
    def look_up(at, rank, b, page_table, page_size, max_pages):
        """A lane's entry of the page table, for its tile of a round from cache row `at` on.

        Of small pages: for its page of the tile of block `rank`.
        """
        lane = ptx.lane_id()
        row = i32(at + rank * 64 + lane * page_size) if parts else i32(at + lane * 64)
        return page_at(row, b, page_table, page_size, max_pages)

    @cuda.jit(device=True, inline="always")
    def place_of(at, b, start, end, entry, page_size, n_pages):
        """Where the tile of cache rows `at` … lies: (row, page or request, first and end of its pages, bad).

        entry: of the page table. Of small pages a lane has one: that for rows `at` + lane · page_size. Those without a
        row of the request's are not looked at: they may not exist.
        """
        row, page, low, high, bad = at, i32(b), i32(0), i32(1), i32(0)
        if parts:
            low = ptx.div_u32(max(start - at, 0), page_size)
            high = ptx.div_u32(i32(min(end - at, 64) + page_size - 1), page_size)
        elif paged:
            row = i32(0)
            if page_size != 64:
                row = i32(at - ptx.div_u32(at, page_size) * page_size)
        if paged:
            bad = i32(entry < 0 or entry >= n_pages)
            page = i32(0) if bad != 0 else entry
            if parts:
                lane = ptx.lane_id()
                bad = ptx.vote_ballot(i32(bad != 0 and low <= lane and lane < high))
        return row, page, low, high, bad

    @cuda.jit(device=True, inline="always")
    def load_keys(base, at, b, start, end, entry, page_size, n_pages):
        """One warp copies the tile of cache rows `at` …, in thirds."""
        row, page, low, high, bad = place_of(at, b, start, end, entry, page_size, n_pages)
        if ptx.elect_one() != 0:
            ptx.st_shared_b32(base + BAD, bad)
            for third in range(3):
                full = i32(base + K_FULL + third * 8)
                if parts:
                    ptx.mbarrier_expect_tx(full, (high - low) * page_size * 384)
                else:
                    ptx.mbarrier_expect_tx(full, 3 * CHUNK)
                    to = i32(base + KEYS + third * 3 * CHUNK)
                    ptx.cp_async_bulk_tensor_4d(to, kv_map(), 0, row, third * 3, page, full)
        ptx.warp_sync()
        if parts:
            lane = ptx.lane_id()
            if low <= lane and lane < high:
                c, to = i32(0), i32(base + KEYS + lane * page_size * 128)
                for third in range(3):
                    for _ in range(3):
                        full = i32(base + K_FULL + third * 8)
                        ptx.cp_async_bulk_tensor_4d(to, chunk_map(), 0, 0, c, page, full)
                        c, to = i32(c + 1), i32(to + CHUNK)
            ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def load_values(base, rank, at, count, b, start, end, entry, page_table, page_size, max_pages, n_pages):
        """One warp copies the block's columns of `count` tiles from cache row `at` on."""
        full = i32(base + V_FULL)
        if ptx.elect_one() != 0:
            expected = i32(count * CHUNK * wide)
            if parts:
                low = ptx.div_u32(max(start - at, 0), page_size)
                high = ptx.div_u32(i32(min(end - at, count * 64) + page_size - 1), page_size)
                expected = i32((high - low) * page_size * 128 * wide)
            ptx.mbarrier_expect_tx(full, expected)
        ptx.warp_sync()
        i = i32(0)
        while i < count:
            if parts:
                its = look_up(at, i, b, page_table, page_size, max_pages)
            else:
                its = ptx.shfl_idx(entry, i)
            tile = i32(at + i * 64)
            row, page, low, high, _ = place_of(tile, b, start, end, its, page_size, n_pages)
            into = i32(base + VALUES + i * wide * CHUNK)
            if parts:
                lane = ptx.lane_id()
                if low <= lane and lane < high:
                    for w in range(wide):
                        to = i32(into + w * CHUNK + lane * page_size * 128)
                        ptx.cp_async_bulk_tensor_4d(to, chunk_map(), 0, 0, rank * wide + w, page, full)
            elif ptx.elect_one() != 0:
                for w in range(wide):
                    ptx.cp_async_bulk_tensor_4d(into + w * CHUNK, chunk_map(), 0, row, rank * wide + w, page, full)
            ptx.warp_sync()
            i = i32(i + 1)

    @cuda.jit(device=True, inline="always")
    def matrix_row(at, warp):
        """(address, 16 times its first unit) of the row that a lane names to `ldmatrix`, in chunks from `at` on."""
        lane = ptx.lane_id()
        return i32(at + (warp * 16 + (lane & 15)) * 128), i32(((lane >> 4) ^ (lane & 7)) << 4)

    # A call per chunk instead of a loop over chunks: an array stays in registers only while every index is a constant,
    # and the compiler does not unroll loops of that length.
    @cuda.jit(device=True, inline="always")
    def keep_chunk(qf, c, at, unit):
        """Chunk c of Q to registers."""
        if c >= rest:
            for j in range(4):
                i = (c - rest) * 16 + j * 4
                a0, a1, a2, a3 = ptx.ldmatrix_x4(i32(at + c * CHUNK + (unit ^ (j << 5))))
                qf[i], qf[i + 1], qf[i + 2], qf[i + 3] = a0, a1, a2, a3

    @cuda.jit(device=True, inline="always")
    def keep(qf, base, warp):
        """What of Q is kept, once it is there."""
        at, unit = matrix_row(i32(base + Q), warp)
        wait(base + Q_FULL, 0)
        keep_chunk(qf, 0, at, unit)
        keep_chunk(qf, 1, at, unit)
        keep_chunk(qf, 2, at, unit)
        wait(base + Q_FULL + 8, 0)
        keep_chunk(qf, 3, at, unit)
        keep_chunk(qf, 4, at, unit)
        keep_chunk(qf, 5, at, unit)
        wait(base + Q_FULL + 16, 0)
        keep_chunk(qf, 6, at, unit)
        keep_chunk(qf, 7, at, unit)
        keep_chunk(qf, 8, at, unit)

    @cuda.jit(device=True, inline="always")
    def multiply_chunk(s, qf, c, queries, keys):
        """S += Q[:, chunk c] · K[:, chunk c]ᵀ; chunk 0 overwrites S."""
        for j in range(4):
            by = described(keys + np.uint32(c * 512 + j * 2), 1024)
            if c < rest:
                qk_rest(s, described(queries + np.uint32(c * 512 + j * 2), 1024), by, i32(c | j))
            else:
                i = (c - rest) * 16 + j * 4
                qk(s, qf[i], qf[i + 1], qf[i + 2], qf[i + 3], by, i32(c | j))

    @cuda.jit(device=True, inline="always")
    def hide(s, half, side, seen):
        """Scores of one of the thread's two rows, 32 columns: what is not seen is -inf."""
        for j in range(4):
            for e in range(2):
                if (seen >> (j * 8 + e)) & 1 == 0:
                    s[(side * 4 + j) * 4 + half * 2 + e] = NEG

    @cuda.jit(device=True, inline="always")
    def store_rows(x, w, chunk, warp, factor_a, factor_b):
        """Accumulators 32·w … of 64 columns, times a factor a row, to a chunk of shared memory."""
        at, unit = matrix_row(chunk, warp)
        for j in range(4):
            i = w * 32 + j * 8
            ptx.stmatrix_x4(
                i32(at + (unit ^ (j << 5))),
                pack(x[i] * factor_a, x[i + 1] * factor_a),
                pack(x[i + 2] * factor_b, x[i + 3] * factor_b),
                pack(x[i + 4] * factor_a, x[i + 5] * factor_a),
                pack(x[i + 6] * factor_b, x[i + 7] * factor_b),
            )

    @cuda.jit(device=True, inline="always")
    def weigh(stats, zero_a, zero_b, sum_a, sum_b):
        """Of a tile, for the thread's two rows: factors that bring it to the scale of all, and sums with it."""
        m_a, l_a = ptx.ld_shared_v2_f32(stats)
        m_b, l_b = ptx.ld_shared_v2_f32(i32(stats + 64))
        f_a, f_b = ptx.ex2_approx(m_a - zero_a), ptx.ex2_approx(m_b - zero_b)
        return f_a, f_b, sum_a + f_a * l_a, sum_b + f_b * l_b

    @cuda.jit(device=True, inline="always")
    def blank(values, low, high, t):
        """Rows `low` … `high` of a tile of V become 0."""
        r = i32(low + (t >> 3))
        while r < high:
            for w in range(wide):
                ptx.st_shared_v4_b32(i32(values + w * CHUNK + r * 128 + (t & 7) * 16), 0, 0, 0, 0)
            r = i32(r + 16)

    @cuda.jit(device=True, inline="always")
    def begin(d, base, i):
        """D = P·V of 64 columns, the i-th of all tiles' chunks."""
        weights = operand(i32(base + places + (i >> (wide - 1)) * PLACE), 16)
        values = operand(i32(base + VALUES + i * CHUNK), CHUNK)
        ptx.wgmma_fence()
        for j in range(4):
            pv(d, described(weights + np.uint32(j * 2), 1024), described(values + np.uint32(j * 128), 1024), i32(j))
        ptx.wgmma_commit()

    @cuda.jit(device=True, inline="always")
    def add(o, half, d, f_a, f_b):
        """O of a chunk += D, on its scale."""
        for j in range(8):
            i = half * 32 + j * 4
            o[i] += f_a * d[j * 4]
            o[i + 1] += f_a * d[j * 4 + 1]
            o[i + 2] += f_b * d[j * 4 + 2]
            o[i + 3] += f_b * d[j * 4 + 3]

    @cuda.jit(device=True, inline="always")
    def normalised(total, top, slot, used, broken):
        """(factor, log-sum-exp) of a row."""
        factor, log = f32(0.0), NEG
        if total != f32(0.0):
            factor = ptx.rcp_approx(total)
            log = (top + ptx.lg2_approx(total)) * LN2
        if slot >= used:
            factor, log = f32(0.0), NEG
        if broken:
            factor, log = f32(math.nan), f32(math.nan)
        return factor, log

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
        warp = ptx.shfl_idx(i32(tid >> 5), 0)  # uniform, or ptxas serialises every wgmma
        rank = ptx.cluster_rank()
        b = i32(i32(cuda.blockIdx.x) >> shift)
        m0 = i32(0)
        if row_tiles > 1:
            item = b
            b = ptx.div_u32(item, row_tiles)
            m0 = i32((item - b * row_tiles) * 64)
        # What comes from memory is asked for at once, by one warp, while another makes barriers and copies Q: lengths,
        # and the pages of a first round that begins with row 0 of the cache.
        entry = i32(0)
        if warp == 0:
            if ptx.elect_one() != 0:
                for i in range(6):
                    ptx.mbarrier_init(base + Q_FULL + i * 8, 1)  # Q_FULL, K_FULL
                ptx.mbarrier_init(base + K_FREE, 128)
                ptx.mbarrier_init(base + V_FULL, 1)
                ptx.mbarrier_init(base + P_FULL, 1)
                ptx.fence_mbarrier_init()
                for third in range(3):
                    full = i32(base + Q_FULL + third * 8)
                    ptx.mbarrier_expect_tx(full, 3 * CHUNK)
                    ptx.cp_async_bulk_tensor_4d(base + Q + third * 3 * CHUNK, q_map(), 0, m0, third * 3, b, full)
            ptx.warp_sync()
        elif warp == COPIER:
            if ptx.elect_one() != 0:
                ptx.prefetch_tensormap(kv_map())
                ptx.prefetch_tensormap(chunk_map())
            ptx.warp_sync()
            if paged:
                entry = look_up(i32(0), rank, b, page_table, page_size, max_pages)
        prefix, used, broken, start, end = extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix)
        cuda.syncthreads()  # barriers are there
        first = i32(start >> 6)
        tiles = i32(0)
        if end > start:
            tiles = i32(((end + 63) >> 6) - first)
        done = i32(0)  # tiles of earlier rounds
        turn = i32(0)
        # The cluster meets once a round, before P is sent: in each block its places are free, and its barriers say how
        # much will come. It meets at the end once more: all that was sent is there.
        if warp == COPIER:
            while done < tiles:
                at = i32((first + done) * 64)
                here = min(i32(tiles - done), i32(size))
                if paged and (turn > 0 or first > 0):
                    entry = look_up(at, rank, b, page_table, page_size, max_pages)
                if rank < here:
                    if turn > 0:
                        wait(base + K_FREE, i32(turn - 1) & 1)
                    mine = entry if parts else ptx.shfl_idx(entry, rank)
                    load_keys(base, i32(at + rank * 64), b, start, end, mine, page_size, n_pages)
                if turn > 0:
                    ptx.cluster_wait()  # now nobody multiplies by V of the round before
                load_values(base, rank, at, here, b, start, end, entry, page_table, page_size, max_pages, n_pages)
                if turn == 0:
                    ptx.cluster_arrive_relaxed()
                    ptx.cluster_wait()
                ptx.cluster_arrive_relaxed()
                done = i32(done + size)
                turn = i32(turn + 1)
        else:
            row0 = i32(m0 + warp * 16 + (ptx.lane_id() >> 2))  # the first of the thread's two rows; the other is + 8
            slot_a = ptx.div_u32(min(row0, i32(n_rows - 1)), heads)
            slot_b = ptx.div_u32(min(i32(row0 + 8), i32(n_rows - 1)), heads)
            qf = cuda.local.array(words, i32)
            s = cuda.local.array(32, f32)  # scores, then products with even chunks of V
            d = cuda.local.array(32, f32)  # with odd ones
            o = cuda.local.array(accumulators, f32)
            for i in range(accumulators):
                o[i] = f32(0.0)
            top_a, top_b, sum_a, sum_b = NEG, NEG, f32(0.0), f32(0.0)
            while done < tiles:
                here = min(i32(tiles - done), i32(size))
                last = done + size >= tiles
                at = i32((first + done) * 64)
                mine = i32(at + rank * 64)
                # ---- scores of one tile
                seen_a0, seen_a1, seen_b0, seen_b1 = i32(-1), i32(-1), i32(-1), i32(-1)
                masked = i32(mine + 64) > min(prefix, end) or mine < start
                if rank < here and masked:  # looked up while Q and K are on their way
                    of_a, of_b = i64(b) * n_slots + slot_a, i64(b) * n_slots + slot_b
                    seen_a0, seen_a1 = tile_seen(visibility, of_a, n_slots, mine, prefix, start, end)
                    seen_b0, seen_b1 = tile_seen(visibility, of_b, n_slots, mine, prefix, start, end)
                if turn == 0:
                    keep(qf, base, warp)
                if warp == 0 and ptx.elect_one() != 0:
                    ptx.mbarrier_expect_tx(base + P_FULL, (here - 1 if rank < here else here) * SENT)
                ptx.warp_sync()
                ptx.fence_proxy_async()
                ptx.cluster_arrive_relaxed()
                if rank < here:
                    for third in range(3):
                        wait(base + K_FULL + third * 8, turn & 1)
                        ptx.wgmma_fence()
                        queries = operand(base + Q, 16)
                        keys = operand(base + KEYS, 16)
                        for c in range(3):
                            multiply_chunk(s, qf, third * 3 + c, queries, keys)
                        ptx.wgmma_commit()
                    bad = ptx.ld_shared_b32(base + BAD) if paged else i32(0)
                    ptx.wgmma_wait_0()
                    if not last:
                        ptx.mbarrier_arrive(base + K_FREE)
                    if masked:
                        move = i32((ptx.lane_id() & 3) * 2)
                        hide(s, 0, 0, i32(seen_a0 >> move))
                        hide(s, 0, 1, i32(seen_a1 >> move))
                        hide(s, 1, 0, i32(seen_b0 >> move))
                        hide(s, 1, 1, i32(seen_b1 >> move))
                    high_a, high_b = s[0], s[2]
                    for j in range(8):
                        high_a = ptx.max_f32(high_a, ptx.max_f32(s[j * 4], s[j * 4 + 1]))
                        high_b = ptx.max_f32(high_b, ptx.max_f32(s[j * 4 + 2], s[j * 4 + 3]))
                    high_a = ptx.max_f32(high_a, ptx.shfl_bfly_f32(high_a, 1))
                    high_b = ptx.max_f32(high_b, ptx.shfl_bfly_f32(high_b, 1))
                    high_a = ptx.max_f32(high_a, ptx.shfl_bfly_f32(high_a, 2))
                    high_b = ptx.max_f32(high_b, ptx.shfl_bfly_f32(high_b, 2))
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
                    add_a += ptx.shfl_bfly_f32(add_a, 1)
                    add_b += ptx.shfl_bfly_f32(add_b, 1)
                    add_a += ptx.shfl_bfly_f32(add_a, 2)
                    add_b += ptx.shfl_bfly_f32(add_b, 2)
                    if bad != 0:
                        add_a, add_b = f32(math.nan), f32(math.nan)
                ptx.cluster_wait()
                # ---- P, maxima and sums to this block's place, and on to the same place in the others
                if rank < here:
                    place = i32(base + places + rank * PLACE)
                    store_rows(s, 0, place, warp, f32(1.0), f32(1.0))
                    lane = ptx.lane_id()
                    if lane & 3 == 0:
                        stats = i32(place + STATS + warp * 128 + lane * 2)
                        ptx.st_shared_v2_f32(stats, high_a, add_a)
                        ptx.st_shared_v2_f32(i32(stats + 64), high_b, add_b)
                    ptx.fence_proxy_async()
                    ptx.bar_sync(1, 128)
                    if ptx.elect_one() != 0:
                        for n in range(sends):
                            to = i32(rank + 1 + n * 4 + warp) & (size - 1)  # not all to the same block at first
                            if to != rank:
                                full = ptx.map_shared(base + P_FULL, to)
                                ptx.cp_async_bulk_cluster(ptx.map_shared(place, to), place, SENT, full)
                    ptx.warp_sync()
                # ---- while P of the others comes: rows of V that are not the request's become 0, as a weight of 0 does
                # not silence NaN
                wait(base + V_FULL, turn & 1)
                t = i32(warp * 32 + ptx.lane_id())
                if at < start:
                    blank(base + VALUES, i32(0), i32(start - at), t)
                if last and i32(at + here * 64) > end:
                    blank(i32(base + VALUES + (here - 1) * wide * CHUNK), i32(end - at - (here - 1) * 64), i32(64), t)
                ptx.fence_proxy_async()
                ptx.bar_sync(1, 128)
                wait(base + P_FULL, turn & 1)
                if last:
                    ptx.cluster_arrive_relaxed()  # what was sent here has come, and its sender may end
                # ---- O += P·V, a chunk of columns of a tile at a time, one ahead. No branch in the loop: where one
                # product begins under a condition and another is read behind it, ptxas does them one by one.
                begin(s, base, i32(0))
                stats = i32(base + places + STATS + warp * 128 + (ptx.lane_id() >> 2) * 8)
                before_a, before_b = top_a, top_b
                for n in range(size):
                    of = i32(stats + min(i32(n), i32(here - 1)) * PLACE)
                    top_a = ptx.max_f32(top_a, ptx.ld_shared_f32(of))
                    top_b = ptx.max_f32(top_b, ptx.ld_shared_f32(i32(of + 64)))
                zero_a = f32(0.0) if top_a == NEG else top_a
                zero_b = f32(0.0) if top_b == NEG else top_b
                if turn > 0:
                    shrink_a, shrink_b = ptx.ex2_approx(before_a - zero_a), ptx.ex2_approx(before_b - zero_b)
                    sum_a, sum_b = sum_a * shrink_a, sum_b * shrink_b
                    for j in range(groups):
                        o[j * 4] *= shrink_a
                        o[j * 4 + 1] *= shrink_a
                        o[j * 4 + 2] *= shrink_b
                        o[j * 4 + 3] *= shrink_b
                chunks = i32(here * wide)
                i = i32(0)
                while i + 2 < chunks:
                    begin(d, base, i32(i + 1))
                    f_a, f_b, sum_a, sum_b = weigh(stats, zero_a, zero_b, sum_a, sum_b)
                    ptx.wgmma_wait_1()
                    add(o, 0, s, f_a, f_b)
                    begin(s, base, i32(i + 2))
                    if wide == 1:  # the next tile; otherwise other columns of the same
                        f_a, f_b, sum_a, sum_b = weigh(i32(stats + PLACE), zero_a, zero_b, sum_a, sum_b)
                    ptx.wgmma_wait_1()
                    add(o, wide - 1, d, f_a, f_b)
                    stats = i32(stats + size // 4 * PLACE)
                    i = i32(i + 2)
                f_a, f_b, sum_a, sum_b = weigh(stats, zero_a, zero_b, sum_a, sum_b)
                if i + 1 < chunks:
                    begin(d, base, i32(i + 1))
                    ptx.wgmma_wait_1()
                    add(o, 0, s, f_a, f_b)
                    if wide == 1:
                        f_a, f_b, sum_a, sum_b = weigh(i32(stats + PLACE), zero_a, zero_b, sum_a, sum_b)
                    ptx.wgmma_wait_0()
                    add(o, wide - 1, d, f_a, f_b)
                else:
                    ptx.wgmma_wait_0()
                    add(o, 0, s, f_a, f_b)
                done = i32(done + size)
                turn = i32(turn + 1)
            if turn == 0:
                for third in range(3):  # nothing may be on its way to a block that ends
                    wait(base + Q_FULL + third * 8, 0)
            # ---- normalised, and through K's place, a warp its own rows, to whole lines of memory
            factor_a, log_a = normalised(sum_a, top_a, slot_a, used, broken)
            factor_b, log_b = normalised(sum_b, top_b, slot_b, used, broken)
            if ptx.vote_all(i32(factor_a != f32(0.0) and factor_b != f32(0.0))) == 0:
                # A factor of 0 marks a row that is not computed, whatever was added up.
                for j in range(groups):
                    o[j * 4] = o[j * 4] if factor_a != f32(0.0) else f32(0.0)
                    o[j * 4 + 1] = o[j * 4 + 1] if factor_a != f32(0.0) else f32(0.0)
                    o[j * 4 + 2] = o[j * 4 + 2] if factor_b != f32(0.0) else f32(0.0)
                    o[j * 4 + 3] = o[j * 4 + 3] if factor_b != f32(0.0) else f32(0.0)
            for w in range(wide):
                store_rows(o, w, i32(base + KEYS + w * CHUNK), warp, factor_a, factor_b)
            ptx.warp_sync()
            lane = ptx.lane_id()
            for n in range(4):
                row = i32(warp * 16 + n * 4 + (lane >> 3))
                if i32(m0 + row) < n_rows:
                    place = i64(b) * n_rows + m0 + row
                    to = ptx.address(out) + 2 * (place * WIDTH + rank * 64 * wide + (lane & 7) * 8)
                    of = i32(base + KEYS + row * 128 + (((lane ^ row) & 7) << 4))
                    for w in range(wide):
                        w0, w1, w2, w3 = ptx.ld_shared_v4_b32(i32(of + w * CHUNK))
                        ptx.st_global_v4_b32(to + w * 128, w0, w1, w2, w3)
            if rank == 0 and lane & 3 == 0:
                row0 = i32(m0 + warp * 16 + (lane >> 2))
                if row0 < n_rows:
                    lse[i64(b) * n_rows + row0] = log_a
                if i32(row0 + 8) < n_rows:
                    lse[i64(b) * n_rows + row0 + 8] = log_b
        if tiles > 0:
            ptx.cluster_wait()  # until what was sent from here has been read

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
