"""What a tree costs behind a prefix kernel: one pass a layer, or prefix, tree and merge, over all layers in one graph.

A serving engine that has a fast kernel without tree mask can add a tree to it by two more launches a layer:
``part="tree"`` for the tail and `merge_states`. Here both ways run with our kernels, so that only the way differs.
For the prefix part the last N rows of the prefix stand as a tree in which every slot sees every other: that is a
kernel without a mask, and reads no row more than one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import kdtree
from kdtree import spec
from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import impls, memory, roofline, sweep, timing, twin
from kdtree.measure.compare import Comparison, compare
from kdtree.measure.setups import Setup
from kdtree.measure.tasks import Task, figures, skipped
from kdtree.tree import DraftTree

OP, METRIC = "verify_attn", "layers"
LAYERS = 61
MERGED = "+merge"  # behind the impl of the rows of prefix, tree and merge
SHAPES = ((1, 8, 9, 4096), (1, 64, 33, 4096), (32, 8, 33, 4096))  # B, H, N, L


def cases(profile: str) -> list[dict[str, Any]]:
    """Parameters of the shapes of a profile."""
    found = []
    for batch, heads, n_slots, length in SHAPES if profile == "full" else SHAPES[:1]:
        base = sweep.REFERENCE[OP] | {"B": batch, "H": heads, "N": n_slots, "L": length}
        found.append(base | {"n_layers": LAYERS})
    return found


def tasks(profile: str) -> list[Task]:
    """One task per shape, with a row for each way. In the simulator each is a skipped row that says why."""
    found = []
    for params in cases(profile):
        first = {"op": OP, "impl": impls.label(None), "case": params, "seed": 0}
        found.append(Task(f"{METRIC}_{spec.case_key(params)}", first, METRIC, partial(_measured, first)))
    return found


def _measured(first: dict[str, Any]) -> list[dict[str, Any]]:
    params = first["case"]
    flop, moved = (params["n_layers"] * x for x in roofline.flop_bytes(OP, params))
    first = first | {"flop": flop, "bytes": moved}
    reason: str | None = f"{METRIC} are measured on a GPU only, and {why_no_gpu()}"
    if gpu_available():
        needed = params["n_layers"] * memory.predicted_bytes(OP, params)["total"]
        reason = memory.fits(needed, memory.free_bytes())
    if reason:
        return [skipped(row, METRIC, reason) for row in (first, first | {"impl": first["impl"] + MERGED})]
    return measure(first)


def measure(first: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of one pass and one of prefix, tree and merge: checked, timed side by side, checked again."""
    stack = Stack.make(first["case"], first["seed"])
    want = {layer: twin.verify_attn(stack.sets[layer].arguments, stack.sets[layer].params) for layer in stack.ends}
    ways = {first["impl"]: stack.one_pass, first["impl"] + MERGED: stack.two_parts}
    roundings = {first["impl"]: 1, first["impl"] + MERGED: 2}  # the parts are of q's dtype, and so is what they make
    before = {label: stack.check(run, want, roundings[label]) for label, run in ways.items()}
    good = {label: [run] for label, run in ways.items() if before[label].ok}
    size = int(first["bytes"])
    cache = timing.cache_of(1, size, timing.l2_bytes())
    limit = {"repeats": 20, "max_seconds": 1.0, "bytes_per_set": size if cache == "cold" else None}
    times = timing.time_graphs(good, cache=cache, **limit) if good else {}
    found = []
    for label, run in ways.items():
        row = first | {"impl": label, "metric": METRIC, "kernel": stack.kernel} | figures(before[label])
        if before[label].ok:
            after = stack.check(run, want, roundings[label])
            row |= figures(after)
            if after.ok:
                row |= {"device_us": times[label].as_dict()}
                row |= {"floor_us": sweep.floor_us(first["flop"], first["bytes"])}
            else:
                row["reason"] = f"after timing: {after.reason}"
        found.append(row)
    return found


@dataclass
class Stack:
    """The attention of all layers: queries, cache and outputs of each, one tree and one page table for all."""

    sets: list[Setup]
    calls: list[tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any], Callable[[], Any]]]
    kernel: str

    @classmethod
    def make(cls, params: dict[str, Any], seed: int) -> Stack:
        """Random layers of a case."""
        from kdtree.measure import setups

        shape = {n: v for n, v in params.items() if n != "n_layers"}
        first = setups.make(OP, shape, seed)
        sets = [first]
        for _ in range(params["n_layers"] - 1):
            own = {n: first.arguments[n].clone().normal_() for n in ("q", "kv")}
            outputs = {n: a.clone() for n, a in first.outputs.items()}
            sets.append(replace(first, arguments=first.arguments | own, outputs=outputs))
        parts = [{n: a.clone() for n, a in first.outputs.items()} for _ in range(2)]
        tree, lengths = all_seeing(first.arguments["tree"]), first.arguments["prefix_lens"] - params["N"]
        before = {"tree": tree, "prefix_lens": lengths}
        return cls(sets, [_calls(s, before, *parts) for s in sets], impls.dispatched(shape))

    @property
    def ends(self) -> tuple[int, ...]:
        """The layers that are checked: the first and the last."""
        return tuple(dict.fromkeys((0, len(self.sets) - 1)))

    def one_pass(self) -> None:
        """Prefix and tree in one call a layer."""
        for whole, _, _, _ in self.calls:
            whole()

    def two_parts(self) -> None:
        """The prefix, then the tree, then their merge."""
        for _, prefix, tree, merge in self.calls:
            prefix()
            tree()
            merge()

    def check(self, run: Callable[[], None], want: dict[int, dict[str, Any]], roundings: int) -> Comparison:
        """Run on poisoned outputs and compare the first and last layers."""
        from kdtree.kernels import launch

        for one in self.sets:
            one.poison()
        run()
        launch.synchronize(OP)
        dtype, found = self.sets[0].params["dtype"], []
        for layer in self.ends:
            found.append(compare(self.sets[layer].outputs, want[layer], dtype, roundings=roundings))
        return max(found, key=lambda outcome: (not outcome.ok, outcome.rel_l2 or 0.0))


def _calls(one: Setup, before: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> Any:
    """A layer's four calls: all of it; the prefix into `a`, the tree into `b`, and both joined."""
    ahead = replace(one, arguments=one.arguments | before, outputs=a)
    tail = replace(one, params=one.params | {"part": "tree"}, outputs=b)
    out = (one.outputs["out"], one.outputs["lse"])
    merge = partial(kdtree.merge_states, a["out"], a["lse"], b["out"], b["lse"], out=out, backend="numba")
    return one.call(), ahead.call(), tail.call(), merge


def all_seeing(tree: DraftTree) -> DraftTree:
    """`tree` (torch) with every slot used and seeing every slot."""
    import torch

    n_slots = tree.n_slots
    row = np.zeros(tree.visibility.shape[-1], dtype=np.uint32)
    for slot in range(n_slots):
        row[slot // 32] |= np.uint32(1 << (slot % 32))
    words = torch.from_numpy(row.view(np.int32)).to(tree.visibility.device)
    seen = words.expand(tree.batch, n_slots, -1).contiguous().view(tree.visibility.dtype)
    return replace(tree, visibility=seen, n_nodes=torch.full_like(tree.n_nodes, n_slots))
