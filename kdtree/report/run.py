"""`kdtree report`: execute the notebooks on this host, then say what came of it.

A run directory is ``<out>/<host>/<run>/``. Everything that has been done is in run.json before the next thing
begins, so a run that was stopped, killed or broken is gone on with by the same command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree.report import notebooks as books
from kdtree.report import runstate
from kdtree.report.exit_codes import ExitCode
from kdtree.report.progress import Progress
from kdtree.report.render import render
from kdtree.report.scrub import for_run


class UsageError(ValueError):
    """The caller asked for something that cannot be done; the message says what."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to. `run_dir` is None when nothing was started, `verdict` is verdict.json."""

    exit_code: ExitCode
    run_dir: Path | None
    verdict: dict[str, Any] | None = None
    message: str = ""


def run(
    out: str | Path = "reports",
    profile: str | None = None,
    host: str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    notebooks: str | Path | None = None,
    require_gpu: bool = False,
    fail_untrusted: bool = False,
    progress: bool = True,
    only_render: bool = False,
) -> RunResult:
    """Measure this host and write its report; see the module docstring.

    profile      "tiny", "quick" or "full"; by default quick on a GPU and tiny under the simulator
    host         name of the host's directory, by default the GPU's name
    resume       go on with a run of the same commit, sources and profile; False begins a new one
    overwrite    with resume: run every notebook again, setting the earlier rows aside
    notebooks    directory of notebooks to run instead of the repository's
    only_render  run nothing; write the pages of the newest run again

    Raises UsageError for a bad argument. KeyboardInterrupt is turned into a report of what there is.
    """
    from kdtree.measure import host as hosts
    from kdtree.measure import results

    if profile is not None and profile not in runstate.PROFILES:
        raise UsageError(f"profile: got {profile!r}, expected one of {', '.join(runstate.PROFILES)}")
    info = hosts.collect()
    simulated = bool(info.get("simulated"))
    if require_gpu and simulated:
        from kdtree.device import why_no_gpu

        return RunResult(ExitCode.NO_GPU, None, message=f"a GPU was demanded and there is none: {why_no_gpu()}")
    slug = host or hosts.slug(info)
    if Path(slug).name != slug or slug.startswith("."):
        raise UsageError(f"host: got {slug!r}, expected a plain directory name")
    host_dir = Path(out) / slug
    if only_render:
        run_dir = runstate.newest(host_dir)
        if run_dir is None:
            raise UsageError(f"host: no run of {slug} in {Path(out).name}/, expected one to render")
        return _result(render(run_dir, fail_untrusted=fail_untrusted), run_dir)
    profile = profile or ("tiny" if simulated else "quick")
    if simulated and profile != "tiny":
        raise UsageError(
            f"profile: got {profile!r}, expected tiny: the simulator runs nothing larger in reasonable time"
        )
    try:
        sources = books.discover(Path(notebooks) if notebooks is not None else None)
    except FileNotFoundError as exc:
        raise UsageError(str(exc)) from exc
    fingerprint = hosts.source_fingerprint()
    name, state = runstate.choose(
        host_dir,
        commit=info.get("commit"),
        dirty=bool(info.get("dirty")),
        source=fingerprint,
        profile=profile,
        resume=resume,
    )
    run_dir = host_dir / name
    run_dir.mkdir(parents=True, exist_ok=True)
    with _alone(run_dir / ".lock", f"{name}: another process is running this report"):
        if state is None:
            state = runstate.new_state(name, slug, fingerprint, profile, info)
        elif overwrite:
            _set_rows_aside(run_dir)
            state["notebooks"], state["trust"], state["sessions"] = {}, [], []
        _note_another_machine(run_dir, info, state)
        rows = results.load(run_dir / "results.jsonl").rows
        state["sessions"].append({"at": runstate.now(), "rows_from": len(rows)})
        state["status"] = runstate.RUNNING
        runstate.save(run_dir, state)
        runstate.write_json(run_dir / "host.json", info)
        try:
            with _terminate_as_interrupt():
                _execute_all(run_dir, state, sources, progress=progress)
        except KeyboardInterrupt:
            state["status"] = runstate.INTERRUPTED
        else:
            every = state["notebooks"].values()
            ran = all(record["status"] == books.COMPLETED for record in every)
            state["status"] = runstate.FINISHED if ran else runstate.BROKEN
        _sweep(run_dir)
        for reason in hosts.trust(info, hosts.collect()):
            if reason not in state["trust"]:
                state["trust"].append(reason)
        runstate.save(run_dir, state)
        return _result(render(run_dir, fail_untrusted=fail_untrusted), run_dir)


def _result(verdict: dict[str, Any], run_dir: Path) -> RunResult:
    return RunResult(ExitCode(verdict["exit_code"]), run_dir, verdict)


def _execute_all(run_dir: Path, state: dict[str, Any], sources: list[Path], *, progress: bool) -> None:
    """Run the notebooks that are not done, recording each in run.json before the next begins."""
    scrubber = for_run(run_dir, books.repo_root())
    rows_file = run_dir / "results.jsonl"
    state["notebooks"] = {p.stem: state["notebooks"][p.stem] for p in sources if p.stem in state["notebooks"]}
    with Progress(sources, enabled=progress) as bar:
        for source in sources:
            target = run_dir / "notebooks" / source.name
            sha = books.digest(source)
            if runstate.is_done(state, source.stem, sha, target) and not _has_errors(rows_file, state, source.stem):
                bar.skip(source)
                continue
            record = books.Outcome(
                books.INTERRUPTED, "interrupted", 0.0, sha, state["source"], state["profile"]
            ).as_dict()
            state["notebooks"][source.stem] = record
            first = record["rows_from"] = _line_count(rows_file)
            runstate.save(run_dir, state)  # as it will be found if this process is killed
            bar.start(source)
            status, reason, seconds = books.execute(
                source, target, run_dir=run_dir, profile=state["profile"], scrubber=scrubber, on_cell=bar.cell
            )
            record |= {"status": status, "reason": reason, "seconds": round(seconds, 2)}
            record |= {"rows_from": first, "rows_to": _line_count(rows_file)}
            runstate.save(run_dir, state)
            bar.finish(source, status, reason)


def _line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _has_errors(rows_file: Path, state: dict[str, Any], notebook: str) -> bool:
    """True when a result that `notebook` recorded is an error: never done, so the notebook runs again."""
    from kdtree.measure import results

    record = state["notebooks"][notebook]
    if not rows_file.exists():
        return False
    rows = results.load(rows_file).rows
    last = {results.key(r): r for r in rows if r["run"] == state["run"] and r["source"] == state["source"]}
    lines = rows_file.read_bytes().split(b"\n")[record.get("rows_from", 0) : record.get("rows_to", 0)]
    return any(last[key]["status"] == "error" for key in _keys(lines) if key in last)


def _keys(lines: list[bytes]) -> set[Any]:
    from kdtree.measure import results

    found = set()
    for line in lines:
        try:
            found.add(results.key(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _sweep(run_dir: Path) -> None:
    """Remove what workers that were killed left behind; all of them are gone by now."""
    for pattern in ("inflight-*", "*.jsonl.lock"):
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


def _set_rows_aside(run_dir: Path) -> None:
    """Append results.jsonl to results.superseded.jsonl and begin a new one: nothing measured is lost."""
    rows, aside = run_dir / "results.jsonl", run_dir / "results.superseded.jsonl"
    if rows.exists():
        with open(aside, "ab") as file:
            file.write(rows.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        rows.unlink()


def _note_another_machine(run_dir: Path, info: dict[str, Any], state: dict[str, Any]) -> None:
    """A run that is gone on with on another GPU or driver is not one measurement; say so."""
    before = runstate.read_json(run_dir / "host.json")
    if before is None or not state["notebooks"]:
        return
    pairs = [("GPU", (before.get("gpu") or {}).get("name"), (info.get("gpu") or {}).get("name"))]
    pairs += [("driver", before.get("driver"), info.get("driver"))]
    for what, old, new in pairs:
        if old != new:
            reason = f"the {what} changed while the run was interrupted: {old} before, {new} now"
            if reason not in state["trust"]:
                state["trust"].append(reason)


@contextmanager
def _alone(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock file `path`; raises UsageError(`otherwise`) when another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(otherwise) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, so that nobody takes a lock that is about to go
        lock.release()


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (a job scheduler's cancel) end the run as Ctrl-C does: kernels ended, a report written."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
