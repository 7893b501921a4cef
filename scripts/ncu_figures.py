#!/usr/bin/env python3
"""Hardware counters of the kernels of `verify_attn` by Nsight Compute, into ncu.json of a run.

    python scripts/ncu_figures.py --run-dir reports/<host>/<run>
    python scripts/ncu_figures.py --run-dir reports/scratch wgmma:B=1,H=8,N=9,L=256

A full run takes them by itself where ncu is installed; this takes them again, or for other calls. Needs the right to
read the counters (root, or the driver's NVreg_RestrictProfilingToAdminUsers=0). Clocks are left alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kdtree.measure import ncu, one_call  # noqa: E402 (the checkout this script lies in)


def main(argv: list[str] | None = None) -> int:
    """Take the figures; exit 1 where there are none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("calls", nargs="*", type=one_call.parsed, metavar="impl:B=4,H=64,N=33,L=16384")
    options = parser.parse_args(argv)
    found = ncu.collect(options.calls or ncu.CALLS)
    if not found["records"]:
        print(found["reason"], file=sys.stderr)
        return 1
    options.run_dir.mkdir(parents=True, exist_ok=True)
    ncu.write(options.run_dir / ncu.FILE, found)
    for record in found["records"]:
        print(record["kernel"], record["case"])
        for name in ncu.FIGURES:
            print(f"  {name:36} {ncu.figure(record, name)}")
        print(f"  {'warps waited for':36} " + ", ".join(f"{what} {share:.0%}" for what, share in ncu.stalls(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
