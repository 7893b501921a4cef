"""Bytes: what an op needs by formula, what it took by measurement, and whether that still fits.

The formulas name every tensor, so that a difference from the measured peak has a place to be looked for.
Sizes are bytes; shapes use the axis letters of `kdtree.spec`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdtree.arrays import ITEM_SIZE
from kdtree.spec import Model
from kdtree.tree import FIELDS, field_shapes, visibility_words

RESERVE = 512 * 2**20  # left free for the CUDA context, cuBLAS workspaces and the serving process beside us
POLL_SECONDS = 0.001

ITEMSIZE = ITEM_SIZE | {"float8_e4m3fn": 1}

# (op, impl) -> bytes of scratch memory that a launcher allocates for `params`. Filled by whoever knows the
# kernels; an implementation without an entry needs none.
WORKSPACE: dict[tuple[str, str], Callable[[Mapping[str, Any]], int]] = {}


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a name that is not in ITEMSIZE."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(ITEMSIZE)}")
    return ITEMSIZE[dtype]


def need(params: Mapping[str, Any], *names: str) -> list[int]:
    """The integers `names` of `params`. Raises ValueError for one that is absent or not a count."""
    out = []
    for name in names:
        value = params.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"params[{name!r}]: got {value!r}, expected a count")
        out.append(value)
    return out


def prefix_lens(params: Mapping[str, Any]) -> list[int]:
    """L of every request: `params["L"]` is one number for all of them or a list of B."""
    (batch,) = need(params, "B")
    lens = params.get("L")
    lens = [lens] * batch if isinstance(lens, int) else lens
    ok = isinstance(lens, Sequence) and len(lens) == batch and all(isinstance(n, int) and n >= 0 for n in lens)
    if not ok:
        raise ValueError(f"params['L']: got {params.get('L')!r}, expected a count or a list of B={batch} counts")
    return list(lens)


def latent_widths(params: Mapping[str, Any]) -> tuple[int, int]:
    """(C, E): width of a value row and of a latent KV row."""
    rank = params.get("kv_lora_rank", Model.kv_lora_rank)
    return rank, rank + params.get("qk_rope_head_dim", Model.qk_rope_head_dim)


def tree_bytes(batch: int, n_slots: int) -> dict[str, int]:
    """Bytes of each array of a DraftTree."""
    out = {}
    for name, shape in field_shapes(batch, n_slots).items():
        count = 1
        for extent in shape:
            count *= extent
        out[name] = count * itemsize(FIELDS[name])
    return out


def _topk(p: Mapping[str, Any]) -> dict[str, int]:
    b, d, k, v = need(p, "B", "D", "K", "V")
    size = itemsize(p.get("dtype", "bfloat16"))
    return {"in.logits": b * d * v * size, "out.log_probs": b * d * k * 4, "out.token_ids": b * d * k * 4}


def _tree_build(p: Mapping[str, Any]) -> dict[str, int]:
    b, d, k, budget = need(p, "B", "D", "K", "budget")
    out = {f"out.{name}": size for name, size in tree_bytes(b, budget + 1).items()}
    return {"in.log_probs": b * d * k * 4, "in.token_ids": b * d * k * 4, **out}


def _verify_attn(p: Mapping[str, Any]) -> dict[str, int]:
    b, h, n = need(p, "B", "H", "N")
    size, lens, (c, e) = itemsize(p.get("dtype", "bfloat16")), prefix_lens(p), latent_widths(p)
    page = p.get("page_size") or 0
    if page:
        pages = [-(-(length + n) // page) for length in lens]
        kv = {"in.kv": sum(pages) * page * e * size, "in.page_table": b * max(pages, default=0) * 4}
    else:
        longest = p.get("Lmax", max(lens, default=0) + n)
        kv = {"in.kv": b * longest * e * size}
    tree = {f"in.tree.{name}": size for name, size in tree_bytes(b, n).items()}
    out = {"out.out": b * n * h * c * size, "out.lse": b * n * h * 4}
    return {"in.q": b * n * h * e * size, **kv, "in.prefix_lens": b * 4, **tree, **out}


def _merge_states(p: Mapping[str, Any]) -> dict[str, int]:
    rows = merged_rows(p)
    part = rows * latent_widths(p)[0] * itemsize(p.get("dtype", "bfloat16"))
    states = {"in.out_a": part, "in.lse_a": rows * 4, "in.out_b": part, "in.lse_b": rows * 4}
    return {**states, "out.out": part, "out.lse": rows * 4}


def _tree_accept(p: Mapping[str, Any]) -> dict[str, int]:
    b, n, d = need(p, "B", "N", "D")
    tree = {f"in.tree.{name}": size for name, size in tree_bytes(b, n).items()}
    return {**tree, "in.predictions": b * n * 4, **accepted_bytes(b, d)}


def _kv_compact(p: Mapping[str, Any]) -> dict[str, int]:
    b, d, layers = need(p, "B", "D", "n_layers")
    row = p.get("E", latent_widths(p)[1]) * itemsize(p.get("dtype", "bfloat16"))
    # In place: the cache itself is not this op's, only the rows that it touches are counted.
    return {"in.kv_rows": layers * b * (d + 1) * row, "in.path": b * (d + 1) * 4}


def merged_rows(params: Mapping[str, Any]) -> int:
    """Number of (node, head) rows of a merge: rows·H, or B·N·H where `rows` is not given."""
    (heads,) = need(params, "H")
    if "rows" in params:
        return need(params, "rows")[0] * heads
    b, n = need(params, "B", "N")
    return b * n * heads


def accepted_bytes(batch: int, depth: int) -> dict[str, int]:
    """Bytes of the outputs of tree_accept."""
    return {"out.path": batch * (depth + 1) * 4} | dict.fromkeys(
        ("out.n_accepted", "out.bonus", "out.status"), batch * 4
    )


FORMULAS: dict[str, Callable[[Mapping[str, Any]], dict[str, int]]] = {
    "topk": _topk,
    "tree_build": _tree_build,
    "verify_attn": _verify_attn,
    "merge_states": _merge_states,
    "tree_accept": _tree_accept,
    "kv_compact": _kv_compact,
}


def predicted_bytes(op: str, params: Mapping[str, Any], impl: str = "numba:simt") -> dict[str, int]:
    """Bytes per named tensor of one call: ``in.*``, ``out.*``, ``workspace`` and their ``total``.

    Raises ValueError for an unknown op or a missing parameter.
    """
    if op not in FORMULAS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(FORMULAS)}")
    parts = FORMULAS[op](params)
    parts["workspace"] = int(WORKSPACE.get((op, impl), lambda _: 0)(params))
    parts["total"] = sum(parts.values())
    return parts


def call_bytes(predicted: Mapping[str, int]) -> int:
    """The part of `predicted` that a call allocates itself, without ``out=``: outputs and workspace."""
    return sum(size for name, size in predicted.items() if name.startswith("out.") or name == "workspace")


def kv_cache_bytes(
    model: Model, tokens: int | Sequence[int], n_layers: int | None = None, dtype: str = "bfloat16"
) -> int:
    """Latent KV cache of `tokens` (one number, or one per request) in all layers of `model`.

    1152 bytes a token and layer in bf16 for K2.6; every tensor-parallel rank holds all of it.
    """
    count = tokens if isinstance(tokens, int) else sum(tokens)
    layers = model.n_layers if n_layers is None else n_layers
    return count * layers * (model.kv_lora_rank + model.qk_rope_head_dim) * itemsize(dtype)


def dense_mask_bytes(n_slots: int, context: int, per_entry: int = 1) -> int:
    """One request's mask with an entry per (slot, key) over the context: N · (context + N) · per_entry."""
    return n_slots * (context + n_slots) * per_entry


def packed_mask_bytes(n_slots: int) -> int:
    """DraftTree.visibility of one request: a bit per pair of slots, in 32-bit words."""
    return n_slots * visibility_words(n_slots) * 4


def fits(predicted: Mapping[str, int] | int, free: int, reserve: int = RESERVE) -> str | None:
    """None when `predicted` bytes fit into `free` with `reserve` to spare, else why the case is skipped."""
    wanted = predicted if isinstance(predicted, int) else predicted["total"]
    if wanted + reserve <= free:
        return None
    return f"needs {_gib(wanted)} and a reserve of {_gib(reserve)}, but only {_gib(free)} are free"


def free_bytes() -> int:
    """Bytes this process could still allocate on the current GPU; host memory where kernels are simulated.

    Memory that torch has cached but does not use counts as free. Raises NotMeasurable when nothing can tell.
    """
    from kdtree.measure import graphs

    if not graphs.gpu_available():
        import psutil

        return int(psutil.virtual_memory().available)
    torch = graphs.torch_cuda(required=False)
    if torch is not None:
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    return _nvml_memory()[0]


def measured_peak(fn: Callable[[], Any]) -> int:
    """Most bytes that `fn` held at once beyond what was allocated before, on the current GPU.

    By torch's allocator where torch sees the GPU: exact to its 512-byte blocks, but blind to memory that
    other libraries allocate. Else by polling the used memory of the whole GPU, which is coarse (2 MiB) and
    counts the context when `fn` is the first to use it. Whatever `fn` returns is kept alive until the peak
    has been read. Raises NotMeasurable without a GPU, and whatever `fn` or a kernel of it raises.
    """
    from kdtree.measure import graphs

    graphs.require_gpu()
    torch = graphs.torch_cuda(required=False)
    if torch is None:
        return _polled_peak(fn)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = fn()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return int(peak)


def _polled_peak(fn: Callable[[], Any]) -> int:
    from kdtree.kernels import launch

    before = peak = _nvml_memory()[1]
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(POLL_SECONDS):
            peak = max(peak, _nvml_memory()[1])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        kept = fn()
        launch.synchronize("measured_peak")
        peak = max(peak, _nvml_memory()[1])
        del kept
    finally:
        finished.set()
        watcher.join()
    return peak - before


def _nvml_memory() -> tuple[int, int]:
    """(free, used) bytes of the current GPU."""
    from kdtree.measure import graphs, nvml

    try:
        return nvml.gpu_memory()
    except Exception as error:
        if not isinstance(error, ImportError) and not type(error).__name__.startswith("NVMLError"):
            raise
        raise graphs.NotMeasurable(f"memory in use cannot be read ({type(error).__name__}: {error})") from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
