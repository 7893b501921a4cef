"""Hardware counters (ncu.json of a run) and the ways to put a tree behind a prefix, as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdtree.measure import layers, ncu
from kdtree.report import fmt
from kdtree.report.tables import case_of, median, of_floor
from kdtree.report.verdict import Row
from kdtree.spec import case_key


def counter_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Rows of text: the kernels as the head, then a line a figure, and what warps waited for at the end."""
    records = found.get("records") or []
    if not records:
        return []
    shown = ("H", "B", "N", "L")
    head = [f"{r['kernel']} {case_key({n: r['case'].get(n) for n in shown})}" for r in records]
    lines = [["", *head]]
    for name in ncu.FIGURES:
        values = [ncu.figure(record, name) for record in records]
        if any(value is not None for value in values):
            lines.append([name, *map(_figure, values)])
    waits = [", ".join(f"{what} {fmt.percent(share)}" for what, share in ncu.stalls(r)) or fmt.NONE for r in records]
    return [*lines, ["warps waited for", *waits]] if any(w != fmt.NONE for w in waits) else lines


def _figure(value: float | None) -> str:
    if value is None:
        return fmt.NONE
    return f"{value:,.0f}" if abs(value) >= 100 else fmt.number(value)


def layer_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """A line a case: all layers in one pass, and by prefix, tree and merge, in one graph each."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.get("metric") == layers.METRIC:
            way = "two" if row["impl"].endswith(layers.MERGED) else "one"
            found.setdefault(case_of(row), {})[way] = row
    lines = []
    for case, ways in found.items():
        one, two = median(ways.get("one")), median(ways.get("two"))
        lines.append(
            {
                "case": case,
                "kernel": str((ways.get("one") or {}).get("kernel") or fmt.NONE),
                "one": fmt.us(one),
                "of_floor": fmt.percent(of_floor(ways.get("one"))),
                "two": fmt.us(two),
                "ratio": fmt.ratio(two / one) if one and two else fmt.NONE,
                "more": fmt.us((two - one) / ways["one"]["case"]["n_layers"]) if one and two else fmt.NONE,
                "reason": str(next((r["reason"] for r in ways.values() if r.get("reason")), "") or ""),
            }
        )
    return lines
