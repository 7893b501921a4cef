"""kv_compact: the accepted slots' KV rows move to the front of the tree part, for all layers in one launch.

Contract: `kdtree.ref.kv_compact`. Per call: reads and writes n_accepted rows a request and layer.

Ladder
    simt   a thread owns one column of words of one request and layer and moves the rows in path order. A path rises,
           so row i is written only after every row that it could hold was read: no staging, no barrier.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kdtree._cuda import SIMULATED, cuda
from kdtree.kernels.bits import pointer_at
from kdtree.kernels.launch import Kernel, Operand, Variant

i64 = np.int64

THREADS = 4 if SIMULATED else 128


@functools.cache
def simt(word: str, threads: int = THREADS) -> Kernel:
    """The readable version; rows are moved in units of `word`, "u32" or "u16"."""

    def kv_compact_simt(
        caches,  # table of pointers to [B,Lmax,E] or [pages,page_size,E], one a layer
        like,  # one of those pointers: gives the element type
        path,  # i32[B,D+1]
        n_accepted,  # i32[B]
        n_nodes,  # i32[B]
        prefix_lens,  # int[B]
        page_table,  # int[B,max_pages] or empty
        path_length,
        row_words,
        page_size,
        max_pages,  # 0 for a contiguous cache
        n_pages,
    ):
        b, layer = i64(cuda.blockIdx.y), i64(cuda.blockIdx.z)
        column = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        prefix, used = i64(prefix_lens[b]), n_nodes[b]
        capacity = i64(page_size) * max_pages if max_pages > 0 else i64(page_size)
        # Without a valid prefix nothing moves; a path is followed while it rises inside the tree.
        if column >= row_words or prefix < 0 or used < 1 or prefix > capacity - used:
            return
        kv = pointer_at(caches, layer, like)
        before = -1
        for i in range(min(i64(n_accepted[b]) + 1, i64(path_length))):
            slot = path[b * path_length + i]
            if slot <= before or slot >= used or (i == 0 and slot != 0):
                return
            before = slot
            if slot != i:
                source, target = prefix + slot, prefix + i
                if max_pages > 0:
                    page_from = i64(page_table[b * max_pages + source // page_size])
                    page_to = i64(page_table[b * max_pages + target // page_size])
                    if page_from < 0 or page_from >= n_pages or page_to < 0 or page_to >= n_pages:
                        return
                    source = page_from * page_size + source % page_size
                    target = page_to * page_size + target % page_size
                else:
                    source += b * page_size
                    target += b * page_size
                kv[target * row_words + column] = kv[source * row_words + column]

    return Kernel(kv_compact_simt, name=f"kv_compact.simt[{word}]", threads=threads)


def kv_compact(
    table: Operand,
    like: Operand,
    inputs: dict[str, Operand],
    shape: dict[str, int],
    *,
    stream: int,
) -> None:
    """Launch on `shape` = {B, layers, path_length, row_words, page_size, max_pages, n_pages}."""
    kernel = simt(like.word[1:])
    if SIMULATED:  # the simulator copies array arguments back: the copy of layer 0 would undo the moves
        like = Operand(np.zeros(1, dtype=np.uint32), like.word)
    args: tuple[Any, ...] = (
        table,
        like,
        inputs["path"],
        inputs["n_accepted"],
        inputs["n_nodes"],
        inputs["prefix_lens"],
        inputs["page_table"],
        ("i32", shape["path_length"]),
        ("i32", shape["row_words"]),
        ("i32", shape["page_size"]),
        ("i32", shape["max_pages"]),
        ("i32", shape["n_pages"]),
    )
    columns = -(-shape["row_words"] // kernel.threads)
    kernel.launch((columns, shape["B"], shape["layers"]), args, stream=stream)


def variants() -> list[Variant]:
    """What is shipped."""
    tail = ("*i32", "*i32", "*i32", "*i32", "*i32", *["i32"] * 5)
    return [Variant("kv_compact", simt(word), ("**", f"*{word}", *tail), f"simt[{word}]", 0) for word in ("u32", "u16")]
