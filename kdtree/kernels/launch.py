"""Compile a kernel once with Numba, launch it cheaply through the driver, run it in the simulator.

Numba's own launch costs 90-290 µs with nine array arguments, because it unpacks each array on every call. Our
kernels take raw pointers and scalars, so that a launch is one driver call on a buffer that is laid out once. The same
source runs in the simulator, where a pointer argument is a flat NumPy array.

Argument types are written as words: ``*f32`` a pointer, ``i64`` a scalar, ``**`` a table of pointers, ``tmap`` a
CUtensorMap by value, which the kernel declares as an int64 and finds with `ptx.tensor_map_address`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree import arrays
from kdtree._cuda import SIMULATED, cuda
from kdtree.arrays import View
from kdtree.kernels import assemble, driver, simulator, tensor_map
from kdtree.kernels.parameters import Launch

STATIC_SHARED_LIMIT = 48 * 1024  # bytes a block may declare statically on every target
LAUNCHES_KEPT = 64  # parameter buffers a kernel keeps: grids times streams in use

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
    if _fault is not None:
        refuse(what)
    try:
        return action()
    except Exception as error:
        if is_cuda_error(error):
            raise set_fault(what, error) from error
        raise


def refuse(what: str) -> None:
    """Raise CudaFault if this process met a CUDA error before."""
    if _fault is not None:
        raise CudaFault(f"{what}: refused, this process met a CUDA error before: {_fault}") from _fault


def set_fault(what: str, error: BaseException) -> CudaFault:
    """Remember a CUDA error, the first of this process, and return what is to be raised."""
    global _fault
    _fault = CudaFault(f"{what}: {error}")
    return _fault


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
    """An array argument: `handle` is a pointer on a GPU and a flat NumPy array in the simulator.

    `source` names the argument of the public call whose array this is; empty for scratch memory and the like.
    """

    handle: Any
    word: str
    source: str = ""


@dataclass(frozen=True)
class TensorMap:
    """An argument by which the copy engine reads `operand`: see `tensor_map.encode` for shape and box."""

    operand: Operand
    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    word: str = assemble.TENSOR_MAP

    @property
    def handle(self) -> bytes:
        """The CUtensorMap. Raises ValueError for what the copy engine cannot read."""
        return tensor_map.encode(self.operand.handle, self.dtype, self.shape, self.box, self.strides)


@dataclass(frozen=True)
class Step:
    """One launch that was made."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    stream: int


_thread = threading.local()


@contextmanager
def recorded() -> Iterator[list[Step]]:
    """While open, the launches that this thread makes on a GPU are listed, also for whoever is listing already."""
    before = getattr(_thread, "steps", None)
    _thread.steps = found = []
    try:
        yield found
    finally:
        _thread.steps = before
        if before is not None:
            before += found


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
        min_blocks: blocks that an SM must have room for, which caps the registers; 0 leaves that to the compiler.
        max_registers: registers a thread may take; None leaves that to the compiler.
        dynamic_shared: bytes a block of dynamic shared memory, which `ptx.shared_base` finds.
        targets: names of the targets it can be compiled for, e.g. ``("sm_90a",)``; None is all.
        cooperative: all blocks run at once, or the launch fails.
        cluster: neighbouring blocks along x that share a cluster.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *,
        name: str,
        threads: int,
        fastmath: bool = False,
        min_blocks: int = 0,
        max_registers: int | None = None,
        dynamic_shared: int = 0,
        targets: tuple[str, ...] | None = None,
        cooperative: bool = False,
        cluster: int = 1,
    ):
        self.function = function
        self.name = name
        self.threads = threads
        self.fastmath = fastmath
        self.min_blocks = min_blocks
        self.max_registers = max_registers
        self.dynamic_shared = dynamic_shared
        self.targets = targets
        self.cooperative = cooperative
        self.cluster = cluster
        self._compiled: dict[tuple, int] = {}
        self._launches: dict[tuple, Launch] = {}
        self._simulated: Any = None

    def __repr__(self) -> str:
        return f"Kernel({self.name}, {self.threads} threads)"

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], *, stream: int = 0) -> None:
        """Launch `grid` blocks. `args` are Operands, TensorMaps and ``(word, value)`` scalars, in the kernel's order.

        A grid with no block is no launch. Raises CudaFault if the driver refuses.
        """
        if 0 in grid:
            return
        if emulated is not None:
            emulated.launch(self, grid, args)
        elif SIMULATED:
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
        launch = self._prepared(grid, words_of(args), stream)
        with launch.lock:
            launch.fill(values_of(args))
            launch.go()
        steps = getattr(_thread, "steps", None)
        if steps is not None:
            steps.append(Step(self, grid, args, stream))

    def _prepared(self, grid: tuple[int, ...], words: tuple[str, ...], stream: int) -> Launch:
        key = (current_device(), words, grid, stream)
        found = self._launches.get(key)
        if found is None:
            if len(self._launches) >= LAUNCHES_KEPT:
                self._launches.clear()
            found = self._launches[key] = self.prepare(grid, words, stream)
        return found

    def prepare(self, grid: tuple[int, ...], words: tuple[str, ...], stream: int) -> Launch:
        """A launch on the current device whose parameters are still to be filled in."""
        config = driver.launch_config(
            grid, self.threads, self.dynamic_shared, stream, cooperative=self.cooperative, cluster=self.cluster
        )
        return Launch(self.compiled(words), self.name, words, config)

    def compiled(self, words: tuple[str, ...]) -> int:
        """Handle of the function for the argument words on the current device, compiled and loaded at first use.

        Raises ValueError for a device that the kernel is not made for.
        """
        device = current_device()
        found = self._compiled.get((words, device))
        if found is None:
            target = assemble.target_of(driver.capability(device))
            if not self.runs_on(target):
                raise ValueError(
                    f"{self.name}: got a device of target {assemble.target_name(target)}, expected one of "
                    f"{', '.join(self.targets or ())}"
                )
            code, entry = assemble.machine_code(self, words, target)
            found = self._compiled[words, device] = driver.load_function(code, entry, self.dynamic_shared)
        return found

    def runs_on(self, target: tuple) -> bool:
        """Can a device of this target, ``(9, 0, "a")`` say, run it? A target without a letter serves later ones too."""
        if self.targets is None:
            return True
        name = assemble.target_name(target)
        plain = [int(t.removeprefix("sm_")) for t in self.targets if t[-1].isdigit()]
        return name in self.targets or any(least <= 10 * target[0] + target[1] for least in plain)


def words_of(args: tuple[Any, ...]) -> tuple[str, ...]:
    """The argument words of a launch's arguments."""
    return tuple(a[0] if isinstance(a, tuple) else a.word for a in args)


def values_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Pointers, scalars and tensor maps as the parameter buffer takes them."""
    return tuple(a[1] if isinstance(a, tuple) else a.handle for a in args)


def current_device() -> int:
    """Index of the current device. Numba makes its context current where this thread has none."""
    found = driver.current_device()
    return found if found >= 0 else cuda.get_current_device().id


emulated: Any = None  # an `emulator.Device` that launches go to, while one is installed


def capability() -> tuple[int, int]:
    """Compute capability of the current device; (0, 0) in the simulator."""
    if emulated is not None:
        return emulated.capability
    return (0, 0) if SIMULATED else driver.capability(current_device())


def sm_count() -> int:
    """Streaming multiprocessors of the current device; 1 in the simulator."""
    if emulated is not None:
        return emulated.sms
    return 1 if SIMULATED else driver.sm_count(current_device())


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
    if emulated is not None:
        return emulated.workspace(nbytes)
    key = (0 if SIMULATED else current_device(), stream)
    blocks = _workspaces.setdefault(key, [])
    if not blocks or blocks[-1].nbytes < nbytes:
        blocks.append(guard(lambda: Workspace(nbytes, like), "workspace"))
    return blocks[-1]


_counters: dict[tuple[int, int], list[tuple[int, int]]] = {}


def counters(count: int, stream: int) -> Operand:
    """`count` int32 for launches on `stream` by which blocks meet: zero at first, and every kernel leaves them zero.

    Memory of its own beside `workspace`, which nobody leaves in order. May be called while a stream is captured.
    """
    if emulated is not None:
        return emulated.counters(count)
    key = (current_device(), stream)
    blocks = _counters.setdefault(key, [])
    if not blocks or blocks[-1][1] < count:
        room = max(count, 1024)
        blocks.append((guard(lambda: driver.allocate_zeroed(4 * room), "counters"), room))
    return Operand(blocks[-1][0], "*i32")


on_release: list[Callable[[], None]] = []  # whoever keeps launches that point to scratch memory forgets them here


def release_workspaces() -> None:
    """Free all scratch memory. CUDA graphs captured before must not be replayed any more."""
    synchronize("release workspaces")
    for forget in on_release:
        forget()
    for pointer, _ in [block for blocks in _counters.values() for block in blocks]:
        guard(lambda pointer=pointer: driver.free(pointer), "release workspaces")
    _counters.clear()
    _workspaces.clear()


_tables: dict[tuple, Operand] = {}


def pointer_table(handles: list[Any]) -> Operand:
    """A device table of pointers (a tuple of arrays in the simulator), kept so that a captured graph can use it."""
    if SIMULATED:
        return Operand(tuple(handles), "**")
    key = (current_device(), *handles)
    found = _tables.get(key)
    if found is None:
        memory = guard(lambda: cuda.to_device(np.array(handles, dtype=np.int64)), "pointer table")
        found = _tables[key] = _Table(memory.__cuda_array_interface__["data"][0], "**", memory)
    return found


@dataclass(frozen=True)
class _Table(Operand):
    memory: Any = None


def signature(words: tuple[str, ...]) -> Any:
    """``void(...)`` in Numba's types for a tuple of argument words."""
    from numba import types

    scalars = {
        "tmap": types.int64,  # in name: see `assemble`
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
