"""The public functions: check arguments, allocate, choose a backend, launch.

Arrays are NumPy, torch or CuPy, or anything with ``__cuda_array_interface__`` or DLPack; results are of the kind
that came in. With ``out=`` nothing is allocated. ``backend="auto"`` runs the kernels on device arrays and the
reference on host arrays; ``"numba"`` on host arrays uses the GPU if there is one and Numba's simulator if not.
torch and CuPy arrays are processed on their library's current stream unless ``stream=`` is given.

What a shape or dtype shows is checked before any launch. What only the values show (a rising row, a length beyond
the cache) is checked for host arrays; device arrays are not read back for it, and the kernels neither fault nor
loop on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kdtree import checks
from kdtree.call import Call
from kdtree.spec import MAX_BUDGET, MAX_DEPTH, MAX_TOPK
from kdtree.tree import FIELDS, DraftTree, field_shapes


@dataclass
class Accepted:
    """Result of `tree_accept`: path i32[B,D+1], n_accepted i32[B], bonus i32[B], status i32[B]."""

    path: Any
    n_accepted: Any
    bonus: Any
    status: Any


def topk(
    logits: Any,  # float[..., V]
    k: int,
    *,
    out: tuple[Any, Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> tuple[Any, Any]:
    """The K most probable tokens of each row of logits.

    Args:
        logits: bfloat16, float16 or float32 [..., V].
        k: 1 <= K <= min(V, 512).
        out: (log_probs f32[..., K], token_ids i32[..., K]).

    Returns:
        (log_probs f32[..., K], token_ids i32[..., K]): logit descending, then token id ascending. A row with a
        NaN, a +inf or nothing but -inf in it has NaN log-probabilities.

    Raises:
        TypeError: `logits` is no array or of another dtype, `k` is no int.
        ValueError: `k` out of range, `out` of another shape.
    """
    call = Call({"logits": logits}, backend=backend, stream=stream)
    v = call.views["logits"]
    if not v.shape or not v.shape[-1]:
        raise ValueError(f"logits: got shape {v.shape}, expected (..., V) with V >= 1")
    checks.array(v, "logits", checks.FLOATS, v.shape)
    checks.integer(k, "k", 1, min(v.shape[-1], MAX_TOPK))
    shape = (*v.shape[:-1], int(k))
    wanted = {"log_probs": ("float32", shape), "token_ids": ("int32", shape)}
    outs = call.outputs(None if out is None else checks.by_name(out, tuple(wanted)), wanted)
    if call.backend == "ref":
        from kdtree.ref.topk import topk as reference

        call.store(outs, dict(zip(wanted, reference(call.host("logits"), int(k)), strict=True)))
    else:
        from kdtree.kernels import topk as kernel

        checks.integer(v.shape[-1], "logits.shape[-1]", 1, kernel.MAX_VOCAB)
        sizes = {"rows": math.prod(v.shape[:-1]), "V": v.shape[-1], "K": int(k)}
        targets = {n: call.operand(a, writes=True) for n, a in outs.items()}
        kernel.topk(call.operand(logits), v.dtype, sizes, targets, stream=call.stream)
        call.finish()
    return outs["log_probs"], outs["token_ids"]


def tree_build(
    log_probs: Any,  # f32[B,D,K]
    token_ids: Any,  # int[B,D,K]
    budget: int,
    *,
    root_tokens: Any = None,  # int[B]
    prefix_lens: Any = None,  # int[B]
    out: DraftTree | None = None,
    validate: bool | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> DraftTree:
    """The `budget` most probable prefixes of the drafts' product distribution, as a tree a request.

    Source: DDTree (arXiv 2604.12989). Slots stand in the order (path log-probability descending, rank path
    ascending); path log-probabilities are float64 sums of the float32 inputs. See `DraftTree` for the arrays.

    Args:
        log_probs: f32[B,D,K], rows non-increasing and <= 0; a row ends at its first entry that is not finite.
        token_ids: int32 or int64 [B,D,K].
        budget: 0..1024 nodes besides the root.
        root_tokens: int32 or int64 [B], token of slot 0 (-1 where not given).
        prefix_lens: int32 or int64 [B], tokens in front of the root (0 where not given).
        out: a DraftTree with N = budget + 1 slots to write into; its `max_depth` becomes D.
        validate: check the rows; by default done for host arrays only, since it reads device arrays back.

    Raises:
        TypeError, ValueError: see the module.
    """
    inputs = {
        "log_probs": log_probs,
        "token_ids": token_ids,
        "root_tokens": root_tokens,
        "prefix_lens": prefix_lens,
    }
    call = Call(inputs, backend=backend, stream=stream, optional=("root_tokens", "prefix_lens"))
    if out is not None:
        checks.instance(out, "out", DraftTree)
    v = call.views["log_probs"]
    checks.array(v, "log_probs", ("float32",), ("B", "D", "K"))
    batch, depth, width = v.shape
    checks.integer(depth, "log_probs.shape[1]", 0, MAX_DEPTH)
    checks.array(call.views["token_ids"], "token_ids", checks.INTS, v.shape)
    for name in ("root_tokens", "prefix_lens"):
        if call.given(name):
            checks.array(call.views[name], name, checks.INTS, (batch,))
    n_slots = checks.integer(budget, "budget", 0, MAX_BUDGET) + 1
    if validate or (validate is None and not v.on_gpu):
        checks.log_probs(call.host("log_probs"))
        checks.values(call.host("token_ids"), "token_ids", *checks.INT32)
        if call.given("root_tokens"):
            checks.values(call.host("root_tokens"), "root_tokens", *checks.INT32)
        if call.given("prefix_lens"):
            checks.values(call.host("prefix_lens"), "prefix_lens", 0, checks.MAX_PREFIX)
    wanted = {n: (FIELDS[n], s) for n, s in field_shapes(batch, n_slots).items()}
    outs = call.outputs(None if out is None else out.arrays(), wanted)
    if call.backend == "ref":
        from kdtree.ref.tree_build import tree_build as reference

        built = reference(
            call.host("log_probs"),
            call.host("token_ids"),
            n_slots - 1,
            root_tokens=call.host("root_tokens") if call.given("root_tokens") else None,
            prefix_lens=call.host("prefix_lens") if call.given("prefix_lens") else None,
        )
        call.store(outs, built.arrays())
    else:
        from kdtree.kernels import tree_build as kernel
        from kdtree.kernels.launch import word_of

        kernel.tree_build(
            call.operands(*inputs),
            {"B": batch, "D": depth, "K": width, "N": n_slots},
            {n: call.given(n) for n in ("root_tokens", "prefix_lens")},
            {n: call.operand(a, writes=True, word=word_of(FIELDS[n])) for n, a in outs.items()},
            stream=call.stream,
        )
        call.finish()
    if out is None:
        return DraftTree.from_arrays(outs, depth)
    out.max_depth = depth
    return out


def tree_accept(
    tree: DraftTree,
    predictions: Any,  # int[B,N]
    *,
    stop_token: int | None = None,
    out: Accepted | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> Accepted:
    """Accept the longest path from the root whose tokens the target predicts.

    Greedy predictions make decoding identical to greedy; predictions sampled once per node from the target make
    it lossless at any temperature. Source: SpecInfer (arXiv 2305.09781).

    Args:
        tree: the DraftTree; token_ids, n_nodes, first_child and next_sibling are read.
        predictions: int32 or int64 [B,N], the target's token behind each slot.
        stop_token: ends the path behind it.

    Returns:
        Accepted. `path` holds slots, root first, -1 padded; `bonus` is the prediction at the last slot. A
        malformed tree gives a status (`kdtree.ref.tree_accept.STATUS_NAMES`) and the walk that was valid until there.

    Raises:
        TypeError, ValueError: see the module.
    """
    checks.instance(tree, "tree", DraftTree)
    if out is not None:
        checks.instance(out, "out", Accepted)
    used = ("token_ids", "n_nodes", "first_child", "next_sibling")
    inputs = {f"tree.{n}": getattr(tree, n) for n in used} | {"predictions": predictions}
    call = Call(inputs, backend=backend, stream=stream)
    batch, n_slots = tree.batch, tree.n_slots
    checks.tree_views(tree, call.views)
    checks.array(call.views["predictions"], "predictions", checks.INTS, (batch, n_slots))
    depth = checks.integer(tree.max_depth, "tree.max_depth", 0, MAX_BUDGET)
    if stop_token is not None:
        stop_token = checks.integer(stop_token, "stop_token", 0, 2**31 - 1)
    wanted = {"path": ("int32", (batch, depth + 1))}
    wanted |= {n: ("int32", (batch,)) for n in ("n_accepted", "bonus", "status")}
    outs = call.outputs(None if out is None else vars(out), wanted)
    if call.backend == "ref":
        from kdtree.ref.tree_accept import tree_accept as reference

        read = replace(tree, **{n: call.host(f"tree.{n}") for n in used})
        result = reference(read, call.host("predictions"), stop_token=stop_token)
        call.store(outs, dict(zip(wanted, result, strict=True)))
    else:
        from kdtree.kernels import tree_accept as kernel

        kernel.tree_accept(
            {n.removeprefix("tree."): o for n, o in call.operands(*inputs).items()},
            {"B": batch, "N": n_slots, "D": depth},
            stop_token,
            {n: call.operand(outs[n], writes=True) for n in wanted},
            stream=call.stream,
        )
        call.finish()
    return Accepted(**outs) if out is None else out
