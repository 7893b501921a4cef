"""Launching: a CUDA error is never swallowed, nothing runs after one, scratch memory is reused."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree import arrays
from kdtree.kernels import OPS, all_variants, launch
from kdtree.kernels.launch import CudaFault, Kernel, Operand, guard, is_cuda_error


@pytest.fixture
def unharmed(monkeypatch):
    """A process without a CUDA error, whatever this test does to it."""
    monkeypatch.setattr(launch, "_fault", None)


class CUDAError(Exception):
    """Named as cuda.core names its own."""


def fail(error: Exception):
    def action():
        raise error

    return action


@pytest.mark.parametrize(
    "error",
    [
        CUDAError("ILLEGAL_ADDRESS"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA_ERROR_MISALIGNED_ADDRESS"),
        CudaFault("before"),
    ],
)
def test_a_cuda_error_of_any_library_is_a_fault(error, unharmed):
    assert is_cuda_error(error)
    with pytest.raises(CudaFault, match="topk.simt: "):
        guard(fail(error), "topk.simt")
    assert launch.fault() is not None


def test_after_a_fault_nothing_runs_any_more(unharmed):
    with pytest.raises(CudaFault):
        guard(fail(CUDAError("ILLEGAL_ADDRESS")), "the first")
    ran = []
    with pytest.raises(
        CudaFault, match="the second: refused, this process met a CUDA error before: the first: ILLEGAL"
    ):
        guard(lambda: ran.append(1), "the second")
    assert not ran


@pytest.mark.parametrize("error", [ValueError("k: got 0"), KeyError("x"), TypeError("no")])
def test_another_error_passes_and_is_no_fault(error, unharmed):
    with pytest.raises(type(error)):
        guard(fail(error), "topk.simt")
    assert launch.fault() is None
    assert guard(lambda: 7, "topk.simt") == 7


def test_a_grid_without_a_block_is_no_launch():
    def kernel(x):
        raise AssertionError("launched")

    for grid in ((0,), (0, 3), (3, 0, 1)):
        Kernel(kernel, name="none", threads=1).launch(grid, (Operand(None, "*i32"),))


def test_scratch_memory_grows_and_is_kept():
    stream, like = -1, arrays.view(np.zeros(1), "x")  # a stream of no one else
    small = launch.workspace(64, stream, like)
    assert launch.workspace(16, stream, like) is small
    large = launch.workspace(4096, stream, like)
    assert large.nbytes >= 4096 and large is not small
    assert launch.workspace(64, stream, like) is large
    assert launch._workspaces[next(k for k in launch._workspaces if k[1] == stream)] == [small, large]


def test_every_op_ships_a_simt_kernel_under_its_own_name():
    variants = all_variants()
    assert {v.op for v in variants} == set(OPS)
    for op in OPS:
        assert any(v.label.startswith("simt") for v in variants if v.op == op), op
    labels = [(v.op, v.label) for v in variants]
    assert len(set(labels)) == len(labels)
    for v in variants:
        assert v.kernel.name.startswith(v.op)
        assert 0 <= v.shared_limit <= launch.STATIC_SHARED_LIMIT


@pytest.mark.parametrize(
    "dtype,word",
    [("bfloat16", "*u16"), ("float16", "*u16"), ("float32", "*f32"), ("int64", "*i64"), ("uint32", "*u32")],
)
def test_arrays_travel_as_words(dtype, word):
    assert launch.word_of(dtype) == word


def test_a_signature_follows_the_words():
    from numba import types

    found = launch.signature(("*f32", "i64", "**", "f32"))
    assert found == types.void(types.CPointer(types.float32), types.int64, types.CPointer(types.int64), types.float32)


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_compiles_once_a_signature():
    import torch

    import kdtree
    from kdtree.kernels import topk

    logits = torch.zeros(2, 37, device="cuda")
    kdtree.topk(logits, 2)
    before = dict(topk.simt("float32")._compiled)
    kdtree.topk(torch.ones(5, 199, device="cuda"), 31)
    assert topk.simt("float32")._compiled == before


@pytest.mark.gpu
def test_on_a_gpu_a_launch_does_not_wait_for_the_device():
    import time

    import torch

    import kdtree

    logits = torch.zeros(2, 37, device="cuda")
    out = kdtree.topk(logits, 2)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second or so
    start = time.perf_counter()
    kdtree.topk(logits, 2, out=out)
    waited = time.perf_counter() - start
    torch.cuda.synchronize()
    assert waited < 0.5
    assert np.isfinite(out[0].cpu().numpy()).all()
