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
from kdtree.measure import machine, session, sweep, tasks

OK, WRONG, DIED = 0, 1, 6


def inflight_path(run_dir: Path, family: str, metric: str) -> Path:
    """The file that names the task at hand; its parent reads it when the process is gone."""
    return run_dir / f"inflight-{family.replace(':', '-').replace('.', '-')}-{metric}.json"


def main(argv: list[str] | None = None) -> int:
    """Run the tasks of one family that are not in ``--skip``; a progress line each on stdout."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.worker", description=main.__doc__)
    parser.add_argument("--family", required=True)
    parser.add_argument("--metric", default="correctness")
    parser.add_argument("--profile", default="")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--skip", default="[]", help="JSON list of task names, or a file that holds one")
    options = parser.parse_args(argv)
    here = session.open_session(options.run_dir, options.profile)
    text = options.skip
    skip = set(json.loads(Path(text).read_text() if not text.startswith("[") else text))
    if options.metric == "latency":
        sweep.use_roofs(machine.read_roofs(options.run_dir))
    inflight = inflight_path(options.run_dir, options.family, options.metric)
    with one_at_a_time(options.metric):
        return run(options, here, skip, inflight)


@contextmanager
def one_at_a_time(metric: str) -> Iterator[None]:
    """While times are taken, no other process of the suite takes any on this machine: it would slow both."""
    if metric != "latency" or not gpu_available():
        yield
        return
    from filelock import FileLock

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
            wrong |= row["status"] == "failed"
        inflight.unlink()
        worst = next((r["status"] for r in rows if r["status"] != "passed"), "passed")
        print(json.dumps({"done": task.name, "status": worst, "number": number, "of": len(todo)}), flush=True)
    return WRONG if wrong else OK


if __name__ == "__main__":
    sys.exit(main())
