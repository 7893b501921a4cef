"""Cut one comparable slice out of many rows: lines for a plot, everything but the x axis held fixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdtree.report.tables import cache_of, median, reference, timed
from kdtree.report.verdict import Row, is_peer
from kdtree.spec import case_key

MAX_LINES = 7  # more cannot be told apart


@dataclass
class Slice:
    """Lines of one plot: `lines[impl]` is rows by rising x; `fixed` are the parameters all of them share."""

    op: str
    fixed: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    lines: dict[str, list[tuple[float, Row]]] = field(default_factory=dict)

    @property
    def caption(self) -> str:
        """The fixed parameters as text."""
        cache = f" · {self.cache} cache" if self.cache else ""
        return case_key(self.fixed) + cache


def tree_size(case: Mapping[str, Any]) -> float | None:
    """Slots of a case's tree, root included."""
    if case.get("N") is not None:
        return float(case["N"])
    return float(case["budget"]) + 1 if case.get("budget") is not None else None


def prefix_length(case: Mapping[str, Any]) -> float | None:
    """Longest prefix of a case in tokens."""
    length = case.get("L")
    if isinstance(length, list):
        length = max(length, default=None)
    return float(length) if isinstance(length, int | float) else None


def cut(rows: Sequence[Row], op: str, x: Callable[[Mapping[str, Any]], float | None], without: Sequence[str]) -> Slice:
    """The slice of the timed rows of `op` along `x` with the most points, nearest to the reference case.

    `without` names the parameters that `x` stands for. A slice of no lines has none with two points.
    """
    groups: dict[str, Slice] = {}
    for row in timed(rows):
        case = row.get("case") or {}
        at = x(case)
        if row["op"] != op or row.get("metric") != "latency" or at is None:
            continue
        fixed = {k: v for k, v in case.items() if k not in without and v is not None}
        key = json.dumps([fixed, cache_of(row)], sort_keys=True, default=str)
        group = groups.setdefault(key, Slice(op, fixed, cache_of(row)))
        group.lines.setdefault(row["impl"], []).append((at, row))
    for group in groups.values():
        for line in group.lines.values():
            line.sort(key=lambda point: point[0])
    groups = {k: g for k, g in groups.items() if any(len({p[0] for p in line}) > 1 for line in g.lines.values())}
    if not groups:
        return Slice(op)
    wanted = reference(op)

    def rank(group: Slice) -> tuple[int, int, int]:
        near = sum(group.fixed.get(k) == v for k, v in wanted.items())
        return (near, group.cache == "cold", sum(map(len, group.lines.values())))

    chosen = max(groups.values(), key=rank)
    chosen.lines = dict(sorted(chosen.lines.items(), key=lambda item: (is_peer(item[1][0][1]), item[0])))
    chosen.lines = _fewer(chosen.lines)
    return chosen


def _fewer(lines: dict[str, list[tuple[float, Row]]]) -> dict[str, list[tuple[float, Row]]]:
    """At most MAX_LINES lines: all of ours, then the peers that are fastest at their last point."""
    ours = {k: v for k, v in lines.items() if not k.startswith("peer:")}
    peers = sorted((k for k in lines if k not in ours), key=lambda k: median(lines[k][-1][1]) or 0.0)
    keep = set(ours) | set(peers[: max(1, MAX_LINES - len(ours))])
    return {k: v for k, v in lines.items() if k in keep}


def floors(part: Slice) -> list[tuple[float, float]]:
    """(x, floor µs) of our own lines in `part`, by rising x."""
    found: dict[float, float] = {}
    for impl, line in part.lines.items():
        if not impl.startswith("peer:"):
            found.update({at: row["floor_us"] for at, row in line if row.get("floor_us")})
    return sorted(found.items())
