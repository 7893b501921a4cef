"""run.json: which run a directory holds, what of it is done, and which directory a new run goes to."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kdtree.report.notebooks import COMPLETED

RUNNING, INTERRUPTED, BROKEN, FINISHED = "running", "interrupted", "broken", "finished"
PROFILES = ("tiny", "quick", "full")


def now() -> str:
    """The current time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (NaN raises ValueError); a reader sees the old file or the new one, never half."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object at `path`; None where there is no file or it does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def load(run_dir: Path) -> dict[str, Any] | None:
    """The run.json of `run_dir`, or None."""
    return read_json(run_dir / "run.json")


def save(run_dir: Path, state: dict[str, Any]) -> None:
    """Write run.json, stamping `updated`."""
    state["updated"] = now()
    write_json(run_dir / "run.json", state)


def run_dirs(host_dir: Path) -> list[Path]:
    """Directories below `host_dir` that hold a run, oldest first (by when the run was created)."""
    found = [(state.get("created", ""), p) for p in host_dir.glob("*/") if (state := load(p)) is not None]
    return [p for _, p in sorted(found, key=lambda item: (item[0], item[1].name))]


def newest(host_dir: Path) -> Path | None:
    """The newest run below `host_dir`, or None."""
    runs = run_dirs(host_dir)
    return runs[-1] if runs else None


def base_id(commit: str | None, dirty: bool, day: str | None = None) -> str:
    """``YYYY-MM-DD-<commit7>[-dirty]``; ``nogit`` where there is no commit to name."""
    day = day or datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{day}-{(commit or 'nogit')[:7]}" + ("-dirty" if dirty and commit else "")


def choose(
    host_dir: Path, *, commit: str | None, dirty: bool, source: str, profile: str, resume: bool = True
) -> tuple[str, dict[str, Any] | None]:
    """(run id, state to resume or None) for a run of this commit, source and profile.

    Today's run of the same is gone on with, finished or not, and so is the newest unfinished one of an
    earlier day; anything else gets an id of its own, numbered when the day's is taken.
    """
    wanted = {"commit": commit, "dirty": dirty, "source": source, "profile": profile}

    def same(state: dict[str, Any]) -> bool:
        return all(state.get(name) == value for name, value in wanted.items())

    base = base_id(commit, dirty)
    if resume:
        for path in reversed(run_dirs(host_dir)):
            state = load(path)
            if state is None or not same(state):
                continue
            if state.get("status") != FINISHED or re.fullmatch(re.escape(base) + r"(-\d+)?", path.name):
                return path.name, state
    name, n = base, 1
    while (host_dir / name).exists():
        n += 1
        name = f"{base}-{n}"
    return name, None


def new_state(run: str, host: str, source: str, profile: str, info: dict[str, Any]) -> dict[str, Any]:
    """run.json of a run that has just begun. `info` is host.json."""
    return {
        "run": run,
        "host": host,
        "source": source,
        "profile": profile,
        "commit": info.get("commit"),
        "dirty": bool(info.get("dirty")),
        "simulated": bool(info.get("simulated")),
        "status": RUNNING,
        "created": now(),
        "updated": now(),
        "trust": [],
        "sessions": [],  # one per call of `kdtree report`: when it began, and how many rows were there before
        "notebooks": {},
    }


def is_done(state: dict[str, Any], name: str, sha: str, output: Path) -> bool:
    """True when notebook `name` completed in this run from the same text, and its output is there."""
    record = state["notebooks"].get(name, {})
    wanted = {"status": COMPLETED, "sha": sha, "source": state["source"], "profile": state["profile"]}
    return all(record.get(k) == v for k, v in wanted.items()) and output.is_file()
