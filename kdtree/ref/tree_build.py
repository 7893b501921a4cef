"""Reference of `tree_build`: the budget most probable prefixes of the drafts' product distribution.

Source of the algorithm: DDTree (liranringel/ddtree, arXiv 2604.12989). The draft gives D independent rows of
candidates; a *rank path* (r0, r1, …) picks candidate r0 at depth 1, r1 at depth 2, and so on. Its score is the
sum of the log-probabilities picked. The tree holds the `budget` best rank paths.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from kdtree.tree import UNUSED, DraftTree, from_parents


def usable(row: np.ndarray) -> int:
    """Number of candidates in front of the first one that is not finite: the row ends there."""
    for r, value in enumerate(row):
        if not math.isfinite(value):
            return r
    return len(row)


def best_rank_paths(log_probs: np.ndarray, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The `budget` best rank paths of one request, best first, as (score, path).

    Order: score descending, then the path as a tuple ascending (a prefix before its extensions, lower ranks
    first). Scores are float64 sums in depth order. A best-first search is exact because neither extending a
    path nor moving its last rank up raises the score.
    """
    depth = len(log_probs)
    widths = [usable(row) for row in log_probs]
    found: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...], float]] = []  # (-score, path, parent's score)

    def push(parent_score: float, path: tuple[int, ...]) -> None:
        level, rank = len(path) - 1, path[-1]
        if level < depth and rank < widths[level]:
            score = parent_score + float(log_probs[level][rank])
            heapq.heappush(frontier, (-score, path, parent_score))

    push(0.0, (0,))
    while frontier and len(found) < budget:
        negative, path, parent_score = heapq.heappop(frontier)
        found.append((-negative, path))
        push(-negative, (*path, 0))  # its first extension
        push(parent_score, (*path[:-1], path[-1] + 1))  # its next sibling
    return found


def tree_build(
    log_probs: np.ndarray,  # f32[B,D,K]
    token_ids: np.ndarray,  # int[B,D,K]
    budget: int,
    *,
    root_tokens: np.ndarray | None = None,  # int[B]
    prefix_lens: np.ndarray | None = None,  # int[B]
) -> DraftTree:
    """Build one tree a request.

    Args:
        log_probs: f32[B,D,K], each row non-increasing and <= 0; a row ends at its first entry that is not finite.
        token_ids: int[B,D,K], the candidates' tokens.
        budget: tree nodes besides the root, >= 0. N = budget + 1.
        root_tokens: int[B], token of slot 0; -1 where not given.
        prefix_lens: int[B], tokens in front of the root; 0 where not given.

    Returns:
        DraftTree with N slots and ``max_depth = D``. Fewer nodes than `budget` where fewer prefixes exist.
    """
    batch, depth, _ = log_probs.shape
    n_slots = budget + 1
    tokens = np.full((batch, n_slots), UNUSED, dtype=np.int32)
    parents = np.full((batch, n_slots), UNUSED, dtype=np.int32)
    scores = np.zeros((batch, n_slots), dtype=np.float64)
    n_nodes = np.ones(batch, dtype=np.int32)
    for b in range(batch):
        slot_of: dict[tuple[int, ...], int] = {(): 0}
        if root_tokens is not None:
            tokens[b, 0] = root_tokens[b]
        for score, path in best_rank_paths(log_probs[b], budget):
            slot = len(slot_of)
            slot_of[path] = slot
            tokens[b, slot] = token_ids[b][len(path) - 1][path[-1]]
            parents[b, slot] = slot_of[path[:-1]]
            scores[b, slot] = score
        n_nodes[b] = len(slot_of)
    return from_parents(tokens, parents, n_nodes, scores=scores, prefix_lens=prefix_lens, max_depth=depth)
