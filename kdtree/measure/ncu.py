"""Where the cycles of `verify_attn` go: hardware counters by NVIDIA's Nsight Compute, kept beside a run's results.

``ncu.json`` in a run's directory:

    {"version": 1, "tool": "ncu 2025.3.1", "gpu": "NVIDIA H200", "at": "…", "reason": null, "records": [
      {"impl": "numba:wgmma", "kernel": "verify_attn_wgmma", "case": {"B": 4, …}, "metrics": {"<name>": 1.0, …}}]}

Metric names are those of ncu, values in its base units (ns, bytes, %). `reason` says why there is none.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import host, one_call, results, sweep
from kdtree.measure.session import Session

FILE, VERSION = "ncu.json", 1
DEADLINE = 420.0  # seconds; compiling the kernels is most of it
REFERENCE = sweep.REFERENCE["verify_attn"]
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("wgmma", REFERENCE | {"L": 16_384}),  # bound by tensor cores
    ("mma", REFERENCE | {"L": 16_384}),
    ("simt", REFERENCE),
    ("wgmma", REFERENCE | {"B": 32, "H": 8, "N": 9, "L": 65_536}),  # bound by memory
    ("mma", REFERENCE | {"B": 32, "H": 8, "N": 9, "L": 65_536}),
)
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"  # warps in that state for an issued instruction

# What a reader wants to know -> metrics that say it, the first that ncu has on this GPU. Values in base units.
FIGURES: dict[str, tuple[str, ...]] = {
    "time, ns": ("gpu__time_duration.sum",),
    "SM cycles": ("sm__cycles_elapsed.max",),
    "tensor cores at work, %": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "shared memory and L1, %": (
        "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
        "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "shared memory by load and store, %": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    ),
    "L2, %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "L2 hits, %": ("lts__t_sector_hit_rate.pct",),
    "device memory, %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "device memory read, bytes": ("dram__bytes_read.sum",),
    "instructions issued, %": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed",),
    "warps an SM, %": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "registers a thread": ("launch__registers_per_thread",),
    "blocks": ("launch__grid_size",),
}


def wanted() -> list[str]:
    """Every metric that is asked for."""
    return [*(name for names in FIGURES.values() for name in names), *(STALL.format(s) for s in STALLS)]


def measure(session: Session, *, overwrite: bool = False) -> dict[str, Any]:
    """ncu.json of the run, taken now if it is not there and this is a full run on a GPU with ncu.

    Never raises for what ncu cannot do here (rights, version): then `records` is empty and `reason` says why.
    """
    path = session.run_dir / FILE
    if path.exists() and not overwrite:
        return read(session.run_dir)
    reason = _why_not(session.profile)
    found = nothing(reason) if reason else collect(CALLS)
    if not reason:
        session.run_dir.mkdir(parents=True, exist_ok=True)
        write(path, found)
    return found


def read(run_dir: Path) -> dict[str, Any]:
    """ncu.json of `run_dir`; one without records where there is none or it cannot be read."""
    try:
        found = json.loads((Path(run_dir) / FILE).read_text())
        if found["version"] != VERSION or not isinstance(found["records"], list):
            raise ValueError(f"version {found['version']}")
    except FileNotFoundError:
        return nothing("no hardware counters were taken in this run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return nothing(f"{FILE} cannot be read ({type(error).__name__}: {error})")
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Strict JSON, a record a line."""
    head = {n: v for n, v in found.items() if n != "records"}
    lines = ",\n ".join(results.dumps(r) for r in found["records"])
    path.write_text(results.dumps(head)[:-1] + f', "records": [\n {lines}\n]}}\n')


def nothing(reason: str) -> dict[str, Any]:
    """An ncu.json without records."""
    return {"version": VERSION, "tool": None, "gpu": None, "at": results.now(), "reason": reason, "records": []}


def _why_not(profile: str) -> str | None:
    if gpu_available() and profile != "full":
        return f"hardware counters are taken in the full profile, this is {profile}"
    return absent()


def absent() -> str | None:
    """Why no hardware counters can be taken here, or None."""
    if not gpu_available():
        return f"hardware counters need a GPU, and {why_no_gpu()}"
    return None if shutil.which("ncu") else "ncu (NVIDIA Nsight Compute) is not on the PATH"


def collect(calls: Sequence[tuple[str, dict[str, Any]]], deadline: float = DEADLINE) -> dict[str, Any]:
    """Counters of each of `calls` = (impl, case), all in one process under ncu."""
    if reason := absent():
        return nothing(reason)
    tool = shutil.which("ncu") or "ncu"
    info = host.collect()
    found = nothing("") | {"tool": _version(tool), "gpu": (info.get("gpu") or {}).get("name"), "reason": None}
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [tool, "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
        command += ["--log-file", str(log), "--metrics", ",".join(_known(tool))]
        command += [sys.executable, "-m", "kdtree.measure.one_call", *(one_call.written(*call) for call in calls)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, env=environment)
        except subprocess.TimeoutExpired:
            return found | {"reason": f"ncu was not done within {deadline:.0f} s"}
        text = log.read_text(errors="replace") if log.exists() else ""
    found["records"] = records(text.splitlines(), calls)
    if not found["records"]:
        said = [line for line in (text + done.stdout).splitlines() if line.startswith("==ERROR==")]
        said += done.stderr.strip().splitlines()[-1:]  # the last line of a traceback
        found["reason"] = f"ncu gave no figure (exit code {done.returncode}): {' '.join(said)[-400:] or 'nothing said'}"
    return found


def _version(tool: str) -> str | None:
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    number = re.search(r"Version (\S+)", said)
    return f"ncu {number[1]}" if number else "ncu"


def _known(tool: str) -> list[str]:
    """The wanted metrics that ncu has for this GPU; all of them where it does not say."""
    try:
        said = subprocess.run([tool, "--query-metrics"], capture_output=True, text=True, timeout=120).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return known(said)


def known(query: str) -> list[str]:
    """The wanted metrics whose base name is in the answer `query` of ``ncu --query-metrics``."""
    names = {line.split()[0] for line in query.splitlines() if line.strip()}
    if not any(name.startswith("sm__") for name in names):
        return wanted()
    return [m for m in wanted() if m.startswith("launch__") or m.split(".")[0] in names]


def records(lines: Iterable[str], calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Records from the lines of ``ncu --csv``: a kernel that is none of ours begins the next of `calls`."""
    found: dict[str, dict[str, Any]] = {}
    at, last = -1, None
    for line in _table(lines):
        name = re.search(r"verify_attn_[a-z]+", line["Kernel Name"])
        if line["ID"] != last:
            last, at = line["ID"], at + (name is None)
        value = _number(line["Metric Value"])
        if name is None or value is None or not 0 <= at < len(calls):
            continue
        impl, case = calls[at]
        record = found.setdefault(line["ID"], {"impl": f"numba:{impl}", "kernel": name[0], "case": case, "metrics": {}})
        record["metrics"][line["Metric Name"]] = value
    return list(found.values())


def _table(lines: Iterable[str]) -> Iterable[dict[str, str]]:
    """Rows of the CSV table among what else ncu writes."""
    kept = [line for line in lines if line.startswith('"')]
    head = next((i for i, line in enumerate(kept) if line.startswith('"ID"')), None)
    if head is None:
        return []
    needed = ("ID", "Kernel Name", "Metric Name", "Metric Value")
    return [row for row in csv.DictReader(kept[head:]) if all(row.get(n) for n in needed) and row["ID"].isdigit()]


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # n/a
        return None
    return value if value == value and abs(value) != float("inf") else None


def figure(record: dict[str, Any], name: str) -> float | None:
    """The figure `name` of FIGURES in a record, or None."""
    return next((record["metrics"][m] for m in FIGURES[name] if m in record["metrics"]), None)


def stalls(record: dict[str, Any], count: int = 3) -> list[tuple[str, float]]:
    """What warps waited for most: (reason, share of all warp states), the largest first."""
    states = {s: record["metrics"].get(STALL.format(s), 0.0) for s in STALLS}
    total = sum(states.values())
    waits = [(s.replace("_", " "), v / total) for s, v in states.items() if total and v and s != "selected"]
    return sorted(waits, key=lambda item: -item[1])[:count]
