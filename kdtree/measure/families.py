"""Run op families, each in a process of its own, with a deadline: one fault does not poison the rest.

A CUDA error, a kernel that never returns or a killed process costs the case at hand. It gets an error row, the
rows before it are kept, and the family goes on behind it in a new process, up to MAX_FAULTS times.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdtree.measure import results, tasks
from kdtree.measure.session import Session
from kdtree.measure.worker import DIED, OK, WRONG

MAX_FAULTS = 3
CASE_DEADLINE = 120.0  # seconds; a kernel that never returns is killed after this
START_DEADLINE = 180.0  # seconds to import, compile nothing yet, and list the tasks


@dataclass
class FamilyResult:
    """What came of one family: `exit_code` 0, 1 or 6; `rows` of this run; `counts` by status."""

    family: str
    metric: str
    exit_code: int
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Rows by status."""
        found = dict.fromkeys(results.STATUSES, 0)
        for row in self.rows:
            found[row["status"]] += 1
        return found


def run(
    family: str,
    session: Session,
    *,
    metric: str = "correctness",
    case_deadline: float = CASE_DEADLINE,
    overwrite: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> FamilyResult:
    """Run the tasks of `family` that this run has no passed or skipped row of yet (all with `overwrite`).

    Args:
        family: an op, or ``module:function`` giving cases.
        case_deadline: seconds one task may take.
        progress: called with {done, status, number, of} after each task.

    Wrong results, faults and kills do not raise: they are rows, and the exit code. Raises ValueError for an
    unknown family or metric.
    """
    session.run_dir.mkdir(parents=True, exist_ok=True)
    todo = tasks.tasks(family, metric, session.profile)
    kept = set() if overwrite else _done_keys(session)
    skip = [t.name for t in todo if results.make_key(session.host, *_identity(t), t.metric) in kept]
    code, faults = OK, 0
    while len(skip) < len(todo):
        status = _Worker(family, metric, session, skip).wait(case_deadline, progress, skip)
        if status in (OK, WRONG):
            code = max(code, status) if code != DIED else DIED
            break
        code, faults = DIED, faults + 1
        if faults == MAX_FAULTS:
            _give_up(todo, skip, metric, session)
            break
    keys = {results.make_key(session.host, *_identity(t), t.metric) for t in todo}
    # Peers have rows of the same cases under their own names.
    wanted = {(k[1], k[3]) for k in keys}
    rows = [r for r in session.rows(metric=metric) if (results.key(r)[1], results.key(r)[3]) in wanted]
    if code == OK and any(r["status"] == "failed" and not r.get("peer_of") for r in rows):
        code = WRONG
    if silent := keys - {results.key(r) for r in rows}:
        raise RuntimeError(f"{len(silent)} of {len(keys)} tasks of {family} left no row, the first is {min(silent)}")
    return FamilyResult(family, metric, code, rows)


def _identity(task: tasks.Task) -> tuple[str, str, dict[str, Any]]:
    return task.first["op"], task.first["impl"], task.first["case"]


def _done_keys(session: Session) -> set[results.Key]:
    """Keys that need not be run again; the file is read once for all tasks."""
    return {results.key(r) for r in session.rows() if r["status"] in ("passed", "skipped")}


def _give_up(todo: list[tasks.Task], skip: list[str], metric: str, session: Session) -> None:
    """Say of each task that was not reached that it was not."""
    reason = f"not run: the family was stopped after {MAX_FAULTS} faults"
    for task in todo:
        if task.name not in skip:
            session.append(task.first | {"metric": metric, "status": "skipped", "reason": reason})


class _Worker:
    """One worker process and what it says."""

    def __init__(self, family: str, metric: str, session: Session, skip: list[str]):
        self.session, self.metric, self.family = session, metric, family
        self.began = False  # has any task been seen at work?
        # Named after this process, since two notebooks may run one family in one directory at a time.
        name = f"inflight-{family}-{metric}-{os.getpid()}".replace(":", "-").replace(".", "-")
        self.inflight = session.run_dir / f"{name}.json"
        self.inflight.unlink(missing_ok=True)
        skip_file = self.inflight.with_suffix(".skip")
        skip_file.write_text(json.dumps(skip))
        command = [sys.executable, "-m", "kdtree.measure.worker", "--family", family, "--metric", metric]
        command += ["--profile", session.profile, "--run-dir", str(session.run_dir), "--skip", str(skip_file)]
        command += ["--inflight", str(self.inflight), "--source", session.source]
        package = str(Path(__file__).resolve().parents[2])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.complaints: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines.put), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.complaints.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, take: Callable[[str], None]) -> None:
        for line in stream:
            take(line)

    def wait(self, deadline: float, progress: Callable | None, skip: list[str]) -> int:
        """Exit code of the worker; names of finished tasks are added to `skip`, the fatal one included."""
        started, late = time.time(), None
        try:
            while self.process.poll() is None:
                self._drain(progress, skip)
                late = self._overdue(started, deadline)
                if late:
                    self._kill()
                    break
                time.sleep(0.05)
            self.process.wait()
        finally:
            if self.process.poll() is None:
                self._kill()
        for reader in self._readers:
            reader.join(timeout=5)
        self._drain(progress, skip)
        self.inflight.with_suffix(".skip").unlink(missing_ok=True)
        code = self.process.returncode
        if code not in (OK, WRONG):
            self._bury(late, code, skip)
            return DIED
        return code

    def _kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _drain(self, progress: Callable | None, skip: list[str]) -> None:
        while not self.lines.empty():
            try:
                event = json.loads(self.lines.get())
            except ValueError:
                continue  # something a library printed
            self.began = True
            if "done" in event:
                skip.append(event["done"])
                if progress:
                    progress(event)

    def _overdue(self, started: float, deadline: float) -> str | None:
        task = self._task()
        if task is None:
            idle = not self.began and time.time() - started > START_DEADLINE
            return f"no task was begun within {START_DEADLINE:.0f} s" if idle else None
        self.began = True
        if time.time() - task["started"] > deadline:
            return f"timeout: no result within {deadline:.0f} s"
        return None

    def _task(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.inflight.read_text())
        except (OSError, ValueError):
            return None

    def _bury(self, late: str | None, code: int, skip: list[str]) -> None:
        """Write the error row of the task that was at hand, unless the worker still did so itself."""
        task = self._task()
        self.inflight.unlink(missing_ok=True)
        tail = "".join(self.complaints).strip().splitlines()[-1:] or [""]
        if task is None:
            rows = [r for r in self.session.rows() if r["status"] == "error" and r.get("pid") == self.process.pid]
            if not rows:
                said = "".join(self.complaints)[-2000:]
                raise RuntimeError(f"the worker ended with {code} outside any task: {late or tail[0]}\n{said}")
            names = [t.name for t in tasks.tasks(self.family, self.metric, self.session.profile)]
            skip.append(names[rows[-1]["seq"] - 1])
            return
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        reason = late or f"died: the process ended with {how} {tail[0]}".strip()
        self.session.append(
            task["first"]
            | {
                "metric": self.metric,
                "status": "error",
                "reason": reason,
                "pid": task["pid"],
                "seq": task["seq"],
            }
        )
        skip.append(task["name"])
