"""verify_attn: MLA weight-absorbed attention of the tree's queries over prefix and visible tree slots.

Contract: `kdtree.ref.verify_attn`. A *row* is one (slot, head) pair: N·H rows a request, all reading the same
latent KV rows. Per call: 2·B·H·N·(L+N)·(E+C) FLOP; the floor in bytes is q + out + each KV row once.

Ladder, a module each: `verify_simt`, `verify_mma`, `verify_cluster`, `verify_wgmma`
    simt    a block stages a tile of KV rows in shared memory once for ROWS rows (slots and heads alike) and keeps their
            outputs in registers. The KV range is split over blocks where rows alone would not fill the GPU; a second
            launch joins the splits by log-sum-exp. No tensor cores, no warp primitives: the readable one.
    mma     64 rows share a KV tile, and both products run on tensor cores by mma.sync. Q stays in registers, split by
            columns over four warps; the next tile is under way by cp.async while this one is worked on.
    cluster Hopper, for short caches: 8 or 4 blocks share a row tile, by KV rows for the scores and by columns for the
            values, and send each other P through shared memory.
    wgmma   Hopper: a warpgroup computes scores and softmax, two compute P·V, and TMA keeps a ring of tiles filled. The
            KV tiles of all requests are cut into equal shares, and partial results are joined in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kdtree._cuda import SIMULATED
from kdtree.arrays import View
from kdtree.kernels import launch, verify_cluster, verify_mma, verify_simt, verify_wgmma
from kdtree.kernels.launch import Operand, Variant
from kdtree.spec import VERIFY_ATTN_IMPLS

IMPLS = VERIFY_ATTN_IMPLS


@dataclass(frozen=True)
class Asked:
    """What a call asks of a kernel.

    capability: of the device, (9, 0) say. page_size: rows a page, 0 for a contiguous cache. capacity: cache rows that a
    request may have. aligned: q, kv and out lie at multiples of 16 bytes.
    """

    capability: tuple[int, int]
    dtype: str
    E: int
    C: int
    B: int = 1
    N: int = 1
    H: int = 64
    capacity: int = 65_536
    page_size: int = 0
    aligned: bool = True
    scale: float = 1.0

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 query rows."""
        return self.B * -(-self.N * self.H // 64)

    @property
    def kv_tiles(self) -> int:
        """Tiles of 64 cache rows that a request may have."""
        return -(-self.capacity // 64)

    @property
    def tiles(self) -> int:
        """Products of 64 query rows and 64 cache rows."""
        return self.row_tiles * self.kv_tiles


def unfit(impl: str, asked: Asked) -> str:
    """Why kernel `impl` cannot take the call; empty where it can."""
    if impl not in _LAUNCHERS:
        return "this version does not have it"
    if impl == "simt":
        return ""
    if SIMULATED:
        return "the simulator has no tensor cores, expected simt"
    have = "sm_{}{}".format(*asked.capability)
    if impl in ("cluster", "wgmma") and asked.capability != (9, 0):
        return f"the device is {have}, expected sm_90"
    if asked.capability < (8, 0):
        return f"the device is {have}, expected sm_80 or later"
    if asked.dtype not in ("bfloat16", "float16"):
        return f"q is {asked.dtype}, expected bfloat16 or float16"
    if (asked.E, asked.C) != (576, 512):
        return f"rows are {asked.E} wide with a value part of {asked.C}, expected 576 and 512"
    if not asked.capacity:
        return "the cache has no rows"
    if not asked.aligned:
        return "q, kv or out does not lie at a multiple of 16 bytes"
    if impl in ("cluster", "wgmma"):
        page = asked.page_size
        if page % 64 and not (page >= 8 and 64 % page == 0):
            return f"pages have {page} rows, expected a multiple of 64, or 8, 16 or 32"
        if asked.scale <= 0:
            return f"scale is {asked.scale:g}, expected a positive one"
    return ""


SMALL = 132  # products of 64 x 64: one for each SM of an H200


def _few_rounds(asked: Asked) -> bool:
    """Do all clusters of an H200 run at once, and are they through the cache in a few rounds?"""
    return asked.row_tiles <= 28 and asked.kv_tiles <= (16 if asked.row_tiles <= 3 else 24)


# The first row that holds, and whose kernel can take the call, is taken. The reasons were measured on an H200;
# `kdtree.measure.grid` times every kernel at every shape.
TABLE: tuple[tuple[str, Callable[[Asked], bool], str], ...] = (
    (
        "cluster",
        _few_rounds,
        "7 to 10 µs at 5 KV tiles where mma takes 14 to 18, as partial results stay on the chip; 4 µs more a round",
    ),
    (
        "mma",
        lambda asked: asked.tiles <= SMALL,
        "a launch of wgmma costs some 10 µs before its first product: TMA, barriers, 100 KB of instructions",
    ),
    ("wgmma", lambda asked: True, "2.5 times the matrix rate of mma.sync, KV copied by TMA"),
    ("mma", lambda asked: True, "tensor cores of any other GPU, and pages of 1 row"),
    ("simt", lambda asked: True, "everything else: float32, other widths, unaligned arrays"),
)


def choose(asked: Asked) -> str:
    """Name of the kernel that the table takes for a call."""
    return next(impl for impl, fits, _ in TABLE if fits(asked) and not unfit(impl, asked))


def verify_attn(
    inputs: dict[str, Operand],
    shape: dict[str, int],
    dtype: str,
    scale: float,
    outs: dict[str, Operand],
    *,
    impl: str | None,
    stream: int,
    like: View,
) -> str:
    """Launch on `shape` = {B,N,H,E,C,page_size,max_pages,n_pages,capacity,with_prefix}; return the kernel's name.

    `page_size` is Lmax and `max_pages` 0 where the cache is contiguous. Scratch memory comes from the library of
    `like`. Raises ValueError, beginning with ``impl:``, where the kernel asked for cannot take the call.
    """
    asked = Asked(
        capability=launch.capability(),
        dtype=dtype,
        E=shape["E"],
        C=shape["C"],
        B=shape["B"],
        N=shape["N"],
        H=shape["H"],
        capacity=shape["capacity"] if shape["n_pages"] else 0,
        page_size=shape["page_size"] if shape["max_pages"] else 0,
        aligned=SIMULATED or not any(o.handle % 16 for o in (inputs["q"], inputs["kv"], outs["out"])),
        scale=scale,
    )
    if impl is None:
        impl = choose(asked)
    elif reason := unfit(impl, asked):
        raise ValueError(f"impl: got {impl!r}, which cannot take this call: {reason}")
    _LAUNCHERS[impl](inputs, shape, dtype, scale, outs, stream=stream, like=like)
    return impl


# Each launcher takes what `verify_simt.launch` takes. A kernel is in this version once it stands here.
_LAUNCHERS: dict[str, Callable[..., None]] = {
    "simt": verify_simt.launch,
    "mma": verify_mma.launch,
    "cluster": verify_cluster.launch,
    "wgmma": verify_wgmma.launch,
}


def variants() -> list[Variant]:
    """What is shipped."""
    return verify_simt.variants() + verify_mma.variants() + verify_cluster.variants() + verify_wgmma.variants()
