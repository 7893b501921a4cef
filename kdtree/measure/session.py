"""Where rows go and what they are signed with: the run that a notebook, the worker and the report share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree.device import gpu_available
from kdtree.measure import results


@dataclass(frozen=True)
class Session:
    """One run on one host. `source` is the fingerprint of the code that the rows speak of."""

    run_dir: Path
    host: str
    run: str
    source: str
    simulated: bool
    profile: str

    @property
    def results_path(self) -> Path:
        """The run's results.jsonl."""
        return self.run_dir / "results.jsonl"

    def append(self, row: dict[str, Any]) -> dict[str, Any]:
        """Sign a row (its op, impl, case, metric, status and figures given), write it, return it."""
        signed = results.new_row(**row, host=self.host, run=self.run, source=self.source, simulated=self.simulated)
        results.append(self.results_path, signed)
        return signed

    def rows(self, *, op: str | None = None, metric: str | None = None) -> list[dict[str, Any]]:
        """The rows of this run and source, the last of each key; optionally of one op or metric."""
        mine, _ = results.current(results.load(self.results_path).rows, run=self.run, source=self.source)
        return [r for r in mine if op in (None, r["op"]) and metric in (None, r["metric"])]


def default_profile() -> str:
    """ "quick" on a GPU, "tiny" under the simulator."""
    return "quick" if gpu_available() else "tiny"


def open_session(run_dir: str | Path = "", profile: str = "") -> Session:
    """The run in `run_dir` (its run.json says which), or a scratch run for exploring when it is empty or new.

    A scratch run lives in ``reports/scratch`` of the checkout, or below the current directory outside of one.
    Its rows are signed "scratch" and never enter a report.
    """
    from kdtree.measure import host

    if not run_dir:
        root = Path(__file__).resolve().parent.parent.parent
        run_dir = (root if (root / "notebooks").is_dir() else Path.cwd()) / "reports" / "scratch"
    run_dir = Path(run_dir)
    state_file = run_dir / "run.json"
    state = json.loads(state_file.read_text()) if state_file.exists() else {}
    return Session(
        run_dir=run_dir,
        host=state.get("host") or "scratch",
        run=state.get("run") or "scratch",
        source=state.get("source") or host.source_fingerprint(),
        simulated=not gpu_available(),
        profile=profile or state.get("profile") or default_profile(),
    )
