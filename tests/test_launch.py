"""Launching: a CUDA error is never swallowed, nothing runs after one, scratch memory is reused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from fake_driver import FUNCTION, FakeDriver

from kdtree import arrays
from kdtree.kernels import OPS, all_variants, assemble, driver, launch
from kdtree.kernels.launch import CudaFault, Kernel, Operand, TensorMap, guard, is_cuda_error


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
        assert 0 <= v.shared_limit <= launch.STATIC_SHARED_LIMIT or v.kernel.dynamic_shared


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


# ---- launching, on a driver that only remembers


@pytest.fixture
def fake(monkeypatch, unharmed) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: found)
    monkeypatch.setattr(driver, "capability", lambda device: found.capability)
    monkeypatch.setattr(launch, "SIMULATED", False)
    monkeypatch.setattr(launch, "_counters", {})
    monkeypatch.setattr(assemble, "machine_code", lambda kernel, words, target: (b"code", kernel.name))
    return found


def kernel(**options) -> Kernel:
    return Kernel(lambda: None, **({"name": "k", "threads": 96} | options))


ARGS = (Operand(0x7000, "*f32"), ("i32", -5), ("f32", 0.5), ("i64", 1 << 40), Operand(0x8000, "**"), ("f64", 2.5))
SIZES = [8, 4, 4, 8, 8, 8]


def test_parameters_arrive_one_by_one(fake):
    fake.sizes = SIZES
    kernel().launch((3, 2), ARGS, stream=77)
    (found,) = fake.launches
    wanted = (("Q", 0x7000), ("i", -5), ("f", 0.5), ("q", 1 << 40), ("Q", 0x8000), ("d", 2.5))
    assert found.parameters == [struct.pack(letter, value) for letter, value in wanted]
    assert (found.grid, found.block, found.shared, found.stream) == ((3, 2, 1), (96, 1, 1), 0, 77)
    assert found.function == FUNCTION and found.attributes == []


def test_a_second_launch_takes_its_own_arguments(fake):
    fake.sizes = [8, 4]
    k = kernel()
    for pointer, n in ((0x7000, 1), (0x9000, 2)):
        k.launch((1,), (Operand(pointer, "*f32"), ("i32", n)))
    assert [found.parameters[0] for found in fake.launches] == [struct.pack("Q", 0x7000), struct.pack("Q", 0x9000)]
    assert fake.loaded == ["k"]


def test_a_kernel_without_parameters_can_be_launched(fake):
    kernel().launch((1,), ())
    assert len(fake.launches) == 1


def test_a_tensor_map_goes_by_value(fake):
    fake.sizes = [128, 4, 128]
    maps = [TensorMap(Operand(p, "*u16"), "float16", (2, 128, 64), (1, 64, 64)) for p in (0x4000, 0x5000)]
    kernel().launch((1,), (maps[0], ("i32", 1), maps[1]))
    first, _, last = fake.launches[0].parameters
    assert first.startswith(b"map of 0x4000") and last.startswith(b"map of 0x5000")


def test_a_map_may_come_as_bytes(fake):
    fake.sizes = [128]
    kernel().launch((1,), (("tmap", b"x" * 128),))
    assert fake.launches[0].parameters == [b"x" * 128]


@pytest.mark.parametrize(("nbytes", "asked"), [(0, []), (48 * 1024, []), (48 * 1024 + 1, [(8, 48 * 1024 + 1)])])
def test_dynamic_shared_memory_above_48_kib_is_asked_for(nbytes, asked, fake):
    kernel(dynamic_shared=nbytes).launch((1,), ())
    assert fake.attributes == asked
    assert fake.launches[0].shared == nbytes


def test_cooperative_launches_and_clusters_are_attributes(fake):
    kernel(cooperative=True, cluster=4).launch((8,), ())
    assert fake.launches[0].attributes == [(2, 1), (4, 4)]


@pytest.mark.parametrize(
    ("targets", "runs"),
    [
        (None, {"sm_80", "sm_86", "sm_90a", "sm_120"}),
        (("sm_90a",), {"sm_90a"}),
        (("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"), {"sm_80", "sm_86", "sm_90a", "sm_120"}),
        (("sm_89",), {"sm_90a", "sm_120"}),
    ],
)
def test_a_kernel_runs_on_its_targets_and_what_comes_after_a_plain_one(targets, runs):
    all_targets = [(8, 0), (8, 6), (9, 0, "a"), (12, 0)]
    found = {assemble.target_name(t) for t in all_targets if kernel(targets=targets).runs_on(t)}
    assert found == runs


def test_a_kernel_for_another_device_is_not_launched(fake):
    fake.capability = (12, 0)
    with pytest.raises(ValueError, match="k: got a device of target sm_120, expected one of sm_90a"):
        kernel(targets=("sm_90a",)).launch((1,), ())
    assert launch.fault() is None and not fake.launches


def test_a_launch_that_fails_is_a_fault_and_the_next_is_refused(fake):
    k = kernel()
    fake.statuses = [700]
    with pytest.raises(CudaFault, match=r"k: k: CUDA_ERROR_ILLEGAL_ADDRESS \(700\), as the driver says it"):
        k.launch((1,), ())
    with pytest.raises(CudaFault, match="k: refused, this process met a CUDA error before"):
        k.launch((1,), ())
    assert len(fake.launches) == 1


def test_launches_kept_are_bounded(fake, monkeypatch):
    monkeypatch.setattr(launch, "LAUNCHES_KEPT", 3)
    k = kernel()
    for blocks in range(1, 9):
        k.launch((blocks,), ())
    assert len(k._launches) <= 3
    assert [found.grid[0] for found in fake.launches] == list(range(1, 9))


def test_what_is_launched_can_be_recorded(fake):
    k = kernel()
    with launch.recorded() as outer:
        k.launch((1,), ARGS, stream=3)
        with launch.recorded() as inner:
            k.launch((2,), ())
        k.launch((0,), ())
        k.launch((3,), ())
    k.launch((9,), ())
    assert [s.grid for s in outer] == [(1,), (2,), (3,)] and [s.grid for s in inner] == [(2,)]
    first = outer[0]
    assert (first.kernel, first.args, first.stream) == (k, ARGS, 3)


def test_counters_are_zero_and_grow(fake):
    first = launch.counters(10, 5)
    assert first.word == "*i32" and launch.counters(1000, 5) == first
    assert fake.memory[0].raw[:4000] == bytes(4000)
    larger = launch.counters(5000, 5)
    assert larger.handle != first.handle and len(fake.memory) == 2  # a captured graph may still use the first
    assert launch.counters(1, 6).handle not in (first.handle, larger.handle)


def test_releasing_frees_the_counters_and_forgets_launches_that_point_to_them(fake, monkeypatch):
    monkeypatch.setattr(launch, "synchronize", lambda what: None)
    monkeypatch.setattr(launch, "_workspaces", {})
    forgotten = []
    monkeypatch.setattr(launch, "on_release", [lambda: forgotten.append(1)])
    launch.counters(10, 5)
    launch.release_workspaces()
    assert fake.memory == [] and forgotten == [1]


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_compiles_once_a_signature():
    import torch

    import kdtree
    from kdtree.kernels import topk

    logits = torch.zeros(2, 37, device="cuda")
    kdtree.topk(logits, 2)
    before = dict(topk.simt("float32")._compiled)
    kdtree.topk(torch.ones(5, 199, device="cuda"), 31)
    assert before and topk.simt("float32")._compiled == before


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


def on_stream() -> int:
    import torch

    return torch.cuda.current_stream().cuda_stream


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1024, 48 * 1024, 96 * 1024])
def test_on_a_gpu_a_block_has_the_dynamic_shared_memory_it_asks_for(nbytes):
    import torch

    from kdtree._cuda import cuda
    from kdtree.kernels import ptx

    def reverse(out, size):
        t, last = cuda.threadIdx.x, ptx.shared_base() + size - 512
        ptx.st_shared_b32(last + t * 4, t * 3)
        cuda.syncthreads()
        out[t] = ptx.ld_shared_b32(last + (127 - t) * 4)

    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    k = Kernel(reverse, name="reverse", threads=128, dynamic_shared=nbytes, min_blocks=1)
    k.launch((1,), (Operand(out.data_ptr(), "*i32"), ("i32", nbytes)), stream=on_stream())
    assert out.tolist() == [3 * (127 - t) for t in range(128)]


@pytest.mark.gpu
def test_on_a_gpu_a_tensor_map_by_value_copies_its_box():
    import torch

    from kdtree._cuda import cuda
    from kdtree.kernels import ptx

    if launch.capability() < (9, 0):
        pytest.skip("the device has no copy engine")
    where = ptx.tensor_map_address(1)

    def copy(out, source, batch, row):
        base, t = ptx.shared_base(), cuda.threadIdx.x
        if t == 0:
            ptx.mbarrier_init(base + 8192, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            ptx.mbarrier_expect_tx(base + 8192, 8192)
            ptx.cp_async_bulk_tensor_3d(base, where(), 0, row, batch, base + 8192)
        while ptx.mbarrier_try_wait(base + 8192, 0) == 0:
            pass
        for i in range(t, 2048, 128):
            out[i] = ptx.ld_shared_b32(base + i * 4)

    k = Kernel(copy, name="copy", threads=128, dynamic_shared=16 * 1024, min_blocks=1)
    for batch, row in ((0, 0), (2, 7), (1, 80)):  # the last box reaches 44 rows outside
        source = torch.randint(1, 2**15, (3, 100, 64), device="cuda").to(torch.int16)
        out = torch.zeros(2048, dtype=torch.int32, device="cuda")
        seen = TensorMap(Operand(source.data_ptr(), "*u16"), "bfloat16", tuple(source.shape), (1, 64, 64))
        args = (Operand(out.data_ptr(), "*i32"), seen, ("i32", batch), ("i32", row))
        k.launch((1,), args, stream=on_stream())
        rows = torch.arange(64)
        swizzled = out.cpu().view(torch.int16).reshape(64, 8, 8)
        found = torch.stack([swizzled[rows, chunk ^ (rows % 8)] for chunk in range(8)], 1).reshape(64, 64)
        want = torch.zeros(64, 64, dtype=torch.int16)
        inside = source[batch, row : row + 64].cpu()
        want[: len(inside)] = inside
        assert (found == want).all(), (batch, row)


@pytest.mark.gpu
def test_on_a_gpu_counters_are_zero_also_while_a_stream_is_captured():
    import torch

    from kdtree._cuda import cuda

    def count(counters, out):
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = counters[cuda.blockIdx.x]

    out = torch.full((2000,), -1, dtype=torch.int32, device="cuda")
    k = Kernel(count, name="count", threads=32)
    k.launch((1,), (Operand(out.data_ptr(), "*i32"), Operand(out.data_ptr(), "*i32")), stream=on_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k.launch((2000,), (launch.counters(2000, on_stream()), Operand(out.data_ptr(), "*i32")), stream=on_stream())
    graph.replay()
    assert out.tolist() == [0] * 2000


@pytest.mark.gpu
def test_on_a_gpu_a_new_thread_can_launch():
    import threading

    import torch

    from kdtree._cuda import cuda

    def fill(out):
        out[cuda.threadIdx.x] = 7

    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    k = Kernel(fill, name="fill", threads=32)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: k.launch((1,), (Operand(out.data_ptr(), "*i32"),)))
    thread.start()
    thread.join()
    assert out.tolist() == [7] * 32
