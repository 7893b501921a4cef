"""tree_build: the budget most probable rank paths, with every derived array, in one launch.

Contract: `kdtree.ref.tree_build`. Order: score descending, then rank path ascending; scores are float64 sums.
Per call: reads 8·B·D·K bytes, writes the DraftTree; no FLOP to speak of. Latency decides.

Ladder
    simt   one block a request. The frontier is a flat list in shared memory; every step the threads search it
           for the best entry and reduce. budget² / threads comparisons, budget · log(threads) barriers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.kernels.bits import _device
from kdtree.kernels.launch import Kernel, Operand, Variant
from kdtree.spec import MAX_BUDGET

f64, i32, i64, u32 = np.float64, np.int32, np.int64, np.uint32

THREADS = 2 if SIMULATED else 128
CAPACITIES = (65, 257, MAX_BUDGET + 1)  # slots that a compiled form has room for


@_device
def path_before(parent_a, rank_a, parent_b, rank_b, parents, ranks, depths):
    """Is rank path a before rank path b as a tuple? A path is its parent's slot and its last rank."""
    level_a, level_b = depths[parent_a], depths[parent_b]
    deeper = level_a > level_b
    while level_a > level_b:
        rank_a, parent_a, level_a = ranks[parent_a], parents[parent_a], level_a - 1
    while level_b > level_a:
        rank_b, parent_b, level_b = ranks[parent_b], parents[parent_b], level_b - 1
    while parent_a != parent_b:
        rank_a, parent_a = ranks[parent_a], parents[parent_a]
        rank_b, parent_b = ranks[parent_b], parents[parent_b]
    if rank_a != rank_b:
        return rank_a < rank_b
    return not deeper


@functools.cache
def simt(capacity: int, threads: int = THREADS) -> Kernel:
    """The readable version for trees of at most `capacity` slots."""

    def tree_build_simt(
        log_probs,  # f32[B,D,K]
        candidates,  # int[B,D,K]
        root_tokens,  # int[B] or empty
        prefix_lens,  # int[B] or empty
        has_root,
        has_prefix,
        depth,
        width,
        n_slots,
        token_ids,  # i32[B,N]
        parents,  # i32[B,N]
        depths,  # i32[B,N]
        scores,  # f64[B,N]
        n_nodes,  # i32[B]
        visibility,  # u32[B,N,W]
        first_child,  # i32[B,N]
        next_sibling,  # i32[B,N]
        positions,  # i64[B,N]
    ):
        b, tid = i64(cuda.blockIdx.x), cuda.threadIdx.x
        rows = b * depth * width
        # The tree so far, by slot.
        score = cuda.shared.array(capacity, np.float64)
        parent = cuda.shared.array(capacity, np.int32)
        rank = cuda.shared.array(capacity, np.int32)
        level = cuda.shared.array(capacity, np.int32)
        # The frontier: candidates whose parent is in the tree. Each step takes one out and adds at most two.
        open_score = cuda.shared.array(capacity, np.float64)
        open_parent = cuda.shared.array(capacity, np.int32)
        open_rank = cuda.shared.array(capacity, np.int32)
        best = cuda.shared.array(threads, np.int32)
        sizes = cuda.shared.array(2, np.int32)  # slots in the tree, entries in the frontier

        if tid == 0:
            score[0], parent[0], rank[0], level[0] = 0.0, -1, -1, 0
            sizes[0], sizes[1] = 1, 0
            if depth > 0 and width > 0 and n_slots > 1 and math.isfinite(log_probs[rows]):
                open_score[0], open_parent[0], open_rank[0] = f64(log_probs[rows]), 0, 0
                sizes[1] = 1
        cuda.syncthreads()

        while sizes[0] < n_slots and sizes[1] > 0:
            # Each thread's best entry, then a tree reduction over the threads.
            mine = -1
            for i in range(tid, sizes[1], threads):
                if (
                    mine < 0
                    or open_score[i] > open_score[mine]
                    or (
                        open_score[i] == open_score[mine]
                        and path_before(
                            open_parent[i],
                            open_rank[i],
                            open_parent[mine],
                            open_rank[mine],
                            parent,
                            rank,
                            level,
                        )
                    )
                ):
                    mine = i
            best[tid] = mine
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if tid < half:
                    i, mine = best[tid + half], best[tid]
                    if i >= 0 and (
                        mine < 0
                        or open_score[i] > open_score[mine]
                        or (
                            open_score[i] == open_score[mine]
                            and path_before(
                                open_parent[i],
                                open_rank[i],
                                open_parent[mine],
                                open_rank[mine],
                                parent,
                                rank,
                                level,
                            )
                        )
                    ):
                        best[tid] = i
                cuda.syncthreads()
                half //= 2
            if tid == 0:
                taken, slot = best[0], sizes[0]
                above, r = open_parent[taken], open_rank[taken]
                score[slot], parent[slot], rank[slot] = open_score[taken], above, r
                level[slot] = level[above] + 1
                sizes[0] = slot + 1
                # Its next sibling takes its place, its first extension goes to the end.
                base = rows + i64(level[above]) * width
                if r + 1 < width and math.isfinite(log_probs[base + r + 1]):
                    open_score[taken] = score[above] + f64(log_probs[base + r + 1])
                    open_rank[taken] = r + 1
                else:
                    last = sizes[1] - 1
                    open_score[taken], open_parent[taken] = open_score[last], open_parent[last]
                    open_rank[taken] = open_rank[last]
                    sizes[1] = last
                base += width
                if level[slot] < depth and math.isfinite(log_probs[base]):
                    last = sizes[1]
                    if last < capacity:
                        open_score[last], open_parent[last] = score[slot] + f64(log_probs[base]), slot
                        open_rank[last] = 0
                        sizes[1] = last + 1
            cuda.syncthreads()

        # Everything that follows from parents and ranks, a slot a thread.
        used = sizes[0]
        words = (n_slots + 31) // 32
        prefix = i64(0)
        if has_prefix:
            prefix = i64(prefix_lens[b])
        if tid == 0:
            n_nodes[b] = used
        for i in range(tid, n_slots, threads):
            out = b * n_slots + i
            for w in range(words):
                visibility[out * words + w] = u32(0)
            child, sibling = -1, -1
            if i >= used:
                token_ids[out], parents[out], depths[out] = -1, -1, 0
                scores[out], positions[out] = f64(-math.inf), prefix
            else:
                if i > 0:
                    token_ids[out] = i32(candidates[rows + i64(level[i] - 1) * width + rank[i]])
                elif has_root:
                    token_ids[out] = i32(root_tokens[b])
                else:
                    token_ids[out] = -1
                parents[out], depths[out] = parent[i], level[i]
                scores[out], positions[out] = score[i], prefix + level[i]
                j = i
                while j >= 0:
                    word = out * words + j // 32
                    visibility[word] = u32(visibility[word] | (u32(1) << u32(j % 32)))
                    j = parent[j]
                j = used - 1
                while j > i:  # downwards, so that the lowest slot is found last
                    if parent[j] == i:
                        child = j
                    if parent[j] == parent[i]:
                        sibling = j
                    j -= 1
            first_child[out], next_sibling[out] = child, sibling

    return Kernel(tree_build_simt, name=f"tree_build.simt[N<={capacity}]", threads=threads)


def capacity_for(n_slots: int) -> int:
    """The smallest compiled capacity with room for `n_slots`."""
    return next(c for c in CAPACITIES if c >= n_slots)


def tree_build(
    inputs: dict[str, Operand],
    shape: dict[str, int],
    flags: dict[str, bool],
    outs: dict[str, Operand],
    *,
    stream: int,
) -> None:
    """Launch on `shape` = {B, D, K, N}; `flags` say whether root_tokens and prefix_lens were given."""
    args: tuple[Any, ...] = (
        inputs["log_probs"],
        inputs["token_ids"],
        inputs["root_tokens"],
        inputs["prefix_lens"],
        ("i32", int(flags["root_tokens"])),
        ("i32", int(flags["prefix_lens"])),
        ("i32", shape["D"]),
        ("i32", shape["K"]),
        ("i32", shape["N"]),
        *outs.values(),
    )
    simt(capacity_for(shape["N"])).launch((shape["B"],), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped (index arrays of int32; int64 ones compile at first use)."""
    words = ("*f32", "*i32", "*i32", "*i32", *["i32"] * 5)
    words += ("*i32", "*i32", "*i32", "*f64", "*i32", "*u32", "*i32", "*i32", "*i64")
    return [Variant("tree_build", simt(c), words, f"simt[N<={c}]", 40 * 1024) for c in CAPACITIES]
