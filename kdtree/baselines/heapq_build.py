"""Peer of `tree_build`: the tree on the host with Python's heapq, as CPU serving engines build it.

Source of the algorithm: DDTree's best-first search (liranringel/ddtree, arXiv 2604.12989) and its ports to
vLLM and SGLang: copy the drafter's top-k to the host, one heap a request, then a dense boolean mask,
parents, child links and positions, and everything back to the device.

Kinder than those ports in two ways, so that a speed-up over it is not made of their overheads: the top-k of
all requests comes over in one copy each, not one a request, and the mask covers the tree alone, not the
context. Ties, rows that end early and underfull trees follow the contract of `kdtree.ref.tree_build`
exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from kdtree.arrays import to_numpy
from kdtree.baselines.base import Baseline, Prepared, importable
from kdtree.tree import UNUSED, DraftTree, visibility_words


def best_first(rows: list[list[float]], widths: list[int], budget: int) -> list[tuple[int, int, int, float]]:
    """The `budget` best prefixes of one request, best first: (parent slot, depth from 1, rank, score).

    `rows[d][r]` is the log-probability of candidate r at depth d + 1; `widths[d]` counts the usable ones.
    The heap holds (-score, rank path, parent slot, parent score): the tuple's own order is the contract's
    order.
    """
    found: list[tuple[int, int, int, float]] = []
    if not rows or not widths[0]:
        return found
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-rows[0][0], (0,), 0, 0.0)]
    while heap and len(found) < budget:
        negative, path, parent, base = heapq.heappop(heap)
        depth, rank, score = len(path), path[-1], -negative
        found.append((parent, depth, rank, score))
        sibling = rank + 1
        if sibling < widths[depth - 1]:
            heapq.heappush(heap, (-(base + rows[depth - 1][sibling]), (*path[:-1], sibling), parent, base))
        if depth < len(rows) and widths[depth]:
            heapq.heappush(heap, (-(score + rows[depth][0]), (*path, 0), len(found), score))
    return found


def link(parents: list[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of each slot, -1 none; `parents[i]` is the parent of slot i + 1."""
    first, following = [UNUSED] * (len(parents) + 1), [UNUSED] * (len(parents) + 1)
    last: dict[int, int] = {}
    for slot, parent in enumerate(parents, start=1):
        if parent in last:
            following[last[parent]] = slot
        else:
            first[parent] = slot
        last[parent] = slot
    return first, following


def fill(
    tree: DraftTree,
    mask: np.ndarray,  # bool[N,N], all False
    b: int,
    nodes: list[tuple[int, int, int, float]],
    tokens: np.ndarray,  # int[D,K]
    prefix: int,
) -> None:
    """Write request b's nodes into the NumPy arrays of `tree` and its visibility into `mask`."""
    used = len(nodes) + 1
    tree.n_nodes[b] = used
    tree.scores[b, 0] = 0.0
    tree.positions[b, :] = prefix
    mask[0, 0] = True
    if not nodes:
        return
    parents, depths, ranks, scores = zip(*nodes, strict=True)
    for slot, parent in enumerate(parents, start=1):
        row = mask[slot]
        row[:] = mask[parent]
        row[slot] = True
    depth = np.array(depths)
    tree.token_ids[b, 1:used] = tokens[depth - 1, ranks]
    tree.parents[b, 1:used] = parents
    tree.depths[b, 1:used] = depth
    tree.scores[b, 1:used] = scores
    tree.positions[b, 1:used] += depth
    tree.first_child[b, :used], tree.next_sibling[b, :used] = link(list(parents))


def build_on_host(
    log_probs: np.ndarray,  # f32[B,D,K]
    token_ids: np.ndarray,  # int[B,D,K]
    budget: int,
    root_tokens: list[int],  # B
    prefix_lens: list[int],  # B
) -> DraftTree:
    """NumPy DraftTree of `budget` + 1 slots a request."""
    batch, depth, _ = log_probs.shape
    n_slots = budget + 1
    tree = DraftTree.empty(batch, n_slots, depth)
    # A row ends at its first entry that is not finite.
    widths = np.isfinite(log_probs).cumprod(axis=2).sum(axis=2).tolist()
    words = visibility_words(n_slots)
    mask = np.zeros((batch, n_slots, 32 * words), dtype=bool)  # padded to whole words for packing
    rows = log_probs.tolist()  # float32 to Python float is exact, so path sums are float64
    for b in range(batch):
        tree.token_ids[b, 0] = root_tokens[b]
        nodes = best_first(rows[b], widths[b], budget)
        fill(tree, mask[b, :, :n_slots], b, nodes, token_ids[b], prefix_lens[b])
    tree.visibility = np.packbits(mask, axis=2, bitorder="little").view("<u4").astype(np.uint32, copy=False)
    return tree


def back_to(array: Any) -> Callable[[np.ndarray], Any]:
    """A function that puts a NumPy array where `array` lives: as it is for NumPy, else as a tensor."""
    if isinstance(array, np.ndarray):
        return lambda host: host
    import torch

    device = array.device
    return lambda host: torch.from_numpy(host).to(device)


def host_list(values: Any, batch: int, default: int) -> list[int]:
    """`values` (an int array, or None for `default` everywhere) as B Python ints."""
    return [default] * batch if values is None else [int(v) for v in to_numpy(values)]


def prepare(inputs: dict[str, Any]) -> Prepared:
    """Inputs of `tree_build`, NumPy or torch. An engine has root tokens and prefix lengths on the host."""
    log_probs, token_ids, budget = inputs["log_probs"], inputs["token_ids"], int(inputs["budget"])
    batch = int(log_probs.shape[0])
    roots = host_list(inputs.get("root_tokens"), batch, -1)
    prefixes = host_list(inputs.get("prefix_lens"), batch, 0)
    to_device = back_to(log_probs)

    def run() -> DraftTree:
        tree = build_on_host(to_numpy(log_probs), to_numpy(token_ids), budget, roots, prefixes)
        return tree.map(to_device)

    return Prepared(run)


PEERS = (
    Baseline(
        name="peer:heapq",
        op="tree_build",
        prepare=prepare,
        available=lambda: importable("torch"),
        timed="two device-to-host copies, the heaps, mask, links, positions, nine host-to-device copies; "
        "root tokens and prefix lengths are on the host beforehand",
        capturable=False,
    ),
)
