"""verify_attn on Hopper: wgmma tensor cores, TMA, warp specialisation, one launch from plan to joined result.

A block works on 64 query rows (row = slot·H + head) against tiles of 64 KV rows. `verify_ring` says what lies in shared
memory and copies it there; `verify_plan` says which block computes what; `verify_join` adds partial results up.
Three warpgroups:

    scores   keeps 448 of Q's 576 columns in registers, computes S = Q·Kᵀ and the running softmax, and stores P over
             the tile's rope part, which only S needed. Tree mask from the bit words, on tiles with tree slots alone.
    left     O[:, :256] += P·V, accumulators in registers; one of its warps copies the left half of Q and of KV tiles,
             and plans what comes next while the tensor cores are at P·V
    right    O[:, 256:] += P·V; one of its warps copies rope parts, for which Q·Kᵀ waits most, then the right half

P·V of tile k is held back (GO) until Q·Kᵀ of tile k + 1 is done: so the tensor cores have work while the scores
warpgroup is in its softmax, and Q·Kᵀ does not share them with P·V when it is what everything waits for. With Q in
registers a tile moves 248 KiB through shared memory; the 2176 clocks that its products take would allow 272.

Register budget: (184 + 2·160)·128 = 168·384. wgmma m64n256 takes 24 registers beside its 128 accumulators, hence 160;
what is left for the scores is seven of Q's nine chunks, 32 scores and 40 others. Values that depend on the lane are
therefore computed where they are used.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels.latent_maps import LATENT, cache_map, page_mode, rows_map
from kdtree.kernels.launch import Kernel, Operand, Variant, counters, sm_count, word_of, workspace
from kdtree.kernels.verify_join import SIDE_BYTES
from kdtree.kernels.verify_plan import plan
from kdtree.kernels.verify_ring import (
    BAD,
    BROKEN,
    CHUNK,
    DONE,
    FETCH,
    FINAL,
    FIRST,
    FLAGS,
    FULL,
    GO,
    I_END,
    I_EXISTS,
    I_ORIGIN,
    I_PREFIX,
    I_REQUEST,
    I_ROWS,
    I_START,
    I_TILES,
    I_USED,
    I_WHICH,
    ISSUED,
    ITEMS,
    KEPT,
    KNOWN,
    LAST,
    MASKED,
    MEETING,
    NOTE_BYTES,
    P_READY,
    PLANNED,
    Q_FULL,
    Q_REST,
    R_ITEM,
    RECORDS,
    ROPE,
    ROPE_FULL,
    ROPES,
    SHARED_BYTES,
    SLOT,
    STATS,
    TOLD,
    UNTIL,
    VALUE_CHUNKS,
    W_BEGIN,
    W_GROUPS,
    W_PARTS,
    W_POSITION,
    W_TOTAL,
    WHOLE,
    WIDTH,
)  # fmt: skip

f32, i32, i64 = np.float32, np.int32, np.int64

THREADS = 384  # three warpgroups
HALF = WIDTH // 2
NEG = f32(-math.inf)
LN2 = f32(math.log(2.0))
# compute-sanitizer's racecheck sees what a thread wrote before it arrived at an mbarrier itself, but neither what its
# warp wrote before one lane arrived for all, nor bar.sync in kernels like this one. With this in the environment every
# lane arrives, and blocks meet at an mbarrier: that it can follow, and it takes 2 µs more.
TRACED = os.environ.get("KDTREE_TRACED") == "1"
SCORES_REGISTERS, VALUES_REGISTERS = 184, 160  # a thread; (184 + 2 * 160) * 128 = 168 * 384


@functools.cache
def wgmma(dtype: str, mode: str, *, early: int = 2, traced: bool = False) -> Kernel:
    """The Hopper kernel for q, kv and out of `dtype`. For `mode` see `latent_maps.page_mode`.

    early: the last steps of Q·Kᵀ that P·V of the tile before need not wait for. traced: see TRACED.
    """
    from kdtree.kernels import ptx, verify_join, verify_plan, verify_ring
    from kdtree.kernels.hopper import described, operand, wait

    extent, tiles_of, window, locate = verify_plan.device_functions()
    prepare, plan_tiles, fetch, look_ahead, issue, copy_ropes = verify_ring.device_functions(mode)
    store_partial, meet, join = verify_join.device_functions(dtype, traced)
    qk = ptx.wgmma_rs(64, dtype)
    qk_rest = ptx.wgmma_ss(64, dtype)
    pv = ptx.wgmma_ss(256, dtype, transposed_b=True)
    pack = ptx.cvt_bf16x2 if dtype == "bfloat16" else ptx.cvt_f16x2
    grow = ptx.setmaxnreg_op("inc", SCORES_REGISTERS)
    shrink = ptx.setmaxnreg_op("dec", VALUES_REGISTERS)
    q_map_address, kv_map_address, rope_map_address, out_map_address = (ptx.tensor_map_address(i) for i in range(4))
    paged = mode != "rows"
    q_registers = 16 * KEPT
    tellers = 32 if traced else 1  # lanes of a warp that arrive for it

    @cuda.jit(device=True, inline="always")
    def tell(barrier):
        """A warp arrives at an mbarrier with what all its lanes have written."""
        if traced:
            ptx.mbarrier_arrive(barrier)
        else:
            ptx.warp_sync()
            if ptx.elect_one() != 0:
                ptx.mbarrier_arrive(barrier)

    # A call per chunk instead of a loop over chunks: an array stays in registers only while every index is a constant,
    # and the compiler does not unroll loops of that length.
    @cuda.jit(device=True, inline="always")
    def load_chunk(qf, c, q_at, matrix_unit):
        """Chunk c of Q to registers 16·c …"""
        for j in range(4):
            a0, a1, a2, a3 = ptx.ldmatrix_x4(i32(q_at + c * CHUNK + (matrix_unit ^ (j << 5))))
            qf[c * 16 + j * 4] = a0
            qf[c * 16 + j * 4 + 1] = a1
            qf[c * 16 + j * 4 + 2] = a2
            qf[c * 16 + j * 4 + 3] = a3

    @cuda.jit(device=True, inline="always")
    def multiply_chunk(s, qf, c, keys):
        """S += Q[:, chunk c] · K[:, chunk c]ᵀ; chunk 0 overwrites S."""
        for j in range(4):
            i = c * 16 + j * 4
            qk(
                s,
                qf[i],
                qf[i + 1],
                qf[i + 2],
                qf[i + 3],
                described(keys + np.uint32(c * 512 + j * 2), 1024),
                i32(c | j),
            )

    @cuda.jit(device=True, inline="always")
    def stage_rows(o, at, matrix_unit, factor_a, factor_b):
        """A values warpgroup's accumulators, normalised, to four chunks of shared memory, as TMA stores them."""
        for j in range(0, 32, 2):
            ptx.stmatrix_x4(
                i32(at + (j >> 3) * CHUNK + (matrix_unit ^ ((j & 6) << 4))),
                pack(o[j * 4] * factor_a, o[j * 4 + 1] * factor_a),
                pack(o[j * 4 + 2] * factor_b, o[j * 4 + 3] * factor_b),
                pack(o[j * 4 + 4] * factor_a, o[j * 4 + 5] * factor_a),
                pack(o[j * 4 + 6] * factor_b, o[j * 4 + 7] * factor_b),
            )

    def verify_attn_wgmma(
        q_map,  # CUtensorMap of q as [B, 9 chunks, N·H rows, 64], box 2 chunks x 64 rows
        kv_map,  # CUtensorMap of the cache as [B or pages, 9, rows, 64], box 4 x 64
        rope_map,  # the same, box 1 x min(page_size, 64)
        out_map,  # CUtensorMap of out as [B, 8, N·H, 64], box 4 x 64
        page_table,  # int[B,max_pages] or empty
        prefix_lens,  # int[B]
        n_nodes,  # i32[B]
        visibility,  # u32[B,N,W]
        batch,
        heads,
        n_slots,
        n_rows,  # N·H
        row_tiles,  # of 64
        page_size,
        max_pages,
        n_pages,
        capacity,  # rows a request may have
        with_prefix,
        passes,
        members,
        groups,
        scale_log2,  # softmax scale · log2(e), positive
        counters,  # i32[2,B,row tiles], zero before the first launch, zero after each
        part_out,  # f32[blocks,2,64,512]
        part_lse,  # f32[blocks,2,64], base 2
        out,  # [B,N,H,512]
        lse,  # f32[B,N,H]
    ):
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        block = i32(cuda.blockIdx.x)
        group = ptx.div_u32(block, members)
        member = i32(block - group * members)
        base = ptx.shared_base()
        if tid == 64:
            ptx.prefetch_tensormap(q_map_address())
            ptx.prefetch_tensormap(kv_map_address())
            ptx.prefetch_tensormap(rope_map_address())
        if tid >= 32 and tid < 64:
            # Warp 1 sets up what warp 0 needs for its first copies, while that reads the lengths.
            if lane == 0:
                for i in range(9):
                    ptx.mbarrier_init(base + FULL + i * 8, 1)  # FULL, ROPE_FULL, Q_FULL
                ptx.mbarrier_init(base + MEETING, THREADS)
                for i in range(2):
                    ptx.mbarrier_init(base + P_READY + i * 8, 4 * tellers)
                    ptx.mbarrier_init(base + GO + i * 8, 1)
                    ptx.mbarrier_init(base + DONE + i * 8, 8 * tellers)
                    ptx.st_shared_b32(base + W_PARTS + i * NOTE_BYTES, 0)
                    ptx.st_shared_v4_b32(base + ISSUED + i * 16, 0, 0, 0, 0)
                    ptx.st_shared_v4_b32(base + UNTIL + i * 16, -1, -1, -1, -1)
                ptx.st_shared_v4_b32(base + PLANNED, 0, -1, 0, 0)
                ptx.st_shared_b32(base + ROPES, 0)
                ptx.st_shared_b32(base + FETCH, i32(member + 2))
                ptx.fence_mbarrier_init()
        if tid < 32:
            locate(
                base + W_BEGIN, lane, group, groups, passes, batch, prefix_lens, n_nodes, n_slots, capacity, with_prefix
            )
            if lane == 0:
                ptx.st_shared_b32(base + W_POSITION, ptx.ld_shared_b32(base + W_BEGIN))
            ptx.warp_sync()
            prepare(
                base,
                lane,
                i32(0),
                member,
                members,
                passes,
                prefix_lens,
                n_nodes,
                n_slots,
                row_tiles,
                capacity,
                with_prefix,
            )
        cuda.syncthreads()
        if tid < 32:
            # The first item is on its way before the second is looked at.
            i = i32(0)
            while i < 2:
                if i == 1:
                    prepare(
                        base,
                        lane,
                        i,
                        member,
                        members,
                        passes,
                        prefix_lens,
                        n_nodes,
                        n_slots,
                        row_tiles,
                        capacity,
                        with_prefix,
                    )
                plan_tiles(base, lane, i32(-1), i, page_table, page_size, max_pages, n_pages)
                known = ptx.ld_shared_b32(base + PLANNED)
                if ptx.elect_one() != 0:
                    ptx.st_shared_b32(base + KNOWN + 4, known)
                    ptx.st_shared_b32(base + TOLD + 4, known)
                ptx.warp_sync()
                side = i32(0)
                while side < 2:
                    issue(base, lane, side, i32(-1), page_table, page_size, max_pages, n_pages)
                    side = i32(side + 1)
                copy_ropes(base, lane, i32(-1), page_table, page_size, max_pages, n_pages)
                i = i32(i + 1)
            fetch(base, known, members)
        more = ptx.ld_shared_b32(base + ITEMS + I_EXISTS) != 0
        tid = ptx.thread_id()
        role = ptx.shfl_idx(i32(tid >> 7), 0)  # uniform, or ptxas serialises every wgmma
        warp = ptx.shfl_idx(i32((tid >> 5) & 3), 0)  # of its warpgroup
        if role == 0:
            grow()
            lane = ptx.lane_id()
            # The address that ldmatrix and stmatrix want of a lane: its row, and unit lane / 16 of it, swizzled. Units
            # 2j and 2j + 1 are at an exclusive or with j << 5.
            matrix_row = i32((warp * 16 + (lane & 15)) * 128)
            matrix_unit = i32(((lane >> 4) ^ (lane & 7)) << 4)
            row0 = i32(warp * 16 + (lane >> 2))  # one row of this thread's accumulators; the other is + 8
            s = cuda.local.array(32, f32)
            qf = cuda.local.array(q_registers, i32)
            words = cuda.local.array(16, i32)
            slot, parity = i32(0), i32(0)
            k = i32(0)  # KV tiles so far
            number = i32(0)  # items so far
            while more:
                # ---- the item's Q: seven chunks into registers, two where wgmma reads them
                of = i32(base + ITEMS + (number & 7) * 64)
                ptx.bar_sync(1, 128)  # every warp is through with the item before
                if warp == 0 and ptx.elect_one() != 0:
                    ptx.mbarrier_expect_tx(base + Q_FULL, 2 * CHUNK)
                    ptx.cp_async_bulk_tensor_4d(
                        base + Q_REST,
                        q_map_address(),
                        0,
                        ptx.ld_shared_b32(of + I_ROWS),
                        KEPT,
                        ptx.ld_shared_b32(of + I_REQUEST),
                        base + Q_FULL,
                    )
                ptx.warp_sync()
                for g in range(2):
                    wait(base + FULL + slot * 16 + g * 8, parity)
                q_at = i32(base + slot * SLOT + matrix_row)
                load_chunk(qf, 0, q_at, matrix_unit)
                load_chunk(qf, 1, q_at, matrix_unit)
                load_chunk(qf, 2, q_at, matrix_unit)
                load_chunk(qf, 3, q_at, matrix_unit)
                load_chunk(qf, 4, q_at, matrix_unit)
                load_chunk(qf, 5, q_at, matrix_unit)
                load_chunk(qf, 6, q_at, matrix_unit)
                slot = i32(slot + 1)
                if slot == 3:
                    slot = i32(0)
                    parity = i32(parity ^ 1)
                top_a, top_b = NEG, NEG
                sum_a, sum_b = f32(0.0), f32(0.0)
                flags = i32(FIRST)
                while flags & LAST == 0:
                    odd = i32(k & 1)
                    q_rest = operand(base + Q_REST, 16)
                    keys = operand(i32(base + slot * SLOT), 16)
                    rope = i32(base + ROPE + odd * CHUNK)
                    wait(base + FULL + slot * 16, parity)
                    ptx.wgmma_fence()
                    multiply_chunk(s, qf, 0, keys)
                    multiply_chunk(s, qf, 1, keys)
                    multiply_chunk(s, qf, 2, keys)
                    multiply_chunk(s, qf, 3, keys)
                    wait(base + FULL + slot * 16 + 8, parity)
                    ptx.wgmma_fence()
                    multiply_chunk(s, qf, 4, keys)
                    multiply_chunk(s, qf, 5, keys)
                    multiply_chunk(s, qf, 6, keys)
                    if flags & FIRST != 0:
                        wait(base + Q_FULL, number & 1)
                    ptx.wgmma_fence()
                    for j in range(4):
                        qk_rest(
                            s,
                            described(q_rest + np.uint32(j * 2), 1024),
                            described(keys + np.uint32(KEPT * 512 + j * 2), 1024),
                            1,
                        )
                    wait(base + ROPE_FULL + odd * 8, (k >> 1) & 1)
                    ptx.wgmma_fence()
                    rope_keys = operand(rope, 16)
                    for j in range(4):
                        if j == 4 - early:
                            ptx.wgmma_commit()
                        qk_rest(
                            s,
                            described(q_rest + np.uint32(512 + j * 2), 1024),
                            described(rope_keys + np.uint32(j * 2), 1024),
                            1,
                        )
                    ptx.wgmma_commit()
                    go = flags & FIRST == 0 and warp == 0
                    flags = ptx.ld_shared_b32(base + RECORDS + (k & 31) * 16)
                    at = i32(flags & ~FLAGS)
                    ptx.wgmma_wait_1()
                    if go and ptx.elect_one() != 0:
                        ptx.mbarrier_arrive(base + GO + (odd ^ 1) * 8)
                    ptx.wgmma_wait_0()
                    stats = i32(base + STATS + odd * 512)
                    buffer = i32(base + slot * SLOT)
                    if flags & MASKED != 0:
                        # ---- mask, only where tree slots or an end are
                        here = ptx.lane_id()
                        start, end = ptx.ld_shared_b32(of + I_START), ptx.ld_shared_b32(of + I_END)
                        prefix, m0 = ptx.ld_shared_b32(of + I_PREFIX), ptx.ld_shared_b32(of + I_ROWS)
                        of_request = i64(ptx.ld_shared_b32(of + I_REQUEST)) * n_slots
                        for half in range(2):
                            row = i32(m0 + warp * 16 + (here >> 2) + half * 8)
                            row_slot = ptx.div_u32(min(row, i32(n_rows - 1)), heads)
                            for side in range(2):
                                seen = window(
                                    visibility, of_request + row_slot, n_slots, i32(at + side * 32), prefix, start, end
                                )
                                seen = i32(seen >> ((here & 3) * 2))
                                for j in range(4):
                                    for e in range(2):
                                        if (seen >> (j * 8 + e)) & 1 == 0:
                                            s[(side * 4 + j) * 4 + half * 2 + e] = NEG
                        # A weight of 0 does not silence NaN: rows that are not the request's become 0.
                        unit = i32((warp & 1) * 32 + here)
                        to = i32(buffer + (unit >> 3) * CHUNK + (unit & 7) * 16)
                        r = i32(warp >> 1)
                        while r < 64:
                            if i32(at + r) < start or i32(at + r) >= end:
                                ptx.st_shared_v4_b32(i32(to + r * 128), 0, 0, 0, 0)
                            r = i32(r + 2)
                    # ---- running softmax
                    new_a, new_b, m_a, m_b = top_a, top_b, NEG, NEG
                    for j in range(4):
                        new_a = max(new_a, max(s[j * 8], s[j * 8 + 1]))
                        new_b = max(new_b, max(s[j * 8 + 2], s[j * 8 + 3]))
                        m_a = max(m_a, max(s[j * 8 + 4], s[j * 8 + 5]))
                        m_b = max(m_b, max(s[j * 8 + 6], s[j * 8 + 7]))
                    new_a, new_b = max(new_a, m_a), max(new_b, m_b)
                    new_a = max(new_a, ptx.shfl_bfly_f32(new_a, 1))
                    new_b = max(new_b, ptx.shfl_bfly_f32(new_b, 1))
                    new_a = max(new_a, ptx.shfl_bfly_f32(new_a, 2))
                    new_b = max(new_b, ptx.shfl_bfly_f32(new_b, 2))
                    # The difference first: a maximum that stays gives exactly 1, and nothing need be rescaled. Products
                    # first, fused with the subtraction, would give 1 + 1e-6, tile after tile.
                    base_a = f32(0.0) if new_a == NEG else new_a
                    base_b = f32(0.0) if new_b == NEG else new_b
                    shrink_a = ptx.ex2_approx((top_a - base_a) * scale_log2)
                    shrink_b = ptx.ex2_approx((top_b - base_b) * scale_log2)
                    shift_a, shift_b = base_a * scale_log2, base_b * scale_log2
                    top_a, top_b = new_a, new_b
                    if lane & 3 == 0:
                        ptx.st_shared_f32(stats + row0 * 4, shrink_a)
                        ptx.st_shared_f32(stats + row0 * 4 + 32, shrink_b)
                    for j in range(8):
                        s[j * 4] = ptx.ex2_approx(s[j * 4] * scale_log2 - shift_a)
                        s[j * 4 + 1] = ptx.ex2_approx(s[j * 4 + 1] * scale_log2 - shift_a)
                        s[j * 4 + 2] = ptx.ex2_approx(s[j * 4 + 2] * scale_log2 - shift_b)
                        s[j * 4 + 3] = ptx.ex2_approx(s[j * 4 + 3] * scale_log2 - shift_b)
                        words[j * 2] = pack(s[j * 4], s[j * 4 + 1])
                        words[j * 2 + 1] = pack(s[j * 4 + 2], s[j * 4 + 3])
                    # P over the rope chunk, in the layout that wgmma reads
                    p_at = i32(rope + matrix_row)
                    for j in range(4):
                        ptx.stmatrix_x4(
                            i32(p_at + (matrix_unit ^ (j << 5))),
                            words[j * 4],
                            words[j * 4 + 1],
                            words[j * 4 + 2],
                            words[j * 4 + 3],
                        )
                    add_a, add_b, m_a, m_b = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
                    for j in range(4):
                        add_a += s[j * 8] + s[j * 8 + 1]
                        add_b += s[j * 8 + 2] + s[j * 8 + 3]
                        m_a += s[j * 8 + 4] + s[j * 8 + 5]
                        m_b += s[j * 8 + 6] + s[j * 8 + 7]
                    sum_a = sum_a * shrink_a + (add_a + m_a)
                    sum_b = sum_b * shrink_b + (add_b + m_b)
                    if paged:
                        if flags & BAD != 0:
                            sum_a, sum_b = f32(math.nan), f32(math.nan)
                    if flags & LAST != 0:
                        # ---- the item ends: final factors for the values warpgroups, LSE to memory
                        here = ptx.lane_id()
                        m0, used = ptx.ld_shared_b32(of + I_ROWS), ptx.ld_shared_b32(of + I_USED)
                        b, which = ptx.ld_shared_b32(of + I_REQUEST), ptx.ld_shared_b32(of + I_WHICH)
                        sum_a += ptx.shfl_bfly_f32(sum_a, 1)
                        sum_b += ptx.shfl_bfly_f32(sum_b, 1)
                        sum_a += ptx.shfl_bfly_f32(sum_a, 2)
                        sum_b += ptx.shfl_bfly_f32(sum_b, 2)
                        for half in range(2):
                            total = sum_a if half == 0 else sum_b
                            top = top_a if half == 0 else top_b
                            row = i32(warp * 16 + (here >> 2) + half * 8)
                            factor, log = f32(0.0), NEG
                            if total != f32(0.0):
                                factor = f32(1.0) / total
                                log = top * scale_log2 + ptx.lg2_approx(total)
                            if ptx.div_u32(min(i32(m0 + row), i32(n_rows - 1)), heads) >= used:
                                factor, log = f32(0.0), NEG
                            if used == BROKEN:
                                factor, log = f32(math.nan), f32(math.nan)
                            if here & 3 == 0:
                                ptx.st_shared_f32(i32(stats + 256 + row * 4), factor)
                                if which != WHOLE:
                                    part_lse[i32((i32(cuda.blockIdx.x) * 2 + which) * 64 + row)] = log
                                elif i32(m0 + row) < n_rows:
                                    lse[i64(b) * n_rows + m0 + row] = log * LN2
                    if flags & FIRST != 0 and warp == 1:
                        prepare(
                            base,
                            ptx.lane_id(),
                            i32(number + 2),
                            member,
                            members,
                            passes,
                            prefix_lens,
                            n_nodes,
                            n_slots,
                            row_tiles,
                            capacity,
                            with_prefix,
                        )
                    ptx.fence_proxy_async()
                    tell(base + P_READY + odd * 8)
                    if flags & LAST != 0:
                        if warp == 0 and ptx.elect_one() != 0:
                            ptx.mbarrier_arrive(base + GO + odd * 8)
                        which = ptx.ld_shared_b32(of + I_WHICH)
                        if which != WHOLE:
                            ptx.bar_sync(1, 128)
                            if warp == 0 and ptx.elect_one() != 0:
                                b, row_tile = (
                                    ptx.ld_shared_b32(of + I_REQUEST),
                                    i32(ptx.ld_shared_b32(of + I_ROWS) >> 6),
                                )
                                ptx.atom_add_acq_rel(ptx.address(counters) + 4 * (i64(b) * row_tiles + row_tile), 1)
                                part = i32(base + W_PARTS + which * NOTE_BYTES)
                                ptx.st_shared_b32(part, 1)
                                ptx.st_shared_b32(part + 4, b)
                                ptx.st_shared_b32(part + 8, row_tile)
                                ptx.st_shared_b32(part + 12, ptx.ld_shared_b32(of + I_ORIGIN))
                                ptx.st_shared_b32(part + 16, ptx.ld_shared_b32(of + I_TILES))
                    flags = i32(flags & ~FIRST)
                    k = i32(k + 1)
                    slot = i32(slot + 1)
                    if slot == 3:
                        slot = i32(0)
                        parity = i32(parity ^ 1)
                number = i32(number + 1)
                more = flags & FINAL == 0
        else:
            shrink()
            o = cuda.local.array(128, f32)
            side = i32(role - 1)
            slot = i32(1)  # the first Q is in slot 0
            k = i32(0)
            while more:
                odd = i32(k & 1)
                phase = i32((k >> 1) & 1)
                wait(base + P_READY + odd * 8, phase)
                flags = ptx.ld_shared_b32(base + RECORDS + (k & 31) * 16)
                if flags & FIRST == 0:
                    stats = i32(base + STATS + odd * 512 + (warp * 16 + (ptx.lane_id() >> 2)) * 4)
                    f_a, f_b = ptx.ld_shared_f32(stats), ptx.ld_shared_f32(stats + 32)
                    if ptx.vote_all(i32(f_a == f32(1.0) and f_b == f32(1.0))) == 0:
                        for j in range(32):
                            o[j * 4] *= f_a
                            o[j * 4 + 1] *= f_a
                            o[j * 4 + 2] *= f_b
                            o[j * 4 + 3] *= f_b
                wait(base + GO + odd * 8, phase)
                ptx.wgmma_fence()
                weights = operand(i32(base + ROPE + odd * CHUNK), 16)
                values = operand(i32(base + slot * SLOT + side * 4 * CHUNK), CHUNK)
                for j in range(4):
                    pv(
                        o,
                        described(weights + np.uint32(j * 2), 1024),
                        described(values + np.uint32(j * 128), 1024),
                        i32(j) | i32(flags & FIRST == 0),
                    )
                ptx.wgmma_commit()
                if side == 0 and warp == 0:
                    look_ahead(base, ptx.lane_id(), k, members, page_table, page_size, max_pages, n_pages)
                ptx.wgmma_wait_0()
                flags = ptx.ld_shared_b32(base + RECORDS + (k & 31) * 16)
                of = i32(base + ITEMS + (ptx.ld_shared_b32(base + RECORDS + (k & 31) * 16 + R_ITEM) & 7) * 64)
                whole = False
                if flags & LAST != 0:
                    stats = i32(base + STATS + odd * 512 + 256 + (warp * 16 + (ptx.lane_id() >> 2)) * 4)
                    final_a, final_b = ptx.ld_shared_f32(stats), ptx.ld_shared_f32(stats + 32)
                    whole = ptx.ld_shared_b32(of + I_WHICH) == WHOLE
                    if ptx.vote_all(i32(final_a != f32(0.0) and final_b != f32(0.0))) == 0:
                        # A factor of 0 marks a row that is not computed, whatever its accumulators hold.
                        for j in range(32):
                            o[j * 4] = o[j * 4] if final_a != f32(0.0) else f32(0.0)
                            o[j * 4 + 1] = o[j * 4 + 1] if final_a != f32(0.0) else f32(0.0)
                            o[j * 4 + 2] = o[j * 4 + 2] if final_b != f32(0.0) else f32(0.0)
                            o[j * 4 + 3] = o[j * 4 + 3] if final_b != f32(0.0) else f32(0.0)
                    if whole:
                        # Through this side's half of the slot, which only this side reads.
                        half = i32(base + slot * SLOT + side * 4 * CHUNK)
                        here = ptx.lane_id()
                        unit = i32(((here >> 4) ^ (here & 7)) << 4)
                        stage_rows(o, i32(half + (warp * 16 + (here & 15)) * 128), unit, final_a, final_b)
                        ptx.fence_proxy_async()
                        if side == 0:
                            ptx.bar_sync(2, 128)
                        else:
                            ptx.bar_sync(3, 128)
                        if warp == 0 and ptx.elect_one() != 0:
                            ptx.cp_async_bulk_tensor_store_4d(
                                out_map_address(),
                                0,
                                ptx.ld_shared_b32(of + I_ROWS),
                                side * 4,
                                ptx.ld_shared_b32(of + I_REQUEST),
                                half,
                            )
                            ptx.cp_async_bulk_commit()
                            ptx.cp_async_bulk_wait_read_0()
                        ptx.warp_sync()
                tell(base + DONE + odd * 8)
                if flags & LAST != 0:
                    if not whole:
                        which, b, m0 = (
                            ptx.ld_shared_b32(of + I_WHICH),
                            ptx.ld_shared_b32(of + I_REQUEST),
                            ptx.ld_shared_b32(of + I_ROWS),
                        )
                        at = (
                            ptx.address(part_out) + i64(i32((i32(cuda.blockIdx.x) * 2 + which) * 2 + side)) * SIDE_BYTES
                        )
                        if i32(m0 + warp * 16) < n_rows:
                            store_partial(o, at, i32(warp * 32 + ptx.lane_id()), final_a, final_b)
                        if side == 0:
                            ptx.bar_sync(2, 128)
                        else:
                            ptx.bar_sync(3, 128)
                        if warp == 0 and ptx.elect_one() != 0:
                            ptx.atom_add_acq_rel(ptx.address(counters) + 4 * (i64(b) * row_tiles + (m0 >> 6)), 1)
                    more = flags & FINAL == 0
                    slot = i32(slot + 1) if slot < 2 else i32(0)  # the next item's Q
                if warp == 0:
                    # What this tile held is free as soon as all eight warps are through with it.
                    wait(base + DONE + i32(k & 1) * 8, i32((k >> 1) & 1))
                    if side == 1:
                        copy_ropes(base, ptx.lane_id(), k, page_table, page_size, max_pages, n_pages)
                    issue(base, ptx.lane_id(), side, k, page_table, page_size, max_pages, n_pages)
                slot = i32(slot + 1) if slot < 2 else i32(0)
                k = i32(k + 1)
        turn = meet(base + MEETING, i32(0))
        # ---- join what several groups computed: each contributor takes a share of the rows
        again = i32(cuda.blockIdx.x)
        group = ptx.div_u32(again, members)
        member = i32(again - group * members)
        which = i32(0)
        while which < 2:  # not unrolled: this is code that runs once
            part = i32(base + W_PARTS + which * NOTE_BYTES)
            if ptx.ld_shared_b32(part) != 0:
                turn = join(
                    base,
                    base + MEETING,
                    turn,
                    part,
                    i32(cuda.threadIdx.x),
                    group,
                    members,
                    member,
                    ptx.ld_shared_b32(base + W_TOTAL),
                    ptx.ld_shared_b32(base + W_GROUPS),
                    batch,
                    n_rows,
                    row_tiles,
                    counters,
                    part_out,
                    part_lse,
                    out,
                    lse,
                )
            which = i32(which + 1)

    name = f"verify_attn.wgmma[{dtype},{mode}]"
    return Kernel(
        verify_attn_wgmma,
        name=name,
        threads=THREADS,
        min_blocks=1,
        dynamic_shared=SHARED_BYTES,
        targets=("sm_90a",),
        cooperative=True,  # blocks wait for each other: all of them run, or none does yet
    )


def workspace_bytes(params: dict[str, Any], sms: int) -> int:
    """Bytes of partial results that a call needs, beside a few counters; `params` = {B, rows, capacity}."""
    return plan(params["B"], params["rows"], params["capacity"], sms).workspace_bytes


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
    chosen = plan(batch, n_rows, shape["capacity"], sm_count())
    space = workspace(chosen.workspace_bytes, stream, like)
    args: tuple[Any, ...] = (
        rows_map(inputs["q"], dtype, shape, LATENT, 2),
        cache_map(inputs["kv"], dtype, shape, 4),
        cache_map(inputs["kv"], dtype, shape, 1),
        rows_map(outs["out"], dtype, shape, VALUE_CHUNKS, 4),
        inputs["page_table"],
        inputs["prefix_lens"],
        inputs["n_nodes"],
        inputs["visibility"],
        ("i32", batch),
        ("i32", shape["H"]),
        ("i32", shape["N"]),
        ("i32", n_rows),
        ("i32", chosen.row_tiles),
        ("i32", shape["page_size"]),  # Lmax of a contiguous cache
        ("i32", shape["max_pages"]),
        ("i32", shape["n_pages"]),
        ("i32", shape["capacity"]),
        ("i32", shape["with_prefix"]),
        ("i32", chosen.passes),
        ("i32", chosen.members),
        ("i32", chosen.groups),
        ("f32", scale * math.log2(math.e)),
        counters(2 * batch * chosen.row_tiles, stream),
        space.part("*f32", 0, chosen.out_bytes // 4),
        space.part("*f32", chosen.out_bytes, chosen.lse_bytes // 4),
        outs["out"],
        outs["lse"],
    )
    wgmma(dtype, page_mode(shape), traced=TRACED).launch((chosen.blocks,), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped: both dtypes, three ways for the cache to lie."""
    if SIMULATED:
        return []
    found = []
    for d in ("bfloat16", "float16"):
        for mode in ("rows", "page", "part"):
            words = (
                *["tmap"] * 4,
                "*i32",
                "*i32",
                "*i32",
                "*u32",
                *["i32"] * 13,
                "f32",
                "*i32",
                "*f32",
                "*f32",
                word_of(d),
                "*f32",
            )
            found.append(Variant("verify_attn", wgmma(d, mode), words, f"wgmma[{d},{mode}]", SHARED_BYTES))
    return found
