"""A CUDA driver that only remembers what it was asked, for tests of the launch path where there is no GPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

FUNCTION = 0x1234  # handle of every function


class FakeDriver:
    """Stands in for `kdtree.kernels.driver.load()`.

    `statuses` are what the next launches return, 0 when there are none left. `sizes` tells how many bytes of each
    parameter a launch reads.
    """

    def __init__(self, sizes: list[int] | None = None):
        self.sizes = sizes or []
        self.statuses: list[int] = []
        self.launches: list[SimpleNamespace] = []
        self.maps: list[SimpleNamespace] = []
        self.memory: list[Any] = []
        self.loaded: list[str] = []
        self.attributes: list[tuple[int, int]] = []
        self.map_status = 0
        self.capability = (9, 0)
        self.device = 0

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: Any) -> int:
        shape = config._obj
        wanted = shape.attributes[: shape.attribute_count]
        self.launches.append(
            SimpleNamespace(
                function=function.value,
                grid=tuple(shape.grid),
                block=tuple(shape.block),
                shared=shape.shared_bytes,
                stream=shape.stream or 0,
                attributes=[(a.id, a.value[0]) for a in wanted],
                parameters=[ctypes.string_at(places[i], size) for i, size in enumerate(self.sizes)],
            )
        )
        return self.statuses.pop(0) if self.statuses else 0

    def cuTensorMapEncodeTiled(self, at: Any, dtype: int, rank: Any, ptr: Any, *arrays: Any) -> int:
        extents, strides, box, steps, *rest = arrays
        self.maps.append(
            SimpleNamespace(
                at=at.value,
                dtype=dtype,
                rank=rank.value,
                ptr=ptr.value,
                shape=list(extents),
                strides=list(strides),
                box=list(box),
                steps=list(steps),
                rest=rest,
            )
        )
        ctypes.memmove(at.value, f"map of {ptr.value:#x}".encode().ljust(128, b"."), 128)
        return self.map_status

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.loaded.append(name.decode())
        function._obj.value = FUNCTION
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return 0

    def cuCtxGetDevice(self, index: Any) -> int:
        index._obj.value = self.device
        return 201 if self.device < 0 else 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {75: self.capability[0], 76: self.capability[1], 16: 132}[attribute]
        return 0

    def cuMemAlloc_v2(self, pointer: Any, nbytes: Any) -> int:
        self.memory.append(ctypes.create_string_buffer(b"?" * nbytes.value))
        pointer._obj.value = ctypes.addressof(self.memory[-1])
        return 0

    def cuMemFree_v2(self, pointer: Any) -> int:
        self.memory = [m for m in self.memory if ctypes.addressof(m) != pointer.value]
        return 0

    def cuMemsetD8Async(self, pointer: Any, value: Any, nbytes: Any, stream: Any) -> int:
        ctypes.memset(pointer.value, value.value, nbytes.value)
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = {700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}.get(status, b"CUDA_ERROR_UNKNOWN")
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"as the driver says it"
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: 0
