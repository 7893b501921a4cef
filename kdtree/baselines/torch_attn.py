"""Peers of `verify_attn` in plain torch: two batched products with the tree as a dense mask, and SDPA.

Source: weight-absorbed MLA as in DeepSeek-V2's published model code (arXiv 2405.04434), with the tree mask of
SpecInfer (arXiv 2305.09781). All heads of a request share one latent row set, so the products are
[N·H, E] × [E, S] and [N·H, S] × [S, C] for each request, prefixes padded to the longest.

Products take the inputs' type and accumulate and return float32 (``torch.bmm(out_dtype=float32)``, torch >=
2.8 on CUDA). Elsewhere the operands are cast to float32 first, which is exact too and slower; that cast is
timed. Scores in bf16, as eager model code has them, would be faster still and wrong by several per cent.

Timed: for a paged cache the gather of the rows (an engine pays it in every layer), the products, the softmax.
Not timed: expanding the bits to the dense mask (once a step for 61 layers).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kdtree.baselines.base import Baseline, Prepared, Unsupported, importable, needs_cuda
from kdtree.baselines.layout import additive, read, visible_rows

FREE_SHARE = 0.9  # of the free GPU memory that a peer's temporaries may take


def bmm_wide(a: Any, b: Any) -> Any:
    """Batched product of half-precision operands on CUDA, accumulated and returned in float32."""
    import torch

    return torch.bmm(a, b, out_dtype=torch.float32)


def bmm_cast(a: Any, b: Any) -> Any:
    """Batched product in float32, operands cast first."""
    import torch

    return torch.bmm(a.float(), b.float())


def product_for(q: Any) -> Callable[[Any, Any], Any]:
    """The batched product with a float32 result that this torch has for tensors like `q`."""
    import torch

    half = q.dtype in (torch.bfloat16, torch.float16)
    return bmm_wide if half and q.is_cuda and "dtype" in torch.ops.aten.bmm.overloads() else bmm_cast


def attend(
    q: Any,  # [B,N,H,E]
    rows: Any,  # [B,S,E]
    bias: Any,  # f32[B,N,1,S], 0 or -inf
    scale: float,
    kv_lora_rank: int,
    product: Callable[[Any, Any], Any],
) -> tuple[Any, Any]:
    """Attention of every slot and head over its request's rows: (out f32[B,N,H,C], lse f32[B,N,H]).

    A row that sees nothing gives (0, -inf) without a branch: its peak is raised from -inf to the lowest
    float, so its weights and their sum are 0, and the sum of any other row is at least 1.
    """
    import torch

    batch, n_slots, heads, width = q.shape
    scores = product(q.reshape(batch, n_slots * heads, width), rows.transpose(1, 2))
    scores = torch.add(bias, scores.view(batch, n_slots, heads, -1), alpha=scale)
    peak = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    flat = weights.view(batch, n_slots * heads, -1).to(q.dtype)
    out = product(flat, rows[..., :kv_lora_rank]).view(batch, n_slots, heads, kv_lora_rank)
    return out / total.clamp_min(1.0), (peak + torch.log(total)).squeeze(-1)


def must_fit(case: Any, width: int) -> None:
    """Raise Unsupported when `attend`'s temporaries (three float32 score arrays) exceed free GPU memory."""
    import torch

    if not case.q.is_cuda:
        return
    needed = 3 * 4 * case.q[..., 0].numel() * width
    free = FREE_SHARE * torch.cuda.mem_get_info(case.q.device)[0]
    if needed > free:
        raise Unsupported(f"dense scores need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of `function`, once a process, shapes static; never falls back to eager silently."""
    import torch

    for limit in (
        "recompile_limit",
        "cache_size_limit",
        "accumulated_recompile_limit",
        "accumulated_cache_size_limit",
    ):
        if hasattr(torch._dynamo.config, limit):  # the default of 8 shapes is less than a sweep has
            setattr(torch._dynamo.config, limit, 4096)
    return torch.compile(function, dynamic=False, fullgraph=True)


def prepare_bmm(inputs: dict[str, Any], *, compile: bool = False) -> Prepared:
    """`inputs` of verify_attn; result (out in q's type, lse f32)."""
    import torch

    case = read(inputs)
    rows, mask = visible_rows(case)
    must_fit(case, mask.shape[-1])
    bias = additive(mask, torch.float32).unsqueeze(2)
    product = product_for(case.q)
    function = compiled(attend) if compile else attend

    def run() -> tuple[Any, Any]:
        out, lse = function(case.q, rows(), bias, case.scale, case.kv_lora_rank, product)
        return out.to(case.q.dtype), lse

    if compile:
        run()
    return Prepared(run)


def prepare_sdpa(inputs: dict[str, Any]) -> Prepared:
    """`inputs` of verify_attn; result (out in q's type, None): SDPA does not return an LSE.

    K and V are one latent head broadcast to H. Kernel choice is torch's own. An empty row is given a column
    to see, because not every SDPA kernel survives one, and zeroed in `finish`.
    """
    from torch.nn.functional import scaled_dot_product_attention

    case = read(inputs)
    rows, mask = visible_rows(case)
    empty = ~mask.any(dim=-1)
    mask[..., 0] |= empty
    bias = additive(mask, case.q.dtype).unsqueeze(1)  # [B,1,N,S]
    heads = case.q.shape[2]
    queries = case.q.transpose(1, 2)  # [B,H,N,E]

    def run() -> Any:
        keys = rows().unsqueeze(1).expand(-1, heads, -1, -1)
        values = keys[..., : case.kv_lora_rank]
        return scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=case.scale)

    def finish(out: Any) -> tuple[Any, None]:
        return out.transpose(1, 2).masked_fill(empty[:, :, None, None], 0), None

    return Prepared(run, finish)


def _peer(name: str, prepare: Any, available: Any, timed: str, reason: str = "") -> Baseline:
    return Baseline(name, "verify_attn", prepare, available, timed, capturable=True, reason=reason)


PEERS = (
    _peer(
        "peer:torch-bmm",
        prepare_bmm,
        lambda: importable("torch"),
        "gather of a paged cache, two batched products, masked softmax; not the expansion of the mask",
    ),
    _peer(
        "peer:torch-compile",
        functools.partial(prepare_bmm, compile=True),
        lambda: needs_cuda("triton"),
        "as torch-bmm, softmax and mask fused by torch.compile; compiling is not timed",
    ),
    _peer(
        "peer:torch-sdpa",
        prepare_sdpa,
        lambda: importable("torch"),
        "gather of a paged cache, scaled_dot_product_attention; not the expansion of the mask",
        "gives no LSE",
    ),
)
