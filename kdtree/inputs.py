"""Inputs of test cases: friendly, ragged, tied and hostile, from a seed.

`numpy.random.RandomState` throughout: its streams are frozen, so that a bundle made today is made again, byte for
byte, by any later NumPy.
"""

from __future__ import annotations

import numpy as np

from kdtree.arrays import numpy_dtype
from kdtree.tree import DraftTree, random_tree

DRAFT_KINDS = ("smooth", "peaked", "ties", "bf16", "identical", "inf", "nan", "certain")


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in `dtype` (bfloat16 included)."""
    return values.astype(numpy_dtype(dtype))


def draft_rows(
    rng: np.random.RandomState, batch: int, depth: int, width: int, kind: str = "smooth", vocab: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(log_probs f32[B,D,K], token_ids i32[B,D,K]) as a drafter could give them.

    Kinds: "smooth" and "peaked" distributions; "ties" all candidates of a row equal in pairs; "bf16" rounded to
    bfloat16, so that ties abound; "identical" the same row at every depth, where float32 sums would change the tree;
    "inf" and "nan" rows that end early; "certain" a first candidate with log-probability 0.
    """
    vocab = vocab or 4 * width + 3
    logits = rng.standard_normal((batch, depth, max(vocab, width))) * (4.0 if kind == "peaked" else 1.5)
    if kind == "identical" and depth:
        logits[:] = logits[:, :1]
    logits -= np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :width]
    rows = np.take_along_axis(logits, order, axis=-1).astype(np.float32)
    tokens = order.astype(np.int32)
    if kind == "ties":
        rows = np.repeat(rows[..., ::2], 2, axis=-1)[..., :width]
    elif kind == "bf16":
        rows = round_to(rows, "bfloat16").astype(np.float32)
    elif kind in ("inf", "nan"):
        rows = end_early(rng, rows, -np.inf if kind == "inf" else np.nan)
    elif kind == "certain":
        rows[..., 0] = 0.0
    return np.ascontiguousarray(rows), np.ascontiguousarray(tokens)


def end_early(rng: np.random.RandomState, rows: np.ndarray, end: float) -> np.ndarray:
    """Put `end` into every row at a random place, the first row of the batch at candidate 0 of depth 0."""
    rows = rows.copy()
    for index in np.ndindex(*rows.shape[:2]):
        rows[index][rng.randint(0, rows.shape[2]) :] = end
    if rows.size:
        rows[0, 0, 0] = end
    return rows


def duplicate_siblings(tokens: np.ndarray) -> np.ndarray:
    """Token ids where candidates 1, 3, 5 … repeat the token of the one before."""
    tokens = tokens.copy()
    odd = tokens[..., 1::2]
    odd[...] = tokens[..., ::2][..., : odd.shape[-1]]
    return tokens


def logits(rng: np.random.RandomState, shape: tuple[int, ...], dtype: str, kind: str = "smooth") -> np.ndarray:
    """Logits [..., V] of `dtype`. Kinds: "smooth", "ties" (few distinct values, ±0 among them), "hostile".

    "hostile" rows in turn: a NaN, a +inf, nothing but -inf, and half -inf.
    """
    values = rng.standard_normal(shape) * 3.0
    if kind == "ties":
        values = np.round(values)
        values[..., ::7] *= -0.0
    elif kind == "hostile":
        flat = values.reshape(-1, shape[-1])
        for r, row in enumerate(flat):
            if r % 4 == 0:
                row[rng.randint(0, len(row))] = np.nan
            elif r % 4 == 1:
                row[rng.randint(0, len(row))] = np.inf
            else:
                row[: len(row) if r % 4 == 2 else len(row) // 2] = -np.inf
    return round_to(values, dtype)


def page_tables(rng: np.random.RandomState, rows: np.ndarray, page_size: int, spare: int = 1) -> tuple[np.ndarray, int]:
    """(page_table i32[B, max_pages], pages): each request's pages scattered, unused entries out of range on purpose."""
    needed = [-(-int(r) // page_size) for r in rows]
    pages = sum(needed) + spare
    order = iter(rng.permutation(pages))
    table = np.full((len(rows), max(max(needed), 1)), 2**31 - 1, dtype=np.int32)
    for b, count in enumerate(needed):
        table[b, :count] = [next(order) for _ in range(count)]
    return table, pages


def cache(
    rng: np.random.RandomState,
    rows: np.ndarray,  # int[B] rows in use
    width: int,
    dtype: str,
    *,
    page_size: int = 0,
    spare_rows: int = 3,
) -> tuple[np.ndarray, np.ndarray | None]:
    """(kv, page_table): random rows where in use, NaN everywhere else. ``page_size=0`` is a contiguous cache."""
    if not page_size:
        kv = np.full((len(rows), int(rows.max()) + spare_rows, width), np.nan)
        for b, used in enumerate(rows):
            kv[b, :used] = rng.standard_normal((used, width))
        return round_to(kv, dtype), None
    table, pages = page_tables(rng, rows, page_size)
    kv = np.full((pages, page_size, width), np.nan)
    for b, used in enumerate(rows):
        values = rng.standard_normal((int(used), width))
        for row in range(int(used)):
            kv[table[b, row // page_size], row % page_size] = values[row]
    return round_to(kv, dtype), table


def attention(
    rng: np.random.RandomState,
    *,
    batch: int,
    heads: int,
    n_slots: int,
    prefix_lens: list[int],
    kv_lora_rank: int = 512,
    rope: int = 64,
    dtype: str = "bfloat16",
    page_size: int = 0,
    ragged: bool = False,
) -> dict:
    """Arguments of `verify_attn` without `scale`: q, kv, tree, prefix_lens, page_table."""
    lengths = np.array(prefix_lens, dtype=np.int32)
    tree = random_tree(rng, batch, n_slots, ragged=ragged, prefix_lens=lengths)
    width = kv_lora_rank + rope
    q = round_to(rng.standard_normal((batch, n_slots, heads, width)), dtype)
    kv, table = cache(rng, lengths + tree.n_nodes, width, dtype, page_size=page_size)
    return {"q": q, "kv": kv, "tree": tree, "prefix_lens": lengths, "page_table": table}


def predictions_for(rng: np.random.RandomState, tree: DraftTree, chance: float = 0.8, vocab: int = 97) -> np.ndarray:
    """i32[B,N]: a target that agrees with a random child of a slot with probability `chance`."""
    wanted = rng.randint(0, vocab, size=(tree.batch, tree.n_slots)).astype(np.int32)
    for b in range(tree.batch):
        for i in range(1, int(tree.n_nodes[b])):
            if rng.random_sample() < chance:
                wanted[b, tree.parents[b, i]] = tree.token_ids[b, i]
    return wanted
