"""How the copy engine sees q, out and the latent cache in the Hopper kernels: rows as chunks of 64 columns.

The chunks are a dimension of their own, between rows and requests (or pages): ``[requests, chunks, rows, 64]``. A box
of several chunks then lands in shared memory chunk after chunk, each in the 128-byte swizzle that `wgmma` reads.
"""

from __future__ import annotations

from kdtree.kernels.launch import Operand, TensorMap

COLUMNS = 64  # a chunk
ROWS = 64  # a tile
LATENT = 9  # chunks of a row of q and of the cache, 512 + 64 wide


def page_mode(shape: dict[str, int]) -> str:
    """How tiles of 64 rows lie: "rows" in a contiguous cache, "page" in pages of 64·k rows, "part" in pages of 64/k."""
    if not shape["max_pages"]:
        return "rows"
    return "part" if shape["page_size"] % ROWS else "page"


def rows_map(operand: Operand, dtype: str, shape: dict[str, int], chunks: int, box: int) -> TensorMap:
    """q or out, [B,N·H rows] of `chunks` chunks, in boxes of 64 rows by `box` chunks."""
    n_rows, width = shape["N"] * shape["H"], chunks * COLUMNS
    extents = (shape["B"], chunks, n_rows, COLUMNS)
    return TensorMap(operand, dtype, extents, (1, box, ROWS, COLUMNS), (n_rows * width, COLUMNS, width, 1))


def cache_map(kv: Operand, dtype: str, shape: dict[str, int], box: int) -> TensorMap:
    """The cache in boxes of `box` chunks by the rows of a tile that lie together: 64, or those of a smaller page."""
    paged, height = shape["max_pages"] > 0, shape["page_size"]  # a contiguous cache: one page of Lmax rows a request
    extents = (shape["n_pages"] if paged else shape["B"], LATENT, height, COLUMNS)
    width = LATENT * COLUMNS
    rows = min(height, ROWS) if paged else ROWS
    return TensorMap(kv, dtype, extents, (1, box, rows, COLUMNS), (height * width, COLUMNS, width, 1))
