"""What works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree.report.notebooks import repo_root

OK, NOTE, BAD = "ok", "note", "BAD"  # a note takes something away (no GPU: no times), a BAD stops the suite


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    state: str
    what: str
    found: str
    advice: str = ""


def version(distribution: str) -> str | None:
    """Installed version of `distribution`, or None; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 11)
    return Finding(OK if good else BAD, "python", found, "" if good else "use Python 3.11 or newer")


def _numpy() -> Finding:
    found = version("numpy")
    if found is None:
        return Finding(BAD, "numpy", "not installed", "pip install 'numpy<2.5'")
    if tuple(int(part) for part in found.split(".")[:2]) >= (2, 5):
        return Finding(BAD, "numpy", found, "numba-cuda 0.30 cannot import under NumPy 2.5: pip install 'numpy<2.5'")
    return Finding(OK, "numpy", found)


def _needed(distribution: str, why: str) -> Callable[[], Finding]:
    def check() -> Finding:
        found = version(distribution)
        if found:
            return Finding(OK, distribution, found)
        return Finding(BAD, distribution, "not installed", f"{why}: pip install {distribution}")

    return check


def _gpu() -> Finding:
    from kdtree import device

    if not device.gpu_available():
        return Finding(
            NOTE,
            "GPU",
            f"none: {device.why_no_gpu()}",
            "kernels run in the simulator: results yes, times never",
        )
    return Finding(OK, "GPU", f"{device.gpu_count()} visible")


def _driver() -> Finding:
    from kdtree.measure import host

    info = host.collect()
    gpu: Mapping[str, Any] = info.get("gpu") or {}
    if not gpu:
        return Finding(NOTE, "driver", "not asked: no GPU")
    driver = info.get("driver") or gpu.get("driver")
    found = f"{gpu.get('name')}, driver {driver}, CUDA {info.get('cuda') or gpu.get('cuda')}"
    missing = info.get("missing") or {}
    if missing:
        return Finding(NOTE, "driver", found, f"not readable: {', '.join(missing)}")
    return Finding(OK, "driver", found)


def _torch() -> Finding:
    if version("torch") is None:
        return Finding(NOTE, "torch", "not installed", "device times and the torch peers need a torch with CUDA")
    import torch

    if torch.cuda.is_available():
        return Finding(OK, "torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Finding(
        NOTE,
        "torch",
        f"{torch.__version__}, {built}, no device",
        "device times need a torch that sees the GPU",
    )


def _compiler(name: str, use: str) -> Callable[[], Finding]:
    def check() -> Finding:
        if shutil.which(name):
            return Finding(OK, name, "on PATH")
        return Finding(NOTE, name, "not on PATH", f"{use}; it comes with the CUDA toolkit")

    return check


def _notebooks() -> Finding:
    folder = repo_root() / "notebooks"
    found = sorted(p.name for p in folder.glob("*.ipynb")) if folder.is_dir() else []
    if found:
        return Finding(OK, "notebooks", f"{len(found)} found")
    return Finding(BAD, "notebooks", "none found", "run from a checkout, or name a folder with --notebooks")


def _fixtures() -> Finding:
    return check_fixtures(repo_root() / "fixtures")


def check_fixtures(folder: Path) -> Finding:
    """Compare the bundles of `folder` with the SHA-256 in its MANIFEST.json; large ones may be absent."""
    advice = "make them again: kdtree fixtures"
    try:
        bundles = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))["bundles"]
    except OSError:
        return Finding(BAD, "fixtures", "no MANIFEST.json", advice)
    except (ValueError, KeyError, TypeError):
        return Finding(BAD, "fixtures", "MANIFEST.json is no manifest", advice)
    match, absent, wrong, later = 0, [], [], 0
    for name, entry in sorted(bundles.items()):
        path = folder / ("large" if entry.get("large") else "") / f"{name}.kdtr"
        if not path.is_file():
            later += bool(entry.get("large"))
            absent += [] if entry.get("large") else [name]
        elif hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]:
            match += 1
        else:
            wrong.append(name)
    if wrong:
        return Finding(BAD, "fixtures", f"{len(wrong)} differ from MANIFEST.json: {', '.join(wrong[:3])}", advice)
    if absent:
        return Finding(BAD, "fixtures", f"{len(absent)} absent: {', '.join(absent[:3])}", advice)
    rest = f", {later} made on demand" if later else ""
    return Finding(OK, "fixtures", f"{match} match MANIFEST.json{rest}")


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", _python),
    ("numpy", _numpy),
    ("numba-cuda", _needed("numba-cuda", "the kernels are compiled with it")),
    ("GPU", _gpu),
    ("driver", _driver),
    ("torch", _torch),
    ("nvcc", _compiler("nvcc", "needed for the CUDA C++ kernels")),
    ("ptxas", _compiler("ptxas", "needed to count registers and spills without a GPU")),
    ("papermill", _needed("papermill", "the report runs notebooks with it")),
    ("nbconvert", _needed("nbconvert", "the report renders notebooks with it")),
    ("ipykernel", _needed("ipykernel", "notebooks run in it")),
    ("matplotlib", _needed("matplotlib", "figures are drawn with it")),
    ("notebooks", _notebooks),
    ("fixtures", _fixtures),
)


def examine() -> list[Finding]:
    """All checks in order. A check that itself breaks is a finding, so the doctor always gets to the end."""
    findings = []
    for what, check in CHECKS:
        try:
            findings.append(check())
        except Exception as exc:
            findings.append(Finding(BAD, what, f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"))
    return findings


def as_text(findings: list[Finding]) -> str:
    """The findings as an aligned table, advice on lines of their own, and one sentence at the end."""
    width = max(len(f.what) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{f.state:<4}  {f.what:<{width}}  {f.found}")
        if f.advice:
            lines.append(f"{'':<4}  {'':<{width}}    {f.advice}")
    bad = sum(f.state == BAD for f in findings)
    lines.append("")
    lines.append(
        "Everything needed is here." if not bad else f"{bad} thing{'s' if bad > 1 else ''} to put right first."
    )
    return "\n".join(lines)
