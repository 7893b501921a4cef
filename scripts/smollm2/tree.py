"""A draft tree from per-depth candidates, and the walk along the target's predictions.

Written apart from the package's own builder, so that a capture can check it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def best_first(
    log_probs: np.ndarray, token_ids: np.ndarray, budget: int, root_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ``budget`` most probable prefixes of the product of D distributions, as a tree.

    log_probs f32[D, K] in non-increasing order, token_ids i32[D, K]. Returns token ids and parents,
    both i32[budget + 1], slot 0 the root (parent -1), unused slots -1 in both. Slots are ordered by path
    score, a float64 sum in depth order, descending; ties by the path of ranks, as tuples compare.
    """
    n_depths, n_ranks = log_probs.shape
    tokens = np.full(budget + 1, -1, np.int32)
    parents = np.full(budget + 1, -1, np.int32)
    tokens[0] = root_token
    # An entry: (-score, ranks from the root, slot of the parent, score of the parent).
    heap: list[tuple[float, tuple[int, ...], int, float]] = []
    if budget and n_depths:
        heap.append((-float(log_probs[0, 0]), (0,), 0, 0.0))
    n_nodes = 1
    while heap and n_nodes <= budget:
        negative, ranks, parent, parent_score = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        tokens[n_nodes], parents[n_nodes] = token_ids[depth, rank], parent
        if rank + 1 < n_ranks:  # the next sibling
            score = parent_score + float(log_probs[depth, rank + 1])
            heapq.heappush(heap, (-score, (*ranks[:-1], rank + 1), parent, parent_score))
        if depth + 1 < n_depths:  # the first child
            score = -negative + float(log_probs[depth + 1, 0])
            heapq.heappush(heap, (-score, (*ranks, 0), n_nodes, -negative))
        n_nodes += 1
    return tokens, parents


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every slot; 0 for the root and for unused slots."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def visibility(parents: Sequence[int]) -> np.ndarray:
    """bool[N, N]: row i sees column j when j is i or an ancestor of i."""
    visible = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


def accept(tokens: Sequence[int], parents: Sequence[int], predictions: Sequence[int]) -> list[int]:
    """Slots from the root along the predictions, for as long as a child has the predicted token."""
    path = [0]
    while True:
        wanted = int(predictions[path[-1]])
        children = [i for i in range(len(parents)) if parents[i] == path[-1] and tokens[i] == wanted]
        if not children:
            return path
        path.append(children[0])
