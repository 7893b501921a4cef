"""reports/index.html: every host and run, newest first, with its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdtree.report import fmt, html, runstate, tables
from kdtree.report.verdict import op_order, score


def write(reports: Path) -> Path:
    """Write `reports`/index.html from the JSON files of each run; returns its path."""
    reports = Path(reports)
    hosts = [h for folder in sorted(reports.iterdir()) if folder.is_dir() and (h := _host(folder, reports))]
    hosts.sort(key=lambda h: (h["simulated"], h["name"]))
    ops = sorted({op for h in hosts for op in h["ops"]}, key=op_order)
    compare = sorted(p.relative_to(reports).as_posix() for p in (reports / "compare").glob("*.html"))
    target = reports / "index.html"
    target.write_text(html.page("index.html.j2", hosts=hosts, ops=ops, comparisons=compare), encoding="utf-8")
    return target


def _host(folder: Path, reports: Path) -> dict[str, Any] | None:
    runs = []
    for run_dir in reversed(runstate.run_dirs(folder)):
        verdict = runstate.read_json(run_dir / "verdict.json")
        state = runstate.load(run_dir) or {}
        unfinished = verdict is None or state.get("status") == runstate.RUNNING
        runs.append(
            {
                "run": run_dir.name,
                "href": f"{folder.name}/{run_dir.name}/index.html" if (run_dir / "index.html").is_file() else None,
                "status": "running" if unfinished else verdict["status"],
                "score": None if verdict is None else score(verdict),
                "profile": state.get("profile"),
                "simulated": bool(state.get("simulated")),
                "trust": verdict is None or verdict["trust"]["ok"],
                "exit": None if verdict is None else verdict["exit_name"],
                "at": state.get("updated", ""),
                "gpu": None if verdict is None else verdict["gpu"],
            }
        )
    if not runs:
        return None
    newest = runs[0]
    tiles = _tiles(folder / newest["run"])
    return {
        "name": folder.name,
        "gpu": newest["gpu"] or ("simulator" if newest["simulated"] else fmt.NONE),
        "simulated": newest["simulated"],
        "newest": newest,
        "older": runs[1:],
        "ops": tiles,
    }


def _tiles(run_dir: Path) -> dict[str, dict[str, Any]]:
    from kdtree.report.render import believed_rows

    return {tile["op"]: tile for tile in tables.tiles(believed_rows(run_dir))}
