"""A prefix kernel without tree mask made exact: it does the prefix, torch the tree, a merge joins the two.

Source: merging partial attention by log-sum-exp, as in FlashAttention's split-KV decoding and FlashInfer's
cascade (arXiv 2501.01005). This is the strongest exact peer for most shapes on Hopper. Natural logarithms
throughout; a part whose LSE is -inf is empty.

Timed: the prefix kernel, the gather of N tree rows, two batched products, softmax, merge, cast. Not timed:
planning the prefix kernel, the mask, the row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kdtree.baselines.base import Prepared
from kdtree.baselines.layout import Case, additive, gatherer, row_numbers, tree_mask, zero_unused
from kdtree.baselines.torch_attn import attend, compiled, product_for

LN_2 = math.log(2.0)


def tail_and_merge(
    q: Any,  # [B,N,H,E]
    tail: Any,  # [B,N,E]
    bias: Any,  # f32[B,N,1,N]
    scale: float,
    kv_lora_rank: int,
    product: Callable[[Any, Any], Any],
    prefix_out: Any,  # [B,N,H,C]
    prefix_lse: Any,  # f32[B,N,H], natural; -inf or +inf (FlashMLA) for an empty prefix
) -> tuple[Any, Any]:
    """Attention over the tree rows joined with the prefix part: (out in q's type, lse f32)."""
    import torch

    out, lse = attend(q, tail, bias, scale, kv_lora_rank, product)
    empty = torch.isinf(prefix_lse)
    prefix_lse = prefix_lse.masked_fill(empty, float("-inf"))
    peak = torch.maximum(lse, prefix_lse).clamp_min(torch.finfo(torch.float32).min)
    weight, prefix_weight = torch.exp(lse - peak), torch.exp(prefix_lse - peak)
    total = weight + prefix_weight
    # An empty prefix may come with anything in its rows: 0 · NaN would stay NaN.
    prefix_out = prefix_out.float().masked_fill(empty.unsqueeze(-1), 0.0)
    share = weight / total.clamp_min(1.0)
    prefix_share = prefix_weight / total.clamp_min(1.0)
    joined = out * share.unsqueeze(-1) + prefix_out * prefix_share.unsqueeze(-1)
    return joined.to(q.dtype), peak + torch.log(total)


def prepare(case: Case, prefix: Callable[[], tuple[Any, Any]], *, compile: bool = False) -> Prepared:
    """`prefix()` -> (out [B,N,H,C], natural lse [B,N,H]) of the prefixes alone; result as `verify_attn`'s."""
    import torch

    bias = additive(tree_mask(case), torch.float32).unsqueeze(2)
    tail = gatherer(case, row_numbers(case, case.prefix, case.tree.n_slots))
    product = product_for(case.q)
    function = compiled(tail_and_merge) if compile else tail_and_merge
    zero = zero_unused(case)

    def run() -> tuple[Any, Any]:
        out, lse = prefix()
        return function(case.q, tail(), bias, case.scale, case.kv_lora_rank, product, out, lse)

    if compile:
        run()
    return Prepared(run, lambda raw: zero(*raw))
