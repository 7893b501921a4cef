"""Every kernel under compute-sanitizer: memcheck, racecheck, synccheck.

``python -m kdtree.measure.sanitize`` runs each kernel in a process of its own under each tool, over the bundles and
a few shapes that make every branch run, and writes a row per kernel and tool. Inputs are NumPy arrays, which the ops
stage through plain allocations, so that the tool sees the end of every array; torch's pool would hide it. Under
racecheck the Hopper kernel `wgmma` is compiled so that the tool can follow it: see `verify_wgmma.TRACED`.
"""

from __future__ import annotations

import argparse
import os
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
from kdtree.measure import cases, impls, invoke
from kdtree.measure.compare import compare
from kdtree.measure.session import Session, open_session
from kdtree.measure.tasks import NotHere

TOOLS = ("memcheck", "racecheck", "synccheck")
DEADLINE = 420.0  # seconds for one kernel under one tool; compiling a tensor-core kernel is part of it
FOUND = 99  # exit code that the tool is told to give
NO_GPU = 5
CANNOT = "cannot run here: "


def kernels_of(op: str) -> tuple[str | None, ...]:
    """Names of the kernels of an op that are run one by one; None is the only one."""
    return impls.NAMES if op == "verify_attn" else (None,)


def run_op(op: str, impl: str | None = None) -> list[str]:
    """Run the op's small cases on host arrays; what was wrong with the results, if anything.

    Raises NotHere when none of them can run on the kernel `impl`.
    """
    wrong, refusals, ran = [], [], 0
    for name, arguments, params in _small_cases(op, impl):
        want = ref_outputs.reference(op, arguments, params)
        given = arguments | {"kv": arguments["kv"].copy()} if op == "kv_compact" else arguments
        got: dict[str, Any] = {}

        def run(given: Any = given, params: Any = params | {"impl": impl}, got: Any = got) -> None:
            got.update(invoke.call(op, given, params, None, backend="numba"))

        if reason := impls.refused(run):
            refusals.append(reason)
            continue
        ran += 1
        outcome = compare(got, want, cases.dtype_of(arguments))
        if not outcome.ok:
            wrong.append(f"{name}: {outcome.reason}")
    if not ran:
        raise NotHere(refusals[0])
    return wrong


def _small_cases(op: str, impl: str | None) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    from kdtree import fixtures

    found = []
    for fixture in fixtures.all_fixtures():
        # n_nodes beyond the array is refused for host arrays; its kernel path runs in the tests with device arrays.
        if fixture.op == op and not fixture.large and impl not in impls.TENSOR_CORES:  # the bundles are narrow
            bundle = fixtures.get(fixture.name)
            found.append((fixture.name, cases.arguments_of(bundle), bundle.params))
    extra = {"topk": _topk_shapes, "tree_build": _tree_shapes}
    found += _attention_shapes(impl) if op == "verify_attn" else extra.get(op, list)()
    return found


def _attention_shapes(impl: str | None) -> list[tuple[str, dict, dict]]:
    """K2.6's row width with and without pages, a prefix long enough that the KV range is split."""
    base = {"B": 2, "H": 8, "N": 9, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 0.14, "ragged": True}
    changes: list[dict[str, Any]] = [
        {"L": [0, 70], "dtype": "bfloat16", "page_size": 64},
        {"L": [130, 5], "dtype": "float16", "page_size": 0},
        {"L": [33, 40], "dtype": "float32", "page_size": 1},
        {"L": 600, "dtype": "bfloat16", "page_size": 16, "B": 1},
    ]
    if impl in impls.TENSOR_CORES:  # several tiles of rows, of which some are walked together, and pages of one row
        del changes[2]
        changes += [
            {"L": [33, 40], "dtype": "bfloat16", "page_size": 1},
            {"L": [0, 200], "dtype": "bfloat16", "page_size": 64, "H": 64, "N": 5, "part": "tree"},
            {"L": [200, 1], "dtype": "float16", "page_size": 0, "H": 64, "N": 5},
        ]
    found = []
    for change in changes:
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


def run(
    session: Session,
    ops: tuple[str, ...] = OPS,
    tools: tuple[str, ...] = TOOLS,
    jobs: int = 4,
    only: tuple[str, ...] = impls.NAMES,
) -> int:
    """All tools over all kernels, `jobs` processes at a time; a row each. `only` chooses among those of verify_attn.

    Returns 0, 1 (a tool or a result complained) or 5 (no GPU, or no compute-sanitizer).
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not gpu_available() or sanitizer is None:
        print(f"compute-sanitizer: {why_no_gpu() or 'not on the PATH'}", file=sys.stderr)
        return NO_GPU
    todo = [(tool, op, impl) for tool in tools for op in ops for impl in kernels_of(op) if impl is None or impl in only]
    code = 0
    with ThreadPoolExecutor(max(1, min(jobs, len(todo)))) as pool:
        done = pool.map(lambda one: _one(sanitizer, *one), todo)
        for (tool, op, impl), (status, text) in zip(todo, done, strict=True):
            label = impls.label(impl or "simt")
            row = {"op": op, "impl": label, "case": {"sanitizer": tool}, "metric": "correctness", "seed": 0}
            session.append(row | {"status": status, "reason": None if status == "passed" else text})
            word = {"passed": "PASS", "failed": "FAIL", "skipped": "SKIP"}[status]
            print(f"{word}  {tool:<9} {op:<12} {label:<12} {text}", flush=True)
            code |= status == "failed"
    return code


def _one(sanitizer: str, tool: str, op: str, impl: str | None) -> tuple[str, str]:
    """(status, the tool's summary line or why it is not clean)."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        # cuda-python asks the driver for functions of later versions and copes with the refusal; memcheck would
        # count each as an error. Errors of our own calls raise `CudaFault` and end the process.
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "kdtree.measure.sanitize", "--inner", op]
    command += ["--impl", impl] if impl else []
    environment = os.environ | ({"KDTREE_TRACED": "1"} if tool == "racecheck" else {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment)
    except subprocess.TimeoutExpired:
        return "failed", f"timeout: not done within {DEADLINE:.0f} s"
    text = done.stdout + done.stderr
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    refusal = re.search(rf"^{CANNOT}(.*)", text, re.MULTILINE)
    if refusal and done.returncode == NO_GPU:
        return "skipped", refusal[1]
    if done.returncode or not summary or not re.search(r"SUMMARY: 0 (errors|hazards)", summary[-1]):
        first = next((line for line in text.splitlines() if "=========" in line and "COMPUTE" not in line), "")
        said = summary[-1] if summary else "no summary"
        return "failed", f"exit code {done.returncode}; {said}; {first} {text[-300:]}"
    return "passed", summary[-1]


def main(argv: list[str] | None = None) -> int:
    """Run compute-sanitizer over every kernel; exit 5 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.sanitize", description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, default=None, help="the run whose results get the rows")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--impl", action="append", choices=impls.NAMES, help="of the kernels of verify_attn")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--inner", choices=OPS, help="run one op here, under a tool that is already there")
    options = parser.parse_args(argv)
    if options.inner:
        try:
            wrong = run_op(options.inner, (options.impl or [None])[0])
        except NotHere as why:
            print(f"{CANNOT}{why}", file=sys.stderr)
            return NO_GPU
        print("\n".join(wrong), file=sys.stderr)
        return int(bool(wrong))
    session = open_session(options.run_dir or "")
    session.run_dir.mkdir(parents=True, exist_ok=True)
    only = tuple(options.impl or impls.NAMES)
    return run(session, tuple(options.op or OPS), tuple(options.tool or TOOLS), options.jobs, only)


if __name__ == "__main__":
    sys.exit(main())
