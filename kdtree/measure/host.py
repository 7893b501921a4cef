"""host.json: what a measurement ran on, and whether its times may be believed.

`collect` never raises and never guesses: what it could not read is null and listed under `missing` with the
reason. Nothing in it names a person, a machine or a path.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kdtree.measure import nvml
from kdtree.measure.distrust import trust
from kdtree.measure.results import now

__all__ = ["collect", "slug", "source_fingerprint", "trust"]

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent

# What a result depends on, relative to the package: a change here makes rows measured before stale.
SOURCES = ("kernels", "ref", "ops.py", "attention.py", "call.py", "recorded.py", "checks.py", "arrays.py", "tree.py")
SOURCES += ("_cuda.py",)

LIBRARIES = (
    "numpy",
    "numba",
    "numba-cuda",
    "llvmlite",
    "cuda-core",
    "cuda-bindings",
    "nvidia-ml-py",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "torch",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "flashinfer-python",
    "flash-mla",
    "sgl-kernel",
    "cuda-bench",
    "ml-dtypes",
    "safetensors",
)


class _Reader:
    """Reads one field at a time; a failure leaves null and a reason."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}

    def __call__(self, name: str, read: Callable[[], Any], *, optional: bool = False) -> Any:
        """`read()`, or None. A GPU that has no such thing leaves no gap in an `optional` field."""
        try:
            return read()
        except Exception as error:
            if not (optional and type(error).__name__ == "NVMLError_NotSupported"):
                self.missing[name] = _why(error)
            return None


def collect() -> dict[str, Any]:
    """host.json as a dict. Never raises; runs nothing on the GPU and creates no CUDA context.

    Keys: at, simulated, gpu (null without one), gpu_count, driver, cuda, cpu {model, cores, threads, arch},
    ram_bytes, os, python, libraries {name: version or null}, commit, dirty, source, complete,
    missing {field: why}. Those of gpu are ATTRIBUTES and FIELDS of `nvml`.
    """
    from kdtree import device

    read = _Reader()
    has_gpu = bool(read("gpu_count", device.gpu_available))
    info: dict[str, Any] = {
        "at": now(),
        "simulated": not has_gpu,
        "gpu": _gpu(read) if has_gpu else None,
        "gpu_count": read("gpu_count", device.gpu_count),
        "driver": read("driver", nvml.driver_version) if has_gpu else None,
        "cuda": read("cuda", nvml.cuda_version) if has_gpu else None,
        "cpu": {
            "model": read("cpu.model", _cpu_model),
            "cores": read("cpu.cores", _cpu_cores),
            "threads": os.cpu_count(),
            "arch": platform.machine(),
        },
        "ram_bytes": read("ram_bytes", _ram_bytes),
        "os": read("os", _os_name),
        "python": platform.python_version(),
        "libraries": {name: read(f"libraries.{name}", lambda n=name: _version(n)) for name in LIBRARIES},
        "commit": read("commit", _commit),
        "dirty": read("dirty", _dirty),
        "source": read("source", source_fingerprint),
    }
    return info | {"complete": not read.missing, "missing": read.missing}


def slug(info: Mapping[str, Any]) -> str:
    """Folder name of a host from its host.json: "nvidia-h200", "simulated-x86_64"; MIG adds its SMs."""
    gpu = info.get("gpu")
    if not gpu:
        arch = (info.get("cpu") or {}).get("arch") or "unknown"
        return "simulated-" + re.sub(r"[^a-z0-9_]+", "-", arch.lower()).strip("-")
    name = re.sub(r"[^a-z0-9]+", "-", str(gpu.get("name") or "unknown-gpu").lower()).strip("-")
    return f"{name}-mig-{gpu.get('sm_count')}sm" if gpu.get("mig") else name


def source_fingerprint() -> str:
    """12 hex digits of a SHA-256 over sorted relative paths and contents of SOURCES, those that exist."""
    files: list[Path] = []
    for name in SOURCES:
        path = PACKAGE / name
        found = path.rglob("*") if path.is_dir() else [path]
        files += [f for f in found if f.is_file() and "__pycache__" not in f.parts]
    digest = hashlib.sha256()
    for relative, file in sorted((f.relative_to(PACKAGE).as_posix(), f) for f in files):
        content = file.read_bytes()
        digest.update(f"{relative}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _gpu(read: _Reader) -> dict[str, Any]:
    gpu = dict.fromkeys((*nvml.ATTRIBUTES, *nvml.FIELDS))
    gpu |= read("gpu.attributes", nvml.driver_attributes) or {}
    try:
        with nvml.Nvml() as library:
            handle = nvml.device_handle(library)
            for name, get in nvml.FIELDS.items():
                optional = name in nvml.OPTIONAL
                gpu[name] = read(f"gpu.{name}", lambda get=get: get(library, handle), optional=optional)
    except Exception as error:
        read.missing["gpu.nvml"] = _why(error)
    return gpu


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "CPU part") and value.strip():
            return " ".join(value.split())
    raise RuntimeError("cpuinfo has no model name")


def _cpu_cores() -> int:
    import psutil

    cores = psutil.cpu_count(logical=False)
    if not cores:
        raise RuntimeError("psutil does not know")
    return cores


def _ram_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _told_commit() -> str | None:
    """What KDTREE_COMMIT says: ``<sha>`` or ``<sha>-dirty``, for a tree that was copied without its .git.

    It is believed only where git knows nothing; `source` tells whether it is true.
    """
    told = os.environ.get("KDTREE_COMMIT", "")
    return told if re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", told) else None


def _commit() -> str:
    try:
        return _git("rev-parse", "HEAD")
    except (RuntimeError, OSError):
        if told := _told_commit():
            return told.removesuffix("-dirty")
        raise


def _dirty() -> bool:
    try:
        _git("rev-parse", "HEAD")  # without a commit every file is untracked, which says nothing
        return bool(_git("status", "--porcelain", "--", ".", ":(exclude)reports"))
    except (RuntimeError, OSError):
        if told := _told_commit():
            return told.endswith("-dirty")
        raise


def _git(*arguments: str) -> str:
    """Output of git in our checkout.

    Raises RuntimeError where the package is not in one: a wheel inside some other repository must not take
    that repository's commit.
    """

    def run(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RuntimeError(f"git {words[0]} ended with status {done.returncode}")
        return done.stdout.strip()

    if Path(run("rev-parse", "--show-toplevel")).resolve() != ROOT.resolve():
        raise RuntimeError("the package does not lie in a git checkout of its own")
    return run(*arguments)


def _why(error: Exception) -> str:
    """An error as a phrase without the paths of this machine."""
    text = re.sub(r"(?<!\w)/(?:[^\s/'\":]+/)*([^\s/'\":]*)", r"\1", str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
