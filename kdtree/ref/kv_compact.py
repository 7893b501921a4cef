"""Reference of `kv_compact`: the accepted slots' KV rows move to the front of the tree part of the cache."""

from __future__ import annotations

import numpy as np

from kdtree.ref.cache import row_address


def moves(path: np.ndarray, n_accepted: int, n_nodes: int, prefix: int, capacity: int) -> list[int]:
    """Slots whose rows become tree rows 0, 1, 2, …: the valid beginning of ``path[0 .. n_accepted]``.

    A path is valid while it starts with slot 0, rises, stays below `n_nodes`, and its rows lie inside the
    cache; what follows the first invalid entry is not moved.
    """
    if prefix < 0 or n_nodes < 1 or prefix + n_nodes > capacity:
        return []
    valid: list[int] = []
    for i in range(min(n_accepted + 1, len(path))):
        slot, floor = int(path[i]), valid[-1] if valid else -1
        if not floor < slot < n_nodes or (i == 0 and slot != 0):
            break
        valid.append(slot)
    return valid


def kv_compact(
    kv: np.ndarray,  # [B,Lmax,E] or [pages,page_size,E]; changed in place
    path: np.ndarray,  # i32[B,D+1]
    n_accepted: np.ndarray,  # i32[B]
    *,
    n_nodes: np.ndarray,  # i32[B]
    prefix_lens: np.ndarray,  # int[B]
    page_table: np.ndarray | None = None,  # int[B,max_pages]
) -> np.ndarray:
    """Row ``prefix + path[i]`` becomes row ``prefix + i`` for i = 0 … n_accepted, for each request.

    All rows are read before the first is written: source and destination overlap. Returns `kv`.
    """
    page_size = kv.shape[1]
    capacity = page_size if page_table is None else page_table.shape[1] * page_size
    for b in range(len(path)):
        prefix = int(prefix_lens[b])
        slots = moves(path[b], int(n_accepted[b]), int(n_nodes[b]), prefix, capacity)
        rows = [kv[row_address(b, prefix + s, page_table, page_size)].copy() for s in slots]
        for i, row in enumerate(rows):
            kv[row_address(b, prefix + i, page_table, page_size)] = row
    return kv
