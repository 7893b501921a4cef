"""Reference of `verify_attn` and `merge_states`: MLA weight-absorbed attention of tree queries.

Source: DeepSeek-V2's multi-head latent attention (arXiv 2405.04434) in its absorbed form: every query head
reads the same latent row; the whole row (latent and rope part) is the key, its first `kv_lora_rank` entries
are the value. The tree mask is ancestor-or-self, as in SpecInfer (arXiv 2305.09781).
"""

from __future__ import annotations

import numpy as np

from kdtree.ref.cache import gather_rows
from kdtree.tree import DraftTree


def visible(words: np.ndarray, j: int) -> bool:
    """Bit j of one visibility row u32[W]."""
    return bool((int(words[j // 32]) >> (j % 32)) & 1)


def attend(q: np.ndarray, rows: np.ndarray, scale: float, kv_lora_rank: int) -> tuple[np.ndarray, float]:
    """softmax(scale · rows·q) over `rows`, applied to their latent part. Natural-log LSE.

    No rows: (0, -inf). Sums are NumPy's, not BLAS's, so that fixtures come out the same on every machine.
    """
    if len(rows) == 0:
        return np.zeros(kv_lora_rank), -np.inf
    logits = scale * np.sum(rows * q, axis=1)
    peak = np.max(logits)
    weights = np.exp(logits - peak)
    total = np.sum(weights)
    out = np.sum(weights[:, None] * rows[:, :kv_lora_rank], axis=0) / total
    return out, float(peak + np.log(total))


def verify_attn(
    q: np.ndarray,  # [B,N,H,E]
    kv: np.ndarray,  # [B,Lmax,E] or [pages,page_size,E]
    tree: DraftTree,
    *,
    prefix_lens: np.ndarray,  # int[B]
    scale: float,
    page_table: np.ndarray | None = None,  # int[B,max_pages]
    part: str = "all",
    kv_lora_rank: int = 512,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each used slot over the whole prefix and the tree slots its visibility bits name.

    Row ``prefix_lens[b] + j`` of request b's cache belongs to tree slot j. ``part="tree"`` leaves the prefix
    out. Rows of the cache beyond ``prefix_lens[b] + n_nodes[b]`` are never read, nor is a row whose bit is 0.

    Returns:
        (out f64[B,N,H,C], lse f64[B,N,H]), natural log. Unused slots, and rows with nothing visible: (0, -inf).

    Raises:
        ValueError: `part` is neither "all" nor "tree".
    """
    if part not in ("all", "tree"):
        raise ValueError(f"part: got {part!r}, expected 'all' or 'tree'")
    batch, n_slots, heads, _ = q.shape
    out = np.zeros((batch, n_slots, heads, kv_lora_rank), dtype=np.float64)
    lse = np.full((batch, n_slots, heads), -np.inf, dtype=np.float64)
    for b in range(batch):
        prefix, used = int(prefix_lens[b]), int(tree.n_nodes[b])
        rows = gather_rows(kv, b, prefix + used, page_table)
        for i in range(used):
            seen = list(range(prefix)) if part == "all" else []
            seen += [prefix + j for j in range(used) if visible(tree.visibility[b, i], j)]
            keys = rows[seen]
            for h in range(heads):
                query = q[b, i, h].astype(np.float64)
                out[b, i, h], lse[b, i, h] = attend(query, keys, scale, kv_lora_rank)
    return out, lse


def merge_states(
    out_a: np.ndarray,  # [..., C]
    lse_a: np.ndarray,  # [...]
    out_b: np.ndarray,  # [..., C]
    lse_b: np.ndarray,  # [...]
) -> tuple[np.ndarray, np.ndarray]:
    """Join two attention results over disjoint rows by their natural-log LSE.

    Returns (out f64[..., C], lse f64[...]). A part with lse -inf is empty and its `out` is not read, so that
    NaN there does not spread; two empty parts give (0, -inf).
    """
    width = out_a.shape[-1]
    flat_a, flat_b = out_a.reshape(-1, width), out_b.reshape(-1, width)
    out = np.zeros(flat_a.shape, dtype=np.float64)
    lse = np.full(len(flat_a), -np.inf, dtype=np.float64)
    for r, (a, b) in enumerate(zip(lse_a.reshape(-1), lse_b.reshape(-1), strict=True)):
        a, b = float(a), float(b)
        if a == -np.inf and b == -np.inf:
            continue
        lse[r] = np.logaddexp(a, b)
        # Weights against the larger LSE, then normalised: against their own sum they would not add up to 1 where
        # LSEs are large.
        weight_a, weight_b = np.exp(a - max(a, b)), np.exp(b - max(a, b))
        if a != -np.inf:
            out[r] += weight_a / (weight_a + weight_b) * flat_a[r].astype(np.float64)
        if b != -np.inf:
            out[r] += weight_b / (weight_a + weight_b) * flat_b[r].astype(np.float64)
    return out.reshape(out_a.shape), lse.reshape(lse_a.shape)
