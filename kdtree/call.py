"""One call of a public function: which arrays came, where they live, which backend runs, how results go back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtree import arrays, checks
from kdtree.arrays import View

BACKENDS = ("auto", "ref", "numba", "native")


class Call:
    """Arrays and backend of one call.

    Args:
        inputs: argument name -> array.
        optional: names of arguments that may be None, which means not given.
        backend: one of BACKENDS. "auto" is the kernels for device arrays and the reference for host arrays.
        stream: see `arrays.stream_handle`.

    Raises TypeError / ValueError for things that are no arrays, for arrays on several devices, for a backend
    that is not in BACKENDS; BackendUnavailable for one that cannot run here.
    """

    def __init__(self, inputs: dict[str, Any], *, backend: str, stream: Any, optional: tuple[str, ...] = ()):
        checks.choice(backend, "backend", BACKENDS)
        self.views = {n: arrays.view(a, n) for n, a in inputs.items() if a is not None or n not in optional}
        checks.same_device(self.views)
        self.lead: View = next(iter(self.views.values()))
        if backend == "native":
            from kdtree import native

            native.require()
        self.backend = ("numba" if self.lead.on_gpu else "ref") if backend == "auto" else backend
        if self.backend == "numba" and self.lead.on_gpu:
            self._check_current_device()
        self.stream = arrays.stream_handle(stream, self.lead)
        self._seen = {id(v.obj): v for v in self.views.values()}
        self._staged: list[Callable[[], None]] = []
        self._keep: list[Any] = []

    def _check_current_device(self) -> None:
        """ValueError unless the arrays lie on the current device, where the kernels are loaded and launched."""
        from kdtree._cuda import SIMULATED
        from kdtree.kernels.launch import current_device

        if not SIMULATED and self.lead.device != f"cuda:{current_device()}":
            raise ValueError(
                f"{next(iter(self.views))}: got an array on {self.lead.device}, expected one on the current device "
                f"cuda:{current_device()}; make its device current around the call"
            )

    def given(self, name: str) -> bool:
        """Was this optional argument given?"""
        return name in self.views

    def host(self, name: str) -> np.ndarray:
        """The argument as a NumPy array."""
        return arrays.to_numpy(self.views[name].obj)

    def outputs(self, out: dict[str, Any] | None, wanted: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
        """The output arrays by name: those of `out` after a check, or new ones of the inputs' kind.

        `wanted` maps a name to (dtype, shape).
        """
        if out is None:
            return {n: arrays.empty(shape, dtype, self.lead) for n, (dtype, shape) in wanted.items()}
        for name, (dtype, shape) in wanted.items():
            v = self._seen[id(out[name])] = arrays.view(out[name], f"out.{name}")
            checks.array(v, f"out.{name}", (dtype,) if name != "visibility" else (dtype, "int32"), shape)
            checks.writable(v, f"out.{name}")
            checks.same_device({next(iter(self.views)): self.lead, f"out.{name}": v})
        checks.apart({f"out.{name}": self._seen[id(out[name])] for name in wanted})
        return out

    def store(self, outs: dict[str, Any], values: dict[str, np.ndarray]) -> None:
        """Write a reference's results into the output arrays."""
        for name, target in outs.items():
            arrays.copy_into(target, values[name], name)

    def operand(self, array: Any, *, writes: bool = False, word: str | None = None, source: str = "") -> Any:
        """`array` as a kernel argument. Host arrays are staged on the GPU where there is one.

        `word` overrides the element type that the kernel sees (rows moved as 32-bit words). `source` is the argument's
        name, for calls that are recorded.
        """
        from kdtree._cuda import SIMULATED, cuda
        from kdtree.kernels.launch import Operand, word_of

        v = self._seen.get(id(array)) or arrays.view(array, "array")
        word = word or word_of(v.dtype)
        if v.on_gpu:
            return Operand(v.ptr, word, source)
        flat = arrays.to_numpy(v.obj).reshape(-1).view(_UNITS[word])
        if SIMULATED:
            # The simulator copies every array back, also one that the kernel only reads.
            return Operand(flat if writes or flat.flags.writeable else flat.copy(), word)
        staged = cuda.to_device(flat) if flat.size else cuda.device_array(1, flat.dtype)
        if writes:
            self._staged.append(lambda: staged.copy_to_host(flat) if flat.size else None)
        self._keep.append(staged)
        return Operand(staged.__cuda_array_interface__["data"][0], word)

    def operands(self, *names: str) -> dict[str, Any]:
        """Arguments by name; an argument that was not given becomes an empty int32 array."""
        return {n: self.operand(self.views[n].obj, source=n) if self.given(n) else self.nothing() for n in names}

    def nothing(self) -> Any:
        """An operand that the kernel does not read."""
        from kdtree._cuda import SIMULATED
        from kdtree.kernels.launch import Operand

        return Operand(np.zeros(0, dtype=np.int32) if SIMULATED else 0, "*i32")

    def finish(self) -> None:
        """Copy staged results back to the host. Without staging nothing is waited for."""
        if self._staged:
            from kdtree.kernels import launch

            launch.synchronize("copy results to the host")
            for copy in self._staged:
                copy()


_UNITS = {
    "*u16": np.uint16,
    "*f32": np.float32,
    "*f64": np.float64,
    "*i32": np.int32,
    "*u32": np.uint32,
    "*i64": np.int64,
}
