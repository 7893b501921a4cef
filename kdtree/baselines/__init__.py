"""What a user would run instead of our kernels: each peer optional, each checked against the reference.

Importing this package imports neither torch nor any peer. `for_op("verify_attn")` lists the peers of an op,
`available()` says which of them run in this process and why the others do not.

Which module holds what
    heapq_build   tree_build on the host, as CPU serving engines do it
    torch_topk    torch.topk + logsumexp
    torch_attn    two batched matrix products, scaled_dot_product_attention
    torch_merge   (used by the next two) a prefix kernel without tree mask + the tree in torch, joined by
    log-sum-exp
    host_accept   the accept walk over dictionaries on the host
    flash_mla, flashinfer, sgl   kernels of those projects, where they are installed
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from kdtree.baselines.base import Baseline, Prepared, Unsupported

OPS = ("topk", "tree_build", "verify_attn", "merge_states", "tree_accept", "kv_compact")
MODULES = ("torch_topk", "heapq_build", "torch_attn", "flash_mla", "flashinfer", "host_accept", "sgl")

__all__ = ["BASELINES", "Baseline", "Prepared", "Unsupported", "available", "for_op"]


@functools.cache
def _registry() -> dict[str, list[Baseline]]:
    found: dict[str, list[Baseline]] = {op: [] for op in OPS}
    for module in MODULES:
        for peer in importlib.import_module(f"{__name__}.{module}").PEERS:
            found[peer.op].append(peer)
    return found


def for_op(op: str) -> list[Baseline]:
    """The peers of `op`, installed or not; merge_states and kv_compact have none. ValueError: unknown op."""
    if op not in OPS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(OPS)}")
    return list(_registry()[op])


def available(op: str | None = None) -> dict[str, tuple[bool, str]]:
    """Peer name -> (runs in this process, why not), of one op or of all."""
    ops = OPS if op is None else (op,)
    return {peer.name: peer.available() for name in ops for peer in for_op(name)}


def __getattr__(name: str) -> Any:
    if name == "BASELINES":  # dict[op, list[Baseline]], built on first use
        return _registry()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
