"""Is there a GPU? Asked of the driver through ctypes, so that the answer needs neither Numba nor torch."""

from __future__ import annotations

import ctypes
import functools
import os

NO_GPU = "KDTREE_NO_GPU"  # set beside NUMBA_ENABLE_CUDASIM where the choice was ours: child processes inherit both


@functools.cache
def _probe() -> tuple[int, str]:
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return 0, os.environ.get(NO_GPU, "NUMBA_ENABLE_CUDASIM is set")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "the CUDA driver (libcuda.so.1) is not installed"
    status = driver.cuInit(0)
    if status:
        return 0, f"cuInit returned {status}"
    count = ctypes.c_int(0)
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return 0, f"cuDeviceGetCount returned {status}"
    if not count.value:
        return 0, "the driver reports no device"
    return count.value, ""


def gpu_count() -> int:
    """Number of CUDA devices this process may use; 0 where there is no driver or the simulator is forced."""
    return _probe()[0]


def gpu_available() -> bool:
    """True when kernels run on a GPU in this process, False when they run under Numba's simulator."""
    return _probe()[0] > 0


def why_no_gpu() -> str:
    """Why `gpu_available()` is False, as a phrase for a report; empty when a GPU is there."""
    return _probe()[1]
