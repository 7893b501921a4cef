"""The kernels behind `verify_attn`: their names, what each refuses, which one the dispatch table takes.

Everything that the suite measures of one of them is a row under ``numba:<name>``. A row of ``numba:auto`` speaks of
whatever the table took: the decoding step, cases that ask for no kernel by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kdtree.device import gpu_available
from kdtree.spec import K26_SCALE, VERIFY_ATTN_IMPLS

NAMES = VERIFY_ATTN_IMPLS
TENSOR_CORES = ("mma", "cluster", "wgmma")
SHORT = 4096  # cache rows: beyond, `cluster` is not what one would measure
AUTO = "numba:auto"


def label(impl: str | None) -> str:
    """The `impl` of a row for a kernel's name; None is what the table takes, which is simt in the simulator."""
    if impl is None:
        return AUTO if gpu_available() else "numba:simt"
    return f"numba:{impl}"


def refused(run: Callable[[], Any]) -> str | None:
    """Why the kernel asked for cannot take the call `run`, or None: then `run` has run.

    A kernel that cannot says so by a ValueError that begins with ``impl:``. Any other error is raised.
    """
    try:
        run()
    except ValueError as error:
        if not str(error).startswith("impl: "):
            raise
        return str(error)
    return None


def worth_timing(impl: str, params: Mapping[str, Any]) -> bool:
    """Is a kernel in its own field at a shape? `cluster` is made for few rows and short caches."""
    row_tiles = params["B"] * -(-params["N"] * params["H"] // 64)
    return impl != "cluster" or (capacity(params) <= SHORT + 128 and row_tiles <= 4 * 16)


def capacity(params: Mapping[str, Any]) -> int:
    """Rows that a request of a case may have: its longest request, in whole pages where there are any."""
    from kdtree.measure import memory

    page = params.get("page_size") or 0
    rows = params.get("Lmax") or max(memory.prefix_lens(params), default=0) + params["N"]
    return -(-rows // page) * page if page else rows


def dispatched(params: Mapping[str, Any]) -> str:
    """Name of the kernel that the table takes for a case on the current device; "simt" in the simulator."""
    from kdtree.kernels import launch
    from kdtree.kernels import verify_attn as kernels
    from kdtree.measure import memory

    if not gpu_available():
        return "simt"
    rank, width = memory.latent_widths(params)
    asked = kernels.Asked(
        capability=launch.capability(),
        dtype=params["dtype"],
        E=width,
        C=rank,
        B=params["B"],
        N=params["N"],
        H=params["H"],
        capacity=capacity(params),
        page_size=params.get("page_size") or 0,
        scale=params.get("scale", K26_SCALE),
    )
    return kernels.choose(asked)


def workspace_bytes(impl: str, params: Mapping[str, Any]) -> int:
    """Scratch bytes that a call of kernel `impl` takes for a case on the current device."""
    from kdtree.kernels import launch
    from kdtree.measure import memory

    module = importlib.import_module(f"kdtree.kernels.verify_{impl}")
    wanted = {
        "B": params["B"],
        "rows": params["N"] * params["H"],
        "capacity": capacity(params),
        "C": memory.latent_widths(params)[0],
        "dtype": params["dtype"],
    }
    return module.workspace_bytes(wanted, launch.sm_count())
