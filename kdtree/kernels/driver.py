"""The few CUDA driver calls that a launch needs, through ctypes.

`cuda.core` boxes and checks every argument, which costs more than the launch itself; here the arguments are laid out
once and a launch is one call with four pointers. Nothing is loaded before the first call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHARED_WITHOUT_ASKING = 48 * 1024  # bytes of dynamic shared memory a block gets without the attribute below
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE, _CLUSTER = 2, 4  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_SM_COUNT, _CAPABILITY = 16, (75, 76)  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, …COMPUTE_CAPABILITY_MAJOR, _MINOR
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT


class DriverError(RuntimeError):
    """A driver call that did not return CUDA_SUCCESS; the text names the call and the error, `status` is its number."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def load() -> Any:
    """The driver library. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int, what: str) -> None:
    """Raise DriverError, with the driver's own words, unless `status` is 0."""
    if status:
        raise DriverError(f"{what}: {_error(status)}", status)


def _error(status: int) -> str:
    texts = []
    for call in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        found = getattr(load(), call)(status, ctypes.byref(text)) == 0 and text.value
        texts.append(text.value.decode() if found and text.value else f"CUDA_ERROR {status}")
    return f"{texts[0]} ({status}), {texts[1]}"


def current_device() -> int:
    """Index of the device whose context is current in this thread; -1 where there is no context."""
    index = ctypes.c_int()
    status = load().cuCtxGetDevice(ctypes.byref(index))
    if status in NO_CONTEXT:
        return -1
    check(status, "cuCtxGetDevice")
    return index.value


def _device_attribute(attribute: int, device: int) -> int:
    value = ctypes.c_int()
    check(load().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    return value.value


@functools.cache
def capability(device: int) -> tuple[int, int]:
    """Compute capability of a device, e.g. (9, 0)."""
    major, minor = (_device_attribute(a, device) for a in _CAPABILITY)
    return major, minor


@functools.cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of a device."""
    return _device_attribute(_SM_COUNT, device)


@contextmanager
def not_captured() -> Iterator[None]:
    """While open, calls that allocate or load are allowed although some stream is being captured in a graph."""
    mode = ctypes.c_int(_RELAXED)
    check(load().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        load().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def load_function(image: bytes, entry: str, dynamic_shared: int) -> int:
    """The function of a cubin, or of PTX, in the current context, allowed `dynamic_shared` bytes a block.

    Raises DriverError. The module stays loaded as long as the context.
    """
    driver, module, function = load(), ctypes.c_void_p(), ctypes.c_void_p()
    with not_captured():
        check(driver.cuModuleLoadData(ctypes.byref(module), image), f"cuModuleLoadData of {entry}")
        status = driver.cuModuleGetFunction(ctypes.byref(function), module, entry.encode())
        check(status, f"cuModuleGetFunction of {entry}")
        if dynamic_shared > SHARED_WITHOUT_ASKING:
            status = driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, dynamic_shared)
            check(status, f"cuFuncSetAttribute of {dynamic_shared} bytes of dynamic shared memory for {entry}")
    return function.value or 0


def allocate_zeroed(nbytes: int) -> int:
    """Device memory that is zero when this returns. Fresh from the driver: nothing queued anywhere can still write it.

    Raises DriverError.
    """
    driver, pointer, stream = load(), ctypes.c_uint64(), ctypes.c_void_p()
    with not_captured():
        check(driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)), f"cuMemAlloc of {nbytes} bytes")
        check(driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), "cuStreamCreate")
        check(driver.cuMemsetD8Async(pointer, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), stream), "cuMemsetD8Async")
        check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy")
    return pointer.value


def free(pointer: int) -> None:
    """Give memory of `allocate_zeroed` back. Raises DriverError."""
    check(load().cuMemFree_v2(ctypes.c_uint64(pointer)), "cuMemFree")


def launch_config(
    grid: tuple[int, ...], threads: int, dynamic_shared: int, stream: int, *, cooperative: bool, cluster: int
) -> LaunchConfig:
    """A launch's shape. A `cooperative` launch fails unless all of its blocks fit on the GPU at once.

    `cluster` > 1 puts so many neighbours along x into a cluster.
    """
    config = LaunchConfig(shared_bytes=dynamic_shared, stream=stream)
    for axis in range(3):
        config.grid[axis] = grid[axis] if axis < len(grid) else 1
        config.block[axis] = threads if axis == 0 else 1
    wanted = [(_COOPERATIVE, (1,))] * cooperative + [(_CLUSTER, (cluster, 1, 1))] * (cluster > 1)
    attributes = (_Attribute * max(len(wanted), 1))()
    for attribute, (kind, values) in zip(attributes, wanted, strict=False):
        attribute.id = kind
        attribute.value[: len(values)] = values
    config.attributes = ctypes.cast(attributes, ctypes.POINTER(_Attribute))  # which keeps them alive with the config
    config.attribute_count = len(wanted)
    return config
