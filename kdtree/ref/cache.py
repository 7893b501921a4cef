"""Where a request's KV rows lie: the address rule shared by `verify_attn` and `kv_compact`."""

from __future__ import annotations

import numpy as np


def row_address(
    b: int,
    row: int,
    page_table: np.ndarray | None,  # int[B, max_pages]
    page_size: int,
) -> tuple[int, int]:
    """(first index, second index) into the cache of row `row` of request `b`.

    Contiguous caches [B, Lmax, E] have no page table: (b, row). Paged ones [pages, page_size, E] look the page up.
    """
    if page_table is None:
        return b, row
    return int(page_table[b][row // page_size]), row % page_size


def gather_rows(
    kv: np.ndarray,  # [B, Lmax, E] or [pages, page_size, E]
    b: int,
    n_rows: int,
    page_table: np.ndarray | None,
) -> np.ndarray:
    """f64[n_rows, E]: the first `n_rows` rows of request `b`."""
    rows = np.empty((n_rows, kv.shape[-1]), dtype=np.float64)
    for row in range(n_rows):
        first, second = row_address(b, row, page_table, kv.shape[1])
        rows[row] = kv[first, second].astype(np.float64)
    return rows
