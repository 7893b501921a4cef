"""Where the rows of a request lie and what each query sees, as torch tensors: shared by the attention peers.

All of it is done in `prepare`: an engine builds masks and row numbers once a step and uses them in every
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kdtree.arrays import to_numpy
from kdtree.baselines.base import Unsupported
from kdtree.tree import DraftTree

ALIGN = 16  # columns; scaled_dot_product_attention copies a mask whose width is not a multiple of it


@dataclass(frozen=True)
class Case:
    """The inputs of `verify_attn` with defaults filled in. `prefix` and `used` are host lists of B ints."""

    q: Any  # [B,N,H,E]
    kv: Any  # [B,Lmax,E] or [pages,page_size,E]
    tree: DraftTree
    scale: float
    page_table: Any  # int[B,max_pages] or None
    kv_lora_rank: int
    part: str
    prefix: list[int]
    used: list[int]

    @property
    def ends(self) -> list[int]:
        """Rows in use per request: prefix and tree."""
        return [p + u for p, u in zip(self.prefix, self.used, strict=True)]


def read(inputs: dict[str, Any]) -> Case:
    """`Case` of the keyword arguments of `verify_attn`. Raises Unsupported for a tree without nodes."""
    case = Case(
        q=inputs["q"],
        kv=inputs["kv"],
        tree=inputs["tree"],
        scale=float(inputs["scale"]),
        page_table=inputs.get("page_table"),
        kv_lora_rank=int(inputs.get("kv_lora_rank", 512)),
        part=inputs.get("part", "all"),
        prefix=[int(n) for n in to_numpy(inputs["prefix_lens"])],
        used=[int(n) for n in to_numpy(inputs["tree"].n_nodes)],
    )
    if min(case.used, default=1) < 1:
        raise Unsupported("tree: a request has no node; there is no row to pad with")
    return case


def tree_mask(case: Case) -> Any:
    """bool[B,N,N]: what used slots see of used slots; unused rows and columns False."""
    import torch

    words = case.tree.visibility.view(torch.int32)
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    mask = bits.flatten(2)[..., : case.tree.n_slots].bool()
    slots = torch.arange(case.tree.n_slots, device=mask.device)
    inside = slots < torch.tensor(case.used, device=mask.device)[:, None]
    return mask & inside[:, :, None] & inside[:, None, :]


def full_mask(case: Case, width: int) -> Any:
    """bool[B,N,width]: what each slot sees of its request's first `width` cache rows, prefix included."""
    import torch

    mask = torch.zeros((len(case.used), case.tree.n_slots, width), dtype=torch.bool, device=case.q.device)
    tree = tree_mask(case)
    for b, (prefix, used) in enumerate(zip(case.prefix, case.used, strict=True)):
        mask[b, :used, :prefix] = True
        mask[b, :used, prefix : prefix + used] = tree[b, :used, :used]
    return mask


def row_numbers(case: Case, start: list[int], width: int) -> Any:
    """int64[B,width]: flat cache rows ``start[b] + 0 … width-1`` of each request, in ``kv.reshape(-1, E)``.

    Columns past the request's last row in use repeat its root row: finite, and masked by the caller.
    """
    import torch

    device = case.kv.device
    first = torch.tensor(start, device=device)[:, None]
    end = torch.tensor(case.ends, device=device)[:, None]
    root = torch.tensor(case.prefix, device=device)[:, None]
    rows = first + torch.arange(width, device=device)
    rows = torch.where(rows < end, rows, root.expand_as(rows))
    page_size = case.kv.shape[1]
    if case.page_table is None:
        return torch.arange(len(start), device=device)[:, None] * page_size + rows
    return case.page_table.to(torch.int64).gather(1, rows // page_size) * page_size + rows % page_size


def gatherer(case: Case, rows: Any) -> Callable[[], Any]:
    """A function that copies the cache rows `rows` int64[B,S] out: [B,S,E]."""
    flat = case.kv.reshape(-1, case.kv.shape[-1])
    index, shape = rows.flatten(), (*rows.shape, case.kv.shape[-1])
    return lambda: flat.index_select(0, index).view(shape)


def visible_rows(case: Case) -> tuple[Callable[[], Any], Any]:
    """(function giving all requests' rows, padded to one width: [B,S,E]; mask bool[B,N,S]).

    A contiguous cache is a view and costs nothing, a paged one is gathered on each call, as are the tree
    rows of ``part="tree"``. Rows beyond a request's own must be finite for their zero weight to make them
    vanish; where a contiguous cache holds NaN there (an engine's does not), a cleaned copy is made here.
    """
    if case.part == "tree":
        return gatherer(case, row_numbers(case, case.prefix, case.tree.n_slots)), tree_mask(case)
    width = -(-max(case.ends) // ALIGN) * ALIGN
    if case.page_table is not None:
        return gatherer(case, row_numbers(case, [0] * len(case.used), width)), full_mask(case, width)
    width = min(width, case.kv.shape[1])
    rows = case.kv[:, :width]
    if not all(bool(rows[b, end:].isfinite().all()) for b, end in enumerate(case.ends)):
        rows = rows.clone()
        for b, end in enumerate(case.ends):
            rows[b, end:] = 0
    return (lambda: rows), full_mask(case, width)


def additive(mask: Any, dtype: Any) -> Any:
    """0 where True, -inf where False."""
    import torch

    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, float("-inf"))


def zero_unused(case: Case) -> Callable[[Any, Any], tuple[Any, Any]]:
    """(out, lse) -> the same with (0, -inf) in unused slots; lse may be None. For a peer's `finish`."""
    import torch

    if min(case.used) == case.tree.n_slots:
        return lambda out, lse: (out, lse)
    slots = torch.arange(case.tree.n_slots, device=case.q.device)
    unused = slots >= torch.tensor(case.used, device=case.q.device)[:, None]

    def finish(out: Any, lse: Any) -> tuple[Any, Any]:
        out = out.masked_fill(unused[:, :, None, None], 0)
        return out, None if lse is None else lse.masked_fill(unused[:, :, None], float("-inf"))

    return finish


def with_visibility(inputs: dict[str, Any], *, causal: bool) -> dict[str, Any]:
    """`inputs` with a tree whose used slots see all used slots, or (causal) those up to their own.

    The question that a kernel without tree mask answers; give it to the reference.
    """
    import numpy as np
    import torch

    tree = inputs["tree"]
    words = np.zeros(tuple(tree.visibility.shape), dtype=np.uint32)
    for b, used in enumerate(to_numpy(tree.n_nodes)):
        for i in range(int(used)):
            for j in range(i + 1 if causal else int(used)):
                words[b, i, j // 32] |= np.uint32(1 << (j % 32))
    seen = torch.from_numpy(words).view(torch.int32).to(tree.visibility.device).view(tree.visibility.dtype)
    return {**inputs, "tree": replace(tree, visibility=seen)}
