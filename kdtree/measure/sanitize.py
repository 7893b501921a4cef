"""Every kernel under compute-sanitizer: memcheck, racecheck, synccheck.

``python -m kdtree.measure.sanitize`` runs each op in a process of its own under each tool, over its bundles and a
few shapes that make every branch run, and writes a row per op and tool. Inputs are NumPy arrays, which the ops
stage through plain allocations, so that the tool sees the end of every array; torch's pool would hide it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kdtree import ref_outputs
from kdtree.device import gpu_available, why_no_gpu
from kdtree.kernels import OPS
from kdtree.measure import cases, invoke
from kdtree.measure.compare import compare
from kdtree.measure.session import Session, open_session

TOOLS = ("memcheck", "racecheck", "synccheck")
DEADLINE = 240.0  # seconds for one op under one tool
FOUND = 99  # exit code that the tool is told to give
NO_GPU = 5


def run_op(op: str) -> list[str]:
    """Run the op's small cases on host arrays; what was wrong with the results, if anything."""
    wrong = []
    for name, arguments, params in _small_cases(op):
        want = ref_outputs.reference(op, arguments, params)
        given = arguments | {"kv": arguments["kv"].copy()} if op == "kv_compact" else arguments
        got = invoke.call(op, given, params, None, backend="numba")
        outcome = compare(got, want, cases.dtype_of(arguments))
        if not outcome.ok:
            wrong.append(f"{name}: {outcome.reason}")
    return wrong


def _small_cases(op: str) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    from kdtree import fixtures

    found = []
    for fixture in fixtures.all_fixtures():
        # n_nodes beyond the array is refused for host arrays; its kernel path runs in the tests with device arrays.
        if fixture.op == op and not fixture.large:
            bundle = fixtures.get(fixture.name)
            found.append((fixture.name, cases.arguments_of(bundle), bundle.params))
    extra = {"verify_attn": _attention_shapes, "topk": _topk_shapes, "tree_build": _tree_shapes}
    for name, arguments, params in extra.get(op, list)():
        found.append((name, arguments, params))
    return found


def _attention_shapes() -> list[tuple[str, dict, dict]]:
    """K2.6's row width with and without pages, a prefix long enough that the KV range is split."""
    base = {
        "B": 2,
        "H": 8,
        "N": 9,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "scale": 0.14,
        "ragged": True,
    }
    found = []
    for change in (
        {"L": [0, 70], "dtype": "bfloat16", "page_size": 64},
        {"L": [130, 5], "dtype": "float16", "page_size": 0},
        {"L": [33, 40], "dtype": "float32", "page_size": 1},
        {"L": 600, "dtype": "bfloat16", "page_size": 16, "B": 1},
    ):
        params = base | change
        arguments, _ = cases.attention_arguments(params, np.random.RandomState(7))
        found.append((str(change), arguments, params))
    return found


def _topk_shapes() -> list[tuple[str, dict, dict]]:
    from kdtree import inputs

    rng = np.random.RandomState(3)
    return [
        (
            f"V{vocab}",
            {"logits": inputs.logits(rng, (2, vocab), "bfloat16", "ties")},
            {"K": k, "dtype": "bfloat16"},
        )
        for vocab, k in ((1, 1), (5000, 512))
    ]


def _tree_shapes() -> list[tuple[str, dict, dict]]:
    from kdtree import inputs

    rng = np.random.RandomState(5)
    found = []
    for budget, width in ((64, 16), (256, 32), (1024, 64)):
        rows, tokens = inputs.draft_rows(rng, 2, 7, width, "bf16")
        found.append((f"budget{budget}", {"log_probs": rows, "token_ids": tokens}, {"budget": budget}))
    return found


def run(session: Session, ops: tuple[str, ...] = OPS, tools: tuple[str, ...] = TOOLS, jobs: int = 4) -> int:
    """All tools over all ops, `jobs` processes at a time; a row each.

    Returns 0, 1 (a tool or a result complained) or 5 (no GPU, or no compute-sanitizer).
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not gpu_available() or sanitizer is None:
        print(f"compute-sanitizer: {why_no_gpu() or 'not on the PATH'}", file=sys.stderr)
        return NO_GPU
    pairs = [(tool, op) for tool in tools for op in ops]
    code = 0
    with ThreadPoolExecutor(max(1, min(jobs, len(pairs)))) as pool:
        done = pool.map(lambda pair: _one(sanitizer, *pair), pairs)
        for (tool, op), (reason, summary) in zip(pairs, done, strict=True):
            row = {"op": op, "impl": "numba:simt", "case": {"sanitizer": tool}, "metric": "correctness", "seed": 0}
            session.append(row | {"status": "failed" if reason else "passed", "reason": reason})
            print(f"{'FAIL' if reason else 'PASS'}  {tool:<9} {op:<12} {reason or summary}", flush=True)
            code |= bool(reason)
    return code


def _one(sanitizer: str, tool: str, op: str) -> tuple[str | None, str]:
    """(why it is not clean or None, the tool's summary line)."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        # cuda-python asks the driver for functions of later versions and copes with the refusal; memcheck would
        # count each as an error. Errors of our own calls raise `CudaFault` and end the process.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "kdtree.measure.sanitize", "--inner", op]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return f"timeout: not done within {DEADLINE:.0f} s", ""
    text = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    if done.returncode or not summary or not re.search(r"SUMMARY: 0 (errors|hazards)", summary[-1]):
        first = next((line for line in text.splitlines() if "=========" in line and "COMPUTE" not in line), "")
        return (
            f"exit code {done.returncode}; {summary[-1] if summary else 'no summary'}; {first} {text[-300:]}",
            "",
        )
    return None, summary[-1]


def main(argv: list[str] | None = None) -> int:
    """Run compute-sanitizer over every kernel; exit 5 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.sanitize", description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, default=None, help="the run whose results get the rows")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--inner", choices=OPS, help="run one op here, under a tool that is already there")
    options = parser.parse_args(argv)
    if options.inner:
        wrong = run_op(options.inner)
        print("\n".join(wrong), file=sys.stderr)
        return int(bool(wrong))
    session = open_session(options.run_dir or "")
    session.run_dir.mkdir(parents=True, exist_ok=True)
    return run(session, tuple(options.op or OPS), tuple(options.tool or TOOLS), options.jobs)


if __name__ == "__main__":
    sys.exit(main())
