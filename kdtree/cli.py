"""The `kdtree` command: doctor, fixtures, report, compare, baseline.

Exit codes: 0 fine, 1 wrong result, 2 usage, 3 slower than baseline, 4 measurement not trustworthy (only where
asked to fail), 5 no GPU where one was demanded, 6 a notebook or kernel died.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from kdtree.report.exit_codes import ExitCode

CODES = (
    "exit codes: 0 fine, 1 wrong result, 2 usage, 3 slower than baseline, 4 measurement not trustworthy "
    "(with --fail-untrusted), 5 no GPU where one was demanded, 6 a notebook or kernel died"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdtree",
        description="Kernels of a DDTree decoding step: checked, measured and reported on this host.",
        epilog=CODES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="say what works on this machine and what to do about the rest")
    doctor.add_argument("--require-gpu", action="store_true", help="exit 5 when there is no GPU")
    doctor.set_defaults(run=_doctor)

    commands.add_parser("fixtures", help="make or check the test cases in fixtures/", add_help=False)

    report = commands.add_parser("report", help="run the notebooks on this host and write its page", epilog=CODES)
    report.add_argument("--out", default="reports", metavar="DIR", help="where reports go (default: reports)")
    report.add_argument("--profile", choices=("tiny", "quick", "full"), help="default: quick on a GPU, tiny without")
    report.add_argument("--host", metavar="NAME", help="directory name of this host (default: its GPU's name)")
    again = report.add_mutually_exclusive_group()
    again.add_argument("--overwrite", action="store_true", help="measure everything again in the run that is there")
    again.add_argument("--no-resume", action="store_true", help="begin a new run instead of going on with one")
    again.add_argument("--render", action="store_true", help="run nothing; write the pages of the newest run again")
    report.add_argument("--notebooks", metavar="DIR", help="run the notebooks of DIR instead of the repository's")
    report.add_argument("--require-gpu", action="store_true", help="exit 5 instead of simulating when there is no GPU")
    report.add_argument(
        "--fail-untrusted", action="store_true", help="exit 4 when clocks, load or sources were not steady"
    )
    report.add_argument("--quiet", action="store_true", help="no progress")
    report.set_defaults(run=_report)

    compare = commands.add_parser("compare", help="set two runs side by side")
    compare.add_argument("a", help="a run directory, host/run, or a host for its newest run")
    compare.add_argument("b", help="another")
    compare.add_argument("-o", "--output", metavar="FILE", help="default: <reports>/compare/<a>-vs-<b>.html")
    compare.add_argument(
        "--reports", default="reports", metavar="DIR", help="where hosts are looked for (default: reports)"
    )
    compare.set_defaults(run=_compare)

    baseline = commands.add_parser("baseline", help="accept a run's times, or check a run against the accepted ones")
    baseline.add_argument("action", choices=("store", "check"))
    baseline.add_argument("target", metavar="RUN", help="a run directory, host/run, or a host for its newest run")
    baseline.add_argument(
        "--reports", default="reports", metavar="DIR", help="where hosts are looked for (default: reports)"
    )
    baseline.set_defaults(run=_baseline)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: sys.argv); returns its exit code. Bad usage: SystemExit(2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["fixtures"]:  # has options of its own
            return _fixtures(words[1:])
        args = _parser().parse_args(words)
        return int(args.run(args))
    except KeyboardInterrupt:
        _say("interrupted")
        return int(ExitCode.DIED)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except OSError as error:  # a folder that is not there or cannot be written
        _say(f"{type(error).__name__}: {error}")
        return int(ExitCode.USAGE)
    except Exception:  # 1 means a wrong result, and this is none
        traceback.print_exc()
        return int(ExitCode.DIED)


def _say(text: str) -> None:
    print(f"kdtree: {text}", file=sys.stderr)


def _headless() -> None:
    """Draw without a display, whatever the shell asks for."""
    os.environ["MPLBACKEND"] = "agg"


def _doctor(args: argparse.Namespace) -> ExitCode:
    from kdtree.device import gpu_available
    from kdtree.report import doctor

    print(doctor.as_text(doctor.examine()))
    return ExitCode.NO_GPU if args.require_gpu and not gpu_available() else ExitCode.OK


def _fixtures(words: list[str]) -> int:
    from kdtree import fixtures

    return int(fixtures.main(words) or 0)


def _report(args: argparse.Namespace) -> ExitCode:
    _headless()
    from kdtree.report.run import UsageError, run

    try:
        result = run(
            out=args.out,
            profile=args.profile,
            host=args.host,
            resume=not args.no_resume,
            overwrite=args.overwrite,
            notebooks=args.notebooks,
            require_gpu=args.require_gpu,
            fail_untrusted=args.fail_untrusted,
            progress=not args.quiet,
            only_render=args.render,
        )
    except UsageError as exc:
        _say(str(exc))
        return ExitCode.USAGE
    if result.run_dir is None or result.verdict is None:
        _say(result.message)
        return result.exit_code
    for line in summary(result.verdict):
        print(line)
    print(f"report: {result.run_dir / 'index.html'}")
    return result.exit_code


def summary(verdict: dict[str, Any]) -> list[str]:
    """A verdict in a few lines for a terminal."""
    from kdtree.report.verdict import score

    kind = "SIMULATED, no times" if verdict["simulated"] else f"MEASURED on {verdict['gpu']}"
    skipped = f", {verdict['counts']['skipped']} skipped" if verdict["counts"]["skipped"] else ""
    lines = [f"{verdict['status'].upper()}: {score(verdict)}{skipped} ({kind})"]
    lines += [f"  {reason}" for reason in verdict["reasons"]]
    lines += [f"  {name}: {r['reason']}" for name, r in verdict["notebooks"].items() if r["status"] != "completed"]
    for failure in verdict["failures"][:10]:
        lines.append(f"  {failure['op']} {failure['impl']} [{failure['case']}]: {failure['reason']}")
    if len(verdict["failures"]) > 10:
        lines.append(f"  and {len(verdict['failures']) - 10} more failing cases")
    lines += [f"  not trustworthy: {reason}" for reason in verdict["trust"]["reasons"]]
    if verdict["baseline"]:
        lines += [f"  {text}" for text in verdict["baseline"].get("worst") or []]
    return lines


def _compare(args: argparse.Namespace) -> ExitCode:
    _headless()
    from kdtree.report.compare import compare

    try:
        result = compare(args.a, args.b, args.output, args.reports)
    except FileNotFoundError as exc:
        _say(str(exc))
        return ExitCode.USAGE
    print(result.text)
    print(f"page: {result.page}")
    return ExitCode.OK


def _baseline(args: argparse.Namespace) -> ExitCode:
    from kdtree.measure import gate
    from kdtree.report.compare import find_run
    from kdtree.report.render import baseline_path, believed_rows

    try:
        run_dir = find_run(args.target, args.reports).resolve()
        rows, path = [dict(row) for row in believed_rows(run_dir)], baseline_path(run_dir)
        if args.action == "store":
            print(f"accepted {gate.store(rows, path)} times of {run_dir.parent.name}/{run_dir.name}")
            return ExitCode.OK
        accepted = gate.load_baseline(path)
    except (FileNotFoundError, ValueError) as exc:
        _say(str(exc))
        return ExitCode.USAGE
    if not accepted:
        _say(f"no baseline of {run_dir.parent.name}: accept one with `kdtree baseline store`")
        return ExitCode.USAGE
    verdicts = gate.compare(rows, accepted)
    for verdict in verdicts:
        if verdict.verdict != "same":
            print(verdict.text)
    found = gate.summarise(verdicts)
    print(", ".join(f"{found[word]} {word}" for word in gate.VERDICTS))
    return ExitCode.SLOWER if found["slower"] else ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
