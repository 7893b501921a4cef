"""Peers of `verify_attn` around FlashMLA's dense decode kernel (deepseek-ai/FlashMLA, also in sgl-kernel).

`flash_mla_with_kvcache` takes q [B,N,H,576], a cache [pages,64,1,576], a block table int32[B,max_pages],
lengths int32[B], and returns out [B,N,H,512] and lse f32[B,H,N]: natural logarithm, +inf (not -inf) where a
length is 0. It knows a causal mask, no tree mask. So there are two kinds of peer:

* ``flashmla-full`` and ``flashmla-causal``: every slot sees the whole tree, or the slots up to its own. Not
  the op's question (`exact` False): the time an ideal tree mask would cost in that kernel. Checked against
  the reference with the mask they do have.
* ``flashmla+torchmerge`` and ``flashmla+compilemerge``: FlashMLA on the prefix, torch on the tree, merged.

Timed: the kernel (with its split-KV combine). Not timed: its scheduling metadata, which an engine makes
once a step, and bringing a cache that is not paged by 64 into such pages, because an engine with this
kernel keeps it so. Needs compute capability 9.0 and bf16 or fp16.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from kdtree.baselines import torch_merge
from kdtree.baselines.base import Baseline, Prepared, Unsupported, needs_cuda
from kdtree.baselines.layout import Case, read, row_numbers, with_visibility, zero_unused

MODULES = ("flash_mla", "sgl_kernel.flash_mla")  # the same functions; the second has wheels on PyPI
PAGE = 64  # rows; the only page size of the kernel
LATENT, ROPE = 512, 64


def available() -> tuple[bool, str]:
    """Hopper and one of `MODULES`."""
    answers = [needs_cuda(module, major=(9,)) for module in MODULES]
    return next((a for a in answers if a[0]), answers[0])


def module() -> Any:
    """The first of `MODULES` that imports; ImportError of the first when none does."""
    first: ImportError | None = None
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            first = first or error
    assert first is not None
    raise first


def check_shape(case: Case) -> None:
    """Raise Unsupported for what the kernel does not take."""
    import torch

    if case.q.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"q: got {case.q.dtype}, FlashMLA takes bfloat16 and float16")
    if case.q.shape[-1] != LATENT + ROPE or case.kv_lora_rank != LATENT:
        raise Unsupported(f"q: got head size {case.q.shape[-1]} with latent {case.kv_lora_rank}, expected 576 with 512")
    if case.part != "all":
        raise Unsupported(f"part: got {case.part!r}, this peer answers 'all'")


def paged(case: Case, page_size: int) -> tuple[Any, Any]:
    """(cache [pages,page_size,E], page table int32[B,max_pages]): views where it lies so, else copies."""
    import torch

    width = case.kv.shape[-1]
    if case.page_table is not None and case.kv.shape[1] == page_size:
        return case.kv, case.page_table.to(torch.int32).contiguous()
    batch = len(case.used)
    if case.page_table is None and case.kv.shape[1] % page_size == 0:
        per_request = case.kv.shape[1] // page_size
        pages = case.kv.reshape(batch * per_request, page_size, width)
    else:
        per_request = -(-max(case.ends) // page_size)
        rows = row_numbers(case, [0] * batch, per_request * page_size)
        pages = case.kv.reshape(-1, width)[rows.flatten()].view(batch * per_request, page_size, width)
    table = torch.arange(batch * per_request, dtype=torch.int32, device=case.kv.device)
    return pages, table.view(batch, per_request)


def kernel(case: Case, lengths: list[int], *, causal: bool) -> Callable[[], tuple[Any, Any]]:
    """A function that runs FlashMLA over each request's first `lengths[b]` rows.

    It returns (out [B,N,H,C], lse f32[B,N,H]), and has run once.
    """
    import torch

    check_shape(case)
    library = module()
    pages, table = paged(case, PAGE)
    cache = pages.unsqueeze(2)
    lens = torch.tensor(lengths, dtype=torch.int32, device=case.q.device)
    q = case.q.contiguous()
    # Older interfaces compute the schedule here; newer ones ignore the arguments and do it on the first call.
    metadata, splits = library.get_mla_metadata(lens, q.shape[1] * q.shape[2], 1)

    def run() -> tuple[Any, Any]:
        out, lse = library.flash_mla_with_kvcache(
            q, cache, table, lens, LATENT, metadata, splits, softmax_scale=case.scale, causal=causal
        )
        return out, lse.transpose(1, 2)

    run()
    return run


def prepare_full(inputs: dict[str, Any], *, causal: bool) -> Prepared:
    """FlashMLA over prefix and tree, every slot seeing all of it (or, causal, the slots up to its own)."""
    case = read(inputs)
    if causal and min(case.used) < case.tree.n_slots:
        raise Unsupported("tree: underfull; the kernel's causal mask is aligned to the last query")
    zero = zero_unused(case)
    return Prepared(kernel(case, case.ends, causal=causal), lambda raw: zero(*raw))


def prepare_merge(inputs: dict[str, Any], *, compile: bool = False) -> Prepared:
    """FlashMLA over the prefix, torch over the tree, merged: exact."""
    case = read(inputs)
    return torch_merge.prepare(case, kernel(case, case.prefix, causal=False), compile=compile)


def _full(name: str, *, causal: bool) -> Baseline:
    return Baseline(
        name=name,
        op="verify_attn",
        prepare=functools.partial(prepare_full, causal=causal),
        available=available,
        timed="the kernel and its combine; not its scheduling metadata",
        capturable=True,
        exact=False,
        reason=f"no tree mask: a slot sees {'the slots up to its own' if causal else 'the whole tree'}",
        asked=functools.partial(with_visibility, causal=causal),
    )


def _merge(name: str, *, compile: bool) -> Baseline:
    return Baseline(
        name=name,
        op="verify_attn",
        prepare=functools.partial(prepare_merge, compile=compile),
        available=available,
        timed="the kernel on the prefix, gathering tree rows, the tree in torch, the merge; not the metadata"
        + (", not compiling" if compile else ""),
        capturable=True,
    )


PEERS = (
    _merge("peer:flashmla+torchmerge", compile=False),
    _merge("peer:flashmla+compilemerge", compile=True),
    _full("peer:flashmla-full", causal=False),
    _full("peer:flashmla-causal", causal=True),
)
