"""Compile a kernel once with Numba, launch it cheaply with `cuda.core`, run it in the simulator.

Numba's own launch costs 90-290 µs with nine array arguments, because it unpacks each array on every call. Our
kernels take raw pointers and scalars, so a launch through `cuda.core` costs a few µs. The same source runs in
the simulator, where a pointer argument is a flat NumPy array.

Argument types are written as words: ``*f32`` a pointer, ``i64`` a scalar, ``**`` a table of pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree import arrays
from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels import simulator

STATIC_SHARED_LIMIT = 48 * 1024  # bytes a block may declare statically on every target

_WORDS = {
    "bfloat16": "*u16",  # 16-bit floats travel as their bits: neither NumPy nor the simulator knows bf16
    "float16": "*u16",
    "uint16": "*u16",
    "float32": "*f32",
    "float64": "*f64",
    "int32": "*i32",
    "uint32": "*u32",
    "int64": "*i64",
}
_SCALARS = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "f64": np.float64, "u32": np.uint32}


class CudaFault(RuntimeError):
    """A CUDA error. The context is dead: nothing measured after it in this process is to be believed."""


_fault: CudaFault | None = None


def fault() -> CudaFault | None:
    """The first CUDA error of this process, or None."""
    return _fault


def guard(action: Callable[[], Any], what: str) -> Any:
    """Run `action`; turn any CUDA error into `CudaFault` and refuse everything after the first one."""
    global _fault
    if _fault is not None:
        raise CudaFault(f"{what}: refused, this process met a CUDA error before: {_fault}") from _fault
    try:
        return action()
    except Exception as error:
        if is_cuda_error(error):
            _fault = CudaFault(f"{what}: {error}")
            raise _fault from error
        raise


def is_cuda_error(error: BaseException) -> bool:
    """True for an error that the CUDA driver or runtime reported, by whatever library it came."""
    name, text = type(error).__name__, str(error)
    return (
        isinstance(error, CudaFault)
        or name in ("CUDAError", "CudaAPIError", "AcceleratorError", "CUDARuntimeError", "CUDADriverError")
        or "CUDA error" in text
        or "CUDA_ERROR" in text
    )


def synchronize(what: str = "synchronize") -> None:
    """Wait for the device and raise `CudaFault` for an error of any launch before."""
    if not SIMULATED:
        guard(cuda.synchronize, what)


def word_of(dtype: str) -> str:
    """The argument word of a pointer to `dtype`."""
    return _WORDS[dtype]


@dataclass(frozen=True)
class Operand:
    """An array argument: `handle` is a pointer on a GPU and a flat NumPy array in the simulator."""

    handle: Any
    word: str


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel, as the cross-compiler and the resource table see it.

    `shared_limit` is what the kernel states about itself: static plus dynamic shared memory, bytes a block.
    """

    op: str
    kernel: Kernel
    words: tuple[str, ...]
    label: str
    shared_limit: int = STATIC_SHARED_LIMIT


class Kernel:
    """A device function in Python and everything compiled from it.

    Args:
        function: the kernel, written against ``kdtree._cuda.cuda``, on raw pointers.
        name: as it appears in reports, e.g. ``topk.simt[bfloat16]``.
        threads: threads a block that the kernel was written for.
        fastmath: let the compiler reorder and approximate float arithmetic.
    """

    def __init__(self, function: Callable[..., None], *, name: str, threads: int, fastmath: bool = False):
        self.function = function
        self.name = name
        self.threads = threads
        self.fastmath = fastmath
        self._compiled: dict[tuple, Any] = {}
        self._configs: dict[tuple[int, ...], Any] = {}
        self._simulated: Any = None

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.threads} threads)"

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], *, stream: int = 0) -> None:
        """Launch `grid` blocks. `args` are Operands and ``(word, value)`` scalars, in the kernel's order.

        A grid with no block is no launch. Raises CudaFault if the driver refuses.
        """
        if 0 in grid:
            return
        if SIMULATED:
            self._simulate(grid, args)
        else:
            guard(lambda: self._launch(grid, args, stream), self.name)

    def _simulate(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if self._simulated is None:
            self._simulated = cuda.jit(self.function)
        values = [a.handle if isinstance(a, Operand) else _SCALARS[a[0]](a[1]) for a in args]
        with simulator.brisk():
            self._simulated[grid, self.threads](*values)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], stream: int) -> None:
        words = tuple(a.word if isinstance(a, Operand) else a[0] for a in args)
        core, kernel = self.compiled(words)
        values = [a.handle if isinstance(a, Operand) else _SCALARS[a[0]](a[1]) for a in args]
        config = self._configs.get(grid)
        if config is None:
            config = self._configs[grid] = core.LaunchConfig(grid=grid, block=self.threads)
        core.launch(_stream(core, stream), config, kernel, *values)

    def compiled(self, words: tuple[str, ...]) -> tuple[Any, Any]:
        """(cuda.core, its Kernel object) for the argument words on the current device, compiled at first use."""
        key = (words, cuda.get_current_device().id)
        found = self._compiled.get(key)
        if found is None:
            import cuda.core as core

            dispatcher = cuda.jit(signature(words), fastmath=self.fastmath)(self.function)
            (overload,) = dispatcher.overloads.values()
            # cuda.core's own kernel object of the function that Numba loaded; the overload keeps it alive.
            found = self._compiled[key] = (core, overload._codelibrary.get_cufunc().kernel, overload)
        return found[0], found[1]


def sm_count() -> int:
    """Streaming multiprocessors of the current device; 1 in the simulator."""
    return 1 if SIMULATED else cuda.get_current_device().MULTIPROCESSOR_COUNT


class Workspace:
    """Scratch memory, as bytes: from torch or CuPy where the op's arrays are theirs, so that they count it."""

    def __init__(self, nbytes: int, like: View):
        self.nbytes = nbytes
        if SIMULATED or not like.on_gpu:
            like = arrays.view(np.empty(0) if SIMULATED else cuda.device_array(1, np.uint8), "workspace")
        self._memory = arrays.empty((nbytes,), "uint8", like)

    def part(self, word: str, offset: int, count: int) -> Operand:
        """`count` elements from byte `offset` on."""
        if SIMULATED:
            dtype = {"*f32": np.float32}[word]
            return Operand(self._memory[offset : offset + 4 * count].view(dtype), word)
        return Operand(arrays.view(self._memory, "workspace").ptr + offset, word)


_workspaces: dict[tuple[int, int], list[Workspace]] = {}


def workspace(nbytes: int, stream: int, like: View) -> Workspace:
    """Scratch memory of at least `nbytes` for launches on `stream`, grown when a call needs more, never zeroed.

    Growing allocates, so call an op once before capturing it in a CUDA graph. Outgrown blocks are kept: a graph
    captured earlier still points to them.
    """
    key = (0 if SIMULATED else cuda.get_current_device().id, stream)
    blocks = _workspaces.setdefault(key, [])
    if not blocks or blocks[-1].nbytes < nbytes:
        blocks.append(guard(lambda: Workspace(nbytes, like), "workspace"))
    return blocks[-1]


def release_workspaces() -> None:
    """Free all scratch memory. CUDA graphs captured before must not be replayed any more."""
    synchronize("release workspaces")
    _workspaces.clear()


_tables: dict[tuple, Operand] = {}


def pointer_table(handles: list[Any]) -> Operand:
    """A device table of pointers (a tuple of arrays in the simulator), kept so that a captured graph can use it."""
    if SIMULATED:
        return Operand(tuple(handles), "**")
    key = (cuda.get_current_device().id, *handles)
    found = _tables.get(key)
    if found is None:
        memory = guard(lambda: cuda.to_device(np.array(handles, dtype=np.int64)), "pointer table")
        found = _tables[key] = _Table(memory.__cuda_array_interface__["data"][0], "**", memory)
    return found


@dataclass(frozen=True)
class _Table(Operand):
    memory: Any = None


_streams: dict[int, Any] = {}


def _stream(core: Any, handle: int) -> Any:
    found = _streams.get(handle)
    if found is None:
        found = _streams[handle] = core.Stream.from_handle(handle)
    return found


def signature(words: tuple[str, ...]) -> Any:
    """``void(...)`` in Numba's types for a tuple of argument words."""
    from numba import types

    scalars = {
        "u16": types.uint16,
        "f32": types.float32,
        "f64": types.float64,
        "i32": types.int32,
        "i64": types.int64,
        "u32": types.uint32,
    }
    scalars |= {"*" + w: types.CPointer(t) for w, t in list(scalars.items())}
    scalars["**"] = types.CPointer(types.int64)
    return types.void(*[scalars[w] for w in words])
