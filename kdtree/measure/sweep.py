"""Latency and memory sweeps: which shapes, and one task per shape that gives a row for us and for each peer.

No row gets a time unless its outputs were right before and after. A case that does not fit into the memory that
is free, or that would take longer than its share, is skipped and says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from kdtree import spec
from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import memory, roofline, timing
from kdtree.measure.tasks import Task

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
        + [{"B": 1}, {"H": 8}, {"H": 16}, {"page_size": 0}],
        "merge_states": [{"B": 1, "N": 9}, {"B": 32, "N": 9, "H": 8}],
        "tree_accept": [{"N": n} for n in (9, 17, 33, 257)] + [{"B": 32}],
        "kv_compact": [{"n_layers": 1}, {"B": 8}, {"B": 32}],
    }
    if profile == "full":
        axes["topk"] += [{"D": 15}, {"dtype": "float16"}]
        axes["tree_build"] += [{"budget": 512, "K": 128}, {"D": 15}, {"B": 32, "budget": 512, "K": 128}]
        axes["verify_attn"] += [{"L": 16_384}]
        axes["verify_attn"] += [{"B": 1, "H": 8, "N": n, "L": 4096} for n in (9, 17, 33, 65)]
        axes["verify_attn"] += [{"B": 1, "H": 8, "N": 9, "L": length} for length in (256, 1024, 16_384, 65_536)]
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
    """One task per shape. Under the simulator each is a skipped row that says why. ValueError: unknown op."""
    if op not in REFERENCE:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(REFERENCE)}")
    found = []
    for params in shapes(op, profile):
        name = f"{metric}_{op}_{spec.case_key(params)}"
        first = {"op": op, "impl": IMPL, "case": params, "seed": 0}
        work = partial(_latency if metric == "latency" else _memory, first, profile)
        found.append(Task(name, first, metric, partial(_measured, work, first, metric)))
    return found


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


def workspace_of(params: dict[str, Any]) -> int:
    """Scratch bytes of our `verify_attn` for a case on the current device."""
    from kdtree.kernels import launch, verify_attn

    page = params.get("page_size") or 0
    rows = params.get("Lmax") or max(memory.prefix_lens(params), default=0) + params["N"]
    wanted = {
        "B": params["B"],
        "rows": params["N"] * params["H"],
        "capacity": -(-rows // page) * page if page else rows,
        "C": params.get("kv_lora_rank", 512),
        "dtype": params["dtype"],
    }
    return verify_attn.workspace_bytes(wanted, launch.sm_count())


memory.WORKSPACE[("verify_attn", IMPL)] = workspace_of


def _skip(first: dict[str, Any], metric: str, reason: str) -> dict[str, Any]:
    return first | {"metric": metric, "status": "skipped", "reason": reason}


def _memory(first: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Predicted beside measured bytes of one call that allocates its outputs and workspace itself."""
    from kdtree.kernels import launch
    from kdtree.measure import invoke, setups

    op, params = first["op"], first["case"]
    predicted = memory.predicted_bytes(op, params, IMPL)
    reason = memory.fits(predicted, memory.free_bytes())
    if reason:
        return [_skip(first, "memory", reason)]
    setup = setups.make(op, params, first["seed"])
    outcome = setup.check(setup.want())
    launch.release_workspaces()
    if op == "kv_compact":
        peak = memory.measured_peak(setup.run)
    else:
        peak = memory.measured_peak(lambda: invoke.call(op, setup.arguments, setup.params, None, backend="numba"))
    call = memory.call_bytes(predicted)
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
    row["memory"] = {"predicted": call, "measured": peak, "inputs": predicted["total"] - call}
    launch.release_workspaces()
    return [row]


def _allocator_slack(predicted: dict[str, int]) -> int:
    """Bytes by which torch's count of a call may lie above the formula, and no more.

    Its allocator rounds each tensor up to 512 bytes, and gives a tensor beyond 1 MiB a whole larger block when the
    rest would be 1 MiB or less.
    """
    made = [size for name, size in predicted.items() if name.startswith("out.") or name == "workspace"]
    return sum(512 + (2**20 if size > 2**20 else 0) for size in made)


def _latency(first: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """Rows of us and of every peer that is installed, timed side by side in one set of windows."""
    import torch

    from kdtree.measure import peers, setups

    op, params = first["op"], first["case"]
    free = memory.free_bytes()
    reason = memory.fits(memory.predicted_bytes(op, params, IMPL), free)
    if reason:
        return [_skip(first, "latency", reason)]
    setup = setups.make(op, params, first["seed"])
    want = setup.want()
    begun = time.perf_counter()
    before = setup.check(want)
    jit_ms = (time.perf_counter() - begun) * 1e3
    flop, moved = roofline.flop_bytes(op, params)
    common = {"metric": "latency", "flop": flop, "bytes": moved}
    if not before.ok:
        return [first | common | _errors(before, "before timing")]
    begun = time.perf_counter()
    setup.run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begun
    if once > SLOWEST_CALL:
        return [_skip(first, "latency", f"one call takes {once:.2f} s, over the {SLOWEST_CALL} s a sweep gives it")]
    size = setups.set_bytes(setup)
    count = timing.rotation(size, timing.l2_bytes(), free - size)
    cache = timing.cache_of(count, size, timing.l2_bytes())
    sets = [setup] + [setup.clone() for _ in range(count - 1)] if cache == "cold" else [setup]
    candidates = {IMPL: [s.run for s in sets]}
    beside = peers.prepared(op, sets, want)
    candidates |= {p.name: p.thunks for p in beside if p.thunks and p.capturable}
    limit = {"max_seconds": SECONDS_A_CANDIDATE.get(profile, 0.3), "repeats": 30}
    warm = timing.time_graphs(candidates, cache="warm", **limit)
    cold = timing.time_graphs(candidates, cache="cold", bytes_per_set=size, **limit) if cache == "cold" else {}
    eager = {p.name: p.thunks for p in beside if p.thunks and not p.capturable}
    host = timing.time_eager(eager, cache="warm", **limit) if eager else {}
    latency = timing.launch_latency(setup.run)
    after = setup.check(want)
    rows = [
        first
        | common
        | _times(IMPL, warm, cold)
        | {"latency_us": latency.latency_us, "host_us": latency.host_us, "jit_ms": jit_ms}
        | _errors(before, None)
        | {"case_name": "reference" if params == REFERENCE[op] else None, "floor_us": floor_us(flop, moved)}
    ]
    if not after.ok:
        rows = [first | common | _errors(after, "after timing")]
    for peer in beside:
        row = {
            "op": op,
            "impl": peer.name,
            "case": params,
            "seed": first["seed"],
            "exact": peer.exact,
            "peer_of": IMPL,
        }
        if peer.thunks:
            row |= common | _times(peer.name, warm | host, cold) | {"status": "passed", "reason": peer.note or None}
            row["floor_us"] = floor_us(flop, moved)
        else:
            row |= common | {"status": peer.status, "reason": peer.note}
        rows.append(row)
    del sets, candidates, beside, setup
    torch.cuda.empty_cache()
    return rows


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


def _errors(outcome: Any, when: str | None) -> dict[str, Any]:
    from kdtree.measure.tasks import figures

    found = figures(outcome)
    if found["reason"] and when:
        found["reason"] = f"{when}: {found['reason']}"
    return found
