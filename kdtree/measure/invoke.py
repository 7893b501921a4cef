"""Call any op from a case's arguments: move them to the device, guard the outputs, run, bring the result back."""

from __future__ import annotations

from typing import Any

import numpy as np

import kdtree
from kdtree.arrays import from_numpy_to_torch
from kdtree.device import gpu_available
from kdtree.measure.guard import GuardedOutputs
from kdtree.tree import FIELDS, DraftTree, field_shapes


def device() -> str:
    """Where kernels run here: "cuda", or "cpu" for the simulator."""
    return "cuda" if gpu_available() else "cpu"


def to_device(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as torch tensors on the GPU, or as they are where the simulator runs."""
    if device() == "cpu":
        return dict(arguments)

    def move(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return from_numpy_to_torch(np.ascontiguousarray(value)).cuda()
        return value.map(move) if isinstance(value, DraftTree) else value

    return {n: move(v) for n, v in arguments.items()}


def output_shapes(op: str, a: dict[str, Any], params: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype, shape) of the op's outputs for arguments `a`; for kv_compact the cache itself."""
    if op == "topk":
        shape = (*a["logits"].shape[:-1], params["K"])
        return {"log_probs": ("float32", shape), "token_ids": ("int32", shape)}
    if op == "tree_build":
        shapes = field_shapes(a["log_probs"].shape[0], params["budget"] + 1)
        return {n: (FIELDS[n], s) for n, s in shapes.items()}
    if op == "verify_attn":
        shape = tuple(a["q"].shape[:3])
        return {"out": (dtype_name(a["q"]), (*shape, params["kv_lora_rank"])), "lse": ("float32", shape)}
    if op == "merge_states":
        shape = tuple(a["out_a"].shape)
        return {"out": (dtype_name(a["out_a"]), shape), "lse": ("float32", shape[:-1])}
    if op == "tree_accept":
        batch = a["tree"].batch
        rest = {n: ("int32", (batch,)) for n in ("n_accepted", "bonus", "status")}
        return {"path": ("int32", (batch, a["tree"].max_depth + 1))} | rest
    return {"kv": (dtype_name(a["kv"]), tuple(a["kv"].shape))}


def dtype_name(array: Any) -> str:
    """Dtype as a word: "bfloat16", "float32", …"""
    return str(getattr(array.dtype, "name", array.dtype)).removeprefix("torch.")


def call(op: str, a: dict[str, Any], params: dict, out: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Run the public function of `op`; outputs by name. `options` go to it (backend, stream).

    ``params["impl"]`` names the kernel of `verify_attn`; without it the dispatch table chooses.
    """
    if op == "topk":
        result = kdtree.topk(a["logits"], params["K"], out=_pair(out), **options)
        return dict(zip(("log_probs", "token_ids"), result, strict=True))
    if op == "tree_build":
        tree = None if out is None else DraftTree.from_arrays(out, a["log_probs"].shape[1])
        given = {n: a[n] for n in ("root_tokens", "prefix_lens") if n in a}
        built = kdtree.tree_build(a["log_probs"], a["token_ids"], params["budget"], out=tree, **given, **options)
        return built.arrays()
    if op == "verify_attn":
        result = kdtree.verify_attn(
            a["q"],
            a["kv"],
            a["tree"],
            prefix_lens=a["prefix_lens"],
            scale=params["scale"],
            page_table=a.get("page_table"),
            part=params.get("part", "all"),
            impl=params.get("impl"),
            kv_lora_rank=params["kv_lora_rank"],
            out=_pair(out),
            **options,
        )
        return dict(zip(("out", "lse"), result, strict=True))
    if op == "merge_states":
        result = kdtree.merge_states(a["out_a"], a["lse_a"], a["out_b"], a["lse_b"], out=_pair(out), **options)
        return dict(zip(("out", "lse"), result, strict=True))
    if op == "tree_accept":
        target = None if out is None else kdtree.Accepted(**out)
        stop = params.get("stop_token")
        return vars(kdtree.tree_accept(a["tree"], a["predictions"], stop_token=stop, out=target, **options))
    accepted = kdtree.Accepted(a["path"], a["n_accepted"], None, None)
    cache = a["kv"] if out is None else out["kv"]
    kdtree.kv_compact(
        cache, a["tree"], accepted, prefix_lens=a["prefix_lens"], page_table=a.get("page_table"), **options
    )
    return {"kv": cache}


def _pair(out: dict[str, Any] | None) -> tuple[Any, Any] | None:
    return None if out is None else tuple(out.values())


def run_guarded(
    op: str, host: dict[str, Any], params: dict, *, moved: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Any], str | None]:
    """Run `op` on host arguments with poisoned, guarded outputs.

    `moved` are the arguments on the device, if the caller has them there already. Returns (outputs by name, what
    was written outside them or None). CUDA errors are raised as `CudaFault`.
    """
    from kdtree.kernels import launch

    a = moved if moved is not None else to_device(host)
    guarded = GuardedOutputs(output_shapes(op, a, params), device())
    if op == "kv_compact":
        guarded.fill("kv", host["kv"])
    options.setdefault("backend", "numba")
    outputs = call(op, a, params, guarded.arrays, **options)
    launch.synchronize(op)
    return outputs, launch.guard(guarded.stray_writes, op)
