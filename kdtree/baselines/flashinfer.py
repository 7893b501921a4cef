"""Peers of `verify_attn` around FlashInfer's BatchMLAPagedAttentionWrapper (flashinfer-ai/flashinfer).

`plan()` takes the page lists in CSR form and reads them back to the host; `run()` takes q and cache split
in latent and rope part (views of one array will do) and returns out [B·N,H,512] and lse f32[B·N,H] **in
base 2**. Any page size, a causal mask, no tree mask. Rows of a request without any KV are left unwritten by
some versions.

* ``flashinfer-fa2-full`` and ``flashinfer-fa3-full``: every slot sees the whole tree (`exact` False), an
  upper reference as in `flash_mla`.
* ``flashinfer-fa2+torchmerge``, ``flashinfer-fa3+torchmerge``: on the prefix, torch on the tree, merged.
  Exact; what there is where FlashMLA does not run.

Timed: `run`; for the merge also the change of base. Not timed: `plan` (once a step) and compiling the
kernel, which FlashInfer does on first use and which needs nvcc. fa3 needs compute capability 9.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kdtree.baselines import torch_merge
from kdtree.baselines.base import Baseline, Prepared, Unsupported, needs_cuda
from kdtree.baselines.flash_mla import LATENT, PAGE, check_shape, paged
from kdtree.baselines.layout import Case, read, with_visibility, zero_unused

WORKSPACE = 128 << 20  # bytes, the size its documentation recommends


def available(backend: str) -> tuple[bool, str]:
    """A GPU that `backend` runs on, and the package."""
    return needs_cuda("flashinfer", major=(9,) if backend == "fa3" else None)


def kernel(case: Case, lengths: list[int], backend: str) -> Callable[[], tuple[Any, Any]]:
    """A function that attends to each request's first `lengths[b]` rows.

    It returns (out [B·N,H,C], base-2 lse f32[B·N,H]), and has run once.
    """
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    check_shape(case)
    device = case.q.device
    batch, n_slots, heads, width = case.q.shape
    page_size = case.kv.shape[1] if case.page_table is not None else PAGE
    pages, table = paged(case, page_size)
    counts = [-(-n // page_size) for n in lengths]
    lists = [table[b, :n] for b, n in enumerate(counts)]
    starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.uint8, device=device), backend=backend)
    wrapper.plan(
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=device) * n_slots,
        kv_indptr=starts,
        kv_indices=torch.cat(lists),
        kv_len_arr=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_heads=heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=width - LATENT,
        page_size=page_size,
        causal=False,
        sm_scale=case.scale,
        q_data_type=case.q.dtype,
        kv_data_type=case.kv.dtype,
    )
    q = case.q.reshape(batch * n_slots, heads, width)
    parts = {
        "q_nope": q[..., :LATENT],
        "q_pe": q[..., LATENT:],
        "ckv_cache": pages[..., :LATENT],
        "kpe_cache": pages[..., LATENT:],
    }

    def run() -> tuple[Any, Any]:
        return wrapper.run(**parts, return_lse=True)

    run()
    return run


def shaped(case: Case, out: Any, lse: Any) -> tuple[Any, Any]:
    """FlashInfer's result as (out [B,N,H,C], natural lse [B,N,H])."""
    batch, n_slots, heads, _ = case.q.shape
    return out.view(batch, n_slots, heads, LATENT), lse.view(batch, n_slots, heads) * torch_merge.LN_2


def prepare_full(inputs: dict[str, Any], *, backend: str) -> Prepared:
    """FlashInfer over prefix and tree, every slot seeing all of it."""
    case = read(inputs)
    zero = zero_unused(case)
    return Prepared(kernel(case, case.ends, backend), lambda raw: zero(*shaped(case, *raw)))


def prepare_merge(inputs: dict[str, Any], *, backend: str) -> Prepared:
    """FlashInfer over the prefix, torch over the tree, merged: exact."""
    case = read(inputs)
    if min(case.prefix) < 1:
        raise Unsupported("prefix_lens: a request has an empty prefix, whose rows FlashInfer may leave unwritten")
    part = kernel(case, case.prefix, backend)
    return torch_merge.prepare(case, lambda: shaped(case, *part()))


def _pair(backend: str) -> tuple[Baseline, Baseline]:
    ready = functools.partial(available, backend)
    merge = Baseline(
        name=f"peer:flashinfer-{backend}+torchmerge",
        op="verify_attn",
        prepare=functools.partial(prepare_merge, backend=backend),
        available=ready,
        timed="run() on the prefix, gathering the tree rows, the tree in torch, the merge; not plan()",
        capturable=True,
    )
    full = Baseline(
        name=f"peer:flashinfer-{backend}-full",
        op="verify_attn",
        prepare=functools.partial(prepare_full, backend=backend),
        available=ready,
        timed="run(); not plan()",
        capturable=True,
        exact=False,
        reason="no tree mask: a slot sees the whole tree",
        asked=functools.partial(with_visibility, causal=False),
    )
    return merge, full


PEERS = (*_pair("fa3"), *_pair("fa2"))
