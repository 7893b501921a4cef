"""CUDA's command-line tools, wherever they are installed."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

# Environment of a process that compiles without a GPU, which the simulator cannot. Read when kdtree is imported.
COMPILING = {"KDTREE_CROSS_COMPILE": "1", "NUMBA_ENABLE_CUDASIM": "0"}


def tool(name: str) -> str:
    """Path of a CUDA tool: from the NVIDIA wheels, else the PATH. Raises FileNotFoundError with what to install."""
    for folder in map(Path, sys.path):
        candidate = folder / "nvidia" / "cu13" / "bin" / name
        if candidate.exists():
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"{name}: neither in the nvidia-cuda-* wheels nor on the PATH; pip install nvidia-cuda-nvcc"
        )
    return found


@functools.cache
def version(name: str) -> str:
    """What a tool says of its version, or "not installed"."""
    try:
        return subprocess.run([tool(name), "--version"], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return "not installed"
