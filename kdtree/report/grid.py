"""`verify_attn` over the grid of shapes, in sums: what each kernel reached, and what was set as its goal.

Pure functions of rows and of times measured elsewhere (`elsewhere.Peers`, or None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdtree.measure import sweep
from kdtree.measure.compare import TOLERANCE
from kdtree.measure.grid import case
from kdtree.measure.impls import NAMES, TENSOR_CORES, label
from kdtree.report import fmt
from kdtree.report.elsewhere import Peers, Shape, shape_of
from kdtree.report.tables import median, of_floor
from kdtree.report.verdict import Row, is_peer
from kdtree.spec import case_key

METRIC = "grid"
SHAPES = 180
CHOSEN = "dispatch"  # the kernel that the dispatch table takes, shape by shape

Points = dict[Shape, Row]


def points(rows: Iterable[Row]) -> dict[str, Points]:
    """Timed rows of the grid by kernel and shape; under CHOSEN those that the dispatch table takes."""
    found: dict[str, Points] = {CHOSEN: {}}
    for row in rows:
        shape = shape_of(row.get("case") or {})
        if row.get("metric") != METRIC or is_peer(row) or shape is None or median(row) is None:
            continue
        found.setdefault(row["impl"], {})[shape] = row
        if row.get("dispatched"):
            found[CHOSEN][shape] = row
    return {impl: at for impl, at in found.items() if at}


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def ratios(at: Points, other: Callable[[Shape], float | None]) -> dict[Shape, float]:
    """Our time over another, at each shape that has both: below 1 where we are faster."""
    found = {}
    for shape, row in at.items():
        theirs, ours = other(shape), median(row)
        if theirs and ours:
            found[shape] = ours / theirs
    return found


@dataclass(frozen=True)
class Line:
    """One kernel over the grid. Ratios are geometric means of our time over theirs; None without such times."""

    impl: str
    shapes: int
    of_floor: float | None
    over_mask_free: float | None
    over_best_exact: float | None
    below_best_exact: int
    compared: int  # shapes that have a time of an exact peer
    worst_over_mask_free: tuple[float, Shape] | None = None
    worst_rel_l2: float | None = None


def line(impl: str, at: Points, peers: Peers | None) -> Line:
    """`at` summed up."""
    free = ratios(at, peers.mask_free) if peers else {}
    exact = ratios(at, lambda shape: (peers.best_exact(shape) or (None, None))[1]) if peers else {}
    shares = [share for row in at.values() if (share := of_floor(row))]
    errors = [row["rel_l2"] for row in at.values() if row.get("rel_l2") is not None]
    return Line(
        impl=impl,
        shapes=len(at),
        of_floor=geomean(shares),
        over_mask_free=geomean(list(free.values())),
        over_best_exact=geomean(list(exact.values())),
        below_best_exact=sum(r < 1 for r in exact.values()),
        compared=len(exact),
        worst_over_mask_free=max(((r, s) for s, r in free.items()), default=None),
        worst_rel_l2=max(errors, default=None),
    )


@dataclass(frozen=True)
class Goal:
    """Something that was set out to be reached. `reached` gives its figure from the rows, or None if not measured."""

    text: str
    target: str
    reached: Callable[[Facts], float | None]
    met: Callable[[float], bool]
    shown: Callable[[float], str]
    detail: Callable[[Facts], str] | None = None  # instead of `shown`, where the figure is not what a reader wants


@dataclass
class Facts:
    """What goals look at."""

    rows: Sequence[Row]
    peers: Peers | None
    by_impl: dict[str, Points] = field(default_factory=dict)

    def row(self, wanted: Mapping[str, Any], impl: str = CHOSEN) -> Row | None:
        """The grid's row at a case."""
        shape = shape_of(wanted)
        return self.by_impl.get(impl, {}).get(shape) if shape else None

    def time(self, wanted: Mapping[str, Any], impl: str = CHOSEN) -> float | None:
        """Its µs."""
        return median(self.row(wanted, impl))

    def rate(self, wanted: Mapping[str, Any], impl: str = CHOSEN) -> float | None:
        """Its TFLOP/s."""
        row, time = self.row(wanted, impl), self.time(wanted, impl)
        return row["flop"] / time / 1e6 if row and time and row.get("flop") else None

    def line(self, impl: str = CHOSEN) -> Line | None:
        """The kernel's sums, once it has all shapes."""
        at = self.by_impl.get(impl, {})
        return line(impl, at, self.peers) if len(at) == SHAPES else None


def _bandwidth_or_rate(facts: Facts) -> float | None:
    """How far the shape got towards 3 TB/s or 480 TFLOP/s, whichever is nearer; 1 is there."""
    wanted = case(8, 32, 9, 65_536)
    row, time = facts.row(wanted), facts.time(wanted)
    if row is None or not time:
        return None
    return max(row["bytes"] / time / 3e6, row["flop"] / time / 480e6)


def _both(facts: Facts, wanted: Mapping[str, Any]) -> str:
    """Bandwidth and rate at a case that was timed."""
    row, time = facts.row(wanted), facts.time(wanted)
    assert row is not None and time
    return f"{row['bytes'] / time / 1e6:.2f} TB/s, {row['flop'] / time / 1e6:.0f} TFLOP/s"


def _wrong(facts: Facts) -> float | None:
    """Share of the grid that passed, over every kernel that ran; None unless the whole grid was asked for."""
    mine = [r for r in facts.rows if r.get("metric") == METRIC and r["status"] != "skipped"]
    shapes = {shape_of(r["case"]) for r in mine}
    return sum(r["status"] == "passed" for r in mine) / len(mine) if len(shapes) == SHAPES else None


def _host(facts: Facts) -> float | None:
    """The larger of the two host times of the kernels that the table takes."""
    cases = (sweep.SMALL, sweep.REFERENCE["verify_attn"])
    found = [
        r["host_us"]
        for r in facts.rows
        if r["op"] == "verify_attn" and r.get("dispatched") and r["case"] in cases and r.get("host_us") is not None
    ]
    return max(found, default=None)


def _workspace(facts: Facts) -> float | None:
    """Measured scratch bytes of the most demanding tensor-core kernel at the largest shape."""
    found = [
        r["memory"]["workspace_measured"]
        for r in facts.rows
        if r.get("metric") == "memory" and r["case"] == sweep.LARGE and r["impl"] != "numba:simt" and r.get("memory")
    ]
    return max((f for f in found if f is not None), default=None)


def _of(name: str, impl: str = CHOSEN) -> Callable[[Facts], float | None]:
    """A figure of a kernel's Line."""
    return lambda facts: getattr(facts.line(impl), name, None)


def _ratio(value: float) -> str:
    return f"{value:.3f}"


def _rate(value: float) -> str:
    return f"{value:.0f} TFLOP/s"


def _rate_goal(wanted: dict[str, Any], target: float, impl: str = CHOSEN) -> Goal:
    shape = {name: wanted[name] for name in ("H", "B", "N", "L")}
    who = impl.removeprefix("numba:") + " at " if impl != CHOSEN else ""
    return Goal(
        who + case_key(shape), f"≥ {target:.0f} TFLOP/s", lambda f: f.rate(wanted, impl), lambda v: v >= target, _rate
    )


MMA = "numba:mma"
GOALS = (
    Goal(
        f"all {SHAPES} shapes right: relative L2 error ≤ {TOLERANCE['bfloat16']:g}, the same bits twice",
        "all",
        _wrong,
        lambda v: v == 1,
        fmt.percent,
    ),
    Goal(
        "our time over FlashMLA without a tree mask, geometric mean",
        "≤ 1.0",
        _of("over_mask_free"),
        lambda v: v <= 1,
        _ratio,
    ),
    Goal(
        "shapes where we are faster than every exact peer",
        str(SHAPES),
        _of("below_best_exact"),
        lambda v: v == SHAPES,
        lambda v: f"{v:.0f}",
    ),
    _rate_goal(case(64, 4, 33, 16_384), 700),
    _rate_goal(case(64, 32, 33, 4096), 680),
    Goal("H=8 B=1 N=9 L=256", "≤ 8 µs", lambda f: f.time(sweep.SMALL), lambda v: v <= 8, lambda v: f"{v:.2f} µs"),
    Goal(
        "H=8 B=32 N=9 L=65536",
        "≥ 3 TB/s or ≥ 480 TFLOP/s",
        _bandwidth_or_rate,
        lambda v: v >= 1,
        fmt.percent,
        lambda f: _both(f, case(8, 32, 9, 65_536)),
    ),
    _rate_goal(case(64, 4, 33, 16_384), 220, MMA),
    Goal(
        "mma: our time over the best exact peer’s, geometric mean",
        "< 1.0",
        _of("over_best_exact", MMA),
        lambda v: v < 1,
        _ratio,
    ),
    Goal(
        "workspace at H=64 B=32 N=65 L=65536",
        "< 64 MB",
        _workspace,
        lambda v: v < 64e6,
        lambda v: f"{v / 1e6:.1f} MB",
    ),
    Goal("host time of a call with out=", "≤ 12 µs", _host, lambda v: v <= 12, lambda v: f"{v:.1f} µs"),
)


@dataclass
class Summary:
    """The grid in sums: a Line a kernel (CHOSEN first), the goals, and the points for figures and tables."""

    by_impl: dict[str, Points]
    lines: list[Line]
    goals: list[dict[str, Any]]
    peers: Peers | None


def summary(rows: Sequence[Row], peers: Peers | None) -> Summary:
    """Sum up the rows of a run. Goals that nothing was measured for read a dash, and are neither met nor missed."""
    ours = [r for r in rows if not is_peer(r)]
    facts = Facts(ours, peers, points(ours))
    shown = dict.fromkeys((CHOSEN, *map(label, TENSOR_CORES), *facts.by_impl))
    lines = [line(impl, facts.by_impl.get(impl, {}), peers) for impl in shown]
    goals = []
    for goal in GOALS:
        value = goal.reached(facts)
        goals.append(
            {
                "what": goal.text,
                "target": goal.target,
                "value": value,
                "measured": fmt.NONE if value is None else goal.detail(facts) if goal.detail else goal.shown(value),
                "met": None if value is None else bool(goal.met(value)),
            }
        )
    return Summary(facts.by_impl, lines, goals, peers)


def goal_table(found: Summary) -> list[dict[str, str]]:
    """Goals as text: what, target, measured, met (yes, no or a dash)."""
    words = {True: "yes", False: "no", None: fmt.NONE}
    return [
        {"what": g["what"], "target": g["target"], "measured": g["measured"], "met": words[g["met"]]}
        for g in found.goals
    ]


def line_table(found: Summary) -> list[dict[str, str]]:
    """A line a kernel as text."""
    out = []
    for one in found.lines:
        worst = one.worst_over_mask_free
        out.append(
            {
                "kernel": one.impl,
                "shapes": str(one.shapes),
                "of floor": fmt.percent(one.of_floor),
                "over FlashMLA without mask": fmt.NONE if one.over_mask_free is None else _ratio(one.over_mask_free),
                "over best exact peer": fmt.NONE if one.over_best_exact is None else _ratio(one.over_best_exact),
                "faster than all exact peers": f"{one.below_best_exact} of {one.compared}"
                if one.compared
                else fmt.NONE,
                "worst shape": f"{_ratio(worst[0])} at H={worst[1][0]} B={worst[1][1]} N={worst[1][2]} L={worst[1][3]}"
                if worst
                else fmt.NONE,
                "largest rel. L2": fmt.error(one.worst_rel_l2),
            }
        )
    return out


def shape_table(found: Summary) -> list[dict[str, Any]]:
    """A line a shape: the chosen kernel's time, rate, share of the floor, and its ratios to the times elsewhere."""
    out = []
    others = [impl for impl in found.by_impl if impl != CHOSEN]
    for shape, row in sorted(found.by_impl.get(CHOSEN, {}).items()):
        time = median(row)
        free = found.peers.mask_free(shape) if found.peers else None
        exact = found.peers.best_exact(shape) if found.peers else None
        times = {impl: median(found.by_impl[impl].get(shape)) for impl in others}
        out.append(
            {
                "shape": dict(zip("HBNL", shape, strict=True)),
                "impl": row["impl"],
                "time": fmt.us(time),
                "iqr": fmt.us(row["device_us"]["iqr"]),
                "rate": fmt.number(row["flop"] / time / 1e6) if time and row.get("flop") else fmt.NONE,
                "of_floor": fmt.percent(of_floor(row)),
                "times": {impl: fmt.us(us) for impl, us in times.items()},
                "over_mask_free": _ratio(time / free) if time and free else fmt.NONE,
                "over_exact": _ratio(time / exact[1]) if time and exact else fmt.NONE,
                "exact": exact[0] if exact else fmt.NONE,
                "error": fmt.error(row.get("rel_l2")),
                "checked": f"{row['checked_rows']} of {row['rows']}" if row.get("checked_rows") else fmt.NONE,
            }
        )
    return out


def ladder(rows: Sequence[Row], wanted: Mapping[str, Any]) -> dict[str, Row | None]:
    """Each kernel's timed row at a case, in rising order of cleverness; None where it has none."""
    found: dict[str, Row | None] = {}
    for name in NAMES:
        mine = [r for r in rows if r["impl"] == label(name) and r["case"] == wanted and median(r) is not None]
        mine.sort(key=lambda r: r.get("metric") != "latency")
        found[name] = mine[0] if mine else None
    return found
