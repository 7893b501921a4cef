"""verify_attn on every tensor core since Ampere: mma.sync, cp.async and ldmatrix, below 99 KiB of shared memory.

A block works on 64 query rows (row = slot·H + head) against tiles of KV rows. Eight warps: two *teams* of four, each
for 32 rows. In a team

    Q·Kᵀ   is split over the 576 columns: warp w multiplies columns 128w … 128w+127 and 16 of the 64 rope columns. Its
           part of Q, 32 x 144, stays in 72 registers for the whole kernel. The four partial sums are exchanged through
           shared memory, after which warp w owns the scores of 8 rows,
    softmax runs on those 8 rows: shuffles within four lanes, no other warp involved,
    P·V    is split over the 512 columns: warp w multiplies all 32 rows with columns 128w … 128w+127, accumulators in
           128 registers, P from shared memory.

So each KV row is read from shared memory once by each team for Q·Kᵀ and once for P·V, and from L2 once by the block.

A tile of KV rows is worked on while the next one is under way to the other slot of shared memory.

Shared memory: 16-byte unit `u` of a tile's row `r` lies at ``r * 1152 + ((u ^ reversed(r & 7)) << 4)`` with the three
bits of ``r & 7`` in reverse order. Then both ways to read are free of bank conflicts: 16 bytes a lane from pairs of
rows (Q·Kᵀ: a lane's eight columns are the four k-pairs of two mma, in Q's registers too), and ldmatrix from eight rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels.launch import Kernel, Operand, Variant, sm_count, word_of, workspace

f32, i32, i64, u32 = np.float32, np.int32, np.int64, np.uint32

THREADS = 256  # eight warps, one block a multiprocessor: each thread may have 255 registers
ROWS = 64  # query rows a block
TILE = 32  # KV rows a tile
SLOTS = 2  # tiles in shared memory: one worked on, one under way
TEAM_ROWS = 32
TEAM_THREADS = 128
WIDTH = 512  # of the value part, columns
ROW_BYTES = 1152  # of Q and KV: 576 columns
UNITS = ROW_BYTES // 16
READERS = THREADS // TILE  # threads that copy one row of KV
ROPE_BYTES = 1024  # where the rope part of a row begins
NEG = f32(-math.inf)
LN2 = f32(math.log(2.0))
LOG2_E = f32(math.log2(math.e))

# Where things are in a block's shared memory, bytes
SLOT_BYTES = TILE * ROW_BYTES
PIECE = 32 * TILE  # float32 scores of 8 rows x TILE columns
SCORES = SLOTS * SLOT_BYTES  # [team][3 receivers][sender] pieces; of those received first, weights take the place
TEAM_SCORES = 12 * PIECE
FACTORS = SCORES + 2 * TEAM_SCORES  # [team][row of 8][owner] f32
TREE_SLOTS = FACTORS + 4 * ROWS  # [row] i32: tree slot of a row, with bit 31 set where it is not in use
FLAG = TREE_SLOTS + 4 * ROWS  # i32: lengths that do not fit, or a page outside the cache
PLACE = FLAG + 4  # i32: strip of partial results where the block's are
SPAN = FLAG + 8  # i32: end of the prefix, end of the request's rows
STATE = FLAG + 16  # [thread] f32: largest score and total so far
SHARED_BYTES = STATE + 8 * THREADS

# A partial result lies in the order of accumulators, so that a warp stores 512 bytes in a row: 16 rows are a strip,
# [group of 8 columns][lane] of four float32: columns 2t, 2t + 1 of rows g and g + 8, where lane = 4g + t.
STRIP_ROWS = 16
STRIP_BYTES = STRIP_ROWS * WIDTH * 4
MAX_SPLITS = 128
COMBINE_SHARED_BYTES = MAX_SPLITS * 4 * (STRIP_ROWS + 1) + 8 * 1024  # weights, sums of 8 warps


@functools.cache
def mma(dtype: str, out_dtype: str) -> Kernel:
    """The portable tensor-core kernel: q and kv of `dtype`; out too, or "float32" for a split's partial result."""
    from kdtree.kernels import ptx, visibility

    window = visibility.window()
    multiply = ptx.mma_m16n8k16(dtype)
    pack = {"bfloat16": ptx.cvt_bf16x2, "float16": ptx.cvt_f16x2}[dtype]
    partial = out_dtype == "float32"
    whole_turns, rest = UNITS // READERS, UNITS % READERS

    @cuda.jit(device=True, forceinline=True)
    def reversed_bits(row):
        """The lower three bits of `row` in reverse order."""
        return i32(((row & 1) << 2) | (row & 2) | ((row >> 2) & 1))

    @cuda.jit(device=True, forceinline=True)
    def partial_scores(s, q, at, rope_at):
        """s[(m * 2 + n) * 4 …] = this warp's columns of Q (32 rows) times those of 16 rows of KV."""
        for i in range(16):
            s[i] = f32(0.0)
        for c in range(4):
            for n in range(2):
                b0, b1, b2, b3 = ptx.ld_shared_v4_b32(i32((at ^ ((c & 1) << 6)) + (c >> 1) * 128 + n * 8 * ROW_BYTES))
                for m in range(2):
                    k = (4 * c + m) * 4
                    multiply(s, (m * 2 + n) * 4, q[k], q[k + 1], q[k + 2], q[k + 3], b0, b1)
                for m in range(2):
                    k = (4 * c + 2 + m) * 4
                    multiply(s, (m * 2 + n) * 4, q[k], q[k + 1], q[k + 2], q[k + 3], b2, b3)
        b0, b1, b2, b3 = ptx.ldmatrix_x4(rope_at)
        for m in range(2):
            k = (16 + m) * 4
            multiply(s, (m * 2) * 4, q[k], q[k + 1], q[k + 2], q[k + 3], b0, b2)
            multiply(s, (m * 2 + 1) * 4, q[k], q[k + 1], q[k + 2], q[k + 3], b1, b3)

    @cuda.jit(device=True, forceinline=True)
    def add_values(o, weights, at):
        """o[(m * 16 + n) * 4 …] += P (32 rows x 16) · V (16 rows x this warp's 128 columns)."""
        a0, a1, a2, a3 = ptx.ldmatrix_x4(weights)
        a4, a5, a6, a7 = ptx.ldmatrix_x4(i32(weights + 2 * PIECE))
        for n in range(8):
            b0, b1, b2, b3 = ptx.ldmatrix_x4_trans(i32((at ^ ((n & 3) << 5)) + (n >> 2) * 128))
            multiply(o, (2 * n) * 4, a0, a1, a2, a3, b0, b1)
            multiply(o, (16 + 2 * n) * 4, a4, a5, a6, a7, b0, b1)
            multiply(o, (2 * n + 1) * 4, a0, a1, a2, a3, b2, b3)
            multiply(o, (16 + 2 * n + 1) * 4, a4, a5, a6, a7, b2, b3)

    # How a thread finds KV rows: cache = (kv, page_table, b, page_size, inverse, max_pages, n_pages, base) with
    # inverse = floor((2**32 - 1) / page_size), and unit, which 16 bytes of a row are the first that it copies.

    @cuda.jit(device=True, forceinline=True)
    def locate(cache, unit, token):
        """Where cache row `token` is: (page as the table has it, or the request; 16-byte units into it)."""
        kv, page_table, b, page_size, inverse, max_pages, n_pages, base = cache
        index = i32((i64(u32(token)) * i64(inverse)) >> 32)  # the quotient, or one less
        offset = i32(token - index * page_size)
        if offset >= page_size:
            index = i32(index + 1)
            offset = i32(offset - page_size)
        page = i32(b)
        if max_pages > 0 and index < max_pages:
            entry = page_table[b * max_pages + index]
            # Nothing here waits for the entry of an int32 table, so that its load is under way until `copy`.
            page = i32(entry)
            if i64(page) != i64(entry):
                page = i32(-1)
        return page, i32(offset * UNITS + unit)

    @cuda.jit(device=True, forceinline=True)
    def copy(cache, to, unit, token, page, offset):
        """Start this thread's copies of row `token`: zeros behind the request's rows and where the page is none."""
        kv, page_table, b, page_size, inverse, max_pages, n_pages, base = cache
        size, at = i32(0), i64(0)
        if token < ptx.ld_shared_b32(i32(base + SPAN + 4)):
            if page >= 0 and page < n_pages:
                size, at = i32(16), i64(page) * i32(page_size * UNITS) + offset
            else:
                ptx.st_shared_b32(i32(base + FLAG), 1)
        row = ptx.address(kv) + (at << 4)
        for i in range(whole_turns):
            ptx.cp_async_16_or_zero(i32(to + i * READERS * 16), row + i * READERS * 16, size)
        if rest > 0 and unit < rest:
            ptx.cp_async_16_or_zero(i32(to + whole_turns * READERS * 16), row + whole_turns * READERS * 16, size)

    def verify_attn_mma(
        q,  # [B,N,H,576]
        kv,  # [B,Lmax,576] or [pages,page_size,576]
        page_table,  # int[B,max_pages] or empty
        prefix_lens,  # int[B]
        n_nodes,  # i32[B]
        visibility,  # u32[B,N,W]
        heads,
        n_slots,
        page_size,  # Lmax for a contiguous cache
        inverse,  # u32: floor((2**32 - 1) / page_size)
        max_pages,  # 0 for a contiguous cache
        n_pages,
        with_prefix,
        scale_2,  # softmax scale · log2(e)
        out,  # [B,N·H,512], or f32[B,splits,strips,64,32,4]
        lse,  # f32[B,N·H], or f32[B,splits,strips,16]
    ):
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & 31)
        warp = ptx.shfl_idx(i32(tid >> 5), 0)
        team, w = i32(warp >> 2), i32(warp & 3)
        g, t = i32(lane >> 2), i32(lane & 3)  # row and column pair of a fragment that this lane holds
        b = i64(cuda.blockIdx.z)
        split, splits = i32(cuda.blockIdx.y), i32(cuda.gridDim.y)
        n_rows = i32(n_slots * heads)
        last_row = i32(n_rows - 1)
        team_row = i32(i32(cuda.blockIdx.x) * ROWS + team * TEAM_ROWS)
        base = ptx.shared_base()
        length, used = i64(prefix_lens[b]), i32(n_nodes[b])

        # ---- this warp's part of Q. Rows in an order of its own: those it will own come first.
        qf = cuda.local.array(72, i32)
        columns = ptx.address(q) + w * 256 + t * 16
        for m in range(2):
            top_row = min(i32(team_row + ((2 * m) ^ w) * 8 + g), last_row)
            low_row = min(i32(team_row + ((2 * m + 1) ^ w) * 8 + g), last_row)
            top_at = columns + (b * n_rows + top_row) * ROW_BYTES
            low_at = columns + (b * n_rows + low_row) * ROW_BYTES
            for c in range(4):
                x0, x1, x2, x3 = ptx.ld_global_v4_b32(top_at + c * 64)
                y0, y1, y2, y3 = ptx.ld_global_v4_b32(low_at + c * 64)
                k = (4 * c + m) * 4
                qf[k], qf[k + 1], qf[k + 2], qf[k + 3] = x0, y0, x1, y1
                qf[k + 8], qf[k + 9], qf[k + 10], qf[k + 11] = x2, y2, x3, y3
            rope = i64(ROPE_BYTES) - w * 224 - t * 12
            k = (16 + m) * 4
            qf[k], qf[k + 1] = ptx.ld_global_b32(top_at + rope), ptx.ld_global_b32(low_at + rope)
            qf[k + 2], qf[k + 3] = ptx.ld_global_b32(top_at + rope + 16), ptx.ld_global_b32(low_at + rope + 16)

        # ---- this block's share of the request's KV rows
        capacity = i64(page_size) * max_pages if max_pages > 0 else i64(page_size)
        # Lengths that do not fit the cache cannot be read: the request's rows become NaN, not a fault.
        broken = length < 0 or used < 0 or used > n_slots or length > capacity - used
        prefix = i32(0) if broken else i32(length)
        start = i32(0) if with_prefix else prefix
        end = i32(0) if broken else i32(prefix + used)
        tiles = i32((max(end - start, 0) + TILE - 1) // TILE)
        here = i32(start + TILE * i32(u32(tiles * split) // u32(splits)))
        stop = i32(start + TILE * i32(u32(tiles * (split + 1)) // u32(splits)))
        strips = i32((n_rows + STRIP_ROWS - 1) // STRIP_ROWS)
        if tid == 0:
            ptx.st_shared_b32(i32(base + FLAG), 1 if broken else 0)
            ptx.st_shared_b32(i32(base + SPAN), prefix)
            ptx.st_shared_b32(i32(base + SPAN + 4), end)
            if partial:
                strip = i32(i32(i32(b) * splits + split) * strips + i32(cuda.blockIdx.x) * (ROWS // STRIP_ROWS))
                ptx.st_shared_b32(i32(base + PLACE), strip)
        if tid < ROWS:
            tree_slot = i32(u32(min(i32(i32(cuda.blockIdx.x) * ROWS + tid), last_row)) // u32(heads))
            if tree_slot >= used:
                tree_slot |= i32(-0x80000000)
            ptx.st_shared_b32(i32(base + TREE_SLOTS + tid * 4), tree_slot)
        ptx.bar_sync(0, THREADS)

        # ---- the first tile of KV under way
        unit, copy_row = i32(tid % READERS), i32(tid // READERS)
        to = i32(base + copy_row * ROW_BYTES + ((unit ^ reversed_bits(copy_row)) << 4))
        cache = (kv, page_table, b, page_size, inverse, max_pages, n_pages, base)
        page, offset = locate(cache, unit, i32(here + copy_row))
        if here < stop:
            copy(cache, to, unit, i32(here + copy_row), page, offset)
            page, offset = locate(cache, unit, i32(here + copy_row + TILE))
        ptx.cp_async_commit()

        # ---- where this lane reads and writes: in slot 0, in its team's areas
        k_at = i32(base + g * ROW_BYTES + w * 256 + ((t ^ reversed_bits(g)) << 4))
        v_at = i32(base + (lane & 15) * ROW_BYTES + w * 256 + (((lane >> 4) ^ reversed_bits(lane)) << 4))
        scores = i32(base + SCORES + team * TEAM_SCORES)
        sent = i32(scores + w * PIECE + lane * 8)
        weights_to = i32(scores + (w ^ 1) * PIECE + lane * 4)
        weights_from = i32(scores + (((lane >> 3) & 1) ^ 1) * PIECE + (lane >> 4) * 128 + (lane & 7) * 16)
        factors = i32(base + FACTORS + team * (4 * TEAM_ROWS) + g * 16)
        own_row = i32(warp * 8 + g)  # in the block

        o = cuda.local.array(128, f32)
        for i in range(128):
            o[i] = f32(0.0)
        s = cuda.local.array(16, f32)
        own = cuda.local.array(8, f32)
        state = i32(base + STATE + tid * 8)
        ptx.st_shared_v2_f32(state, NEG, f32(0.0))  # of the scores in base 2; the total is this lane's share

        for i in range(8):
            own[i] = f32(0.0)
        halves = ptx.shfl_idx(i32(2), 0)  # of a tile. Were it known, loops would be unrolled, for which registers lack
        slot = i32(0)
        while here < stop:
            # The tile has landed, and all warps are through with the one before, where the next one goes.
            ptx.cp_async_wait_0()
            ptx.bar_sync(0, THREADS)
            if i32(here + TILE) < stop:
                copy(cache, i32(to + (SLOT_BYTES - slot)), unit, i32(here + TILE + copy_row), page, offset)
                page, offset = locate(cache, unit, i32(here + 2 * TILE + copy_row))
            ptx.cp_async_commit()

            # ---- partial scores; three quarters go to their owners
            p = i32(0)
            while p < halves:
                rows = i32(slot + p * 16 * ROW_BYTES)
                rope_at = i32(((v_at + rows) ^ (w << 5)) + (ROPE_BYTES - w * 256))
                partial_scores(s, qf, i32(k_at + rows), rope_at)
                for i in range(4):
                    own[i] = own[i + 4]
                    own[i + 4] = s[(i >> 1) * 4 + (i & 1)]
                for d in range(1, 4):
                    i = (d >> 1) * 8 + (d & 1) * 2
                    place = i32(sent + (d - 1) * 4 * PIECE + p * 512)
                    ptx.st_shared_v2_f32(place, s[i], s[i + 1])
                    ptx.st_shared_v2_f32(i32(place + 256), s[i + 4], s[i + 5])
                p = i32(p + 1)
            ptx.bar_sync(1 + team, TEAM_THREADS)
            for d in range(1, 4):
                for i in range(0, 8, 2):
                    place = i32(scores + (w ^ d) * PIECE + lane * 8 + (d - 1) * 4 * PIECE + i * 128)
                    x, y = ptx.ld_shared_v2_f32(place)
                    own[i] += x
                    own[i + 1] += y
            for i in range(8):
                own[i] *= scale_2

            # ---- mask, only where tree slots are
            prefix_end, end = ptx.ld_shared_v2_b32(i32(base + SPAN))
            j = i32(here - prefix_end)
            if j > -TILE:
                row_slot = i32(ptx.ld_shared_b32(i32(base + TREE_SLOTS + own_row * 4)) & 0x7FFFFFFF)
                words = i32((n_slots + 31) >> 5)
                seen = i32(window(visibility, b * n_slots + row_slot, words, j, i32(end - here)) >> (2 * t))
                for i in range(8):
                    if (seen >> ((i >> 1) * 8 + (i & 1))) & 1 == 0:
                        own[i] = NEG

            # ---- softmax of 8 rows, four lanes a row
            peak, total = ptx.ld_shared_v2_f32(state)
            top = peak
            for i in range(8):
                top = ptx.max_f32(top, own[i])
            top = ptx.max_f32(top, ptx.shfl_bfly_f32(top, 1))
            top = ptx.max_f32(top, ptx.shfl_bfly_f32(top, 2))
            shift = f32(0.0) if top == NEG else top
            shrink = ptx.ex2_approx(peak - shift)
            total *= shrink
            if t == 0:
                ptx.st_shared_f32(i32(factors + w * 4), shrink)
            ptx.warp_sync()
            for i in range(0, 8, 2):
                x, y = ptx.ex2_approx(own[i] - shift), ptx.ex2_approx(own[i + 1] - shift)
                ptx.st_shared_b32(i32(weights_to + (i >> 1) * 128), pack(x, y))
                total += x + y
            ptx.st_shared_v2_f32(state, top, total)
            ptx.bar_sync(1 + team, TEAM_THREADS)

            # ---- accumulate values
            f0, f1, f2, f3 = ptx.ld_shared_v4_f32(factors)
            one = f32(1.0)
            if ptx.vote_all(i32(f0 == one and f1 == one and f2 == one and f3 == one)) == 0:
                for n in range(16):
                    o[n * 4] *= f0
                    o[n * 4 + 1] *= f0
                    o[n * 4 + 2] *= f1
                    o[n * 4 + 3] *= f1
                    o[n * 4 + 64] *= f2
                    o[n * 4 + 65] *= f2
                    o[n * 4 + 66] *= f3
                    o[n * 4 + 67] *= f3
            p = i32(0)
            while p < halves:
                add_values(o, i32(weights_from + p * 256), i32(v_at + slot + p * 16 * ROW_BYTES))
                p = i32(p + 1)
            slot = i32(SLOT_BYTES - slot)
            here = i32(here + TILE)

        # ---- finish: every warp learns the final factor of its team's rows
        peak, total = ptx.ld_shared_v2_f32(state)
        total += ptx.shfl_bfly_f32(total, 1)
        total += ptx.shfl_bfly_f32(total, 2)
        ptx.cp_async_wait_0()
        ptx.bar_sync(0, THREADS)
        factor, log = f32(0.0), NEG
        if total != f32(0.0):
            factor = f32(1.0) / total
            log = (peak + ptx.lg2_approx(total)) * LN2
        if ptx.ld_shared_b32(i32(base + TREE_SLOTS + own_row * 4)) < 0:
            factor, log = f32(0.0), NEG
        if ptx.ld_shared_b32(i32(base + FLAG)) != 0:
            factor, log = f32(math.nan), f32(math.nan)
        tile_row = i32(i32(cuda.blockIdx.x) * ROWS)
        place = ptx.ld_shared_b32(i32(base + PLACE)) if partial else i32(0)
        first_lse = i64(place) * STRIP_ROWS if partial else b * n_rows + tile_row
        if t == 0:
            ptx.st_shared_f32(i32(factors + w * 4), factor)
            if i32(tile_row + own_row) < n_rows:
                lse[first_lse + own_row] = log
        ptx.bar_sync(1 + team, TEAM_THREADS)
        for piece_row in range(4):
            f = ptx.ld_shared_f32(i32(factors + piece_row * 4))
            i = (piece_row >> 1) * 64 + (piece_row & 1) * 2
            for n in range(16):
                # A factor of 0 marks a row that is not computed: whatever is in its accumulators.
                o[i + n * 4] = o[i + n * 4] * f if f != f32(0.0) else f32(0.0)
                o[i + n * 4 + 1] = o[i + n * 4 + 1] * f if f != f32(0.0) else f32(0.0)
        if partial:
            strip = i32(team * (TEAM_ROWS // STRIP_ROWS))  # of the block
            at = ptx.address(out) + i64(i32(place + strip)) * STRIP_BYTES + (w * 8192 + lane * 16)
            strip = i32(strip + i32(cuda.blockIdx.x) * (ROWS // STRIP_ROWS))  # of the request
            for m in range(2):
                # What saw nothing is not read.
                f, h = ptx.ld_shared_f32(i32(factors + m * 8)), ptx.ld_shared_f32(i32(factors + m * 8 + 4))
                if i32(strip + m) < strips and (f != f32(0.0) or h != f32(0.0)):
                    for n in range(16):
                        i = m * 64 + n * 4
                        ptx.st_global_v4_f32(at + (m * STRIP_BYTES + n * 512), o[i], o[i + 1], o[i + 2], o[i + 3])
        else:
            result_row = b * n_rows + team_row
            # Through the slots' memory, so that 16 lanes store 256 bytes in a row: unit u of row r at u ^ (r & 7).
            stage = i32(base + warp * 8192)
            place = i32(stage + g * 256 + (g << 4) + t * 4)
            for piece_row in range(4):
                i = (piece_row >> 1) * 64 + (piece_row & 1) * 2
                for n in range(16):
                    word_at = i32((place ^ ((n & 7) << 4)) + (n >> 3) * 128 + piece_row * 2048)
                    ptx.st_shared_b32(word_at, pack(o[i + n * 4], o[i + n * 4 + 1]))
            ptx.warp_sync()
            upper, chunk = i32(lane >> 4), i32(lane & 15)
            place = i32(stage + upper * 256 + ((chunk ^ upper) << 4))
            at = ptx.address(out) + (result_row + upper) * (2 * WIDTH) + w * 256 + chunk * 16
            for i in range(16):
                x0, x1, x2, x3 = ptx.ld_shared_v4_b32(i32((place ^ ((i & 3) << 5)) + i * 512))
                if i32(team_row + upper + 2 * i) < n_rows:
                    ptx.st_global_v4_b32(at + i * (4 * WIDTH), x0, x1, x2, x3)

    name = f"verify_attn.mma[{dtype}->{out_dtype}]"
    return Kernel(verify_attn_mma, name=name, threads=THREADS, min_blocks=1, dynamic_shared=SHARED_BYTES)


@functools.cache
def combine(out_dtype: str) -> Kernel:
    """Join the splits of each row by log-sum-exp: a warp, or a team of up to eight, per strip and 16 columns.

    Launched on (4 · teams, strips, B) blocks; the warps of a team take every `teams`-th split. What they add up is
    added in the order of the warps.
    """
    from kdtree.kernels import ptx

    pack = {"bfloat16": ptx.cvt_bf16x2, "float16": ptx.cvt_f16x2}[out_dtype]
    pitch = 4 * (STRIP_ROWS + 1)  # of a split's weights in shared memory, bytes
    sums_at = MAX_SPLITS * pitch

    @cuda.jit(device=True, forceinline=True)
    def load(v, at, stride, k, teams, splits):
        """Columns of four splits from `k` on: eight loads under way."""
        for i in range(4):
            place = at + min(i32(k + i * teams), i32(splits - 1)) * stride
            for two in range(2):
                j = i * 8 + two * 4
                v[j], v[j + 1], v[j + 2], v[j + 3] = ptx.ld_relaxed_v4_f32(place + two * 512)

    def verify_attn_combine(
        part_out,  # f32[B,splits,strips,64,32,4]; not read where the LSE is -inf
        part_lse,  # f32[B,splits,strips,16]
        splits,
        rows,
        out,  # [B,rows,512]
        lse,  # f32[B,rows]
    ):
        tid = i32(cuda.threadIdx.x)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        teams, strips = i32(i32(cuda.gridDim.x) >> 2), i64(cuda.gridDim.y)
        team = i32(warp & (teams - 1))
        columns = ptx.div_u32(i32(i32(cuda.blockIdx.x) * 8 + warp), teams)  # 16 columns
        b, strip = i64(cuda.blockIdx.z), i32(cuda.blockIdx.y)
        first = b * splits * strips + strip
        at = ptx.address(part_out) + first * STRIP_BYTES + (columns * 1024 + lane * 16)
        stride = strips * STRIP_BYTES
        base = ptx.shared_base()
        v = cuda.local.array(32, f32)
        load(v, at, stride, team, teams, splits)

        # ---- weights: 16 threads a row, each for every 16th split
        row, part = i32(tid >> 4), i32(tid & 15)
        logs = ptx.address(part_lse) + (first * 64 + row * 4)
        place = i32(base + row * 4)
        top = NEG  # passes over NaN, the sum below does not
        for k in range(part, splits, 16):
            log = ptx.ld_relaxed_f32(logs + strips * 64 * k)
            ptx.st_shared_f32(i32(place + k * pitch), log)
            top = ptx.max_f32(top, log)
        for i in range(4):
            top = ptx.max_f32(top, ptx.shfl_bfly_f32(top, 1 << i))
        shift = f32(0.0) if top == NEG else top
        total = f32(0.0)
        for k in range(part, splits, 16):
            weight = ptx.ex2_approx((ptx.ld_shared_f32(i32(place + k * pitch)) - shift) * LOG2_E)
            ptx.st_shared_f32(i32(place + k * pitch), weight)
            total += weight
        for i in range(4):
            total += ptx.shfl_bfly_f32(total, 1 << i)
        inverse = f32(0.0) if total == f32(0.0) else f32(1.0) / total
        for k in range(part, splits, 16):
            ptx.st_shared_f32(i32(place + k * pitch), ptx.ld_shared_f32(i32(place + k * pitch)) * inverse)
        row = i32(strip * STRIP_ROWS + row)
        if i32(cuda.blockIdx.x) == 0 and part == 0 and row < rows:
            lse[b * rows + row] = NEG if total == f32(0.0) else shift + ptx.lg2_approx(total) * LN2
        ptx.bar_sync(0, THREADS)

        # ---- values
        sums = cuda.local.array(8, f32)
        for i in range(8):
            sums[i] = f32(0.0)
        weights = i32(base + (lane >> 2) * 4)
        k = team
        while k < splits:
            for i in range(4):
                other = i32(k + i * teams)
                if other < splits:
                    w0 = ptx.ld_shared_f32(i32(weights + other * pitch))
                    w1 = ptx.ld_shared_f32(i32(weights + other * pitch + 32))
                    # A weight of 0 does not silence what is in memory that nobody wrote.
                    for j in range(0, 8, 4):
                        sums[j] += w0 * (v[i * 8 + j] if w0 != f32(0.0) else f32(0.0))
                        sums[j + 1] += w0 * (v[i * 8 + j + 1] if w0 != f32(0.0) else f32(0.0))
                        sums[j + 2] += w1 * (v[i * 8 + j + 2] if w1 != f32(0.0) else f32(0.0))
                        sums[j + 3] += w1 * (v[i * 8 + j + 3] if w1 != f32(0.0) else f32(0.0))
            k = i32(k + 4 * teams)
            if k < splits:
                load(v, at, stride, k, teams, splits)
        if teams > 1:
            mine = i32(base + sums_at + warp * 1024 + lane * 16)
            ptx.st_shared_v4_f32(mine, sums[0], sums[1], sums[2], sums[3])
            ptx.st_shared_v4_f32(i32(mine + 512), sums[4], sums[5], sums[6], sums[7])
            ptx.bar_sync(0, THREADS)
            if team == 0:
                for other in range(1, teams):
                    for j in range(0, 8, 4):
                        x, y, z, w = ptx.ld_shared_v4_f32(i32(mine + other * 1024 + j * 128))
                        sums[j] += x
                        sums[j + 1] += y
                        sums[j + 2] += z
                        sums[j + 3] += w
        if team == 0:
            # A lane has two columns of each 8. Neighbours exchange: an even one gets four of the first 8, an odd one
            # of the second, so that a row's 32 bytes are stored together.
            odd = i32(lane & 1)
            t = i32(lane & 3)
            first_row = b * rows + strip * STRIP_ROWS
            to = ptx.address(out) + first_row * (2 * WIDTH) + (columns * 32 + odd * 16 + (t >> 1) * 8)
            for half in range(2):
                even_word = pack(sums[2 * half], sums[2 * half + 1])
                odd_word = pack(sums[4 + 2 * half], sums[4 + 2 * half + 1])
                got = ptx.shfl_bfly_b32(even_word if odd else odd_word, 1)
                x, y = (got, odd_word) if odd else (even_word, got)
                row = i32((lane >> 2) + 8 * half)
                if i32(strip * STRIP_ROWS + row) < rows:
                    ptx.st_global_v2_b32(to + row * (2 * WIDTH), x, y)

    name = f"verify_attn.combine_mma[{out_dtype}]"
    return Kernel(verify_attn_combine, name=name, threads=THREADS, min_blocks=4, dynamic_shared=COMBINE_SHARED_BYTES)


def combine_teams(splits: int) -> int:
    """Warps of `combine` that share a strip's 16 columns: one for four splits, 8 at most, a power of two."""
    return next(teams for teams in (1, 2, 4, 8) if teams == 8 or 4 * teams >= splits)


# What `plan` weighs, µs: of an H200; the last two are estimates
STEP_US = 2.02  # a tile of KV rows in a block
BLOCK_US = 6.5  # a block's beginning and end
COMBINE_US = 6.0  # launching and running `combine`
PART_BYTES_PER_US = 4.5e6  # partial results written, and read again

MIN_STEPS = 2  # tiles of a split
MAX_WORKSPACE = 60_000_000  # bytes


@dataclass(frozen=True)
class Plan:
    """Blocks of a call: row tiles x splits x requests. One split writes the result itself."""

    grid: tuple[int, int, int]
    rows: int

    @property
    def splits(self) -> int:
        """Blocks that share a request's KV rows."""
        return self.grid[1]

    @property
    def strips(self) -> int:
        """Groups of 16 rows of a request."""
        return -(-self.rows // STRIP_ROWS)

    @property
    def parts(self) -> int:
        """Partial rows: [B,splits,strips·16]; 0 without a split."""
        return self.grid[2] * self.splits * self.strips * STRIP_ROWS if self.splits > 1 else 0

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory: partial outputs and their LSEs."""
        return 4 * self.parts * (WIDTH + 1)


@functools.lru_cache(maxsize=4096)
def plan(batch: int, n_slots: int, heads: int, capacity: int, sm_count: int) -> Plan:
    """The number of splits with the least estimated time, from shapes alone: the lengths stay on the GPU."""
    rows = n_slots * heads
    row_tiles = -(-rows // ROWS)
    steps = max(1, -(-capacity // TILE))
    best: tuple[float, Plan] | None = None
    for splits in range(1, max(1, min(MAX_SPLITS, steps // MIN_STEPS)) + 1):
        found = Plan((row_tiles, splits, batch), rows)
        if found.workspace_bytes > MAX_WORKSPACE:
            break
        waves = -(-row_tiles * splits * batch // sm_count)
        cost = waves * (BLOCK_US + -(-steps // splits) * STEP_US)
        if splits > 1:
            cost += COMBINE_US + found.workspace_bytes / PART_BYTES_PER_US
        if best is None or cost < best[0]:
            best = (cost, found)
    assert best is not None
    return best[1]


def workspace_bytes(params: dict[str, int], sm_count: int) -> int:
    """Bytes of partial outputs and LSEs that a call needs; 0 without a split. `params` = {B, rows, capacity}."""
    return plan(params["B"], params["rows"], 1, params["capacity"], sm_count).workspace_bytes


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
    if not shape["B"] * shape["N"] * shape["H"]:
        return
    chosen = plan(shape["B"], shape["N"], shape["H"], shape["capacity"], sm_count())
    into, into_dtype = outs, dtype
    if chosen.parts:
        space = workspace(chosen.workspace_bytes, stream, like)
        into_dtype = "float32"
        into = {
            "out": space.part("*f32", 0, chosen.parts * WIDTH),
            "lse": space.part("*f32", 4 * chosen.parts * WIDTH, chosen.parts),
        }
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
        ("u32", 0xFFFFFFFF // max(shape["page_size"], 1)),
        ("i32", shape["max_pages"]),
        ("i32", shape["n_pages"]),
        ("i32", shape["with_prefix"]),
        ("f32", scale * math.log2(math.e)),
        into["out"],
        into["lse"],
    )
    mma(dtype, into_dtype).launch(chosen.grid, args, stream=stream)
    if chosen.parts:
        counts = ("i32", chosen.splits), ("i32", chosen.rows)
        joined = (into["out"], into["lse"], *counts, outs["out"], outs["lse"])
        grid = (4 * combine_teams(chosen.splits), chosen.strips, shape["B"])
        combine(dtype).launch(grid, joined, stream=stream)


def variants() -> list[Variant]:
    """What is shipped: each dtype alone and in front of `combine`."""
    if SIMULATED:
        return []
    found = []
    for d in ("bfloat16", "float16"):
        w = word_of(d)
        for out in (d, "float32"):
            sizes = ("i32", "i32", "i32", "u32", "i32", "i32", "i32", "f32")
            words = (w, w, "*i32", "*i32", "*i32", "*u32", *sizes, word_of(out), "*f32")
            found.append(Variant("verify_attn", mma(d, out), words, f"mma[{d}->{out}]", SHARED_BYTES))
        joined = ("*f32", "*f32", "i32", "i32", w, "*f32")
        found.append(Variant("verify_attn", combine(d), joined, f"combine_mma[{d}]", COMBINE_SHARED_BYTES))
    return found
