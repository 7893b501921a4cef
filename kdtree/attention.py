"""The public functions that read or move the latent KV cache: verify_attn, merge_states, kv_compact.

What `kdtree.ops` says of arrays, backends and checks holds here too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from kdtree import checks, recorded
from kdtree.call import Call
from kdtree.ops import Accepted
from kdtree.spec import VERIFY_ATTN_IMPLS
from kdtree.tree import DraftTree


def verify_attn(
    q: Any,  # [B,N,H,E]
    kv: Any,  # [B,Lmax,E] or [pages,page_size,E]
    tree: DraftTree,
    *,
    prefix_lens: Any,  # int[B]
    scale: float,
    page_table: Any = None,  # int[B,max_pages]
    part: str = "all",
    impl: str | None = None,
    kv_lora_rank: int = 512,
    out: tuple[Any, Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> tuple[Any, Any]:
    """MLA weight-absorbed attention of the tree's queries over the prefix and the visible tree slots.

    Row ``prefix_lens[b] + j`` of request b's cache holds tree slot j. Source: MLA (arXiv 2405.04434) with
    ancestor-or-self visibility (arXiv 2305.09781).

    Args:
        q: bfloat16, float16 or float32 [B,N,H,E], already absorbed: E = kv_lora_rank + rope width.
        kv: the latent cache, dtype of q: contiguous [B,Lmax,E], or paged [pages,page_size,E] with `page_table`.
        tree: the DraftTree; `n_nodes` and `visibility` are read.
        prefix_lens: int32 or int64 [B], 0 allowed.
        scale: softmax scale; K2.6's is `spec.K26_SCALE`, not ``E**-0.5``.
        page_table: int32 or int64 [B,max_pages].
        part: "all", or "tree" for the tree slots alone (join with a prefix kernel by `merge_states`).
        impl: "simt", "mma", "cluster" or "wgmma", or None for the dispatch table of `kernels.verify_attn`.
        kv_lora_rank: C, width of the value part of a row.
        out: (out [B,N,H,C] of q's dtype, lse f32[B,N,H]).

    Returns:
        (out [B,N,H,C] of q's dtype, lse f32[B,N,H]) with the natural-log LSE. Unused slots and rows with nothing
        visible give 0 and -inf. A device-side length or page outside the cache gives NaN for that request. NaN or
        infinity in a used tree slot's cache row stays with the queries that see it in the reference and in "simt"; on
        tensor cores it makes NaN of other queries of the request too, since they multiply it by a weight of 0.

    Raises:
        TypeError, ValueError: see `kdtree.ops`. A kernel asked for by name that cannot take the call is a ValueError
            that begins with ``impl:``.
    """
    if recorded.known and out is not None:
        done = _again(q, kv, tree, prefix_lens, scale, page_table, part, impl, kv_lora_rank, out, backend, stream)
        if done:
            return done
    checks.instance(tree, "tree", DraftTree)
    inputs = {
        "q": q,
        "kv": kv,
        "tree.n_nodes": tree.n_nodes,
        "tree.visibility": tree.visibility,
        "prefix_lens": prefix_lens,
        "page_table": page_table,
    }
    call = Call(inputs, backend=backend, stream=stream, optional=("page_table",))
    v = call.views["q"]
    checks.array(v, "q", checks.FLOATS, ("B", "N", "H", "E"))
    batch, n_slots, heads, head_dim = v.shape
    checks.array(call.views["kv"], "kv", (v.dtype,), ("pages or B", "rows", head_dim))
    if (tree.batch, tree.n_slots) != (batch, n_slots):
        raise ValueError(f"tree: got B={tree.batch} N={tree.n_slots}, expected B={batch} N={n_slots} as q")
    checks.tree_views(tree, call.views)
    checks.choice(part, "part", ("all", "tree"))
    checks.choice(impl, "impl", (None, *VERIFY_ATTN_IMPLS))
    checks.integer(kv_lora_rank, "kv_lora_rank", 1, head_dim)
    scale = checks.number(scale, "scale")
    cache = _cache_shape(call, batch)
    if not v.on_gpu:
        _check_lengths(call, cache, n_slots)
    wanted = {
        "out": (v.dtype, (batch, n_slots, heads, int(kv_lora_rank))),
        "lse": ("float32", (batch, n_slots, heads)),
    }
    outs = call.outputs(None if out is None else checks.by_name(out, tuple(wanted)), wanted)
    if call.backend == "ref":
        from kdtree.ref.verify_attn import verify_attn as reference

        result = reference(
            call.host("q"),
            call.host("kv"),
            replace(tree, n_nodes=call.host("tree.n_nodes"), visibility=call.host("tree.visibility")),
            prefix_lens=call.host("prefix_lens"),
            scale=scale,
            page_table=call.host("page_table") if call.given("page_table") else None,
            part=part,
            kv_lora_rank=int(kv_lora_rank),
        )
        call.store(outs, dict(zip(wanted, result, strict=True)))
    else:
        steps = _launch_attention(call, cache, outs, scale, part, impl)
        call.finish()
        if out is not None and v.kind == "torch" and v.on_gpu and steps:
            _remember(steps, inputs | outs, (scale, part, impl, int(kv_lora_rank), call.stream, page_table is None))
    return outs["out"], outs["lse"]


# What arguments that are no tensors, no tree or no two outputs raise when they are taken for some.
_ODD = (AttributeError, TypeError, ValueError, RuntimeError)


def _remember(steps: list[Any], arrays: dict[str, Any], rest: tuple) -> None:
    from kdtree.kernels import verify_simt as kernel

    # The launchers decide by shapes, dtypes and whether these three are aligned, so that is all a repeated call needs.
    how = {"aligned": ("q", "kv", "out"), "apart": ("out", "lse"), "made_by": (kernel, "simt")}
    if all(arrays[n].data_ptr() % 16 == 0 for n in how["aligned"]):
        recorded.keep((arrays["q"].size(), *rest), steps, arrays, **how)


def _again(
    q: Any,
    kv: Any,
    tree: Any,
    prefix_lens: Any,
    scale: Any,
    page_table: Any,
    part: Any,
    impl: Any,
    kv_lora_rank: Any,
    out: Any,
    backend: Any,
    stream: Any,
) -> tuple[Any, Any] | None:
    """Repeat an equal call's launches and return `out`; None where the call needs a closer look, or is the first."""
    try:
        into, lse = out
        n_nodes, visibility = tree.n_nodes, tree.visibility
        if type(tree) is not DraftTree or type(scale) is not float or type(kv_lora_rank) is not int:
            return None
        if backend != "auto" and backend != "numba":
            return None
        if stream is None:
            stream = recorded.current_stream(q.get_device())
        key = (q.size(), scale, part, impl, kv_lora_rank, stream, page_table is None)
        replays = recorded.known.get(key, ())
    except _ODD:
        return None
    if page_table is None:
        tensors = (q, kv, n_nodes, visibility, prefix_lens, into, lse)
    else:
        tensors = (q, kv, n_nodes, visibility, prefix_lens, page_table, into, lse)
    return (into, lse) if recorded.repeat(replays, tensors) else None


def _launch_attention(
    call: Call, cache: dict[str, int], outs: dict[str, Any], scale: float, part: str, impl: str | None
) -> list[Any]:
    """Launch; the launches that were made on a GPU."""
    from kdtree.kernels import launch
    from kdtree.kernels import verify_attn as kernel

    batch, n_slots, heads, head_dim = call.views["q"].shape
    inputs = {n.removeprefix("tree."): o for n, o in call.operands(*_INPUTS).items()}
    if inputs["visibility"].word == "*i32":
        inputs["visibility"] = call.operand(call.views["tree.visibility"].obj, word="*u32", source="tree.visibility")
    sizes = {
        "B": batch,
        "N": n_slots,
        "H": heads,
        "E": head_dim,
        "C": outs["out"].shape[-1],
        "with_prefix": int(part == "all"),
    }
    targets = {n: call.operand(a, writes=True, source=n) for n, a in outs.items()}
    with launch.recorded() as steps:
        kernel.verify_attn(
            inputs,
            sizes | cache,
            call.views["q"].dtype,
            float(scale),
            targets,
            impl=impl,
            stream=call.stream,
            like=call.lead,
        )
    return steps


_INPUTS = ("q", "kv", "tree.n_nodes", "tree.visibility", "prefix_lens", "page_table")


def _cache_shape(call: Call, batch: int) -> dict[str, int]:
    """Checked addresses of the cache: {page_size, max_pages, n_pages, capacity}; page_size is Lmax when contiguous."""
    kv = call.views["kv"]
    checks.array(call.views["prefix_lens"], "prefix_lens", checks.INTS, (batch,))
    if not call.given("page_table"):
        checks.shape(kv, "kv", (batch, "Lmax", kv.shape[2]))
        return {"page_size": kv.shape[1], "max_pages": 0, "n_pages": batch, "capacity": kv.shape[1]}
    checks.array(call.views["page_table"], "page_table", checks.INTS, (batch, "max_pages"))
    max_pages = call.views["page_table"].shape[1]
    if not max_pages or not kv.shape[1]:
        raise ValueError(f"page_table: got {max_pages} pages of {kv.shape[1]} rows, expected at least one of each")
    return {
        "page_size": kv.shape[1],
        "max_pages": max_pages,
        "n_pages": kv.shape[0],
        "capacity": max_pages * kv.shape[1],
    }


def _check_lengths(call: Call, cache: dict[str, int], n_slots: int) -> None:
    lengths, used = call.host("prefix_lens").astype(np.int64), call.host("tree.n_nodes")
    checks.cache_rows(lengths, used, n_slots, cache["capacity"])
    if call.given("page_table"):
        checks.pages(call.host("page_table"), lengths + used, cache["page_size"], cache["n_pages"])


def merge_states(
    out_a: Any,  # [..., C]
    lse_a: Any,  # f32[...]
    out_b: Any,  # [..., C]
    lse_b: Any,  # f32[...]
    *,
    out: tuple[Any, Any] | None = None,
    backend: str = "auto",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Join two attention results over disjoint rows by their natural-log LSE.

    A part with lse -inf is empty: its `out` is not read, and two empty parts give (0, -inf). FlashMLA marks
    empty rows with +inf and FlashInfer's LSE is base 2: convert before merging.

    Args:
        out_a, out_b: bfloat16, float16 or float32 [..., C], one dtype.
        lse_a, lse_b: f32[...].
        out: (out [..., C] of that dtype, lse f32[...]); may be the inputs themselves.

    Raises:
        TypeError, ValueError: see `kdtree.ops`.
    """
    if recorded.known and out is not None:
        done = _merged_again((out_a, lse_a, out_b, lse_b), out, backend, stream)
        if done:
            return done
    inputs = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    call = Call(inputs, backend=backend, stream=stream)
    v = call.views["out_a"]
    if len(v.shape) < 2:
        raise ValueError(f"out_a: got shape {v.shape}, expected (..., C)")
    checks.array(v, "out_a", checks.FLOATS, v.shape)
    checks.array(call.views["out_b"], "out_b", (v.dtype,), v.shape)
    for name in ("lse_a", "lse_b"):
        checks.array(call.views[name], name, ("float32",), v.shape[:-1])
    wanted = {"out": (v.dtype, v.shape), "lse": ("float32", v.shape[:-1])}
    outs = call.outputs(None if out is None else checks.by_name(out, tuple(wanted)), wanted)
    if call.backend == "ref":
        from kdtree.ref.verify_attn import merge_states as reference

        result = reference(*[call.host(n) for n in inputs])
        call.store(outs, dict(zip(wanted, result, strict=True)))
    else:
        from kdtree.kernels import launch
        from kdtree.kernels import merge_states as kernel

        sizes = {"rows": math.prod(v.shape[:-1]), "C": v.shape[-1]}
        targets = {n: call.operand(a, writes=True, source=n) for n, a in outs.items()}
        with launch.recorded() as steps:
            kernel.merge_states(v.dtype, call.operands(*inputs), sizes, targets, stream=call.stream)
        call.finish()
        if out is not None and v.kind == "torch" and v.on_gpu and steps:
            how = {"aligned": (), "apart": ("out", "lse"), "made_by": (kernel, "simt")}
            recorded.keep(("merge_states", v.obj.size(), call.stream), steps, inputs | outs, **how)
    return outs["out"], outs["lse"]


def _merged_again(states: tuple[Any, ...], out: Any, backend: Any, stream: Any) -> tuple[Any, Any] | None:
    """As `_again`."""
    try:
        into, lse = out
        if backend != "auto" and backend != "numba":
            return None
        if stream is None:
            stream = recorded.current_stream(states[0].get_device())
        replays = recorded.known.get(("merge_states", states[0].size(), stream), ())
    except _ODD:
        return None
    return (into, lse) if recorded.repeat(replays, (*states, into, lse)) else None


def kv_compact(
    kv: Any,  # [B,Lmax,E] or [pages,page_size,E], or a list of those, one per layer; changed in place
    tree: DraftTree,
    accepted: Accepted,
    *,
    prefix_lens: Any,  # int[B]
    page_table: Any = None,  # int[B,max_pages]
    backend: str = "auto",
    stream: Any = None,
) -> Any:
    """Move the accepted slots' KV rows to the front of the tree part, in place, for all layers in one launch.

    Row ``prefix + path[i]`` becomes row ``prefix + i`` for i = 0 … n_accepted. Afterwards the prefix of the next
    step is ``prefix_lens + n_accepted + 1`` rows long. A path that does not rise inside the tree is followed up to
    there.

    Args:
        kv: bfloat16, float16 or float32; all layers of one shape and dtype.
        tree: `n_nodes` is read.
        accepted: `path` and `n_accepted` are read.
        prefix_lens: int32 or int64 [B].
        page_table: int32 or int64 [B,max_pages].

    Returns:
        `kv`.

    Raises:
        TypeError, ValueError: see `kdtree.ops`.
    """
    checks.instance(tree, "tree", DraftTree)
    checks.instance(accepted, "accepted", Accepted)
    layers = list(kv) if isinstance(kv, list | tuple) else [kv]
    if not layers:
        raise ValueError("kv: got an empty list, expected at least one layer")
    inputs = {
        "kv": layers[0],
        "accepted.path": accepted.path,
        "accepted.n_accepted": accepted.n_accepted,
        "tree.n_nodes": tree.n_nodes,
        "prefix_lens": prefix_lens,
        "page_table": page_table,
    } | {f"kv[{i}]": layer for i, layer in enumerate(layers)}
    call = Call(inputs, backend=backend, stream=stream, optional=("page_table",))
    v, batch = call.views["kv"], tree.batch
    for i in range(len(layers)):
        checks.writable(call.views[f"kv[{i}]"], f"kv[{i}]")
        checks.array(call.views[f"kv[{i}]"], f"kv[{i}]", (v.dtype,), v.shape)
    checks.array(v, "kv", checks.FLOATS, ("pages or B", "rows", "E"))
    checks.array(call.views["accepted.path"], "accepted.path", ("int32",), (batch, "D+1"))
    checks.array(call.views["accepted.n_accepted"], "accepted.n_accepted", ("int32",), (batch,))
    checks.tree_views(tree, call.views)
    cache = _cache_shape(call, batch)
    if not v.on_gpu:
        _check_lengths(call, cache, tree.n_slots)
    if call.backend == "ref":
        from kdtree.ref.kv_compact import kv_compact as reference

        for i in range(len(layers)):
            moved = reference(
                call.host(f"kv[{i}]"),
                call.host("accepted.path"),
                call.host("accepted.n_accepted"),
                n_nodes=call.host("tree.n_nodes"),
                prefix_lens=call.host("prefix_lens"),
                page_table=call.host("page_table") if call.given("page_table") else None,
            )
            if v.on_gpu:
                call.store({"kv": layers[i]}, {"kv": moved})
    else:
        from kdtree.kernels import kv_compact as kernel
        from kdtree.kernels import launch

        # Rows travel as 32-bit words where their width and place allow it.
        row_bytes = v.shape[2] * (v.nbytes // max(math.prod(v.shape), 1))
        whole = row_bytes % 4 == 0 and all(call.views[f"kv[{i}]"].ptr % 4 == 0 for i in range(len(layers)))
        word, unit = ("*u32", 4) if whole else ("*u16", 2)
        caches = [call.operand(layer, writes=True, word=word) for layer in layers]
        names = ("accepted.path", "accepted.n_accepted", "tree.n_nodes", "prefix_lens", "page_table")
        sizes = {
            "B": batch,
            "layers": len(layers),
            "path_length": call.views["accepted.path"].shape[1],
            "row_words": row_bytes // unit,
        }
        kernel.kv_compact(
            launch.pointer_table([c.handle for c in caches]),
            caches[0],
            {n.rpartition(".")[2]: o for n, o in call.operands(*names).items()},
            sizes | cache,
            stream=call.stream,
        )
        call.finish()
    return kv
