"""Where there is no GPU, kernels run in Numba's simulator and tests marked `gpu` are skipped with the reason."""

from __future__ import annotations

import os

import pytest

# Chooses the simulator before any test can import numba.cuda by itself.
import kdtree._cuda  # noqa: F401
from kdtree.device import gpu_available, why_no_gpu

os.environ.setdefault("MPLBACKEND", "agg")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two workers with a team of threads each fight for the same cores, and spin while they wait.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if gpu_available():
        return
    skip = pytest.mark.skip(reason=f"needs a GPU: {why_no_gpu()}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_report_header() -> str:
    """One line on top of a test run."""
    return "kernels: GPU" if gpu_available() else f"kernels: Numba's simulator ({why_no_gpu()})"
