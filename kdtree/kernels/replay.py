"""The launches of one call, to be made again on other arrays of the same shapes: see `kdtree.recorded`."""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from kdtree.kernels import driver, launch, tensor_map
from kdtree.kernels.parameters import POINTER


class Replay:
    """The launches of one call.

    Args:
        steps: what was launched, see `launch.recorded`.
        arrays: name -> torch tensor of the call.
        aligned: names whose pointers must be multiples of 16.
        apart: names of two outputs, which must not overlap.
        made_by: (module, name of a kernel factory in it); with another factory in its place nothing is repeated.

    Raises ValueError if a launch uses an array's memory without saying which array it is: it cannot be repeated on
    another one.
    """

    def __init__(
        self,
        steps: list[Any],
        arrays: dict[str, Any],
        *,
        aligned: tuple[str, ...],
        apart: tuple[str, str],
        made_by: tuple[Any, str],
    ):
        names = list(arrays)
        self._same = same_as(list(arrays.values()))
        self._current_device = sys.modules["torch"]._C._cuda_getDevice
        self._device = next(iter(arrays.values())).get_device()
        self._aligned = tuple(names.index(n) for n in aligned)
        self._apart = tuple((names.index(n), _nbytes(arrays[n])) for n in apart)
        self._module, self._factory_name = made_by
        self._factory = getattr(*made_by)
        self._lock = threading.Lock()
        self._block = ctypes.create_string_buffer(8 * len(names))
        self._pack = struct.Struct(f"<{len(names)}{POINTER}").pack_into
        self._maps: list[_Map] = []
        self._launches = []
        spans = [(a.data_ptr(), a.data_ptr() + _nbytes(a)) for a in arrays.values()]
        for step in steps:
            one = step.kernel.prepare(step.grid, launch.words_of(step.args), step.stream)
            one.fill(launch.values_of(step.args))
            for index, arg in enumerate(step.args):
                operand = arg.operand if isinstance(arg, launch.TensorMap) else arg
                if isinstance(operand, tuple):
                    continue
                if not operand.source:
                    if any(start <= operand.handle < end for start, end in spans):
                        raise ValueError(f"{step.kernel.name}: argument {index} lies in an array that it does not name")
                elif isinstance(arg, launch.TensorMap):
                    self._maps.append(_Map(one, index, names.index(operand.source), arg))
                else:
                    one.point(index, ctypes.addressof(self._block) + 8 * names.index(operand.source))
            self._launches.append(one)
        self._calls = [(one.call, one.given) for one in self._launches]

    def repeats(self, tensors: tuple[Any, ...]) -> bool:
        """Launch on `tensors`, which come in the order of `arrays`. False, and nothing done, if they are others.

        Raises CudaFault.
        """
        if not self._same(*tensors) or getattr(self._module, self._factory_name) is not self._factory:
            return False
        pointers = [t.data_ptr() for t in tensors]
        for index in self._aligned:
            if pointers[index] & 15:
                return False
        (first, length), (second, width) = self._apart
        if pointers[first] < pointers[second] + width and pointers[second] < pointers[first] + length:
            return False
        if self._current_device() != self._device:
            return False
        self(pointers)
        return True

    def __call__(self, pointers: list[int]) -> None:
        """Launch on `pointers`, one an array in the order of `arrays`. Raises CudaFault."""
        if launch._fault is not None:
            launch.refuse(self._launches[0].name)
        with self._lock:
            self._pack(self._block, 0, *pointers)
            for one in self._maps:
                if one.pointer != pointers[one.source]:
                    one.encode(pointers[one.source])
            for call, given in self._calls:
                status = call(*given)
                if status in driver.NO_CONTEXT:  # a thread that has not met CUDA yet
                    launch.current_device()
                    status = call(*given)
                if status:
                    self._failed(status)

    def _failed(self, status: int) -> None:
        name = self._launches[0].name
        try:
            driver.check(status, name)
        except driver.DriverError as error:
            raise launch.set_fault(name, error) from error


class _Map:
    """A tensor map among the parameters of a launch, and the pointer that it was made for."""

    def __init__(self, one: Any, index: int, source: int, like: Any):
        self._buffer, self._at = one.buffer, one.offsets[index]
        self._like = like
        self.source = source
        self.pointer = like.operand.handle

    def encode(self, pointer: int) -> None:
        """Write the map of the same tensor at `pointer` into the parameters."""
        like = self._like
        self._buffer[self._at : self._at + tensor_map.BYTES] = tensor_map.encode(
            pointer, like.dtype, like.shape, like.box, like.strides
        )
        self.pointer = pointer


def _nbytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def same_as(tensors: list[Any]) -> Callable[..., bool]:
    """A function: are its arguments tensors of the shapes, strides, dtypes and device of these, one by one?

    torch has it in one call, for its compiler's guards (it may also answer False where only the mode differs, inference
    mode say). Where that is missing it is put together from what every tensor tells.
    """
    try:
        made = sys.modules["torch"]._C._dynamo.guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        if made.check(*tensors):
            return made.check
    except (AttributeError, TypeError, RuntimeError):
        pass
    wanted = [_described(t) for t in tensors]
    return lambda *given: [_described(t) for t in given] == wanted


def _described(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), tensor.size(), tensor.stride(), tensor.dtype, tensor.device
