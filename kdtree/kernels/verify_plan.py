"""Who computes what in verify_attn: shares of the KV range, planned from shapes, cut from lengths on the device.

A *row tile* is 64 rows (slot·H + head) of a request, a *KV tile* 64 rows of its cache. `members` blocks form a group:
they walk the same KV tiles at the same time, each for its own row tile, so a tile comes from memory once and from L2
for the others. A request with more row tiles than members is walked in `passes`. All KV tiles of all requests and
passes, laid end to end, are cut into equal ranges, one a group, wherever the cut falls: that balances ragged lengths.
A range that does not hold a request's whole pass gives a partial result; `join` adds those up by log-sum-exp, each
contributor taking a share of the rows. Partial results always add in the order of the KV tiles: two runs give the same
bits.

The host chooses passes, members and groups from shapes (`plan`); the lengths stay on the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree._cuda import cuda

i32, i64 = np.int32, np.int64


@functools.cache
def device_functions() -> tuple[Any, ...]:
    """(extent, tiles_of, window, locate) for Numba kernels."""
    from kdtree.kernels import ptx, visibility

    slots = visibility.window()

    @cuda.jit(device=True, inline="always")
    def extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix):
        """(prefix, used slots, broken, first row, end): what request b sees; nothing if its lengths do not fit."""
        length, used = i64(prefix_lens[b]), i32(n_nodes[b])
        broken = length < 0 or used < 0 or used > n_slots or length > capacity - used
        prefix, start = i32(0), i32(0)
        if broken:
            used = i32(0)
        else:
            prefix = i32(length)
            if with_prefix == 0:
                start = prefix
        return prefix, used, broken, start, i32(prefix + used)

    @cuda.jit(device=True, inline="always")
    def tiles_of(start, end):
        """(KV tiles, the first one): at least one, so that a request without rows is written too."""
        first = i32(start >> 6)
        return i32(max(i32(1), i32(((end + 63) >> 6) - first))), first

    @cuda.jit(device=True, inline="always")
    def window(visibility, row, n_slots, token, prefix, start, end):
        """Bits of the 32 cache rows from `token` on that slot `row` of visibility [B·N, W] sees, int32."""
        bits = slots(visibility, row, i32((n_slots + 31) >> 5), i32(token - prefix), i32(end - token))
        before = i32(min(max(start - token, 0), 32))
        return i32(bits & ~((i64(1) << before) - 1))

    @cuda.jit(device=True, inline="always")
    def tiles_at(b, batch, prefix_lens, n_nodes, n_slots, capacity, with_prefix):
        """KV tiles of request b, 0 where there is none."""
        count = i32(0)
        if b < batch:
            prefix, used, broken, start, end = extent(prefix_lens, n_nodes, b, n_slots, capacity, with_prefix)
            count, first = tiles_of(start, end)
        return count

    @cuda.jit(device=True, inline="always")
    def locate(words, lane, group, groups, passes, batch, prefix_lens, n_nodes, n_slots, capacity, with_prefix):
        """One warp writes {first, end of the group's range, its first request, where that begins, total, groups}."""
        total = i32(0)
        for b0 in range(0, batch, 32):
            mine = tiles_at(i32(b0 + lane), batch, prefix_lens, n_nodes, n_slots, capacity, with_prefix)
            for step in (16, 8, 4, 2, 1):
                mine = i32(mine + ptx.shfl_bfly_b32(mine, step))
            total = i32(total + mine)
        total = i32(total * passes)
        groups = i32(min(groups, total))
        begin, stop = i32(0), i32(0)
        if group < groups:
            begin = ptx.div_u32(group * total, groups)  # `plan` keeps the product below 2**32
            stop = ptx.div_u32((group + 1) * total, groups)
        request, request_base, base = i32(0), i32(0), i32(0)
        for b0 in range(0, batch, 32):
            count = tiles_at(i32(b0 + lane), batch, prefix_lens, n_nodes, n_slots, capacity, with_prefix)
            mine = i32(count * passes)
            upto = mine
            for step in (1, 2, 4, 8, 16):
                below = ptx.shfl_up(upto, step)
                if lane >= step:
                    upto = i32(upto + below)
            here = ptx.shfl_idx(upto, 31)
            if base <= begin and begin < base + here:
                before = i32(cuda.popc(ptx.vote_ballot(i32(base + upto <= begin))))
                request = i32(b0 + before)
                request_base = i32(base + ptx.shfl_idx(i32(upto - mine), before))
            base = i32(base + here)
        if lane == 0:
            ptx.st_shared_b32(words, begin)
            ptx.st_shared_b32(words + 4, stop)
            ptx.st_shared_b32(words + 8, request)
            ptx.st_shared_b32(words + 12, request_base)
            ptx.st_shared_b32(words + 16, total)
            ptx.st_shared_b32(words + 20, groups)

    return extent, tiles_of, window, locate


@dataclass(frozen=True)
class Plan:
    """Shares of one call, from its shapes. The workspace holds partial outputs, then their LSEs."""

    passes: int
    members: int
    groups: int
    row_tiles: int
    out_bytes: int
    lse_bytes: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.members * self.groups

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory."""
        return self.out_bytes + self.lse_bytes


# What `plan` weighs, µs: fitted to some 700 plans over 180 shapes on an H200, which it meets within 3 % on average
TILE_US = 1.6  # a KV tile against a row tile
ITEM_US = 6.0  # beginning and ending an item
SPLIT_US = 3.0  # meeting, and adding partial results up
PART_US = 0.08  # more for each contributor
PARTIAL_BYTES_PER_US = 4.7e6  # partial results written and read again
UNEVEN_US = 8.0  # a range that holds parts of two requests meets twice
L2_BYTES = 40e6  # of KV that is still there in the next pass
BYTES_PER_US = 3.0e6  # of KV, from memory


@functools.lru_cache(maxsize=4096)
def plan(batch: int, n_rows: int, capacity: int, sm_count: int) -> Plan:
    """Passes, members and groups for B requests of N·H = `n_rows` rows and at most `capacity` cache rows.

    The choice is that of the least estimated time: the tiles of the busiest block, or the bytes of KV that come from
    memory, once a pass where KV does not stay in L2; and what items and splits cost.
    """
    row_tiles = max(1, -(-n_rows // 64))
    tiles = max(1, -(-capacity // 64))
    kv_bytes = 1152.0 * batch * capacity
    partial_bytes = -(-n_rows // 16) * 16 * 2048 / row_tiles  # of a row tile: warps without a row store nothing
    best: tuple[float, int, int, int] | None = None
    # Ranges are cut by 32-bit arithmetic: positions below 2**31, a position times groups below 2**32.
    for passes in range(1, row_tiles + 1):
        members = -(-row_tiles // passes)
        if members > sm_count or -(-row_tiles // members) != passes:
            continue
        walks = batch * passes  # of one request's tiles by one group
        work = walks * tiles
        if work >= 2**31:
            continue
        most = min(sm_count // members, work, (2**32 - 1) // work)
        even = {walks * i for i in range(1, most // walks + 1)} | {i for i in range(1, most + 1) if walks % i == 0}
        for groups in sorted(even | {most}):
            busiest = -(-work // groups)
            cost = busiest * TILE_US + ITEM_US * -(-walks // groups)
            if walks % groups:
                uneven = groups not in even
                cost += SPLIT_US + UNEVEN_US * uneven + PART_US * -(-groups // walks)
                cost += (1 + uneven) * groups * members * partial_bytes / PARTIAL_BYTES_PER_US
            cost = max(cost, kv_bytes * (passes if kv_bytes > L2_BYTES else 1) / BYTES_PER_US)
            if best is None or cost < best[0] - 1e-6:
                best = (cost, passes, members, groups)
    if best is None:
        raise ValueError(
            f"got B={batch}, {n_rows} rows of N·H and a cache of {capacity} rows a request, expected less: "
            "their tiles of 64 x 64 cannot be numbered in 31 bits"
        )
    _, passes, members, groups = best
    blocks = members * groups
    return Plan(
        passes=passes,
        members=members,
        groups=groups,
        row_tiles=row_tiles,
        out_bytes=blocks * 2 * 64 * 512 * 4,
        lse_bytes=blocks * 2 * 64 * 4,
    )
