"""Peers of `tree_accept` and `tree_build` around SGLang's sgl-kernel (sgl-project/sglang).

* ``sgl-verify-greedy``: `verify_tree_greedy`, one thread a request walking first-child and next-sibling
  links. Exact. No stop token.
* ``sgl-build-links``: `build_tree_kernel_efficient`, which turns the nodes chosen elsewhere into links,
  positions and a dense mask of the tree (QLEN_ONLY). Choosing the nodes, the op's main work, is not in it:
  `exact` False.

Its tensors are int64; `retrive_*` (spelled so, or `retrieve_*`, hence passed by position) index slots,
accept_index is global (b·N + slot). Newer SGLang compiles the same functions itself, in
`sglang.jit_kernel.eagle_utils`.

Timed: filling the -1 the kernels expect in their outputs (an engine does it every step) and the kernel. Not
timed: int64 copies of tree and predictions, which are the engine's own form.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import numpy as np

from kdtree.arrays import to_numpy
from kdtree.baselines import heapq_build
from kdtree.baselines.base import Baseline, Prepared, Unsupported, needs_cuda
from kdtree.baselines.host_accept import child_maps
from kdtree.tree import UNUSED, DraftTree, visibility_words

MODULES = ("sgl_kernel", "sglang.jit_kernel.eagle_utils")
QLEN_ONLY = 1  # tree_mask_mode: bool mask of the tree alone, flat B·N·N
MAX_SLOTS = 1024  # one thread a slot


def available() -> tuple[bool, str]:
    """A GPU and one of `MODULES`."""
    answers = [needs_cuda(name) for name in MODULES]
    return next((a for a in answers if a[0]), answers[0])


def function(name: str) -> Any:
    """Function `name` of the first of `MODULES` that has it; ImportError when none does."""
    for module in MODULES:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name}: found in neither {' nor '.join(MODULES)}")


def prepare_accept(inputs: dict[str, Any]) -> Prepared:
    """Inputs of `tree_accept` as torch tensors."""
    import torch

    from kdtree.ops import Accepted

    if inputs.get("stop_token") is not None:
        raise Unsupported("stop_token: verify_tree_greedy has none")
    tree, predictions = inputs["tree"], inputs["predictions"]
    # Raises Unsupported for a malformed tree, which this kernel would walk out of bounds.
    child_maps(tree.numpy())
    verify = function("verify_tree_greedy")
    batch, n_slots, device = tree.batch, tree.n_slots, predictions.device
    int32 = {"dtype": torch.int32, "device": device}
    predicts = torch.full((batch * n_slots,), UNUSED, **int32)
    accept_index = torch.full((batch, tree.max_depth + 1), UNUSED, **int32)
    accept_count = torch.zeros(batch, **int32)
    first_slot = torch.arange(batch, device=device)[:, None] * n_slots
    index = first_slot + torch.arange(n_slots, device=device)
    candidates, first_child, next_sibling, target = (
        a.to(torch.int64).contiguous() for a in (tree.token_ids, tree.first_child, tree.next_sibling, predictions)
    )

    def run() -> tuple[Any, Any, Any]:
        accept_index.fill_(UNUSED)
        verify(predicts, accept_index, accept_count, candidates, index, first_child, next_sibling, target)
        return predicts, accept_index, accept_count

    def finish(raw: tuple[Any, Any, Any]) -> Any:
        predicted, path, count = raw
        last = path.gather(1, count[:, None].long()).flatten().long()
        local = torch.where(path >= 0, path - first_slot.int(), path)
        return Accepted(local, count.clone(), predicted[last], torch.zeros_like(count))

    return Prepared(run, finish)


def encode(tree: DraftTree) -> tuple[np.ndarray, np.ndarray, int, int]:
    """A NumPy tree in EAGLE's numbering.

    Returns (parent_list i64[B,topk·(depth-1)+1], selected_index i64[B,N-1], topk, depth).

    There a candidate's number divided by topk is the entry of `parent_list` that holds its parent's number,
    0 for the root. Any numbering with that property will do: child r of slot p is p·topk + r, and entry p
    holds p's number.
    """
    batch, n_slots = tree.token_ids.shape
    rank = np.zeros((batch, n_slots), dtype=np.int64)
    for b in range(batch):
        seen = [0] * n_slots
        for slot in range(1, n_slots):
            parent = int(tree.parents[b, slot])
            rank[b, slot] = seen[parent]
            seen[parent] += 1
    topk = int(rank.max(initial=0)) + 1
    depth = -(-(n_slots - 1) // topk) + 1  # enough entries for one a slot
    number = np.maximum(tree.parents, 0).astype(np.int64) * topk + rank
    parent_list = np.zeros((batch, topk * (depth - 1) + 1), dtype=np.int64)
    parent_list[:, 1:n_slots] = number[:, 1:]
    return parent_list, number[:, 1:].copy(), topk, depth


def prepare_build(inputs: dict[str, Any]) -> Prepared:
    """Inputs of `tree_build` as torch tensors. The nodes are chosen here, by `heapq_build`."""
    import torch

    tree = heapq_build.prepare(inputs)()
    host = tree.numpy()
    batch, n_slots, device = tree.batch, tree.n_slots, tree.token_ids.device
    if not 2 <= n_slots <= MAX_SLOTS:
        raise Unsupported(f"budget: got {n_slots - 1}, the kernel takes 1..{MAX_SLOTS - 1}")
    if int(host.n_nodes.min()) < n_slots:
        raise Unsupported("tree: underfull; the kernel walks out of its row for a slot without parent")
    build = function("build_tree_kernel_efficient")
    parents, selected, topk, depth = encode(host)
    parents, selected = (torch.from_numpy(a).to(device) for a in (parents, selected))
    prefix = torch.tensor(heapq_build.host_list(inputs.get("prefix_lens"), batch, 0), device=device)
    mask = torch.zeros(batch * n_slots * n_slots, dtype=torch.bool, device=device)
    positions = torch.zeros(batch * n_slots, dtype=torch.int64, device=device)
    index, next_token, next_sibling = (
        torch.full((batch, n_slots), UNUSED, dtype=torch.int64, device=device) for _ in range(3)
    )

    tensors = (parents, selected, prefix, mask, positions, index, next_token, next_sibling)

    def run() -> None:
        next_token.fill_(UNUSED)
        next_sibling.fill_(UNUSED)
        build(*tensors, topk, depth, n_slots, QLEN_ONLY)

    def finish(_: None) -> DraftTree:
        dense = np.zeros((batch, n_slots, 32 * visibility_words(n_slots)), dtype=bool)
        dense[..., :n_slots] = to_numpy(mask).reshape(batch, n_slots, n_slots)
        words = np.packbits(dense, axis=2, bitorder="little").view(np.uint32)
        return replace(
            tree,
            visibility=torch.from_numpy(words).to(device),
            first_child=next_token.int(),
            next_sibling=next_sibling.int(),
            positions=positions.view(batch, n_slots).clone(),
        )

    return Prepared(run, finish)


_peer = functools.partial(Baseline, available=available, capturable=True)

PEERS = (
    _peer(
        name="peer:sgl-verify-greedy",
        op="tree_accept",
        prepare=prepare_accept,
        timed="filling accept_index with -1, the kernel",
    ),
    _peer(
        name="peer:sgl-build-links",
        op="tree_build",
        prepare=prepare_build,
        timed="filling two link arrays with -1, the kernel; not choosing the nodes",
        exact=False,
        reason="links, mask and positions only: the nodes are chosen beforehand",
    ),
)
