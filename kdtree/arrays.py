"""One view of NumPy, torch, CuPy and Numba arrays: pointer, shape, dtype, device.

The kernels take raw pointers, so this is all they need; results are made by the library the inputs came from.
torch and CuPy are recognised by the module of the object's type and imported only when such an object comes in.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEM_SIZE = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "uint16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}


@dataclass(slots=True)  # made several times a call: plain attributes cost a third of frozen ones
class View:
    """What a kernel or a check needs to know of an array.

    kind: "numpy" | "torch" | "cupy" | "numba"; device: "cpu" or "cuda:<index>".
    """

    obj: Any
    kind: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    contiguous: bool
    ptr: int

    @property
    def on_gpu(self) -> bool:
        """True for device memory."""
        return self.device != "cpu"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_SIZE.get(self.dtype, 1)


_kinds: dict[type, str | None] = {}


def kind_of(array: Any) -> str | None:
    """Which library `array` belongs to, or None. Asked once a type."""
    kind = type(array)
    if kind not in _kinds:
        _kinds[kind] = _kind_of(array)
    return _kinds[kind]


def _kind_of(array: Any) -> str | None:
    if isinstance(array, np.ma.MaskedArray | np.matrix):
        return None  # a mask would be lost, and a matrix never has one axis
    if isinstance(array, np.ndarray):
        return "numpy"
    root = type(array).__module__.partition(".")[0]
    if root in ("torch", "cupy"):
        return root if hasattr(array, "dtype") and hasattr(array, "shape") else None
    if hasattr(array, "__cuda_array_interface__"):
        return "numba"
    return "dlpack" if hasattr(array, "__dlpack__") else None


_torch_devices: dict[Any, str] = {}
_torch_dtypes: dict[Any, str] = {}


def view(array: Any, name: str) -> View:
    """Describe `array`; `name` is the argument's name for the error.

    Raises TypeError for anything that is none of NumPy, torch, CuPy, `__cuda_array_interface__` or DLPack.
    """
    kind = kind_of(array)
    if kind == "dlpack":
        array, kind = _from_dlpack(array, name), "torch"
    if kind == "numpy":
        # Bytes in foreign order are another dtype: a kernel would read them as they lie.
        dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
        return View(array, kind, array.shape, dtype, "cpu", array.flags.c_contiguous, array.ctypes.data)
    if kind == "torch":
        where = array.device
        device = _torch_devices.get(where)
        if device is None:
            if where.type not in ("cpu", "cuda"):
                raise TypeError(f"{name}: got a torch tensor on {where}, expected cpu or cuda")
            device = "cpu" if where.type == "cpu" else f"cuda:{where.index or 0}"
            _torch_devices[where] = device
        dtype = _torch_dtypes.get(array.dtype)
        if dtype is None:
            dtype = _torch_dtypes[array.dtype] = str(array.dtype).removeprefix("torch.")
        return View(array, kind, tuple(array.shape), dtype, device, array.is_contiguous(), array.data_ptr())
    if kind == "cupy":
        device = f"cuda:{array.device.id}"
        contiguous = bool(array.flags.c_contiguous)
        return View(array, kind, tuple(array.shape), array.dtype.name, device, contiguous, array.data.ptr)
    if kind == "numba":
        return _from_interface(array)
    raise TypeError(
        f"{name}: got {type(array).__name__}, expected a NumPy, torch or CuPy array or one with "
        "__cuda_array_interface__ or DLPack"
    )


def _from_dlpack(array: Any, name: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise TypeError(
            f"{name}: got {type(array).__name__}, whose only interface is DLPack; reading it needs torch"
        ) from error
    return torch.from_dlpack(array)


def _from_interface(array: Any) -> View:
    face = array.__cuda_array_interface__
    shape = tuple(face["shape"])
    dtype = np.dtype(face["typestr"])
    packed, strides = dtype.itemsize, []
    for extent in reversed(shape):
        strides.insert(0, packed)
        packed *= extent
    contiguous = face.get("strides") is None or tuple(face["strides"]) == tuple(strides)
    return View(array, "numba", shape, dtype.name, f"cuda:{_current_device()}", contiguous, face["data"][0])


def _current_device() -> int:
    from kdtree._cuda import SIMULATED, cuda

    return 0 if SIMULATED else cuda.get_current_device().id


def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype of a dtype name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def to_numpy(array: Any) -> np.ndarray:
    """`array` on the host: a view where it already is there, a copy otherwise. bfloat16 stays bfloat16."""
    v = view(array, "array")
    if v.kind == "numpy":
        return v.obj
    if v.kind == "torch":
        tensor = v.obj.detach().cpu().contiguous()
        if v.dtype == "bfloat16":
            import torch

            return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return tensor.numpy()
    if v.kind == "cupy":
        return v.obj.get()
    return v.obj.copy_to_host() if hasattr(v.obj, "copy_to_host") else np.asarray(v.obj)


def empty(shape: tuple[int, ...], dtype: str, like: View) -> Any:
    """An uninitialised array of the kind and on the device of `like`."""
    if like.kind == "numpy":
        return np.empty(shape, dtype=numpy_dtype(dtype))
    if like.kind == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.obj.device)
    if like.kind == "cupy":
        import cupy

        with cupy.cuda.Device(int(like.device.partition(":")[2])):
            return cupy.empty(shape, dtype=numpy_dtype(dtype))
    from kdtree._cuda import cuda

    return cuda.device_array(shape, dtype=numpy_dtype(dtype))


def copy_into(target: Any, source: np.ndarray, name: str) -> None:
    """Write `source` (host) into `target`, cast to its dtype."""
    v = view(target, name)
    host = np.ascontiguousarray(source.astype(numpy_dtype(v.dtype)))
    if v.kind == "numpy":
        v.obj[...] = host
    elif v.kind == "torch":
        v.obj.copy_(from_numpy_to_torch(host))
    elif v.kind == "cupy":
        v.obj.set(host)
    else:
        v.obj.copy_to_device(host)


def from_numpy_to_torch(host: np.ndarray) -> Any:
    """A torch CPU tensor on the memory of `host`, bfloat16 included."""
    import torch

    if host.dtype.name == "bfloat16":
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def current_stream(v: View) -> int:
    """Handle of the stream that the library of `v` launches on now; 0 is the default stream."""
    if v.kind == "torch" and v.on_gpu:
        return sys.modules["torch"].cuda.current_stream(v.obj.device).cuda_stream
    if v.kind == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0


def stream_handle(stream: Any, like: View) -> int:
    """Handle of `stream`: None, an int, or a torch, CuPy, Numba or ``__cuda_stream__`` stream.

    Raises TypeError for anything else.
    """
    if stream is None:
        return current_stream(like)
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    handle = getattr(stream, "handle", None)
    if handle is not None:
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(
        f"stream: got {type(stream).__name__}, expected None, an int handle, or a torch, CuPy or Numba stream"
    )
