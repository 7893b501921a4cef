"""`verify_attn` over a whole grid of shapes, once each: every kernel checked, then timed cold.

The grid is that of published measurements of other kernels (see `kdtree.report.elsewhere`), so that the two can be set
side by side shape by shape. It is made to take minutes: inputs are drawn on the GPU, the right answer is a float64
product there, and a kernel gets a fraction of a second.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from kdtree import spec
from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import impls, memory, roofline, sweep, timing, twin
from kdtree.measure.compare import Comparison, compare
from kdtree.measure.setups import Setup
from kdtree.measure.tasks import Task, figures, skipped

OP, METRIC = "verify_attn", "grid"
HEADS, BATCHES, SLOTS, LENGTHS = (8, 16, 64), (1, 4, 32), (9, 17, 33, 65), (256, 1024, 4096, 16_384, 65_536)
CHECK_SECONDS = 2.0  # a float64 answer that takes longer is computed for a sample of rows
TILE_EDGE = 16  # rows; the height of every kernel's row tiles is a multiple of it
LIMITS: dict[str, Any] = {"repeats": 30, "max_seconds": 0.25}  # of one kernel at one shape


def case(heads: int, batch: int, n_slots: int, length: int) -> dict[str, Any]:
    """Parameters of a shape of the grid, in the order that the sweep's cases have."""
    return sweep.REFERENCE[OP] | {"B": batch, "H": heads, "N": n_slots, "L": length}


SAMPLE = (  # of the quick profile: the corners that goals are set at, and one where the host's part shows
    sweep.REFERENCE[OP],
    case(64, 4, 33, 16_384),
    case(64, 32, 33, 4096),
    case(8, 32, 9, 65_536),
    case(8, 1, 9, 256),
)


def shapes(profile: str) -> Iterator[dict[str, Any]]:
    """All 180 shapes in the full profile, SAMPLE in the quick one, the reference case in the tiny one."""
    if profile == "full":
        for heads, batch, n_slots, length in itertools.product(HEADS, BATCHES, SLOTS, LENGTHS):
            yield case(heads, batch, n_slots, length)
    else:
        yield from SAMPLE if profile == "quick" else SAMPLE[:1]


def tasks(profile: str) -> list[Task]:
    """One task per shape, with a row for each kernel. In the simulator each is a skipped row that says why."""
    found = []
    for params in shapes(profile):
        first = {"op": OP, "impl": impls.label("mma"), "case": params, "seed": 0}
        found.append(Task(f"{METRIC}_{spec.case_key(params)}", first, METRIC, partial(_measured, first)))
    return found


def _measured(first: dict[str, Any]) -> list[dict[str, Any]]:
    flop, moved = roofline.flop_bytes(OP, first["case"])
    first = first | {"flop": flop, "bytes": moved}
    if not gpu_available():
        return [skipped(first, METRIC, f"{METRIC} is measured on a GPU only, and {why_no_gpu()}")]
    reason = memory.fits(need_bytes(first["case"]), memory.free_bytes())
    return [skipped(first, METRIC, reason)] if reason else measure(first)


def need_bytes(params: dict[str, Any]) -> int:
    """Bytes of a shape's inputs in rotation and of its check, near enough to say whether they fit."""
    predicted = memory.predicted_bytes(OP, params, impls.label("mma"))["total"]
    outputs = 8 * params["B"] * params["N"] * params["H"] * 512
    return predicted + int(timing.COLD_BYTES) + 8 * outputs


def measure(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of every kernel that takes the shape: checked, cold time side by side, checked again."""
    import torch

    from kdtree.measure import setups

    params = first["case"]
    setup = setups.make(OP, params | {"nan_behind": True}, first["seed"])
    picked = checked_rows(params)
    want = twin.verify_attn(setup.arguments, setup.params, picked)
    everything = params["B"] * params["N"] * params["H"]
    first = first | {"metric": METRIC, "rows": everything, "checked_rows": params["B"] * len(picked)}
    first["floor_us"] = sweep.floor_us(first["flop"], first["bytes"])
    chosen = impls.dispatched(params)
    rows, ready = [], {}
    for name in dict.fromkeys((*(n for n in impls.TENSOR_CORES if impls.worth_timing(n, params)), chosen)):
        row = first | {"impl": impls.label(name), "dispatched": name == chosen}
        reason, first_call = timing.first_call(partial(impls.refused, setup.by(name).run))
        if reason:
            rows.append(skipped(row, METRIC, reason))
            continue
        outcome = check(setup.by(name), want, picked)
        if outcome.ok:
            ready[name] = row | first_call | figures(outcome)
        else:
            rows.append(row | figures(outcome))
    times = _times(setup, tuple(ready)) if ready else {}
    for name, row in ready.items():
        after = check(setup.by(name), want, picked)
        if not after.ok:
            rows.append(row | sweep.errors(after, "after timing") | {"jit_ms": None, "jit_cached": None})
            continue
        sample = times[name]
        rows.append(row | {"device_us": sample.as_dict(), "tflops": row["flop"] / sample.median / 1e6})
    del setup, want
    torch.cuda.empty_cache()
    return rows


def _times(setup: Setup, names: tuple[str, ...]) -> dict[str, timing.Sample]:
    """Cold times of the kernels `names` over input sets that together exceed the L2, or warm ones where they cannot."""
    from kdtree.measure import setups

    size, l2 = setups.set_bytes(setup), timing.l2_bytes()
    count = timing.rotation(size, l2, memory.free_bytes())
    cache = timing.cache_of(count, size, l2)
    sets = [setup] + [setup.clone() for _ in range(count - 1)] if cache == "cold" else [setup]
    candidates = {name: [s.by(name).call() for s in sets] for name in names}
    return timing.time_graphs(candidates, cache=cache, bytes_per_set=size if cache == "cold" else None, **LIMITS)


def check(setup: Setup, want: dict[str, Any], picked: list[int]) -> Comparison:
    """Two calls on poisoned outputs: the same bits, the rows `picked` as `want` has them, all others finite."""
    import torch

    runs = []
    for _ in range(2):
        setup.poison()
        setup.run()
        torch.cuda.synchronize() if setup.outputs["out"].is_cuda else None
        runs.append({n: a.clone() for n, a in setup.outputs.items()})
    got = runs[0]
    if any(not torch.equal(_bits(got[n]), _bits(runs[1][n])) for n in got):
        return Comparison(False, "two runs on the same inputs gave different bits")
    lost = [n for n, a in got.items() if not bool(a.isfinite().all())]
    if lost:
        return Comparison(False, f"{' and '.join(lost)}: not finite somewhere, although every row sees its prefix")
    batch, n_slots, heads, width = got["out"].shape
    at = torch.as_tensor(picked, device=got["out"].device)
    seen = {"out": got["out"].view(batch, n_slots * heads, width), "lse": got["lse"].view(batch, n_slots * heads)}
    return compare({n: a[:, at] for n, a in seen.items()}, want, setup.params["dtype"])


def _bits(array: Any) -> Any:
    import torch

    return array.view(torch.uint8)


def checked_rows(params: dict[str, Any]) -> list[int]:
    """Row numbers (slot·H + head) of each request that are compared with float64: all, or `sampled` ones."""
    if check_seconds(params, float64_rate()) <= CHECK_SECONDS:
        return list(range(params["N"] * params["H"]))
    return sampled(params["N"], params["H"])


def check_seconds(params: dict[str, Any], flop_a_second: float, bytes_a_second: float = 1e12) -> float:
    """How long the float64 answer for all rows takes: its products, and a dozen passes over its logits."""
    flop, _ = roofline.flop_bytes(OP, params)
    logits = flop / (2 * (576 + 512))
    return flop / flop_a_second + 12 * 8 * logits / bytes_a_second


def sampled(n_slots: int, heads: int) -> list[int]:
    """Rows that show a mistake at any edge: both sides of every tile of rows, and the first and last slots whole."""
    count = n_slots * heads
    edges = itertools.chain.from_iterable((at - 1, at) for at in range(TILE_EDGE, count, TILE_EDGE))
    return sorted({*edges, *range(min(heads, count)), *range(max(0, count - heads), count)})


@functools.cache
def float64_rate() -> float:
    """FLOP a second of a float64 matrix product here: a GPU for games has a sixtieth of a data centre's."""
    import torch

    side = 2048
    a = torch.randn((side, side), dtype=torch.float64, device="cuda")
    torch.matmul(a, a)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    torch.matmul(a, a)
    torch.cuda.synchronize()
    return 2 * side**3 / max(time.perf_counter() - begun, math.ulp(1.0))
