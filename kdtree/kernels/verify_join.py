"""Partial results of verify_attn: how they lie in memory, and how a block adds its share of them up.

A block writes at most two partial results: the end of one item and the beginning of another. Values lie in the order
in which wgmma's accumulators do, so that a warp stores 512 consecutive bytes: ``[block, 2, side, j, thread]`` of four
float32 each, where `side` is the half of the 512 columns, `j` a group of 8 columns, and a thread's four are columns
2q, 2q + 1 of rows r and r + 8 (q = lane % 4, r = 16 · warp + lane / 4). Base-2 LSEs: ``[block, 2, 64]``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kdtree._cuda import cuda

f32, i32, i64 = np.float32, np.int32, np.int64
NEG = f32(-math.inf)
LN2 = f32(math.log(2.0))

WARPS = 12  # of a block
ARRIVALS = 3  # warpgroups of a contributor, each of which counts for itself
PART_BYTES = 64 * 512 * 4
SIDE_BYTES = PART_BYTES // 2
WEIGHTS_BYTES = 36 * 1024  # of shared memory: 64 weights for up to 144 contributors; then 12 x 512 bytes


@functools.cache
def device_functions(dtype: str, traced: bool = False) -> tuple[Any, Any, Any]:
    """(store_partial, meet, join) for outputs of `dtype`. traced: see `verify_wgmma.TRACED`."""
    from kdtree.kernels import ptx
    from kdtree.kernels.hopper import wait

    pack = ptx.cvt_bf16x2 if dtype == "bfloat16" else ptx.cvt_f16x2

    @cuda.jit(device=True, inline="always")
    def store_partial(o, at, t, factor_a, factor_b):
        """A values warpgroup's accumulators, normalised, to its side of a partial result at address `at`."""
        for j in range(32):
            ptx.st_global_v4_f32(
                at + i32((j * 128 + t) * 16),
                o[j * 4] * factor_a,
                o[j * 4 + 1] * factor_a,
                o[j * 4 + 2] * factor_b,
                o[j * 4 + 3] * factor_b,
            )

    @cuda.jit(device=True, inline="always")
    def meet(meeting, turn):
        """All threads of the block meet; returns the parity of the next phase of mbarrier `meeting`."""
        if traced:
            ptx.mbarrier_arrive(meeting)
            wait(meeting, turn)
        else:
            cuda.syncthreads()
        return i32(turn ^ 1)

    @cuda.jit(device=True, inline="always")
    def place_of(k, first, members, member):
        """Number of contributor k's partial result: the first one's item begins in its range, the others' go on."""
        return i64(((first + k) * members + member) * 2 + (1 if k == 0 else 0))

    @cuda.jit(device=True, inline="always")
    def join(
        scratch,  # shared memory, 42 KiB
        meeting,  # mbarrier of all threads of the block
        turn,  # the parity of its phase
        words,  # shared memory: {used, request, row tile, first position, tiles} of the unfinished item
        tid,
        group,
        members,
        member,
        total,
        groups,
        batch,
        n_rows,
        row_tiles,
        counters,
        part_out,
        part_lse,
        out,
        lse,
    ):
        """Wait for all contributors of an item, then add up this block's share, in units of 16 rows x 8 columns."""
        b, row_tile = ptx.ld_shared_b32(words + 4), ptx.ld_shared_b32(words + 8)
        position, tiles = ptx.ld_shared_b32(words + 12), ptx.ld_shared_b32(words + 16)
        # The group whose range [i·total/groups, (i+1)·total/groups) holds a position
        first = ptx.div_u32((position + 1) * groups - 1, total)
        last = ptx.div_u32((position + tiles) * groups - 1, total)
        n, mine = i32(last - first + 1), i32(group - first)
        arrived = ptx.address(counters) + 4 * (i64(b) * row_tiles + row_tile)
        left = arrived + 4 * i64(batch) * row_tiles
        if tid == 0:
            while ptx.ld_acquire(arrived) < n * ARRIVALS:
                pass
            if ptx.atom_add_acq_rel(left, 1) == n - 1:
                # Every contributor has seen the sum: the next launch finds zeros.
                ptx.st_global_b32(arrived, 0)
                ptx.st_global_b32(left, 0)
        turn = meet(meeting, turn)
        warp, lane = i32(tid >> 5), i32(tid & 31)
        # ---- weights of every row in every partial result
        logs = ptx.address(part_lse)
        for i in range(tid, n * 16, 384):
            k = i32(i >> 4)
            x, y, z, w = ptx.ld_relaxed_v4_f32(logs + place_of(k, first, members, member) * 256 + (i & 15) * 16)
            ptx.st_shared_v4_f32(i32(scratch + i * 16), x, y, z, w)
        turn = meet(meeting, turn)
        if tid < 256:
            row, part = i32(tid >> 2), i32(tid & 3)
            top = NEG  # max passes over NaN, the sum below does not
            for k in range(part, n, 4):
                top = max(top, ptx.ld_shared_f32(i32(scratch + (k * 64 + row) * 4)))
            top = max(top, ptx.shfl_bfly_f32(top, 1))
            top = max(top, ptx.shfl_bfly_f32(top, 2))
            shift = f32(0.0) if top == NEG else top
            weight = f32(0.0)
            for k in range(part, n, 4):
                weight += ptx.ex2_approx(ptx.ld_shared_f32(i32(scratch + (k * 64 + row) * 4)) - shift)
            weight += ptx.shfl_bfly_f32(weight, 1)
            weight += ptx.shfl_bfly_f32(weight, 2)
            inverse = f32(0.0) if weight == f32(0.0) else f32(1.0) / weight
            for k in range(part, n, 4):
                at = i32(scratch + (k * 64 + row) * 4)
                ptx.st_shared_f32(at, ptx.ex2_approx(ptx.ld_shared_f32(at) - shift) * inverse)
            at_row = i64(row_tile) * 64 + row
            if mine == 0 and part == 0 and at_row < n_rows:
                log = NEG if weight == f32(0.0) else (shift + ptx.lg2_approx(weight)) * LN2
                lse[i64(b) * n_rows + at_row] = log
        turn = meet(meeting, turn)
        # ---- values: a warp takes every 12th unit, three at a time; or `teams` warps take one, each every `teams`-th
        # part of it
        # Warps whose 16 rows are not there have stored nothing.
        units = i32(64 * min((n_rows - row_tile * 64 + 15) >> 4, 4))
        begin, stop = ptx.div_u32(units * mine, n), ptx.div_u32(units * (mine + 1), n)
        shares = i32(stop - begin)
        teams, team, unit = i32(1), i32(0), i32(begin + warp)
        if shares > 0 and shares <= WARPS // 2:
            teams = ptx.div_u32(WARPS, shares)
            team = ptx.div_u32(warp, shares)
            unit = i32(begin + warp - team * shares)
        if team >= teams:
            unit = stop
        # 32-bit offsets: all partial results together stay below 2 GiB.
        stride = i32(members * 2 * PART_BYTES)
        values = ptx.address(part_out) + i32((first * members + member) * 2 * PART_BYTES) + lane * 16
        v = cuda.local.array(60, f32)
        sums = cuda.local.array(12, f32)
        last_unit = i32(units - 1)
        turns = i32(0)
        while unit < stop or (teams > 1 and turns == 0):  # teams meet once, with all warps of the block
            turns = i32(turns + 1)
            for i in range(12):
                sums[i] = f32(0.0)
            # Three units at a time; a unit is (16 rows, side, 8 columns).
            unit_b = i32(min(i32(unit + WARPS), last_unit))
            unit_c = i32(min(i32(unit + 2 * WARPS), last_unit))
            from_a = i32((unit & 63) * 2048 + (unit >> 6) * 512)
            from_b = i32((unit_b & 63) * 2048 + (unit_b >> 6) * 512)
            from_c = i32((unit_c & 63) * 2048 + (unit_c >> 6) * 512)
            row_a = i32(scratch + ((unit >> 6) * 16 + (lane >> 2)) * 4)
            row_b = i32(scratch + ((unit_b >> 6) * 16 + (lane >> 2)) * 4)
            row_c = i32(scratch + ((unit_c >> 6) * 16 + (lane >> 2)) * 4)
            k = team if unit < stop else n
            while k < n:
                # Fifteen loads in flight: five parts of three units
                for i in range(5):
                    part = i32(k + i * teams)
                    if part < n:
                        place = i32(part * stride + (PART_BYTES if part == 0 else 0))
                        for u in range(3):
                            x, y, z, w = ptx.ld_relaxed_v4_f32(
                                values + i32(place + (from_a if u == 0 else from_b if u == 1 else from_c))
                            )
                            v[i * 12 + u * 4] = x
                            v[i * 12 + u * 4 + 1] = y
                            v[i * 12 + u * 4 + 2] = z
                            v[i * 12 + u * 4 + 3] = w
                for i in range(5):
                    part = i32(k + i * teams)
                    if part < n:
                        for u in range(3):
                            at = i32((row_a if u == 0 else row_b if u == 1 else row_c) + part * 256)
                            w_a, w_b = ptx.ld_shared_f32(at), ptx.ld_shared_f32(i32(at + 32))
                            sums[u * 4] += w_a * v[i * 12 + u * 4]
                            sums[u * 4 + 1] += w_a * v[i * 12 + u * 4 + 1]
                            sums[u * 4 + 2] += w_b * v[i * 12 + u * 4 + 2]
                            sums[u * 4 + 3] += w_b * v[i * 12 + u * 4 + 3]
                k = i32(k + 5 * teams)
            if teams > 1:
                ptx.st_shared_v4_f32(
                    i32(scratch + WEIGHTS_BYTES + warp * 512 + lane * 16), sums[0], sums[1], sums[2], sums[3]
                )
                turn = meet(meeting, turn)
                if team == 0:
                    for other in range(1, teams):
                        at = i32(scratch + WEIGHTS_BYTES + (other * shares + warp) * 512 + lane * 16)
                        x, y, z, w = ptx.ld_shared_v4_f32(at)
                        sums[0] += x
                        sums[1] += y
                        sums[2] += z
                        sums[3] += w
            if team == 0 and unit < stop:
                for u in range(3):
                    which = i32(unit + u * WARPS)
                    row = i32(row_tile * 64 + (which >> 6) * 16 + (lane >> 2))
                    at = ptx.address(out) + 2 * ((i64(b) * n_rows + row) * 512 + (which & 63) * 8 + (lane & 3) * 2)
                    if which < stop and (u == 0 or teams == 1):
                        if row < n_rows:
                            ptx.st_global_b32(at, pack(sums[u * 4], sums[u * 4 + 1]))
                        if i32(row + 8) < n_rows:
                            ptx.st_global_b32(at + 8 * 1024, pack(sums[u * 4 + 2], sums[u * 4 + 3]))
            unit = stop if teams > 1 else i32(unit + 3 * WARPS)
        turn = meet(meeting, turn)
        return turn

    return store_partial, meet, join
