"""A float64 twin of the attention reference in torch, for shapes that the loops of the reference cannot do.

Checked itself against `kdtree.ref.verify_attn` in the tests; runs where its inputs lie.
"""

from __future__ import annotations

from typing import Any

CHUNK_ELEMENTS = 1 << 28  # float64 logits held at once: 2 GiB, and as much again for each of some six temporaries
BYTES_AN_ELEMENT = 64  # of a chunk, temporaries included


def verify_attn(a: dict[str, Any], params: dict, picked: Any = None) -> dict[str, Any]:
    """{out f64[B,N,H,C], lse f64[B,N,H]} for torch arguments of `verify_attn`.

    With `picked`, a list of row numbers slot·H + head, only those rows of each request: {out f64[B,R,C], lse f64[B,R]}.
    """
    import torch

    q, kv, tree, table = a["q"], a["kv"], a["tree"], a.get("page_table")
    batch, n_slots, heads, width = q.shape
    latent, scale = params["kv_lora_rank"], params["scale"]
    chosen = range(n_slots * heads) if picked is None else picked
    chosen = torch.as_tensor(list(chosen), dtype=torch.int64, device=q.device)
    count = len(chosen)
    out = torch.zeros((batch, count, latent), dtype=torch.float64, device=q.device)
    lse = torch.full((batch, count), float("-inf"), dtype=torch.float64, device=q.device)
    lengths, nodes = a["prefix_lens"].tolist(), tree.n_nodes.tolist()
    visible, limit = dense_visibility(tree), chunk_elements(q)
    for b in range(batch):
        prefix, used = lengths[b], nodes[b]
        if table is None:
            rows = kv[b, : prefix + used].double()
        else:
            at = torch.arange(prefix + used, device=q.device)
            rows = kv[table[b].long()[at // kv.shape[1]], at % kv.shape[1]].double()
        mask = torch.zeros((n_slots, prefix + used), dtype=torch.bool, device=q.device)
        mask[:used, :prefix] = params.get("part", "all") == "all"
        mask[:used, prefix:] = visible[b, :used, :used]
        queries, slots = q[b].reshape(-1, width), chosen // heads
        step = max(1, limit // max(1, prefix + used))
        for first in range(0, count, step):
            part = slice(first, first + step)
            logits = (queries[chosen[part]].double() @ rows.T) * scale
            logits.masked_fill_(~mask[slots[part]], float("-inf"))
            total = torch.logsumexp(logits, -1)
            weights = torch.exp_(logits.sub_(torch.where(total.isfinite(), total, 0.0)[:, None]))
            out[b, part] = weights @ rows[:, :latent]
            lse[b, part] = total
    if picked is None:
        return {"out": out.view(batch, n_slots, heads, latent), "lse": lse.view(batch, n_slots, heads)}
    return {"out": out, "lse": lse}


def chunk_elements(like: Any) -> int:
    """How many float64 logits to hold at once where `like` lies: fewer where little memory is free."""
    if not like.is_cuda:
        return CHUNK_ELEMENTS
    from kdtree.measure import memory

    return max(1 << 20, min(CHUNK_ELEMENTS, memory.free_bytes() // 2 // BYTES_AN_ELEMENT))


def dense_visibility(tree: Any) -> Any:
    """bool[B,N,N] of a torch DraftTree, on its device."""
    import torch

    words = tree.visibility.view(torch.int32).long() & 0xFFFFFFFF
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.reshape(*words.shape[:2], -1)[..., : tree.n_slots].bool()


def topk(logits: Any, k: int) -> dict[str, Any]:
    """{log_probs f64[..., K], token_ids i32[..., K]} of regular logits (no NaN, something finite in each row)."""
    import torch

    values, order = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    total = torch.logsumexp(logits.double(), -1, keepdim=True)
    log_probs = torch.clamp(values[..., :k] - total, max=0.0)
    return {"log_probs": log_probs, "token_ids": order[..., :k].to(torch.int32)}
