"""From believed rows to what the page shows: tiles, the main table, correctness details, memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kdtree.report import fmt
from kdtree.report.verdict import Row, counts, is_peer, op_order
from kdtree.spec import case_key

OWN_SECTION = ("grid", "layers")  # metrics whose rows have tables of their own
MAX_TABLE_ROWS = 1500  # keeps the page well below 4 MiB; the rest is in results.jsonl


def median(row: Row | None) -> float | None:
    """Median device time of `row` in µs; None where it has none, and always for a simulated row."""
    if row is None or row.get("simulated") or row.get("status") != "passed":
        return None
    timing = row.get("device_us")
    return timing["median"] if timing else None


def warm(row: Row | None) -> float | None:
    """Median device time with the inputs in cache, in µs; None where only the cold one was taken."""
    timing = row.get("device_us_warm") if row is not None and median(row) is not None else None
    return timing["median"] if timing else None


def of_floor(row: Row | None) -> float | None:
    """How much of the floor was reached: floor / measured, 1 is the floor."""
    time, floor = median(row), row.get("floor_us") if row else None
    return floor / time if time and floor else None


def is_upper_reference(row: Row) -> bool:
    """True for a peer that computes less than we do (no tree mask): shown, but not a rival."""
    return row.get("exact") is False


def case_of(row: Row) -> str:
    return case_key(row.get("case") or {})


def natural(case: str) -> list[tuple[int, float, str]]:
    """Sort key of a case key that puts N=9 before N=17."""
    words = re.split(r"(\d+(?:\.\d+)?)", case)
    return [(0, float(w), "") if i % 2 else (1, 0.0, w) for i, w in enumerate(words)]


def cell_key(row: Row) -> tuple[str, str]:
    """What must agree for two times to be compared: the op and the case."""
    return (str(row["op"]), case_of(row))


def cache_of(row: Row) -> str | None:
    return (row.get("device_us") or {}).get("cache")


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that carry a believable device time."""
    return [r for r in rows if median(r) is not None]


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest of `rows`, or None."""
    return min(timed(rows), key=lambda r: median(r) or 0.0, default=None)


def best_peers(rows: Sequence[Row]) -> dict[tuple[str, str, str | None], Row]:
    """Fastest exact peer per (op, case, cache)."""
    found: dict[tuple[str, str, str | None], Row] = {}
    for row in timed(rows):
        key = (*cell_key(row), cache_of(row))
        if is_peer(row) and not is_upper_reference(row):
            if key not in found or (median(row) or 0) < (median(found[key]) or 0):
                found[key] = row
    return found


def reference(op: str) -> dict[str, Any]:
    """Parameters of the case that a tile speaks of; empty for an op without one."""
    from kdtree.measure.sweep import REFERENCE

    return REFERENCE.get(op, {})


def reference_case(op: str, rows: Sequence[Row]) -> str | None:
    """Case key of the timed row of ours for `op` that is marked as reference, else of the nearest to it."""
    pool = [r for r in timed(rows) if r["op"] == op and not is_peer(r) and r["metric"] not in OWN_SECTION]
    if not pool:
        return None
    wanted = reference(op)

    def nearness(row: Row) -> tuple[bool, int, float]:
        case = row.get("case") or {}
        exact = sum(case.get(k) == v for k, v in wanted.items())
        far = 0.0
        for name, value in wanted.items():
            got = case.get(name)
            if isinstance(value, int) and isinstance(got, int | float) and got > 0:
                far += max(got, value) / min(got, value)
        return (row.get("case_name") == "reference", exact, -far)

    return case_of(max(pool, key=nearness))


def tiles(rows: Sequence[Row], after_fault: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """One tile per op that has a row of ours: times at the reference case, % of floor, speed-up, correctness.

    `after_fault` are the rows that are not believed; an op that has some is not right.
    """
    peers = best_peers(rows)
    out = []
    for op in sorted({r["op"] for r in (*rows, *after_fault) if not is_peer(r)}, key=op_order):
        ours = [r for r in rows if r["op"] == op and not is_peer(r)]
        case = reference_case(op, rows)
        here = [r for r in timed(ours) if case_of(r) == case and r["metric"] not in OWN_SECTION]
        # What is called without asking for a kernel by name, where there are several.
        here = [r for r in here if r.get("dispatched")] or here
        # Cold is what a decoding step sees: the layers before have been through L2.
        top = best([r for r in here if cache_of(r) == "cold"]) or best(here)
        peer = peers.get((op, case, cache_of(top))) if top and case else None
        tally = counts(ours)
        bad = tally["failed"] + tally["error"]
        unbelieved = sum(r["op"] == op and not is_peer(r) for r in after_fault)
        out.append(
            {
                "op": op,
                "impl": top["impl"] if top else None,
                "case": case,
                "time": fmt.us(median(top)),
                "iqr": fmt.us(top["device_us"]["iqr"]) if top else fmt.NONE,
                "warm": fmt.us(warm(top)),
                "cache": cache_of(top) if top else None,
                "latency": fmt.us(top.get("latency_us")) if top else fmt.NONE,
                "floor": fmt.percent(of_floor(top)),
                "floor_value": min(1.0, of_floor(top) or 0.0),
                "peer": peer["impl"].removeprefix("peer:") if peer else None,
                "speedup": fmt.ratio((median(peer) or 0) / (median(top) or 1)) if peer else fmt.NONE,
                "counts": tally,
                "bad": bad,
                "unbelieved": unbelieved,
                "state": "bad" if bad or unbelieved else "good" if tally["passed"] else "none",
            }
        )
    return out


def _merged(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], case_of(row), row["impl"]), {})[str(row["metric"])] = row
    return groups


def _status(parts: Mapping[str, Row]) -> str:
    # Skipped alone is skipped; a pass that was not timed is a pass.
    order = ("error", "failed", "passed", "skipped")
    return min((str(r["status"]) for r in parts.values()), key=order.index)


def main_table(rows: Sequence[Row], verdicts: Mapping[tuple[str, str, str], str] | None = None) -> list[dict[str, Any]]:
    """One line per (op, case, implementation), ours before peers, slowest status of its metrics.

    `verdicts` maps (op, case key, impl) to the baseline verdict of its latency. Rows of metrics that have a section
    of their own are left out.
    """
    rows = [r for r in rows if r.get("metric") not in OWN_SECTION]
    peers = best_peers(rows)
    lines = []
    for (op, case, impl), parts in _merged(rows).items():
        latency, right = parts.get("latency"), parts.get("correctness")
        any_row = next(iter(parts.values()))
        time, peer = median(latency), None
        if latency is not None and not is_peer(latency):
            peer = peers.get((op, case, cache_of(latency)))
        timing = latency["device_us"] if latency is not None and time is not None else {}
        lines.append(
            {
                "op": op,
                "case": case,
                "impl": impl,
                "peer": is_peer(any_row),
                "note": "no tree mask" if is_upper_reference(any_row) else None,
                "dispatched": bool((latency or {}).get("dispatched")),
                "status": _status(parts),
                "reason": next((r["reason"] for r in parts.values() if r.get("reason")), None),
                "time": fmt.us(time),
                "time_value": time,
                "iqr": fmt.us(timing.get("iqr")),
                "warm": fmt.us(warm(latency)),
                "latency": fmt.us(latency.get("latency_us")) if timing and latency else fmt.NONE,
                "host": fmt.us(latency.get("host_us")) if timing and latency else fmt.NONE,
                "floor": fmt.us(latency.get("floor_us")) if latency else fmt.NONE,
                "of_floor": fmt.percent(of_floor(latency)),
                "of_floor_value": of_floor(latency),
                "speedup": fmt.ratio((median(peer) or 0) / time) if peer and time else fmt.NONE,
                "speedup_value": (median(peer) or 0) / time if peer and time else None,
                "error": fmt.error((right or latency or {}).get("rel_l2")),
                "baseline": (verdicts or {}).get((op, case, impl)),
            }
        )
    lines.sort(key=lambda x: (op_order(x["op"]), natural(x["case"]), x["peer"], x["impl"]))
    return lines


def correctness_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every correctness row with its seed and errors; what did not pass comes first."""
    order = {"error": 0, "failed": 1, "skipped": 2, "passed": 3}
    picked = [r for r in rows if r.get("metric") == "correctness"]
    picked.sort(key=lambda r: (order[r["status"]], op_order(r["op"]), is_peer(r), r["impl"], natural(case_of(r))))
    return [
        {
            "op": r["op"],
            "impl": r["impl"],
            "case": case_of(r),
            "status": r["status"],
            "seed": r.get("seed"),
            "max_abs": fmt.error(r.get("max_abs")),
            "max_rel": fmt.error(r.get("max_rel")),
            "rel_l2": fmt.error(r.get("rel_l2")),
            "reason": r.get("reason"),
        }
        for r in picked
    ]


def memory_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Predicted beside measured bytes, and what was skipped because it would not fit."""
    lines = []
    for row in rows:
        memory = row.get("memory") or {}
        if row.get("metric") != "memory" and not memory:
            continue
        predicted, measured = memory.get("predicted"), memory.get("measured")
        if predicted is None and measured is None and row["status"] in ("passed",):
            continue
        predicted = predicted.get("total") if isinstance(predicted, Mapping) else predicted
        lines.append(
            {
                "op": row["op"],
                "impl": row["impl"],
                "case": case_of(row),
                "status": row["status"],
                "predicted": fmt.size(predicted),
                "measured": fmt.size(measured),
                "ratio": fmt.ratio(measured / predicted) if predicted and measured is not None else fmt.NONE,
                "workspace": fmt.size(memory.get("workspace")),
                "inputs": fmt.size(memory.get("inputs")),
                "reason": row.get("reason"),
            }
        )
    lines.sort(key=lambda x: (op_order(x["op"]), natural(x["case"]), x["impl"]))
    return lines
