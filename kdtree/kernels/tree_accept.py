"""tree_accept: walk from the root along the target's predictions, bounded, whatever the tree holds.

Contract: `kdtree.ref.tree_accept`. Per call: reads at most 3·B·N links and tokens, writes 4·B·(D+4) bytes.

Ladder
    simt   one thread a request follows the links. A link must lead to a higher slot inside the tree, so the walk
           takes at most N steps and never leaves its row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kdtree._cuda import cuda
from kdtree.kernels.launch import Kernel, Operand, Variant
from kdtree.ref.tree_accept import BAD_LINK, BAD_N_NODES, CYCLE, OK, TOO_DEEP

i32, i64 = np.int32, np.int64

THREADS = 1


@functools.cache
def simt() -> Kernel:
    """The readable version."""

    def tree_accept_simt(
        token_ids,  # i32[B,N]
        n_nodes,  # i32[B]
        first_child,  # i32[B,N]
        next_sibling,  # i32[B,N]
        predictions,  # int[B,N]
        n_slots,
        max_depth,
        has_stop,
        stop_token,
        path,  # i32[B,D+1]
        n_accepted,  # i32[B]
        bonus,  # i32[B]
        status,  # i32[B]
    ):
        b = i64(cuda.blockIdx.x)
        row, places = b * n_slots, b * (max_depth + 1)
        for d in range(max_depth + 1):
            path[places + d] = -1
        n_accepted[b] = 0
        bonus[b] = -1
        used = n_nodes[b]
        if used < 1 or used > n_slots:
            status[b] = BAD_N_NODES
            return
        here, length, verdict, walking = 0, 0, OK, True
        path[places] = 0
        while walking:
            walking = False
            want = i64(predictions[row + here])
            if not (has_stop and here != 0 and token_ids[row + here] == stop_token):
                origin, child = here, first_child[row + here]
                while child != -1 and verdict == OK:
                    if child < 0 or child >= used:
                        verdict = BAD_LINK
                    elif child <= origin:
                        verdict = CYCLE
                    elif token_ids[row + child] == want:
                        if length >= max_depth:
                            verdict = TOO_DEEP
                        else:
                            length += 1
                            path[places + length] = child
                            here, walking = child, True
                        break
                    else:
                        origin, child = child, next_sibling[row + child]
        n_accepted[b] = length
        bonus[b] = i32(predictions[row + here])
        status[b] = verdict

    return Kernel(tree_accept_simt, name="tree_accept.simt", threads=THREADS)


def tree_accept(
    inputs: dict[str, Operand],
    shape: dict[str, int],
    stop_token: int | None,
    outs: dict[str, Operand],
    *,
    stream: int,
) -> None:
    """Launch on `shape` = {B, N, D}."""
    args: tuple[Any, ...] = (
        inputs["token_ids"],
        inputs["n_nodes"],
        inputs["first_child"],
        inputs["next_sibling"],
        inputs["predictions"],
        ("i32", shape["N"]),
        ("i32", shape["D"]),
        ("i32", int(stop_token is not None)),
        ("i32", -1 if stop_token is None else stop_token),
        *outs.values(),
    )
    simt().launch((shape["B"],), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped."""
    tail = ("i32", "i32", "i32", "i32", "*i32", "*i32", "*i32", "*i32")
    return [
        Variant("tree_accept", simt(), ("*i32",) * 4 + (word,) + tail, f"simt[{word[1:]}]", 0)
        for word in ("*i32", "*i64")
    ]
