"""Two runs side by side, case by case. Never averaged: a mean over hosts or cases is nobody's number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree.report import facts, fmt, html, plots, runstate, series, tables
from kdtree.report.render import believed_rows
from kdtree.report.verdict import Row, is_peer, op_order, score

ABSENT = "n/a"  # the run has no such result at all; a dash means that it has one without a time


@dataclass(frozen=True)
class Comparison:
    """`page` is where the HTML went, `text` a table for a terminal, `lines` its rows."""

    page: Path
    text: str
    lines: list[dict[str, Any]]


@dataclass
class _Side:
    label: str
    run_dir: Path
    state: dict[str, Any]
    host: dict[str, Any]
    verdict: dict[str, Any]
    rows: list[Row]


def find_run(name: str | Path, reports: str | Path = "reports") -> Path:
    """The run directory that `name` means: a path to one, ``host/run``, or a host for its newest run.

    Raises FileNotFoundError naming what was looked for.
    """
    reports = Path(reports)
    for path in (Path(name), reports / name):
        if runstate.load(path) is not None:
            return path
        if path.is_dir() and (newest := runstate.newest(path)) is not None:
            return newest
    known = sorted(p.name for p in reports.glob("*/") if runstate.newest(p)) if reports.is_dir() else []
    raise FileNotFoundError(
        f"run: got {str(name)!r}, expected a run directory or one of the hosts: {', '.join(known) or 'none'}"
    )


def compare(
    run_a: str | Path, run_b: str | Path, out: str | Path | None = None, reports: str | Path = "reports"
) -> Comparison:
    """Write a page that sets two runs side by side.

    `run_a` and `run_b` are run directories or host names. `out` is a file, by default
    ``<reports>/compare/<a>-vs-<b>.html``. Raises FileNotFoundError for an unknown run.
    """
    sides = [_side(find_run(name, reports)) for name in (run_a, run_b)]
    if sides[0].label == sides[1].label:  # two runs of one host
        for side in sides:
            side.label = f"{side.label} {side.run_dir.name}"
    lines = table([side.rows for side in sides])
    file = "-vs-".join(side.label.replace(" ", "_") for side in sides) + ".html"
    page = Path(out) if out is not None else Path(reports) / "compare" / file
    text = html.page(
        "compare.html.j2",
        sides=[_card(side) for side in sides],
        facts=_facts(sides),
        figures=_figures(sides),
        lines=lines[: tables.MAX_TABLE_ROWS],
        left_out=max(0, len(lines) - tables.MAX_TABLE_ROWS),
        tiles=_tiles(sides),
        script=(html.TEMPLATES / "report.js").read_text(encoding="utf-8"),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return Comparison(page, _as_text([side.label for side in sides], lines), lines)


def _side(run_dir: Path) -> _Side:
    state = runstate.load(run_dir) or {}
    host = runstate.read_json(run_dir / "host.json") or {}
    verdict = runstate.read_json(run_dir / "verdict.json")
    if verdict is None:
        raise FileNotFoundError(f"run: {run_dir.name} has no verdict.json; render it with `kdtree report --render`")
    return _Side(state["host"], run_dir, state, host, verdict, list(believed_rows(run_dir)))


def _card(side: _Side) -> dict[str, Any]:
    return {
        "label": side.label,
        "run": side.run_dir.name,
        "gpu": side.verdict["gpu"] or "no GPU",
        "v": side.verdict,
        "score": score(side.verdict),
    }


def _facts(sides: Sequence[_Side]) -> list[dict[str, Any]]:
    """Lines of the host table: a fact, its value on each side, and whether they differ."""
    found = [dict(facts.host(side.host)) for side in sides]
    labels = list(dict.fromkeys(label for side in found for label in side))
    return [
        {
            "label": label,
            "values": [side.get(label, ABSENT) for side in found],
            "differs": len({s.get(label) for s in found}) > 1,
        }
        for label in labels
    ]


def _figures(sides: Sequence[_Side]) -> list[dict[str, str]]:
    """Our fastest kernel of each side in one plot, where the sides have cases in common."""
    mixed: list[Row] = []
    for side in sides:
        fastest: dict[tuple[str, str], Row] = {}
        for row in tables.timed(r for r in side.rows if r["metric"] not in tables.OWN_SECTION):
            key = tables.cell_key(row)
            if not is_peer(row) and (tables.median(row) or 0) <= (tables.median(fastest.get(key)) or math.inf):
                fastest[key] = row
        # Each host has a floor of its own, so the plot of both shows none.
        mixed += [{**row, "impl": side.label, "floor_us": None} for row in fastest.values()]
    out = []
    for op in ("verify_attn", "tree_build"):
        wanted: list[tuple[str, Any, tuple[str, ...], Any]] = [
            ("tree size", series.tree_size, ("N", "budget"), plots.time_by_tree_size)
        ]
        if op == "verify_attn":
            wanted.append(("prefix length", series.prefix_length, ("L",), plots.time_by_prefix))
        for what, axis, without, draw in wanted:
            part = series.cut(mixed, op, axis, without)
            if len(part.lines) == len(sides):
                name = f"cmp-{op}-{what.split()[0]}"
                title = f"{op}: time against {what}"
                svg = plots.to_svg(draw(mixed, op), name)
                out.append({"id": name, "title": title, "alt": f"{title}, {part.caption}", "svg": svg})
    return out


def _tiles(sides: Sequence[_Side]) -> list[dict[str, Any]]:
    by_side = [{t["op"]: t for t in tables.tiles(side.rows)} for side in sides]
    ops = sorted({op for tiles in by_side for op in tiles}, key=op_order)
    return [{"op": op, "sides": [tiles.get(op) for tiles in by_side]} for op in ops]


def table(sides: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """One line per (op, case, implementation) that any of `sides` has, with a cell for each side.

    A cell holds the device time, status and share of the floor. `ratio` is second / first, where both have a
    time.
    """
    found: list[dict[tuple[str, str, str], dict[str, Any]]] = []
    for rows in sides:
        found.append({(r["op"], r["case"], r["impl"]): r for r in tables.main_table(rows)})

    def order(key: tuple[str, str, str]) -> tuple[Any, ...]:
        op, case, impl = key
        return (op_order(op), tables.natural(case), impl.startswith("peer:"), impl)

    keys = sorted({k for side in found for k in side}, key=order)
    lines = []
    for op, case, impl in keys:
        cells = [_cell(side.get((op, case, impl))) for side in found]
        times = [cell["value"] for cell in cells]
        ratio = times[1] / times[0] if len(times) == 2 and None not in times else None
        lines.append(
            {
                "op": op,
                "case": case,
                "impl": impl,
                "peer": is_peer({"impl": impl}),
                "cells": cells,
                "ratio": fmt.ratio(ratio),
                "ratio_value": ratio,
            }
        )
    return lines


def _cell(line: Mapping[str, Any] | None) -> dict[str, Any]:
    if line is None:
        return {"time": ABSENT, "status": ABSENT, "of_floor": ABSENT, "value": None}
    return {
        "time": line["time"],
        "status": line["status"],
        "of_floor": line["of_floor"],
        "value": line["time_value"],
    }


def _as_text(labels: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> str:
    head = ["op", "implementation", "case", *(f"{label} µs" for label in labels), "second / first"]
    body = []
    for line in lines:
        cells = [c["time"] if c["status"] in ("passed", ABSENT) else c["status"] for c in line["cells"]]
        body.append([line["op"], line["impl"], line["case"], *cells, line["ratio"]])
    if not body:
        return "no result on either side"
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]

    def pad(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(pad, [head, *body]))
