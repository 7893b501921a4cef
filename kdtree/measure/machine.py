"""What this GPU can do, and how far two ways of timing agree: measured once a run, in a process of its own.

Writes ``roofs.json`` and ``agreement.json`` into the run's directory. Every floor of the run comes from the first;
the second compares our graph replays with NVIDIA's cuda-bench at each op's reference case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import roofline
from kdtree.measure.session import Session

ROOFS, AGREEMENT = "roofs.json", "agreement.json"
DEADLINE = 300.0  # seconds


def measure(session: Session, *, overwrite: bool = False) -> dict[str, Any]:
    """{"roofs": {…} or None, "agreement": {…}} of this run; measured unless the files are there.

    Raises RuntimeError with the process's output if measuring fails. Without a GPU nothing is measured and
    "agreement" says why.
    """
    if not gpu_available():
        return {"roofs": None, "agreement": {"reason": f"nothing is timed: {why_no_gpu()}", "cases": []}}
    files = [session.run_dir / name for name in (ROOFS, AGREEMENT)]
    if overwrite or not all(f.exists() for f in files):
        session.run_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kdtree.measure.machine", "--run-dir", str(session.run_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
        if done.returncode:
            raise RuntimeError(f"measuring the machine failed ({done.returncode}):\n{done.stderr[-3000:]}")
    roofs, agreement = (json.loads(f.read_text()) for f in files)
    return {"roofs": roofs, "agreement": agreement}


def read_roofs(run_dir: Path) -> roofline.Roofs | None:
    """The roofs that this run measured, or None."""
    path = run_dir / ROOFS
    return roofline.Roofs(**json.loads(path.read_text())) if path.exists() else None


def agreement() -> dict[str, Any]:
    """Graph replay beside cuda-bench, cold, at each reference case: {"reason": …, "cases": [{op, case, …}]}."""
    from kdtree.measure import cross_check, setups, sweep, timing
    from kdtree.spec import case_key

    ok, reason = cross_check.available()
    if not ok:
        return {"reason": reason, "cases": []}
    made = {op: setups.make(op, params) for op, params in sweep.REFERENCE.items()}
    for setup in made.values():
        setup.run()
    theirs = cross_check.cuda_bench_times({op: s.run for op, s in made.items()})
    cases = []
    for op, setup in made.items():
        size = setups.set_bytes(setup)
        count = timing.rotation(size, timing.l2_bytes(), 8 << 30)
        cache = timing.cache_of(count, size, timing.l2_bytes())
        sets = [setup.run] + ([setup.clone().run for _ in range(count - 1)] if cache == "cold" else [])
        ours = timing.time_graphs({op: sets}, cache=cache, max_seconds=0.5)[op]
        if op in theirs.samples:
            sample = theirs.samples[op]
            cases.append(
                {
                    "op": op,
                    "case": case_key(sweep.REFERENCE[op]),
                    "cache": cache,
                    "graph_us": ours.median,
                    "cuda_bench_us": sample.median,
                    "ratio": timing.agreement(ours, sample),
                }
            )
    return {"reason": theirs.reason, "cases": cases}


def main(argv: list[str] | None = None) -> int:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.machine", description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    roofs = roofline.measure_roofs()
    (options.run_dir / ROOFS).write_text(json.dumps(roofs.as_dict(), allow_nan=False, indent=1) + "\n")
    found = agreement()
    (options.run_dir / AGREEMENT).write_text(json.dumps(found, allow_nan=False, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
