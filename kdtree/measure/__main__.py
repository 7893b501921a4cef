"""One family and metric from the command line: ``python -m kdtree.measure verify_attn --metric grid``.

Prints a line for each row. Rows go to the scratch run, or to the run in ``--run-dir``.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kdtree.measure import families, results, session
from kdtree.spec import case_key


def line(row: dict[str, Any]) -> str:
    """A row as text: status, kernel, case, µs, TFLOP/s, share of the floor, error, reason."""
    words = [f"{row['status']:<7}", f"{row['impl']:<24}", case_key(row["case"])]
    time = (row["device_us"] or {}).get("median")
    if time:
        words += [f"{time:.2f} us", f"{row['device_us']['cache']}", f"iqr {row['device_us']['iqr']:.2f}"]
        words += [f"{row['flop'] / time / 1e6:.0f} TFLOP/s"] if row["flop"] else []
        words += [f"{row['floor_us'] / time:.0%} of floor"] if row["floor_us"] else []
    words += [f"host {row['host_us']:.1f} us"] if row.get("host_us") else []
    words += [f"rel_l2 {row['rel_l2']:.1e}"] if row["rel_l2"] is not None else []
    words += [f"workspace {row['memory']['workspace']}"] if "workspace" in (row["memory"] or {}) else []
    words += ["dispatched"] if row.get("dispatched") else []
    return "  ".join([*words, str(row["reason"] or "")]).rstrip()


def main(argv: list[str] | None = None) -> int:
    """Run one family; the exit code is the family's: 0, 1 for a wrong result, 6 for a fault."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure", description=main.__doc__)
    parser.add_argument("family", help="an op, or module:function")
    parser.add_argument("--metric", choices=results.METRICS, default="correctness")
    parser.add_argument("--profile", choices=("tiny", "quick", "full"), default="")
    parser.add_argument("--run-dir", default="", help="the run whose results get the rows")
    parser.add_argument("--overwrite", action="store_true", help="run what has passed before too")
    parser.add_argument("--wrong-only", action="store_true", help="print the rows that did not pass, and the count")
    options = parser.parse_args(argv)
    here = session.open_session(options.run_dir, options.profile)
    try:
        found = families.run(options.family, here, metric=options.metric, overwrite=options.overwrite)
    except ValueError as error:
        parser.error(str(error))
    for row in found.rows:
        if not options.wrong_only or row["status"] != "passed":
            print(line(row))
    print(", ".join(f"{count} {status}" for status, count in found.counts.items()))
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
