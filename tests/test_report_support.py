"""Made-up rows, hosts, runs and notebooks for the tests of the report; nobody measured these numbers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import nbformat

from kdtree.measure import results
from kdtree.report import runstate
from kdtree.report.notebooks import COMPLETED
from kdtree.spec import MODELS

RUN, SOURCE, HOST = "2026-12-01-abc1234", "0123456789ab", "nvidia-fake-h200"
COMMIT = "abc1234def5678900000000000000000000000ff"


def row(op: str = "topk", impl: str = "numba:simt", case: dict | None = None, **fields: Any) -> dict[str, Any]:
    """A valid passed correctness row of the run above; `fields` replace what is given."""
    base: dict[str, Any] = {
        "metric": "correctness",
        "status": "passed",
        "host": HOST,
        "run": RUN,
        "source": SOURCE,
        "simulated": False,
        "seed": 0,
        "max_abs": 1.2e-3,
        "max_rel": 2.1e-2,
        "rel_l2": 8e-4,
        "pid": 100,
        "seq": 0,
        "at": "2026-12-01T10:00:00Z",
    }
    base |= fields
    if base["status"] != "passed" and not base.get("reason"):
        base["reason"] = "made up"
    return results.new_row(op, impl, case if case is not None else {"B": 1, "K": 8}, **base)


def timed(op: str, impl: str, case: dict, us: float, **fields: Any) -> dict[str, Any]:
    """A latency row of `us` µs."""
    sample = {"median": us, "iqr": round(us * 0.004, 3), "n": 40, "cache": "cold"}
    fields = {"metric": "latency", "device_us": sample, "latency_us": us + 9.0} | fields
    return row(op, impl, case, **fields)


def host_info(simulated: bool = False) -> dict[str, Any]:
    """host.json of a fake H200, or of a machine without a GPU."""
    gpu = {
        "name": "NVIDIA H200 (made up)",
        "compute_capability": "9.0",
        "sm_count": 132,
        "l2_bytes": 62914560,
        "shared_per_block_bytes": 232448,
        "memory_bytes": 150_754_820_096,
        "memory_used_bytes": 620_000_000,
        "clocks": {"sm_mhz": 1980, "memory_mhz": 3201, "sm_max_mhz": 1980, "memory_max_mhz": 3201},
        "power_w": 120.0,
        "power_limit_w": 700.0,
        "power_limit_default_w": 700.0,
        "temperature_c": 34,
        "ecc": True,
        "mig": False,
        "throttle": [],
        "throttle_ns": {},
        "utilization_percent": 0,
        "other_processes": 0,
        "other_processes_bytes": 0,
    }
    return {
        "at": "2026-12-01T10:00:00Z",
        "simulated": simulated,
        "gpu": None if simulated else gpu,
        "gpu_count": 0 if simulated else 1,
        "driver": None if simulated else "580.00.00",
        "cuda": None if simulated else "13.0",
        "cpu": {"model": "Made-up CPU 9000", "cores": 16, "threads": 32, "arch": "x86_64"},
        "ram_bytes": 137_438_953_472,
        "os": "Some Linux 12",
        "python": "3.12.3",
        "libraries": {"numpy": "2.4.6", "numba-cuda": "0.30.4", "torch": None if simulated else "2.11.0"},
        "commit": COMMIT,
        "dirty": False,
        "source": SOURCE,
        "complete": True,
        "missing": {},
    }


def make_run(
    reports: Path,
    rows: list[dict[str, Any]],
    *,
    host: str = HOST,
    run: str = RUN,
    simulated: bool = False,
    status: str = runstate.FINISHED,
    notebooks: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write the files of a run as `kdtree report` leaves them before rendering; returns its directory."""
    run_dir = reports / host / run
    run_dir.mkdir(parents=True, exist_ok=True)
    info = host_info(simulated)
    state = runstate.new_state(run, host, SOURCE, "tiny" if simulated else "quick", info)
    done = {"status": COMPLETED, "reason": None, "seconds": 12.3, "sha": "0" * 12, "source": SOURCE}
    state |= {"status": status, "notebooks": notebooks or {"00_host": done}} | fields
    runstate.save(run_dir, state)
    runstate.write_json(run_dir / "host.json", info)
    with open(run_dir / "results.jsonl", "w") as file:
        for line in rows:
            file.write(json.dumps(line | {"host": host, "run": line["run"] if line["run"] != RUN else run}) + "\n")
    return run_dir


def many_rows(simulated: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of every op, metric and status, as a quick run of a GPU (or a simulated run) might give."""
    noise, out = random.Random(seed), []

    def add(op: str, impl: str, case: dict, us: float, flop: float, moved: float, **fields: Any) -> None:
        peer = impl.startswith("peer:")
        error = 0.0 if op in ("tree_build", "tree_accept", "kv_compact") else 10 ** noise.uniform(-4.2, -2.8)
        figures = {"rel_l2": error, "max_abs": 3 * error, "max_rel": 20 * error, "seed": len(out)}
        common = {"simulated": simulated} | figures | fields
        out.append(row(op, impl, case, **common))
        if not simulated:
            us *= noise.uniform(0.97, 1.03)
            floor = max(flop / 787e6, moved / 4.3e6, 1.0)
            warm = {"median": round(us * 0.93, 2), "iqr": 0.2, "n": 40, "cache": "warm"}
            figures = {"flop": flop, "bytes": moved, "floor_us": round(floor, 2), "device_us_warm": warm}
            out.append(timed(op, impl, case, round(us, 2), **figures, **common))
        if not peer:
            memory = {
                "predicted": int(moved),
                "measured": None if simulated else int(moved * noise.uniform(1, 1.02)),
            }
            out.append(row(op, impl, case, metric="memory", memory=memory, **common))

    model = MODELS["k2.6-tp1"]
    heads, lengths = (2, (5, 17)) if simulated else (model.n_heads, (256, 1024, 4096, 16384))
    for length in lengths:
        for n in (3, 7) if simulated else (9, 17, 33, 65, 129, 257):
            case = {"B": 4, "H": heads, "N": n, "L": length, "dtype": "bfloat16", "page_size": 64}
            flop, moved = (
                2 * 4 * heads * n * (length + n) * 1088,
                4 * (length + n) * 1152 + 4 * n * heads * 2176,
            )
            ideal = max(flop / 787e6, moved / 4.3e6, 1.0)
            for impl, slow in (("numba:simt", 60), ("numba:mma", 2.3), ("numba:wgmma", 1.45)):
                if not simulated or impl == "numba:simt":
                    add("verify_attn", impl, case, ideal * slow + 3, flop, moved)
            if not simulated:
                add("verify_attn", "peer:torch-bmm", case, ideal * 3.4 + 25, flop, moved)
                add("verify_attn", "peer:flash_mla-full", case, ideal * 1.3 + 9, flop, moved, exact=False)
    for n in (3, 7) if simulated else (9, 17, 33, 65, 129, 257):
        case = {"B": 4, "D": 7, "K": 8, "budget": n - 1}
        add("tree_build", "numba:simt", case, 3 + n * 0.21, 8 * n, 4 * n * 60)
        add("tree_build", "numba:warp", case, 2 + n * 0.06, 8 * n, 4 * n * 60)
        walk = {"B": 4, "N": n, "D": 7}
        add(
            "tree_accept",
            "numba:warp",
            walk,
            2.1 + 0.1 * math.log2(n),
            0,
            4 * n * 20,
            mean_accepted=1 + math.log2(n) / 2.2,
        )
        add(
            "kv_compact",
            "numba:simt",
            {"B": 4, "D": 7, "N": n, "n_layers": 61, "dtype": "bfloat16"},
            3.4,
            0,
            4 * 8 * 61 * 2304,
        )
        if not simulated:
            add("tree_build", "peer:heapq", case, 90 + n * 4, 8 * n, 4 * n * 60)
            add("tree_accept", "peer:host", walk, 160 + n, 0, 4 * n * 20)
    step = {"model": "k2.6-tp1", "B": 4, "H": heads, "D": 7, "K": 8, "budget": 32, "L": 4096, "n_layers": 61}
    if not simulated:
        parts = {"topk": 5.3, "tree_build": 4.1, "verify_attn": 8591.0, "tree_accept": 2.5, "kv_compact": 3.4}
        out.append(timed("decode_step", "numba:simt", step, 8550.0, parts=parts, rel_l2=None, max_abs=None))
    case = {"B": 4, "D": 7, "K": 8, "V": 97 if simulated else 163840, "dtype": "bfloat16"}
    moved = 4 * 7 * case["V"] * 2
    add("topk", "numba:block", case, moved / 4.3e6 * 1.6 + 2, 2 * moved, moved)
    if not simulated:
        add("topk", "peer:torch", case, 90.3, 2 * moved, moved)
        big = {"B": 64, "H": heads, "N": 257, "L": 262144, "dtype": "bfloat16", "page_size": 64}
        why = "needs 162.1 GiB, 139.2 GiB are free"
        out.append(
            row(
                "verify_attn",
                "numba:wgmma",
                big,
                status="skipped",
                reason=why,
                rel_l2=None,
                max_abs=None,
                max_rel=None,
            )
        )
    return out


def notebook(path: Path, *cells: str, parameters: str | None = 'run_dir = "."\nprofile = "tiny"') -> Path:
    """Write a notebook of code `cells`, the parameters cell in front unless None; returns `path`."""
    nb = nbformat.v4.new_notebook()
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    if parameters is not None:
        cell = nbformat.v4.new_code_cell(parameters)
        cell.metadata.tags = ["parameters"]
        nb.cells.append(cell)
    nb.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


def test_made_up_rows_are_valid():
    assert len(many_rows()) > 100
    assert all(r["device_us"] is None for r in many_rows(simulated=True))
