"""Peer of `tree_accept`: the accept walk on the host over one dictionary of children a slot.

Source of the algorithm: `follow_verified_tree` of liranringel/ddtree, also in its vLLM port. The
dictionaries are a by-product of building the tree on the host, so they are made in `prepare` and not timed;
what a step pays is the copy of the target's predictions to the host (which waits for the GPU), the walk,
and the copies back. The published code lets the last of two siblings with one token win; here the first
does, as in our contract.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtree.arrays import to_numpy
from kdtree.baselines.base import Baseline, Prepared, Unsupported, importable
from kdtree.baselines.heapq_build import back_to
from kdtree.tree import UNUSED, DraftTree


def child_maps(tree: DraftTree) -> list[list[dict[int, int]]]:
    """[b][slot] -> {token: child slot} of a NumPy tree, the first of equal siblings kept.

    Raises Unsupported for a malformed tree: an engine that built the tree itself has no code for one.
    """
    maps: list[list[dict[int, int]]] = []
    for b in range(tree.batch):
        used = int(tree.n_nodes[b])
        if not 1 <= used <= tree.n_slots:
            raise Unsupported(f"tree: request {b} has n_nodes {used}, expected 1..{tree.n_slots}")
        per_slot: list[dict[int, int]] = []
        for slot in range(used):
            children: dict[int, int] = {}
            before, child = slot, int(tree.first_child[b, slot])
            while child != UNUSED:
                if not before < child < used:
                    raise Unsupported(
                        f"tree: request {b} links slot {before} to {child}, expected {before + 1}..{used - 1}"
                    )
                children.setdefault(int(tree.token_ids[b, child]), child)
                before, child = child, int(tree.next_sibling[b, child])
            per_slot.append(children)
        maps.append(per_slot)
    return maps


def walk(
    children: list[dict[int, int]], predictions: list[int], max_depth: int, stop_token: int | None
) -> tuple[list[int], int]:
    """(accepted slots, root first; bonus token) of one request."""
    here = 0
    path = [0]
    while len(path) <= max_depth:
        want = predictions[here]
        child = children[here].get(want)
        if child is None:
            break
        path.append(child)
        here = child
        if want == stop_token:
            break
    return path, predictions[here]


def prepare(inputs: dict[str, Any]) -> Prepared:
    """Inputs of `tree_accept`, NumPy or torch."""
    from kdtree.ops import Accepted

    tree, predictions, stop_token = inputs["tree"], inputs["predictions"], inputs.get("stop_token")
    stop = None if stop_token is None else int(stop_token)
    batch, max_depth = tree.batch, tree.max_depth
    maps = child_maps(tree.numpy())
    to_device = back_to(predictions)

    def run() -> Any:
        path = np.full((batch, max_depth + 1), UNUSED, dtype=np.int32)
        n_accepted, bonus = np.empty(batch, dtype=np.int32), np.empty(batch, dtype=np.int32)
        for b, row in enumerate(to_numpy(predictions).tolist()):
            slots, bonus[b] = walk(maps[b], row, max_depth, stop)
            path[b, : len(slots)] = slots
            n_accepted[b] = len(slots) - 1
        status = np.zeros(batch, dtype=np.int32)
        return Accepted(*(to_device(a) for a in (path, n_accepted, bonus, status)))

    return Prepared(run)


PEERS = (
    Baseline(
        name="peer:host-walk",
        op="tree_accept",
        prepare=prepare,
        available=lambda: importable("torch"),
        timed="device-to-host copy of the predictions, the walk, four host-to-device copies; "
        "the child dictionaries are made beforehand",
        capturable=False,
    ),
)
