"""The process that runs one family's tasks. Started by `families.run`; see there.

It ends at the first fault: whatever raises from a kernel, a CUDA error, an out-of-bounds access that the
simulator saw, leaves a process whose later results nobody should believe. Exit codes: 0 all passed, 1 a wrong
result, 6 a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdtree.device import gpu_available
from kdtree.measure import host, machine, results, session, sweep, tasks

OK, WRONG, DIED = 0, 1, 6


def main(argv: list[str] | None = None) -> int:
    """Run the tasks of one family that are not in ``--skip``; a progress line each on stdout."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.worker", description=main.__doc__)
    parser.add_argument("--family", required=True)
    parser.add_argument("--metric", default="correctness")
    parser.add_argument("--profile", default="")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--skip", required=True, type=Path, help="file with a JSON list of task names")
    parser.add_argument("--inflight", required=True, type=Path, help="file that names the task at hand")
    parser.add_argument("--source", required=True, help="fingerprint of the sources that the rows are to speak of")
    options = parser.parse_args(argv)
    here = session.open_session(options.run_dir, options.profile)
    actual = host.source_fingerprint()
    if options.source != actual:
        print(
            f"the sources changed under this run: it began with {options.source}, they are {actual} now; "
            "open a new session or begin a new run",
            file=sys.stderr,
        )
        return DIED
    if options.metric in results.TIMED:
        sweep.use_roofs(machine.read_roofs(options.run_dir))
    with one_at_a_time(options.metric):
        return run(options, here, set(json.loads(options.skip.read_text())), options.inflight)


@contextmanager
def one_at_a_time(metric: str) -> Iterator[None]:
    """While times are taken, no other process of the suite takes any on this machine: it would slow both."""
    if metric not in results.TIMED or not gpu_available():
        yield
        return
    from filelock import FileLock

    print(json.dumps({"waiting": "for the GPU to be free of other timings"}), flush=True)
    with FileLock(Path(tempfile.gettempdir()) / "kdtree-timing.lock"):
        yield


def run(options: argparse.Namespace, here: session.Session, skip: set[str], inflight: Path) -> int:
    """The tasks that are not in `skip`, one after the other; the exit code."""
    wrong = False
    todo = tasks.tasks(options.family, options.metric, here.profile)
    for number, task in enumerate(todo, 1):
        if task.name in skip:
            continue
        at = {"pid": os.getpid(), "seq": number}
        inflight.write_text(json.dumps({"name": task.name, "started": time.time(), "first": task.first} | at))
        try:
            rows = task.run()
        except Exception as error:  # a fault ends the process: see above
            reason = f"died: {type(error).__name__}: {error}"
            here.append(task.first | at | {"metric": task.metric, "status": "error", "reason": reason})
            inflight.unlink()
            traceback.print_exc()
            return DIED
        for row in rows:
            here.append(row | at)
            wrong |= row["status"] == "failed" and not row.get("peer_of")
        inflight.unlink()
        ours = [r for r in rows if not r.get("peer_of")]
        worst = next((r["status"] for r in ours if r["status"] != "passed"), "passed")
        print(json.dumps({"done": task.name, "status": worst, "number": number, "of": len(todo)}), flush=True)
    return WRONG if wrong else OK


if __name__ == "__main__":
    sys.exit(main())
