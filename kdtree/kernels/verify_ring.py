"""Shared memory of a block of `verify_wgmma`, and the device functions that keep it filled.

A block's work is a list of *items*: a row tile of 64 query rows against a range of KV tiles. Copied are the *entries*
of a ring of three 64 KiB slots: an item's Q, then the value parts of its KV tiles. The rope parts of the tiles have
two places of their own, for even and odd tiles; P replaces them there.

    prepare    notes an item down, in eight places by turns, since who writes an item's output may lag behind
    copy_step  copies the entries that have room once P·V of tile k is done
    copy_rope  copies the rope part of tile k + 2 then, where P of tile k has been

A TMA box of four chunks of 64 columns makes a tile two instructions: its tensor map has the columns as two dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kdtree._cuda import cuda

i32, i64 = np.int32, np.int64

TILE = 64  # KV rows a tile and query rows a block
CHUNK = TILE * 128  # bytes: 64 rows of 64 elements, the width of a 128-byte swizzle pattern
VALUE_CHUNKS = 8  # of the value part, 512 wide; the ninth chunk of a row is its rope part
KEPT = 7  # chunks of Q that live in registers, 112 of them
SLOT = VALUE_CHUNKS * CHUNK
SLOTS = 3
WIDTH = 512  # of the value part

# Bytes from the base of shared memory
ROPE = SLOTS * SLOT
Q_REST = ROPE + 2 * CHUNK  # Q's last two chunks
STATS = Q_REST + 2 * CHUNK  # for even and odd tiles: 64 rescale factors, 64 final factors
ITEMS = STATS + 2 * 512  # eight items
TICKETS = ITEMS + 8 * 64  # one a slot
ROPES = TICKETS + SLOTS * 16  # where the rope parts of four tiles come from, and the tile, if it is to be copied later
WORDS = ROPES + 4 * 16
BARS = WORDS + 128
SHARED_BYTES = BARS + 128
# mbarriers: two a slot, for its halves; then by even and odd tiles
FULL, ROPE_FULL, Q_FULL, P_READY, GO, DONE = (BARS + 8 * i for i in (0, 6, 8, 9, 11, 13))
HALF_SLOT = SLOT // 2

# An item. WHICH is WHOLE, or the number of the block's partial result.
(I_REQUEST, I_ROWS, I_FIRST, I_EXISTS, I_T0, I_T1, I_FINAL, I_PREFIX, I_START, I_END, I_USED, I_WHICH, I_ORIGIN,
 I_TILES) = (4 * i for i in range(14))  # fmt: skip
WHOLE = 2
BROKEN = -1  # in USED: the request's lengths do not fit its cache

# A ticket: what is in a slot
T_AT, T_FLAGS, T_ITEM, T_BAD = 0, 4, 8, 12
FIRST, LAST, MASKED, FINAL = 1, 2, 4, 8  # of an item's tiles; with tree slots or an end in it; the block's last

# The block's range; where `prepare` and `copy_step` stand
W_BEGIN, W_STOP, W_REQUEST, W_BASE, W_TOTAL, W_GROUPS = (WORDS + 4 * i for i in range(6))
W_POSITION = WORDS + 28
C_SLOT, C_TILE, C_KV, C_ITEM, C_HELD = (WORDS + 32 + 4 * i for i in range(5))  # C_HELD has a word a slot
W_PARTS = WORDS + 64
NOTE_BYTES = 32  # of what is kept of an unfinished item: used, request, row tile, first position, tiles


@functools.cache
def device_functions(mode: str) -> tuple[Any, Any, Any]:
    """(prepare, copy_step, copy_rope), for a kernel whose first three parameters are the maps of q, KV and rope parts.

    mode: see `latent_maps.page_mode`.
    """
    from kdtree.kernels import ptx
    from kdtree.kernels.verify_plan import device_functions as plan_functions

    extent, tiles_of, _, _ = plan_functions()
    q_map, kv_map, rope_map = (ptx.tensor_map_address(i) for i in range(3))
    paged = mode != "rows"
    parts = mode == "part"

    @cuda.jit(device=True, inline="always")
    def prepare(
        base, lane, number, member, members, passes, prefix_lens, n_nodes, n_slots, row_tiles, capacity, with_prefix
    ):
        """One warp notes item `number` of the block down, or that there is none."""
        item = i32(base + ITEMS + (number & 7) * 64)
        position, stop = ptx.ld_shared_b32(base + W_POSITION), ptx.ld_shared_b32(base + W_STOP)
        if position >= stop:
            if lane == 0:
                ptx.st_shared_b32(item + I_EXISTS, 0)
        else:
            missing = (passes - 1) * members + member >= row_tiles  # the last pass has no row tile for this member
            b, origin = ptx.ld_shared_b32(base + W_REQUEST), ptx.ld_shared_b32(base + W_BASE)
            prefix, used, broken, start, end = extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix)
            tiles, first = tiles_of(start, end)
            sweep = ptx.div_u32(position - origin, tiles)
            if missing and sweep == passes - 1:
                # Go on with the next request, if it begins in the range.
                origin = i32(origin + tiles * passes)
                position = origin
                sweep = i32(0)
                if position < stop:
                    b = i32(b + 1)
                    prefix, used, broken, start, end = extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix)
                    tiles, first = tiles_of(start, end)
            t0 = i32(position - origin - sweep * tiles)
            t1 = i32(min(tiles, t0 + stop - position))
            position = i32(position + t1 - t0)
            which = i32(WHOLE)
            if t0 > 0:
                which = i32(0)
            elif t1 < tiles:
                which = i32(1)
            final = position >= stop
            if missing and t1 == tiles and sweep == passes - 2:
                final = position + tiles >= stop
            if lane == 0 and t1 <= t0:
                ptx.st_shared_b32(item + I_EXISTS, 0)
            elif lane == 0:
                if broken:
                    used = i32(BROKEN)
                flag = i32(FINAL) if final else i32(0)
                ptx.st_shared_v4_b32(item, b, (sweep * members + member) * 64, first, 1)
                ptx.st_shared_v4_b32(item + I_T0, t0, t1, flag, prefix)
                ptx.st_shared_v4_b32(item + I_START, start, end, used, which)
                ptx.st_shared_b32(item + I_ORIGIN, origin + sweep * tiles)
                ptx.st_shared_b32(item + I_TILES, tiles)
                if t1 == tiles and sweep == passes - 1:
                    b = i32(b + 1)
                    origin = i32(origin + tiles * passes)
                if final:
                    position = stop
                ptx.st_shared_b32(base + W_REQUEST, b)
                ptx.st_shared_b32(base + W_BASE, origin)
                ptx.st_shared_b32(base + W_POSITION, position)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def rope(base, k, lane, page_table, page_size, max_pages, n_pages, row, where, low, high):
        """One warp: copy the rope part of tile k."""
        full = i32(base + ROPE_FULL + (k & 1) * 8)
        into = i32(base + ROPE + (k & 1) * CHUNK)
        if ptx.elect_one() != 0:
            if high <= low:
                ptx.mbarrier_arrive(full)
            elif parts:
                ptx.mbarrier_expect_tx(full, (high - low) * page_size * 128)
            else:
                ptx.mbarrier_expect_tx(full, CHUNK)
                ptx.cp_async_bulk_tensor_4d(into, rope_map(), 0, row, VALUE_CHUNKS, where, full)
        if parts:
            ptx.warp_sync()
            if low <= lane and lane < high:  # a lane a page, of which a tile has eight at most
                page = i32(page_table[i64(where) * max_pages + i32(ptx.div_u32(row, page_size) + lane)])
                if page < 0 or page >= n_pages:
                    page = i32(0)
                ptx.cp_async_bulk_tensor_4d(
                    i32(into + lane * page_size * 128), rope_map(), 0, 0, VALUE_CHUNKS, page, full
                )

    @cuda.jit(device=True, inline="always")
    def copy_rope(base, k, lane, page_table, page_size, max_pages, n_pages):
        """One warp, once P·V of tile k - 2 is done: copy the rope part of tile k, if `copy_step` left that."""
        row, where, rows, tile = ptx.ld_shared_v4_b32(base + ROPES + (k & 3) * 16)
        if tile == k:
            low, high = i32(rows & 255), i32(rows >> 8)
            rope(base, k, lane, page_table, page_size, max_pages, n_pages, row, where, low, high)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def copy_step(base, lane, k, page_table, page_size, max_pages, n_pages):
        """One warp, once P·V of tile k is done (-1: at the start): copy the entries that have room now.

        A slot is free when the KV tile in it is used up, or the first tile of the item whose Q it holds. The place of a
        rope part is free when P of two tiles before is used up. The maps of q and of the cache have four dimensions: 64
        columns, rows, chunks of columns, requests or pages. Boxes: q 64 rows x 2 chunks; kv 64 x 4; rope a page's rows
        of a tile x 1.
        """
        slot, tile, kv, number = ptx.ld_shared_v4_b32(base + C_SLOT)
        more = True
        while more:
            item = i32(base + ITEMS + (number & 7) * 64)
            b, rows, first, exists = ptx.ld_shared_v4_b32(item)
            more = ptx.ld_shared_b32(base + C_HELD + slot * 4) <= k and (tile >= 0 or exists != 0)
            if more:
                full = i32(base + FULL + slot * 16)
                into = i32(base + slot * SLOT)
                t0, t1, final, prefix = ptx.ld_shared_v4_b32(item + I_T0)
                if tile < 0:
                    if ptx.elect_one() != 0:
                        for g in range(2):
                            ptx.mbarrier_expect_tx(full + g * 8, HALF_SLOT)
                        for c in range(0, 8, 2):
                            ptx.cp_async_bulk_tensor_4d(into + c * CHUNK, q_map(), 0, rows, c, b, full + (c >> 2) * 8)
                        ptx.st_shared_b32(base + C_HELD + slot * 4, kv)
                    tile = t0
                else:
                    start, end, used, which = ptx.ld_shared_v4_b32(item + I_START)
                    at = i32((first + tile) * 64)
                    flags = i32(0)
                    if tile == t0:
                        flags = i32(FIRST)
                    if tile == i32(t1 - 1):
                        flags = i32(flags | LAST | final)
                    if i32(at + 64) > min(prefix, end) or at < start:
                        flags = i32(flags | MASKED)
                    tile = i32(tile + 1)
                    if flags & LAST != 0:
                        tile = i32(-1)
                    row, where, low, high, bad = at, b, i32(0), i32(1), i32(0)
                    height = i32(64)
                    if parts:
                        height = i32(page_size)
                    if paged:
                        # Rows that are not the request's are not read: their pages may not exist.
                        low = ptx.div_u32(max(start - at, 0), height)
                        high = ptx.div_u32(max(min(end - at, 64) + height - 1, 0), height)
                        index = ptx.div_u32(at, page_size)
                        if parts:
                            if low <= lane and lane < high:
                                page = i32(page_table[i64(b) * max_pages + i32(index + lane)])
                                if page < 0 or page >= n_pages:
                                    bad = i32(1)
                            bad = ptx.vote_ballot(bad)
                        elif high > low:
                            where = i32(page_table[i64(b) * max_pages + index])
                            row = i32(at - index * page_size)
                            if where < 0 or where >= n_pages:
                                bad = i32(1)
                                where = i32(0)
                    if ptx.elect_one() != 0:
                        ptx.st_shared_v4_b32(base + TICKETS + slot * 16, at, flags, number, bad)
                        if kv > i32(k + 2):
                            ptx.st_shared_v4_b32(base + ROPES + (kv & 3) * 16, row, where, i32(low | (high << 8)), kv)
                        ptx.st_shared_b32(base + C_HELD + slot * 4, kv)
                        for g in range(2):
                            if high > low:
                                ptx.mbarrier_expect_tx(full + g * 8, (high - low) * height * 512)
                            else:
                                ptx.mbarrier_arrive(full + g * 8)
                        if not parts and high > low:
                            for g in range(2):
                                ptx.cp_async_bulk_tensor_4d(
                                    into + g * HALF_SLOT, kv_map(), 0, row, g * 4, where, full + g * 8
                                )
                            if kv > i32(k + 2):
                                ptx.cp_async_bulk_prefetch_tensor_4d(rope_map(), 0, row, VALUE_CHUNKS, where)
                    ptx.warp_sync()
                    if parts:
                        if low <= lane and lane < high:
                            page = i32(page_table[i64(b) * max_pages + i32(index + lane)])
                            if page < 0 or page >= n_pages:
                                page = i32(0)
                            to = i32(into + lane * height * 128)
                            c = i32(0)
                            while c < VALUE_CHUNKS:
                                ptx.cp_async_bulk_tensor_4d(
                                    i32(to + c * CHUNK), rope_map(), 0, 0, c, page, i32(full + (c >> 2) * 8)
                                )
                                c = i32(c + 1)
                    if kv <= i32(k + 2):
                        # Nothing is in its place: at once. Later ones are the other warpgroup's, see `copy_rope`.
                        ptx.warp_sync()
                        rope(base, kv, lane, page_table, page_size, max_pages, n_pages, row, where, low, high)
                    kv = i32(kv + 1)
                    if tile < 0:
                        number = i32(number + 1)
                ptx.warp_sync()
                slot = i32(slot + 1)
                if slot == SLOTS:
                    slot = i32(0)
        if ptx.elect_one() != 0:
            ptx.st_shared_v4_b32(base + C_SLOT, slot, tile, kv, number)
        ptx.warp_sync()

    return prepare, copy_step, copy_rope
