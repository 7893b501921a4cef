"""The ground under device timing: is there a GPU to time, and one CUDA graph of what a candidate launches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from kdtree.device import gpu_available

Thunk = Callable[[], object]


class NotMeasurable(RuntimeError):
    """There is nothing here to take a measurement with."""


class CaptureError(RuntimeError):
    """A candidate cannot be captured in a CUDA graph."""


def require_gpu() -> None:
    """Raise NotMeasurable unless kernels run on a GPU in this process."""
    if not gpu_available() or os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise NotMeasurable("no GPU: times are never taken under the simulator")


def torch_cuda(*, required: bool = True) -> Any:
    """The torch module if it sees the GPU. Else None, or NotMeasurable with the reason when `required`."""
    require_gpu()
    try:
        import torch
    except ImportError as error:
        why = f"device times need torch, which does not import: {error}"
    else:
        if torch.cuda.is_available():
            return torch
        why = f"device times need torch with CUDA; torch {torch.__version__} sees no GPU"
    if required:
        raise NotMeasurable(why)
    return None


def l2_bytes() -> int:
    """L2 cache of the current GPU in bytes, as the driver reports it."""
    torch = torch_cuda()
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def capture(name: str, run: Thunk, stream: Any) -> Any:
    """A torch CUDA graph of what `run` launches on the torch stream `stream`, ready to replay.

    Raises CaptureError when it cannot be captured, or when nothing was: work on a stream of its own escapes
    the capture, and replaying an empty graph is very fast. After a failed capture torch's random generators
    may refuse to work in this process.
    """
    torch = torch_cuda()
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        raise NotMeasurable(f"device times need torch 2.8 or later, found {torch.__version__}") from None
    cause: Exception | None = None
    try:
        # torch.cuda.graph does not restore the stream when ending the capture fails; the outer context does.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            try:
                run()
            except Exception as error:
                cause = error  # ending a broken capture raises as well; the first error is the one that tells
                raise
    except Exception as error:
        cause = cause or error
        torch.cuda.synchronize()  # a context that died says so here, as the CUDA error that it is
        launch = sys.modules.get("kdtree.kernels.launch")
        if launch is not None and launch.fault() is not None:
            raise cause from None
        raise CaptureError(
            f"candidate {name!r} cannot be captured in a CUDA graph ({type(cause).__name__}: {cause}); "
            "time it with time_eager"
        ) from cause
    if not n_nodes(graph):
        raise CaptureError(f"candidate {name!r} launched nothing on the current torch stream: its graph is empty")
    graph.instantiate()
    return graph


def n_nodes(graph: Any) -> int:
    """Number of nodes (kernels, copies, memsets) of a graph from `capture`."""
    from cuda.bindings import driver

    status, _, count = driver.cuGraphGetNodes(driver.CUgraph(init_value=graph.raw_cuda_graph()))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuGraphGetNodes: CUDA error {status!r}")
    return int(count)
