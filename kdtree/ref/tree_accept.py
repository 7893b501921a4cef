"""Reference of `tree_accept`: walk from the root along the target's predictions.

Source: SpecInfer's token verification (arXiv 2305.09781), greedy form. With predictions sampled once per node
from the target the same walk is lossless at any temperature, because the node reached is a sample of the target.
"""

from __future__ import annotations

import numpy as np

from kdtree.tree import UNUSED, DraftTree

OK = 0
BAD_N_NODES = 1  # n_nodes outside 1..N: nothing was walked
BAD_LINK = 2  # a child or sibling link outside 0..n_nodes-1 (and not -1)
CYCLE = 3  # a link that does not lead to a higher slot, so it could lead back
TOO_DEEP = 4  # the path would be longer than D
STATUS_NAMES = {
    OK: "ok",
    BAD_N_NODES: "n_nodes out of range",
    BAD_LINK: "link out of range",
    CYCLE: "link leads back",
    TOO_DEEP: "path deeper than max_depth",
}


def check_link(link: int, origin: int, n_nodes: int) -> int:
    """Status of following `link` from slot `origin`."""
    if not 0 <= link < n_nodes:
        return BAD_LINK
    return OK if link > origin else CYCLE


def walk(tree: DraftTree, predictions: np.ndarray, b: int, stop_token: int | None) -> tuple[list[int], int, int]:
    """(path, bonus, status) of request b. Links only ever lead to higher slots, so the walk ends."""
    n_nodes = int(tree.n_nodes[b])
    if not 1 <= n_nodes <= tree.n_slots:
        return [], UNUSED, BAD_N_NODES
    path, status = [0], OK
    while status == OK:
        here = path[-1]
        want = int(predictions[b][here])
        if stop_token is not None and here != 0 and int(tree.token_ids[b, here]) == stop_token:
            break
        origin, child = here, int(tree.first_child[b, here])
        while child != UNUSED:
            status = check_link(child, origin, n_nodes)
            if status != OK or int(tree.token_ids[b, child]) == want:
                break
            origin, child = child, int(tree.next_sibling[b, child])
        if status != OK or child == UNUSED:
            break
        if len(path) > tree.max_depth:
            status = TOO_DEEP
            break
        path.append(child)
    return path, int(predictions[b][path[-1]]), status


def tree_accept(
    tree: DraftTree,
    predictions: np.ndarray,  # int[B,N]
    *,
    stop_token: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Accept the longest path whose tokens the target predicts.

    From slot 0, while some child's token equals the prediction at the current slot, step to the first such
    child. A path ends behind an accepted `stop_token`.

    Returns:
        path i32[B,D+1] (slots, root first, -1 padded), n_accepted i32[B] (root excluded), bonus i32[B] (the
        prediction at the last slot), status i32[B]. For a malformed tree the status says what was wrong and the
        rest is the walk that was valid until there; with a bad n_nodes that is nothing: path and bonus are -1.
    """
    batch = tree.batch
    paths = np.full((batch, tree.max_depth + 1), UNUSED, dtype=np.int32)
    n_accepted = np.zeros(batch, dtype=np.int32)
    bonus = np.full(batch, UNUSED, dtype=np.int32)
    status = np.zeros(batch, dtype=np.int32)
    for b in range(batch):
        path, last, status[b] = walk(tree, predictions, b, stop_token)
        bonus[b] = np.int64(last).astype(np.int32)  # tokens are int32: what is no token keeps its low bits
        paths[b, : len(path)] = path
        n_accepted[b] = max(len(path) - 1, 0)
    return paths, n_accepted, bonus, status
