"""Peer of `topk`: torch.topk and torch.logsumexp, as DDTree drafters do (liranringel/ddtree, vLLM, SGLang).

Two variants: over a float32 copy of the logits (what the published code does), and torch.topk on the logits
in their own type with only the log-sum-exp in float32, which is faster on bf16 and selects the same values.

torch leaves the order of equal logits open, and so which of several equal candidates at the cut is kept.
Hence `tie_order` is False and `disagreements` compares values. Rows with a NaN or +inf logit are outside
this peer's
contract: torch ranks NaN first where ours ranks it last.
"""

from __future__ import annotations

from typing import Any

from kdtree.baselines.base import Baseline, Prepared, importable


def topk_float(logits: Any, k: int) -> tuple[Any, Any]:
    """float[..., V] -> (log_probs f32[..., k], token_ids i32[..., k]) through a float32 copy."""
    import torch

    wide = logits.float()
    values, indices = torch.topk(wide, k, dim=-1)
    return values - torch.logsumexp(wide, dim=-1, keepdim=True), indices.int()


def topk_native(logits: Any, k: int) -> tuple[Any, Any]:
    """As `topk_float`, with the selection in the logits' own type."""
    import torch

    values, indices = torch.topk(logits, k, dim=-1)
    return values.float() - torch.logsumexp(logits.float(), dim=-1, keepdim=True), indices.int()


def disagreements(inputs: dict[str, Any], got: Any, want: Any, *, atol: float = 2e-5) -> list[str]:
    """Complaints about `got` = (log_probs, token_ids) beside the reference's `want`; ties may be permuted.

    Right is: the log-probabilities within `atol`, distinct tokens in each row, and rank for rank a token with
    exactly the logit of the reference's token. `inputs` holds `logits`; `want` may be NumPy or torch.
    """
    import torch

    logits = inputs["logits"].cpu().double()
    log_probs, token_ids = (torch.as_tensor(a).cpu() for a in got)
    want_probs, want_ids = (torch.as_tensor(a).cpu() for a in want)
    complaints = []
    if log_probs.shape != want_probs.shape or token_ids.shape != want_ids.shape:
        return [f"shapes: got {tuple(log_probs.shape)}, expected {tuple(want_probs.shape)}"]
    worst = (log_probs.double() - want_probs.double()).abs().nan_to_num(posinf=0.0).max().item()
    same_holes = torch.equal(torch.isfinite(log_probs), torch.isfinite(want_probs))
    if worst > atol or not same_holes:
        complaints.append(f"log_probs: off by {worst:.3g}, expected at most {atol:.3g} and the same finite entries")
    ids = token_ids.long()
    if not ((ids >= 0) & (ids < logits.shape[-1])).all():
        return [*complaints, "token_ids: some lie outside the vocabulary"]
    if not torch.equal(logits.gather(-1, ids), logits.gather(-1, want_ids.long())):
        complaints.append("token_ids: some rank holds a token with another logit than the reference's")
    ordered = ids.sort(dim=-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        complaints.append("token_ids: a token occurs twice in a row")
    return complaints


def _peer(name: str, function: Any, what: str) -> Baseline:
    def prepare(inputs: dict[str, Any]) -> Prepared:
        logits, k = inputs["logits"], int(inputs["k"])
        return Prepared(lambda: function(logits, k))

    return Baseline(
        name=name,
        op="topk",
        prepare=prepare,
        available=lambda: importable("torch"),
        timed=f"everything: {what}, log-sum-exp, subtraction, cast of the indices to int32",
        capturable=True,
        tie_order=False,
        check=disagreements,
    )


PEERS = (
    _peer("peer:torch-topk-float", topk_float, "float32 copy of the logits, top-k on it"),
    _peer("peer:torch-topk-native", topk_native, "top-k in the logits' type, float32 copy for the log-sum-exp"),
)
