"""Where there is no GPU, kernels run in Numba's simulator and tests marked `gpu` are skipped with the reason."""

from __future__ import annotations

import os

import pytest

from kdtree.device import gpu_available, why_no_gpu

# Asked before anything may set NUMBA_ENABLE_CUDASIM, so that the reason given below is the real one.
NO_GPU = "" if gpu_available() else why_no_gpu()

if NO_GPU:
    # Numba reads this when it is imported; a test may import it before kdtree._cuda would have set it.
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

os.environ.setdefault("MPLBACKEND", "agg")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers with a team of threads each fight for the same cores, and spin while they wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not NO_GPU:
        return
    skip = pytest.mark.skip(reason=f"needs a GPU: {NO_GPU}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_report_header() -> str:
    """One line on top of a test run."""
    return f"kernels: Numba's simulator ({NO_GPU})" if NO_GPU else "kernels: GPU"
