"""Shared memory of a block of `verify_wgmma`, and the device functions that keep it filled.

A block's work is a list of *items*: a row tile of 64 query rows against a range of KV tiles. Copied are the *entries*
of a ring of three 64 KiB slots: an item's Q, then the value parts of its KV tiles. The rope parts of the tiles have
two places of their own, for even and odd tiles; P replaces them there.

    prepare     notes an item down, in eight places by turns, since who writes an item's output may lag behind
    plan        works out records of up to 32 tiles, a lane each: where they lie, what is to be heeded
    look_ahead  the left warpgroup's part while the tensor cores are at P·V of tile k: plans, fetches a tile to the L2
    copy_ropes  the right one's, once P·V of tile k is done: copies the rope parts of tiles up to k + 2
    issue       then, on both sides: copies that side's half of the entries that have room now

Who copies also multiplies, and nothing is multiplied meanwhile: what can be known before is in the records.

A TMA box of four chunks of 64 columns is half a tile: its tensor map has the columns as two dimensions.
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
HALF_SLOT = SLOT // 2
WIDTH = 512  # of the value part
AHEAD = 4  # of the next tile to be copied: how far tiles are fetched to the L2

# Bytes from the base of shared memory
ROPE = SLOTS * SLOT
Q_REST = ROPE + 2 * CHUNK  # Q's last two chunks
STATS = Q_REST + 2 * CHUNK  # for even and odd tiles: 64 rescale factors, 64 final factors
ITEMS = STATS + 2 * 512  # eight items
RECORDS = ITEMS + 8 * 64  # of 32 tiles by turns
WORDS = RECORDS + 32 * 16
BARS = WORDS + 224
SHARED_BYTES = BARS + 128
# mbarriers: two a slot, for its halves; by even and odd tiles; all threads of the block
FULL, ROPE_FULL, Q_FULL, P_READY, GO, DONE, MEETING = (BARS + 8 * i for i in (0, 6, 8, 9, 11, 13, 15))

# An item. WHICH is WHOLE, or the number of the block's partial result.
(I_REQUEST, I_ROWS, I_FIRST, I_EXISTS, I_T0, I_T1, I_FINAL, I_PREFIX, I_START, I_END, I_USED, I_WHICH, I_ORIGIN,
 I_TILES) = (4 * i for i in range(14))  # fmt: skip
WHOLE = 2
BROKEN = -1  # in USED: the request's lengths do not fit its cache

# A record: {cache row, a multiple of 64, and flags; page or request; row in that; item's number}
R_ITEM = 12
FIRST, LAST, MASKED, FINAL = 1, 2, 4, 8  # of an item's tiles; with tree slots or an end in it; the block's last
EMPTY, BAD, FLAGS = 16, 32, 63  # no row of it is the request's; a page that is none; all of them

# The block's range; where `prepare` stands, and what copies: by sides where a side is read or written by one alone
W_BEGIN, W_STOP, W_REQUEST, W_BASE, W_TOTAL, W_GROUPS = (WORDS + 4 * i for i in range(6))
W_POSITION = WORDS + 28
PLANNED = WORDS + 32  # {tiles, the item's next tile or -1, items}
ISSUED = WORDS + 48  # a side: {tiles, slot, is the next tile's Q copied}
UNTIL = WORDS + 80  # a side and slot: the tile whose P·V frees it
KNOWN = WORDS + 112  # a side: planned tiles that it may read
TOLD = WORDS + 120  # the same, from the left side to the right, for even and odd tiles
ROPES = WORDS + 128  # tiles whose rope parts are copied
FETCH = WORDS + 132  # the next tile that this block fetches to the L2 for its group
W_PARTS = WORDS + 144
NOTE_BYTES = 32  # of what is kept of an unfinished item: used, request, row tile, first position, tiles


@functools.cache
def device_functions(mode: str) -> tuple[Any, ...]:
    """(prepare, plan, fetch, look_ahead, issue, copy_ropes), for a kernel whose first parameters map q, KV, rope parts.

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
            ptx.warp_sync()  # all have read what one writes now
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
    def small_pages(at, start, end, page_size):
        """(first, end) of a tile's small pages that hold rows of the request. The others may not exist."""
        low = ptx.div_u32(max(start - at, 0), page_size)
        return low, ptx.div_u32(max(min(end - at, 64) + page_size - 1, 0), page_size)

    @cuda.jit(device=True, inline="always")
    def plan(base, lane, k, upto, page_table, page_size, max_pages, n_pages):
        """One warp, at tile k: records of tiles up to k + 30, of items up to number `upto`, which are noted."""
        planned, tile, number, _ = ptx.ld_shared_v4_b32(base + PLANNED)
        limit = i32(k + 31)  # its place is that of tile k - 1, which nobody reads any more
        more = planned < limit and (tile >= 0 or number <= upto)
        while more:
            item = i32(base + ITEMS + (number & 7) * 64)
            b, rows, first, exists = ptx.ld_shared_v4_b32(item)
            if exists == 0:
                more = False
            else:
                t0, t1, final, prefix = ptx.ld_shared_v4_b32(item + I_T0)
                start, end, used, which = ptx.ld_shared_v4_b32(item + I_START)
                if tile < 0:
                    tile = t0
                count = min(i32(t1 - tile), i32(limit - planned))
                if lane < count:
                    mine = i32(tile + lane)
                    at = i32((first + mine) * 64)
                    row, where, word = at, b, at
                    if mine == t0:
                        word = i32(word | FIRST)
                    if mine == i32(t1 - 1):
                        word = i32(word | LAST | final)
                    if i32(at + 64) > min(prefix, end) or at < start:
                        word = i32(word | MASKED)
                    if at >= end:
                        word = i32(word | EMPTY)
                    elif parts:
                        low, high = small_pages(at, start, end, page_size)
                        index = ptx.div_u32(at, page_size)
                        while low < high:
                            page = i32(page_table[i64(b) * max_pages + i32(index + low)])
                            if page < 0 or page >= n_pages:
                                word = i32(word | BAD)
                            low = i32(low + 1)
                    elif paged:
                        index = ptx.div_u32(at, page_size)
                        where = i32(page_table[i64(b) * max_pages + index])
                        row = i32(at - index * page_size)
                        if where < 0 or where >= n_pages:
                            word = i32(word | BAD)
                            where = i32(0)
                    ptx.st_shared_v4_b32(base + RECORDS + ((planned + lane) & 31) * 16, word, where, row, number)
                planned = i32(planned + count)
                tile = i32(tile + count)
                if tile == t1:
                    tile = i32(-1)
                    number = i32(number + 1)
                more = planned < limit and (tile >= 0 or number <= upto)
        ptx.warp_sync()
        if ptx.elect_one() != 0:
            ptx.st_shared_v4_b32(base + PLANNED, planned, tile, number, 0)
            ptx.st_shared_b32(base + KNOWN, planned)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def fetch(base, planned, members):
        """One warp: tiles that are soon to be copied come to the L2, a tile from each of the group's blocks in turn.

        Three slots are too few to wait for memory.
        """
        upto = i32(min(ptx.ld_shared_b32(base + ISSUED) + AHEAD, planned))
        tile = ptx.ld_shared_b32(base + FETCH)
        ptx.warp_sync()
        if not parts and ptx.elect_one() != 0:
            while tile < upto:
                word, where, row, _ = ptx.ld_shared_v4_b32(base + RECORDS + (tile & 31) * 16)
                if word & EMPTY == 0:
                    for g in range(2):
                        ptx.cp_async_bulk_prefetch_tensor_4d(kv_map(), 0, row, g * 4, where)
                    ptx.cp_async_bulk_prefetch_tensor_4d(rope_map(), 0, row, VALUE_CHUNKS, where)
                tile = i32(tile + members)
            ptx.st_shared_b32(base + FETCH, tile)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def look_ahead(base, lane, k, members, page_table, page_size, max_pages, n_pages):
        """The left side's first warp, while P·V of tile k is under way."""
        if ptx.ld_shared_b32(base + PLANNED) < i32(k + 8):
            upto = i32(ptx.ld_shared_b32(base + RECORDS + (k & 31) * 16 + R_ITEM) + 2)
            plan(base, lane, k, upto, page_table, page_size, max_pages, n_pages)
        planned = ptx.ld_shared_b32(base + PLANNED)
        if ptx.elect_one() != 0:
            ptx.st_shared_b32(base + TOLD + (k & 1) * 4, planned)
        fetch(base, planned, members)

    @cuda.jit(device=True, inline="always")
    def issue(base, lane, side, k, page_table, page_size, max_pages, n_pages):
        """One warp a side, once P·V of tile k is done (-1: at the start): copy that side's half of what has room now.

        A slot is free when the KV tile in it is used up, or the first tile of the item whose Q it holds. The maps of q
        and of the cache have four dimensions: 64 columns, rows, chunks of columns, requests or pages. Boxes: q 64 rows
        x 2 chunks; kv 64 x 4; rope a page's rows of a tile x 1.
        """
        issued, slot, asked, _ = ptx.ld_shared_v4_b32(base + ISSUED + side * 16)
        known = ptx.ld_shared_b32(base + KNOWN + side * 4)
        more = issued < known
        while more:
            until = i32(base + UNTIL + side * 16 + slot * 4)
            if ptx.ld_shared_b32(until) > k:
                more = False
            else:
                word, where, row, number = ptx.ld_shared_v4_b32(base + RECORDS + (issued & 31) * 16)
                full = i32(base + FULL + slot * 16 + side * 8)
                into = i32(base + slot * SLOT + side * HALF_SLOT)
                ptx.warp_sync()
                if asked == 0 and word & FIRST != 0:
                    if ptx.elect_one() != 0:
                        ptx.st_shared_b32(until, issued)
                        b, rows, first, exists = ptx.ld_shared_v4_b32(base + ITEMS + (number & 7) * 64)
                        ptx.mbarrier_expect_tx(full, HALF_SLOT)
                        for c in range(0, 4, 2):
                            ptx.cp_async_bulk_tensor_4d(into + c * CHUNK, q_map(), 0, rows, i32(side * 4 + c), b, full)
                    asked = i32(1)
                else:
                    if ptx.elect_one() != 0:
                        ptx.st_shared_b32(until, issued)
                        if word & EMPTY != 0:
                            ptx.mbarrier_arrive(full)
                        elif not parts:
                            ptx.mbarrier_expect_tx(full, HALF_SLOT)
                            ptx.cp_async_bulk_tensor_4d(into, kv_map(), 0, row, side * 4, where, full)
                    if parts and word & EMPTY == 0:
                        at = i32(word & ~FLAGS)
                        start, end, used, which = ptx.ld_shared_v4_b32(base + ITEMS + (number & 7) * 64 + I_START)
                        low, high = small_pages(at, start, end, page_size)
                        if ptx.elect_one() != 0:
                            ptx.mbarrier_expect_tx(full, (high - low) * page_size * 512)
                        ptx.warp_sync()
                        if low <= lane and lane < high:  # a lane a page, of which a tile has eight at most
                            index = i32(ptx.div_u32(at, page_size) + lane)
                            page = i32(page_table[i64(where) * max_pages + index])
                            if page < 0 or page >= n_pages:
                                page = i32(0)
                            for c in range(4):
                                to = i32(into + c * CHUNK + lane * page_size * 128)
                                ptx.cp_async_bulk_tensor_4d(to, rope_map(), 0, 0, i32(side * 4 + c), page, full)
                    asked = i32(0)
                    issued = i32(issued + 1)
                ptx.warp_sync()
                slot = i32(slot + 1) if slot < SLOTS - 1 else i32(0)
                more = issued < known
        ptx.warp_sync()
        if ptx.elect_one() != 0:
            ptx.st_shared_v4_b32(base + ISSUED + side * 16, issued, slot, asked, 0)
        ptx.warp_sync()

    @cuda.jit(device=True, inline="always")
    def copy_ropes(base, lane, k, page_table, page_size, max_pages, n_pages):
        """The right side's first warp, once P·V of tile k is done: where P of tile k was is room."""
        tile = ptx.ld_shared_b32(base + ROPES)
        known = ptx.ld_shared_b32(base + TOLD + (k & 1) * 4)
        while tile <= i32(k + 2) and tile < known:
            word, where, row, number = ptx.ld_shared_v4_b32(base + RECORDS + (tile & 31) * 16)
            full = i32(base + ROPE_FULL + (tile & 1) * 8)
            into = i32(base + ROPE + (tile & 1) * CHUNK)
            if ptx.elect_one() != 0:
                if word & EMPTY != 0:
                    ptx.mbarrier_arrive(full)
                elif not parts:
                    ptx.mbarrier_expect_tx(full, CHUNK)
                    ptx.cp_async_bulk_tensor_4d(into, rope_map(), 0, row, VALUE_CHUNKS, where, full)
            if parts and word & EMPTY == 0:
                at = i32(word & ~FLAGS)
                start, end, used, which = ptx.ld_shared_v4_b32(base + ITEMS + (number & 7) * 64 + I_START)
                low, high = small_pages(at, start, end, page_size)
                if ptx.elect_one() != 0:
                    ptx.mbarrier_expect_tx(full, (high - low) * page_size * 128)
                ptx.warp_sync()
                if low <= lane and lane < high:
                    page = i32(page_table[i64(where) * max_pages + i32(ptx.div_u32(at, page_size) + lane)])
                    if page < 0 or page >= n_pages:
                        page = i32(0)
                    to = i32(into + lane * page_size * 128)
                    ptx.cp_async_bulk_tensor_4d(to, rope_map(), 0, 0, VALUE_CHUNKS, page, full)
            tile = i32(tile + 1)
        ptx.warp_sync()
        if ptx.elect_one() != 0:
            ptx.st_shared_b32(base + ROPES, tile)
            ptx.st_shared_b32(base + KNOWN + 4, known)
        ptx.warp_sync()

    return prepare, plan, fetch, look_ahead, issue, copy_ropes
