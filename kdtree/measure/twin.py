"""A float64 twin of the attention reference in torch, for shapes that the loops of the reference cannot do.

Checked itself against `kdtree.ref.verify_attn` in the tests; runs where its inputs lie.
"""

from __future__ import annotations

from typing import Any

CHUNK_ELEMENTS = 1 << 28  # float64 logits held at once: 2 GiB


def verify_attn(a: dict[str, Any], params: dict) -> dict[str, Any]:
    """{out f64[B,N,H,C], lse f64[B,N,H]} for torch arguments of `verify_attn`."""
    import torch

    q, kv, tree, table = a["q"], a["kv"], a["tree"], a.get("page_table")
    batch, n_slots, heads, width = q.shape
    latent, scale = params["kv_lora_rank"], params["scale"]
    out = torch.zeros((batch, n_slots, heads, latent), dtype=torch.float64, device=q.device)
    lse = torch.full((batch, n_slots, heads), float("-inf"), dtype=torch.float64, device=q.device)
    lengths, nodes = a["prefix_lens"].tolist(), tree.n_nodes.tolist()
    visible = dense_visibility(tree)
    for b in range(batch):
        prefix, used = lengths[b], nodes[b]
        if table is None:
            rows = kv[b, : prefix + used].double()
        else:
            at = torch.arange(prefix + used, device=q.device)
            rows = kv[table[b].long()[at // kv.shape[1]], at % kv.shape[1]].double()
        mask = torch.zeros((used, prefix + used), dtype=torch.bool, device=q.device)
        mask[:, :prefix] = params.get("part", "all") == "all"
        mask[:, prefix:] = visible[b, :used, :used]
        step = max(1, CHUNK_ELEMENTS // max(1, heads * (prefix + used)))
        for first in range(0, used, step):
            part = slice(first, min(first + step, used))
            logits = (q[b, part].double().reshape(-1, width) @ rows.T).reshape(-1, heads, prefix + used) * scale
            logits.masked_fill_(~mask[part, None, :], float("-inf"))
            total = torch.logsumexp(logits, -1)
            weights = torch.exp(logits - torch.where(total.isfinite(), total, 0.0)[..., None])
            out[b, part] = (weights.reshape(-1, prefix + used) @ rows[:, :latent]).reshape(-1, heads, latent)
            lse[b, part] = total
    return {"out": out, "lse": lse}


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
