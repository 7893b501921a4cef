"""From the files of a run to its pages: verdict.json, a page per notebook, index.html, the list of hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtree.report import html, index, nbhtml, runstate, verdict
from kdtree.report.notebooks import repo_root
from kdtree.report.scrub import Scrubber, for_run


def render(run_dir: Path, *, fail_untrusted: bool = False) -> dict[str, Any]:
    """Write verdict.json and all pages of `run_dir`, and the list of hosts; returns the verdict.

    Reads run.json, host.json and results.jsonl. Raises FileNotFoundError where there is no run.
    """
    from kdtree.measure import ncu, results

    run_dir = Path(run_dir)
    state, host = runstate.load(run_dir), runstate.read_json(run_dir / "host.json") or {}
    if state is None:
        raise FileNotFoundError(f"run: no run.json in {run_dir.name}, expected the directory of a run")
    if not host:
        state["trust"] = [*state["trust"], "host.json is missing or cannot be read: nothing says what was measured."]
    scrubber = for_run(run_dir, repo_root())
    loaded = results.load(run_dir / "results.jsonl")
    rows = [scrubber.value(row) for row in loaded.rows]
    judged = _judge(rows, state)
    against, summary, problems = gate(run_dir, judged.believed, state)
    result = verdict.build(
        judged,
        state=state,
        host=host,
        baseline=summary,
        problems=[scrubber.text(p) for p in [*loaded.problems, *problems]],
        refused=refused_rows(run_dir / "results.jsonl"),
        fail_untrusted=fail_untrusted,
    )
    pages = notebook_pages(run_dir, state)
    page = html.report(
        result,
        judged,
        host=_clean(host, scrubber),
        state=_clean(state, scrubber),
        against=against,
        roofs=runstate.read_json(run_dir / "roofs.json") or host.get("roofs"),
        agreement=runstate.read_json(run_dir / "agreement.json"),
        counters=scrubber.value(ncu.read(run_dir)),
        notebook_pages=pages,
    )
    runstate.write_json(run_dir / "verdict.json", result)
    (run_dir / "index.html").write_text(page, encoding="utf-8")
    index.write(run_dir.parent.parent)
    return result


def refused_rows(path: Path) -> int:
    """How many lines of results.jsonl are neither valid rows nor the torn beginning of one."""
    from kdtree.measure import results

    refused = 0
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            # A writer that was killed leaves the beginning of a row; anything else was put there.
            refused += bool(line.strip()) and not line.startswith(b'{"op"')
            continue
        try:
            results.dumps(row)
            results.validate(row)
        except (ValueError, TypeError):
            refused += 1
    return refused


def _clean(value: Mapping[str, Any], scrubber: Scrubber) -> dict[str, Any]:
    return scrubber.value(value)


def baseline_path(run_dir: Path) -> Path:
    """Where the accepted numbers of a run's host are."""
    return run_dir.parent.parent / "baselines" / f"{run_dir.parent.name}.json"


def gate(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], state: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any] | None, list[str]]:
    """(verdicts, summary or None, problems) of `rows` against the baseline of the run's host."""
    from kdtree.measure import gate as gates

    path = baseline_path(run_dir)
    if state.get("simulated") or not path.exists():
        return [], None, []
    try:
        accepted = gates.load_baseline(path)
    except ValueError as exc:
        return [], None, [str(exc)]
    found = gates.compare([dict(r) for r in rows], accepted)
    return found, gates.summarise(found), []


def notebook_pages(run_dir: Path, state: Mapping[str, Any]) -> dict[str, str]:
    """Write the page of each executed notebook; returns its address from the run directory by notebook."""
    pages = {}
    for name, record in state["notebooks"].items():
        notebook = run_dir / "notebooks" / f"{name}.ipynb"
        if notebook.is_file():
            target = notebook.with_suffix(".html")
            nbhtml.convert(notebook, target, title=name, status=record["status"], reason=record["reason"])
            pages[name] = f"notebooks/{target.name}"
    return pages


def believed_rows(run_dir: Path) -> list[Mapping[str, Any]]:
    """The rows of `run_dir` to be believed, one per key; raises FileNotFoundError where there is no run."""
    from kdtree.measure import results

    state = runstate.load(Path(run_dir))
    if state is None:
        raise FileNotFoundError(f"run: no run.json in {Path(run_dir).name}, expected the directory of a run")
    rows = results.load(Path(run_dir) / "results.jsonl").rows
    return _judge(rows, state).believed


def _judge(rows: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> verdict.Judged:
    sessions = [session["rows_from"] for session in state.get("sessions", [])]
    return verdict.judge(rows, run=state["run"], source=state["source"], sessions=sessions)
