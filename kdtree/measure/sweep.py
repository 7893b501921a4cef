"""Latency and memory sweeps: which shapes, and one task per shape that gives a row for us and for each peer.

No row gets a time unless its outputs were right before and after. A case that does not fit into the memory that
is free, or that would take longer than its share, is skipped and says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kdtree import spec
from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import impls, memory, roofline, timing
from kdtree.measure.compare import Comparison
from kdtree.measure.setups import Setup
from kdtree.measure.tasks import Task, skipped

METRICS = ("latency", "memory")
IMPL = "numba:simt"
SECONDS_A_CANDIDATE = {"quick": 0.3, "full": 0.4}
SLOWEST_CALL = 0.25  # seconds; a call beyond this is not timed in a sweep
REFERENCE = {  # the case that a tile of the report shows
    "topk": {"B": 1, "D": 7, "K": 64, "V": 163_840, "dtype": "bfloat16"},
    "tree_build": {"B": 1, "D": 7, "K": 64, "budget": 64},
    "verify_attn": {"B": 4, "H": 64, "N": 33, "L": 4096, "dtype": "bfloat16", "page_size": 64},
    "merge_states": {"B": 4, "N": 33, "H": 64, "dtype": "bfloat16"},
    "tree_accept": {"B": 1, "N": 65, "D": 7},
    "kv_compact": {"B": 1, "D": 7, "N": 65, "n_layers": 61, "dtype": "bfloat16"},
}
SMALL = {"B": 1, "H": 8, "N": 9, "L": 256, "dtype": "bfloat16", "page_size": 64}  # where the host's part shows most
LARGE = {"B": 32, "H": 64, "N": 65, "L": 65_536, "dtype": "bfloat16", "page_size": 64}  # where memory shows most
SIMT_FLOP = 1e9  # beyond it simt is timed at the reference case alone: it is a hundred times slower than the others


def shapes(op: str, profile: str) -> Iterator[dict[str, Any]]:
    """Parameters of the timed cases of `op`: the reference case first, then one axis at a time."""
    base = REFERENCE[op]
    yield base
    if profile == "tiny":
        return
    axes: dict[str, list[dict[str, Any]]] = {
        "topk": [{"B": 8}, {"B": 32}, {"K": 8}, {"K": 512}, {"dtype": "float32"}],
        "tree_build": [{"budget": n} for n in (8, 16, 32, 128)] + [{"B": 8}, {"B": 32}],
        "verify_attn": [{"N": n} for n in (9, 17, 65)]
        + [{"L": length} for length in (256, 1024)]
        + [{"B": 1}, {"H": 8}, {"H": 16}, {"page_size": 0}, SMALL],
        "merge_states": [{"B": 1, "N": 9}, {"B": 32, "N": 9, "H": 8}],
        "tree_accept": [{"N": n} for n in (9, 17, 33, 257)] + [{"B": 32}],
        "kv_compact": [{"n_layers": 1}, {"B": 8}, {"B": 32}],
    }
    if profile == "full":
        axes["topk"] += [{"D": 15}, {"dtype": "float16"}]
        axes["tree_build"] += [{"budget": 512, "K": 128}, {"D": 15}, {"B": 32, "budget": 512, "K": 128}]
        axes["verify_attn"] += [{"L": 16_384}]
        axes["verify_attn"] += [{"B": 1, "H": 8, "N": n, "L": 4096} for n in (9, 17, 33, 65)]
        axes["verify_attn"] += [{"B": 1, "H": 8, "N": 9, "L": length} for length in (1024, 16_384, 65_536)]
        axes["verify_attn"] += [
            {"B": 1, "L": 256, "N": 9},
            {"B": 32, "H": 8, "N": 9},
            {"B": 32, "H": 16, "L": 1024},
        ]
        axes["merge_states"] += [{"B": 32}]
        axes["kv_compact"] += [{"dtype": "float32"}]
    for change in axes[op]:
        yield base | change


def tasks(op: str, metric: str, profile: str) -> list[Task]:
    """One task per shape. Under the simulator each is a skipped row that says why. ValueError: unknown op.

    A latency task of `verify_attn` gives a row for each of its kernels, a memory task speaks of one.
    """
    if op not in REFERENCE:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(REFERENCE)}")
    found = []
    for params, impl in _asked(op, metric, profile):
        name = f"{metric}_{op}_{impl}_{spec.case_key(params)}"
        first = {"op": op, "impl": impl, "case": params, "seed": 0}
        work = partial(_latency if metric == "latency" else _memory, first, profile)
        found.append(Task(name, first, metric, partial(_measured, work, first, metric)))
    return found


def _asked(op: str, metric: str, profile: str) -> Iterator[tuple[dict[str, Any], str]]:
    """(case, impl that a task's first row is of): simt alone exists in the simulator, mma runs on every GPU we know."""
    several = op == "verify_attn" and gpu_available()
    for params in shapes(op, profile):
        yield params, impls.label("mma") if several else IMPL
        if several and metric == "memory":
            others = [n for n in impls.NAMES if n != "mma" and impls.worth_timing(n, params)]
            yield from ((params, impls.label(name)) for name in others)
    if op == "verify_attn" and metric == "memory" and profile == "full":
        yield from ((LARGE, impls.label(name)) for name in impls.NAMES if impls.worth_timing(name, LARGE))


def _measured(work: Any, first: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    if not gpu_available():
        reason = f"{metric} is measured on a GPU only, and {why_no_gpu()}"
        return [first | {"metric": metric, "status": "skipped", "reason": reason} | _predicted(first, metric)]
    return work()


def _predicted(first: dict[str, Any], metric: str) -> dict[str, Any]:
    """What the formulas say without a GPU: bytes and FLOP are facts of the shape."""
    flop, moved = roofline.flop_bytes(first["op"], first["case"])
    figures: dict[str, Any] = {"flop": flop, "bytes": moved}
    if metric == "memory":
        predicted = memory.predicted_bytes(first["op"], first["case"])
        call = memory.call_bytes(predicted)
        figures["memory"] = {"predicted": call, "measured": None, "inputs": predicted["total"] - call}
    return figures


for _name in impls.NAMES:
    memory.WORKSPACE[("verify_attn", impls.label(_name))] = partial(impls.workspace_bytes, _name)


def _memory(first: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Predicted beside measured bytes of one call that allocates its outputs and workspace itself."""
    from kdtree.kernels import launch
    from kdtree.measure import invoke, setups

    op, params, impl = first["op"], first["case"], first["impl"]
    predicted = memory.predicted_bytes(op, params, impl)
    call = memory.call_bytes(predicted)
    said = {"predicted": call, "measured": None, "inputs": predicted["total"] - call}
    said |= {"workspace": predicted["workspace"], "workspace_measured": None}
    reason = memory.fits(predicted, memory.free_bytes()) or _too_slow(first)
    if reason:
        return [skipped(first, "memory", reason) | {"memory": said}]
    name = impl.removeprefix("numba:") if op == "verify_attn" else None
    setup = setups.make(op, params, first["seed"]).by(name)
    if reason := impls.refused(setup.run):
        return [skipped(first, "memory", reason)]
    outcome = setup.check(setup.want())
    launch.release_workspaces()
    if op == "kv_compact":
        peak = memory.measured_peak(setup.run)
    else:
        asked = setup.params | {"impl": name}
        peak = memory.measured_peak(lambda: invoke.call(op, setup.arguments, asked, None, backend="numba"))
    row = first | {
        "metric": "memory",
        "status": "passed" if outcome.ok else "failed",
        "reason": outcome.reason,
    }
    slack = _allocator_slack(predicted)
    if outcome.ok and not call <= peak <= call + slack:
        row |= {
            "status": "failed",
            "reason": f"the call allocated {peak} bytes, predicted {call} (+ {slack})",
        }
    row["memory"] = said | {"measured": peak, "workspace_measured": peak - (call - predicted["workspace"])}
    launch.release_workspaces()
    return [row]


def _too_slow(first: dict[str, Any]) -> str | None:
    """Why a case is not run although it would fit: a call of simt at LARGE takes many seconds."""
    slow = first["op"] == "verify_attn" and first["impl"] == IMPL and first["case"] == LARGE
    return "predicted alone: one call of this kernel takes many seconds at this shape" if slow else None


def _allocator_slack(predicted: dict[str, int]) -> int:
    """Bytes by which torch's count of a call may lie above the formula, and no more.

    Its allocator rounds each tensor up to 512 bytes, and gives a tensor beyond 1 MiB a whole larger block when the
    rest would be 1 MiB or less.
    """
    made = [size for name, size in predicted.items() if name.startswith("out.") or name == "workspace"]
    return sum(512 + (2**20 if size > 2**20 else 0) for size in made)


@dataclass
class _Ours:
    """One of our kernels at a case: what its row is called, and what came of its check before timing."""

    label: str
    impl: str | None
    before: Comparison
    first_call: dict[str, Any]  # see `timing.first_call`


def _latency(first: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Rows of our kernels and of every peer that is installed, timed side by side in one set of windows."""
    import torch

    from kdtree.measure import peers, setups

    op, params = first["op"], first["case"]
    free = memory.free_bytes()
    reason = memory.fits(memory.predicted_bytes(op, params, first["impl"]), free)
    if reason:
        return [skipped(first, "latency", reason)]
    setup = setups.make(op, params, first["seed"])
    want = setup.want()
    flop, moved = roofline.flop_bytes(op, params)
    common = {"metric": "latency", "flop": flop, "bytes": moved, "floor_us": floor_us(flop, moved)}
    chosen = impls.dispatched(params) if op == "verify_attn" else None
    ours, rows = [], []
    for label, impl in _kernels(op, params, chosen):
        row = first | common | {"impl": label}
        tried = _tried(setup.by(impl), want, row, label)
        rows += [tried] if isinstance(tried, dict) else []
        ours += [tried] if isinstance(tried, _Ours) else []
    if not ours:
        return rows
    size = setups.set_bytes(setup)
    count = timing.rotation(size, timing.l2_bytes(), free - size)
    cache = timing.cache_of(count, size, timing.l2_bytes())
    sets = [setup] + [setup.clone() for _ in range(count - 1)] if cache == "cold" else [setup]
    candidates = {one.label: [s.by(one.impl).call() for s in sets] for one in ours}
    beside = peers.prepared(op, sets, want)
    candidates |= {p.name: p.thunks for p in beside if p.thunks and p.capturable}
    limit = {"max_seconds": SECONDS_A_CANDIDATE.get(profile, 0.3), "repeats": 30}
    warm = timing.time_graphs(candidates, cache="warm", **limit)
    cold = timing.time_graphs(candidates, cache="cold", bytes_per_set=size, **limit) if cache == "cold" else {}
    eager = {p.name: p.thunks for p in beside if p.thunks and not p.capturable}
    host = timing.time_eager(eager, cache="warm", **limit) if eager else {}
    for one in ours:
        row = first | common | {"impl": one.label, "dispatched": one.impl == chosen}
        rows.append(row | _timed(one, setup.by(one.impl), want, warm, cold))
        rows[-1]["case_name"] = "reference" if params == REFERENCE[op] else None
    rows += [_beside(peer, first, common, warm | host, cold) for peer in beside]
    del sets, candidates, beside, setup
    torch.cuda.empty_cache()
    return rows


def _kernels(op: str, params: dict[str, Any], chosen: str | None) -> list[tuple[str, str | None]]:
    """(label, name) of our kernels at a case; for `verify_attn` without simt where that takes too long."""
    if op != "verify_attn":
        return [(IMPL, None)]
    few = params == REFERENCE[op] or roofline.flop_bytes(op, params)[0] <= SIMT_FLOP
    timed = {n for n in impls.NAMES if (few if n == "simt" else impls.worth_timing(n, params))} | {chosen}
    return [(impls.label(n), n) for n in impls.NAMES if n in timed]


def _tried(setup: Setup, want: dict[str, Any], row: dict[str, Any], label: str) -> _Ours | dict[str, Any]:
    """A first call, which compiles, and its check; a row that says why the kernel is not timed, if it is not."""
    import torch

    reason, first_call = timing.first_call(partial(impls.refused, setup.run))
    if reason:
        return row | {"status": "skipped", "reason": reason}
    before = setup.check(want)
    if not before.ok:
        return row | errors(before, "before timing")
    begun = time.perf_counter()
    setup.run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begun
    if once > SLOWEST_CALL:
        reason = f"one call takes {once:.2f} s, over the {SLOWEST_CALL} s a sweep gives it"
        return row | {"status": "skipped", "reason": reason}
    return _Ours(label, setup.impl, before, first_call)


def _timed(one: _Ours, setup: Setup, want: dict[str, Any], warm: Any, cold: Any) -> dict[str, Any]:
    """Times of a kernel of ours, if its outputs are still right."""
    latency = timing.launch_latency(setup.call())
    after = setup.check(want)
    if not after.ok:
        return errors(after, "after timing")
    waits = {"latency_us": latency.latency_us, "host_us": latency.host_us} | one.first_call
    return _times(one.label, warm, cold) | waits | errors(one.before, None)


def _beside(peer: Any, first: dict[str, Any], common: dict[str, Any], warm: Any, cold: Any) -> dict[str, Any]:
    """The row of a peer."""
    row = first | common | {"impl": peer.name, "exact": peer.exact, "peer_of": first["impl"]}
    if not peer.thunks:
        return row | {"status": peer.status, "reason": peer.note}
    return row | _times(peer.name, warm, cold) | {"status": "passed", "reason": peer.note or None}


_roofs: list[roofline.Roofs] = []


def floor_us(flop: float, moved: float) -> float:
    """Floor of a case over this GPU's roofs, which are measured once a process."""
    return roofline.floor_us(flop, moved, roofs())


def roofs() -> roofline.Roofs:
    """The measured roofs of this GPU."""
    if not _roofs:
        _roofs.append(roofline.measure_roofs())
    return _roofs[0]


def use_roofs(measured: roofline.Roofs | None) -> None:
    """Take the roofs that the run has measured already, so that all its floors are over the same ones."""
    if measured is not None:
        _roofs[:] = [measured]


def _times(name: str, warm: dict[str, timing.Sample], cold: dict[str, timing.Sample]) -> dict[str, Any]:
    """`device_us` is the cold time where there is one; the warm one stands beside it."""
    if name in cold:
        return {"device_us": cold[name].as_dict(), "device_us_warm": warm[name].as_dict()}
    return {"device_us": warm[name].as_dict()}


def errors(outcome: Comparison, when: str | None) -> dict[str, Any]:
    """Fields of a row for a check, and in the reason when it was made."""
    from kdtree.measure.tasks import figures

    found = figures(outcome)
    if found["reason"] and when:
        found["reason"] = f"{when}: {found['reason']}"
    return found
