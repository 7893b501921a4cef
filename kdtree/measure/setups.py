"""Timed cases on a GPU: their inputs as torch tensors, clones to rotate over, the call, and the right answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import kdtree
from kdtree import inputs, ref_outputs
from kdtree.measure import invoke, twin
from kdtree.measure.compare import Comparison, compare
from kdtree.spec import K26_SCALE
from kdtree.tree import DraftTree, random_tree

LATENT, ROPE = 512, 64
DEVICE = "cuda"


@dataclass
class Setup:
    """One input set of a timed case. `arguments` are keyword arguments of the public op (torch, CUDA).

    `impl` names the kernel of `verify_attn`; None is the dispatch table's choice.
    """

    op: str
    params: dict[str, Any]
    arguments: dict[str, Any]
    outputs: dict[str, Any]
    impl: str | None = None

    def clone(self) -> Setup:
        """The same values in other memory."""
        arguments, outputs = _map(self.arguments, lambda t: t.clone()), _map(self.outputs, _empty)
        return replace(self, arguments=arguments, outputs=outputs)

    def by(self, impl: str | None) -> Setup:
        """The same memory, for another kernel."""
        return replace(self, impl=impl)

    def run(self) -> None:
        """One call of our kernels into `outputs`, on the current stream. Allocates nothing."""
        self.call()()

    def call(self) -> Callable[[], Any]:
        """The call that `run` makes with its arguments bound: a host pays for nothing but the call itself."""
        a = self.arguments
        if self.op == "kv_compact":
            accepted = kdtree.Accepted(a["path"], a["n_accepted"], None, None)
            bound = {"prefix_lens": a["prefix_lens"], "backend": "numba"}
            return functools.partial(kdtree.kv_compact, a["kv"], a["tree"], accepted, **bound)
        if self.op == "verify_attn":
            out = (self.outputs["out"], self.outputs["lse"])
            bound = {n: a[n] for n in ("prefix_lens", "page_table", "scale", "kv_lora_rank") if a.get(n) is not None}
            bound |= {"part": self.params.get("part", "all"), "impl": self.impl, "out": out, "backend": "numba"}
            return functools.partial(kdtree.verify_attn, a["q"], a["kv"], a["tree"], **bound)
        return lambda: invoke.call(self.op, a, self.params, self.outputs, backend="numba")

    def poison(self) -> None:
        """NaN into every float output, -1 into every integer one."""
        for array in self.outputs.values():
            array.view(_torch().uint8).fill_(0xFF)

    def check(self, want: dict[str, Any]) -> Comparison:
        """Run once on poisoned outputs and compare with `want`."""
        if self.op == "kv_compact":
            return self._check_moves()
        self.poison()
        self.run()
        _torch().cuda.synchronize()
        return compare(self.outputs, want, self.params.get("dtype"))

    def want(self) -> dict[str, Any]:
        """The right outputs: the reference's, or for large inputs its float64 twin's."""
        if self.op == "verify_attn":
            return twin.verify_attn(self.arguments, self.params)
        if self.op == "topk":
            return twin.topk(self.arguments["logits"], self.params["K"])
        if self.op == "kv_compact":
            return {}
        host = {n: _host(a) for n, a in self.arguments.items()}
        return ref_outputs.reference(self.op, host, self.params)

    def _check_moves(self) -> Comparison:
        """Fresh values in layer 0 and the last layer, one call, and the reference on their copies."""
        torch, a = _torch(), self.arguments
        for layer in {id(k): k for k in (a["kv"][0], a["kv"][-1])}.values():
            layer.normal_()
        before = [k.clone() for k in (a["kv"][0], a["kv"][-1])]
        self.run()
        torch.cuda.synchronize()
        host = {n: _host(v) for n, v in a.items() if n != "kv"}
        for got, old in zip((a["kv"][0], a["kv"][-1]), before, strict=True):
            moved = ref_outputs.reference("kv_compact", host | {"kv": _host(old)}, self.params)
            outcome = compare({"kv": got}, moved, None)
            if not outcome.ok:
                return outcome
        return outcome


def make(op: str, params: dict[str, Any], seed: int = 0) -> Setup:
    """The first input set of a timed case. `params` as `roofline.flop_bytes` takes them.

    Large arrays are drawn on the GPU. ``nan_behind`` in `params` fills what `verify_attn` must not read.
    """
    full = params | {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "scale": K26_SCALE}
    torch = _torch()
    torch.manual_seed(seed)
    arguments = _MAKERS[op](full, np.random.RandomState(seed), torch)
    outputs = {}
    if op != "kv_compact":
        for name, (dtype, shape) in invoke.output_shapes(op, arguments, full).items():
            outputs[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
    return Setup(op, full, arguments, outputs)


def _topk(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    logits = torch.randn((p["B"], p["D"], p["V"]), device=DEVICE) * 3
    return {"logits": logits.to(getattr(torch, p["dtype"])), "k": p["K"]}


def _tree_build(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    rows, tokens = inputs.draft_rows(rng, p["B"], p["D"], p["K"], "peaked")
    lengths = rng.randint(0, 65_536, size=p["B"]).astype(np.int32)
    roots = rng.randint(0, 1000, size=p["B"]).astype(np.int32)
    arguments = {"log_probs": rows, "token_ids": tokens, "root_tokens": roots, "prefix_lens": lengths}
    return invoke.to_device(arguments) | {"budget": p["budget"]}


def _verify_attn(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    batch, n_slots, dtype = p["B"], p["N"], getattr(torch, p["dtype"])
    lengths = np.full(batch, p["L"], dtype=np.int32)
    tree = _tree(batch, n_slots, int(rng.randint(2**31)))
    tree = replace(tree, positions=tree.positions + p["L"])
    arguments = invoke.to_device({"tree": tree, "prefix_lens": lengths})
    width, rows, page = LATENT + ROPE, p["L"] + n_slots, p.get("page_size", 0)
    arguments["q"] = torch.randn((batch, n_slots, p["H"], width), device=DEVICE, dtype=dtype)
    if page:
        needed = -(-rows // page)
        order = torch.randperm(batch * needed, device=DEVICE).to(torch.int32)
        arguments["page_table"] = order.reshape(batch, needed).contiguous()
        shape: tuple[int, ...] = (batch * needed, page, width)
    else:
        shape = (batch, rows, width)
    kv = arguments["kv"] = torch.randn(shape, device=DEVICE, dtype=dtype)
    if p.get("nan_behind") and page and rows % page:
        kv[arguments["page_table"][:, -1].long(), rows % page :] = float("nan")
    return arguments | {"scale": p["scale"], "kv_lora_rank": LATENT}


@functools.lru_cache(maxsize=32)
def _tree(batch: int, n_slots: int, seed: int) -> DraftTree:
    """Random trees behind no prefix. Many shapes share them: drawing 32 trees of 65 slots takes 0.1 s."""
    return random_tree(np.random.RandomState(seed), batch, n_slots, max_depth=7)


def _merge_states(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    shape = (p["B"], p["N"], p["H"])
    made = {}
    for side in "ab":
        made[f"out_{side}"] = torch.randn((*shape, LATENT), device=DEVICE).to(getattr(torch, p["dtype"]))
        made[f"lse_{side}"] = torch.randn(shape, device=DEVICE)
    return made


def _tree_accept(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    tree = random_tree(rng, p["B"], p["N"], max_depth=p["D"])
    return invoke.to_device({"tree": tree, "predictions": inputs.predictions_for(rng, tree, 0.9)})


def _kv_compact(p: dict, rng: np.random.RandomState, torch: Any) -> dict[str, Any]:
    batch, depth, n_slots = p["B"], p["D"], p["N"]
    lengths = rng.randint(0, 128, size=batch).astype(np.int32)
    tree = random_tree(rng, batch, n_slots, max_depth=depth, prefix_lens=lengths)
    # Every accepted slot moves: the most bytes that the op can have to move.
    path = np.stack([np.concatenate([[0], 2 + np.arange(depth)]) for _ in range(batch)]).astype(np.int32)
    accepted = np.full(batch, depth, dtype=np.int32)
    arguments = {"tree": tree, "path": path, "n_accepted": accepted, "prefix_lens": lengths}
    layer = (batch, 128 + n_slots, LATENT + ROPE)
    dtype = getattr(torch, p["dtype"])
    caches = [torch.randn(layer, device=DEVICE, dtype=dtype) for _ in range(p["n_layers"])]
    return invoke.to_device(arguments) | {"kv": caches}


_MAKERS: dict[str, Callable[[dict, np.random.RandomState, Any], dict[str, Any]]] = {
    "topk": _topk,
    "tree_build": _tree_build,
    "verify_attn": _verify_attn,
    "merge_states": _merge_states,
    "tree_accept": _tree_accept,
    "kv_compact": _kv_compact,
}


def set_bytes(setup: Setup) -> int:
    """Bytes of one input set with its outputs."""

    def size(value: Any) -> int:
        if isinstance(value, DraftTree):
            return sum(size(a) for a in value.arrays().values())
        if isinstance(value, list):
            return sum(size(v) for v in value)
        return value.numel() * value.element_size() if hasattr(value, "element_size") else 0

    return sum(size(v) for v in (*setup.arguments.values(), *setup.outputs.values()))


def _map(values: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, DraftTree):
            return value.map(convert)
        if isinstance(value, list):
            return [convert(v) for v in value]
        return convert(value) if hasattr(value, "element_size") else value

    return {n: one(v) for n, v in values.items()}


def _host(value: Any) -> Any:
    from kdtree.arrays import to_numpy

    if isinstance(value, DraftTree):
        return value.numpy()
    return to_numpy(value) if hasattr(value, "element_size") else value


def _empty(tensor: Any) -> Any:
    return _torch().empty_like(tensor)


def _torch() -> Any:
    import torch

    return torch
