"""Correctness cases of each kernel of `verify_attn`, by name, at K2.6's width of 576 and 512.

Every case runs twice and must give the same bits, with NaN in every cache row that a request does not own, into
guarded outputs poisoned with NaN. `damage` breaks what lies on the GPU after the checks of the host: those requests
must come back as NaN and leave the others alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kdtree import inputs
from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import impls, invoke
from kdtree.measure.compare import Comparison, compare
from kdtree.measure.tasks import NotHere
from kdtree.spec import K26_SCALE

OP = "verify_attn"
DTYPES, PAGES = ("bfloat16", "float16"), (0, 1, 16, 64)
# Pages that a kernel takes: every size of tree has to meet those.
TAKEN = {"mma": PAGES} | dict.fromkeys(("cluster", "wgmma"), (0, 8, 16, 64))
HEADS = (8, 9, 16, 64)  # 9: no tile of rows begins with a slot
RAGGED = [0, 1, 63, 64, 65, 500]  # prefix lengths around the edge of a tile of 64
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": K26_SCALE}
BASE: dict[str, Any] = {"B": 3, "H": 8, "N": 9, "L": [0, 70, 301], "dtype": "bfloat16", "page_size": 64, "ragged": True}

# What is broken on the GPU, request by request: a length or a page that no kernel may follow.
DAMAGE: dict[str, tuple[str, int]] = {
    "negative prefix": ("prefix_lens", -1),
    "prefix beyond the cache": ("prefix_lens", 100_000),
    "largest prefix": ("prefix_lens", 2**31 - 1),
    "negative n_nodes": ("n_nodes", -3),
    "n_nodes above N": ("n_nodes", 10_000),
    "page behind the last": ("page_table", 10**6),
    "negative page": ("page_table", -1),
}
DAMAGED = 1  # the request that is broken


def params(profile: str, pages: tuple[int, ...] = PAGES) -> Iterator[dict[str, Any]]:
    """Parameters of the cases of one kernel that takes `pages`. Tiny: one. Quick: a few of each kind. Full: all."""
    if profile == "tiny":
        yield BASE | {"B": 2, "L": [0, 70]}
        return
    full = profile == "full"
    for dtype, page, part in itertools.product(DTYPES, PAGES, ("all", "tree") if full else ("all",)):
        yield BASE | {"B": len(RAGGED), "L": RAGGED, "dtype": dtype, "page_size": page, "part": part}
    for page in (8, 32, 128) if full else ():
        yield BASE | {"B": len(RAGGED), "L": RAGGED, "page_size": page}
    turns = itertools.cycle(itertools.product(DTYPES, pages, HEADS))
    for n_slots in range(1, 66) if full else (1, 2, 31, 32, 33, 64, 65):
        dtype, page, heads = next(turns)
        yield BASE | {"N": n_slots, "H": heads, "dtype": dtype, "page_size": page}
    for n_slots, heads in itertools.product((129, 1025) if full else (129,), HEADS if full else HEADS[:1]):
        yield BASE | {
            "N": n_slots,
            "H": heads,
            "B": 1 if n_slots > 1000 else 2,
            "L": [300, 7][: 1 if n_slots > 1000 else 2],
        }
    for heads in (1, 2, 3, 128) if full else (1, 128):
        yield BASE | {"H": heads}
    for length, batch in ((4096, 1), (20_000, 1), (3000, 7)) if full else ((4096, 1),):
        yield BASE | {"B": batch, "L": length, "ragged": False}  # one request's KV range shared by many blocks
        yield BASE | {"B": batch, "L": length, "H": 64, "N": 33, "dtype": "float16", "page_size": 0}
    for dtype in DTYPES if full else DTYPES[:1]:
        yield BASE | {"dtype": dtype, "heat": 6.0}  # scores so far apart that few rows have any weight
        yield BASE | {"dtype": dtype, "heat": 6.0, "rising": True}  # … and the largest come last
    for damage, page in itertools.product(DAMAGE if full else list(DAMAGE)[::3], (0, 16, 64)):
        if page or DAMAGE[damage][0] != "page_table":
            yield BASE | {"page_size": page, "L": [5, 70, 301], "ragged": False, "damage": damage}


def kernels(profile: str) -> Iterator[tuple[str, str, dict[str, Any], Callable[[int], Comparison]]]:
    """(impl, name, params, function of a seed) of every case of every kernel; of simt, which bundles check, a few."""
    few = () if profile == "tiny" else tuple(itertools.islice(params("quick"), len(DTYPES) * len(PAGES)))
    asked = {"simt": few} | {impl: tuple(params(profile, TAKEN[impl])) for impl in impls.TENSOR_CORES}
    for impl, changes in asked.items():
        for change in changes:
            name = f"{impl}_" + "_".join(f"{k}{v}" for k, v in change.items()).replace(" ", "")
            full = {"impl": impl} | change | WIDTHS
            yield impl, name, full, partial(check, full)


def arguments(p: dict[str, Any], rng: np.random.RandomState) -> dict[str, Any]:
    """Host arguments of a case."""
    lengths = p["L"] if isinstance(p["L"], list) else [p["L"]] * p["B"]
    shape = {"batch": p["B"], "heads": p["H"], "n_slots": p["N"], "prefix_lens": lengths}
    shape |= {"dtype": p["dtype"], "page_size": p["page_size"], "ragged": p.get("ragged", False)}
    given = inputs.attention(rng, **shape)
    if p.get("heat"):
        given["q"] = inputs.round_to(given["q"].astype(np.float32) * p["heat"], p["dtype"])
    if p.get("rising"):
        _rise(given)
    return given


def _rise(given: dict[str, Any]) -> None:
    """Let later cache rows be larger ones, so that the running maximum of a row keeps moving."""
    kv, table = given["kv"], given["page_table"]
    for b, count in enumerate(given["prefix_lens"] + given["tree"].n_nodes):
        at = np.arange(count)
        size = kv.shape[1]
        rows = (b, at) if table is None else (table[b, at // size], at % size)
        kv[rows] = (kv[rows].astype(np.float32) * (0.2 + at / count)[:, None]).astype(kv.dtype)


def check(p: dict[str, Any], seed: int) -> Comparison:
    """Run a case on the GPU against the float64 twin; `NotHere` where its kernel does not take it."""
    from kdtree.measure import twin

    if not gpu_available():
        raise NotHere(f"{p['impl']} needs a GPU, and {why_no_gpu()}")
    host = arguments(p, np.random.RandomState(seed))
    moved = invoke.to_device(host)
    want = twin.verify_attn(moved, p)
    if p.get("damage"):
        break_request(moved, want, p["damage"])
    runs: list[Any] = []

    def run() -> None:
        runs.append(invoke.run_guarded(OP, host, p, moved=moved))

    if reason := impls.refused(run):
        raise NotHere(reason)
    run()
    (got, stray), (again, stray_too) = runs
    outcome = compare(got, want, p["dtype"])
    if outcome.ok and any(_differ(got[n], again[n]) for n in got):
        outcome = replace(outcome, ok=False, reason="two runs on the same inputs gave different bits")
    stray = stray or stray_too
    return replace(outcome, ok=False, reason=stray) if stray else outcome


def break_request(moved: dict[str, Any], want: dict[str, Any], damage: str) -> None:
    """Put the damage where the kernel reads, and NaN where the answer has to be."""
    name, value = DAMAGE[damage]
    if name == "page_table":
        moved["page_table"][DAMAGED, 0] = value  # of the prefix, which every row of the request sees
    elif name == "n_nodes":
        moved["tree"].n_nodes[DAMAGED] = value
    else:
        moved["prefix_lens"][DAMAGED] = value
    for array in want.values():
        array[DAMAGED] = float("nan")


def _differ(a: Any, b: Any) -> bool:
    """True where two tensors differ in any bit; NaN equals itself."""
    import torch

    return not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
