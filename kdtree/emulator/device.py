"""A GPU on which `launch.Kernel`s run by emulation. Needs a process without the simulator (KDTREE_CROSS_COMPILE=1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from kdtree.arrays import ITEM_SIZE
from kdtree.emulator.machine import Machine
from kdtree.emulator.memory import Global
from kdtree.emulator.program import Program, parse
from kdtree.emulator.tensor import Map
from kdtree.kernels import assemble, launch
from kdtree.kernels.crosscompile import EMULATED, TARGETS, stand_in

TARGET = TARGETS[EMULATED]

_programs: dict[tuple, Program] = {}


def program_of(kernel: launch.Kernel, words: tuple[str, ...]) -> Program:
    """A kernel's PTX, parsed; compiled by Numba unless an earlier process has."""
    key = (id(kernel), words)
    if key not in _programs:
        stand_in(TARGET)
        text, entry = assemble.kept_ptx(kernel, words, TARGET)
        _programs[key] = parse(text, entry)
    return _programs[key]


class Device:
    """A GPU with `sms` multiprocessors, at most so many blocks at once; `seed` fixes the order in which things happen.

    While `installed`, launches of this process come here. Pointers are those of `pointer`.
    """

    capability = TARGET[:2]

    def __init__(self, sms: int, *, seed: int = 0):
        self.sms, self.seed = sms, seed
        self.memory = Global()
        self.counted: np.ndarray | None = None

    def pointer(self, array: np.ndarray) -> launch.Operand:
        """A C-contiguous array as an argument: the kernel reads and writes its memory."""
        return launch.Operand(self.memory.add(array), launch.word_of(str(array.dtype)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take this process's launches, workspaces and counters."""
        before, launch.emulated = launch.emulated, self
        try:
            yield
        finally:
            launch.emulated = before

    # ---- what `launch` asks of it

    def launch(self, kernel: launch.Kernel, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Run a launch to its end. Raises what `machine` finds."""
        machine = Machine(
            program_of(kernel, launch.words_of(args)),
            threads=kernel.threads,
            dynamic_shared=kernel.dynamic_shared,
            cluster=kernel.cluster,
            memory=self.memory,
            seed=self.seed,
        )
        if kernel.cooperative and prod(grid) > self.sms:
            raise RuntimeError(f"{kernel.name}: a cooperative launch of {prod(grid)} blocks on {self.sms} SMs")
        machine.launch(grid, [_value(a) for a in args])

    def workspace(self, nbytes: int) -> Any:
        """Scratch memory, full of NaN."""
        return _Scratch(self.memory.add(np.full(nbytes // 4 + 1, np.nan, np.float32)))

    def counters(self, count: int) -> launch.Operand:
        """Counters, zero."""
        self.counted = np.zeros(count, np.int32)
        return self.pointer(self.counted)


class _Scratch:
    """What `launch.workspace` returns."""

    def __init__(self, address: int):
        self.address = address

    def part(self, word: str, offset: int, count: int) -> launch.Operand:
        """`count` elements from byte `offset` on."""
        return launch.Operand(self.address + offset, word)


def _value(argument: Any) -> Any:
    if isinstance(argument, launch.TensorMap):
        shape = argument.shape
        strides = argument.strides or tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        return Map(argument.operand.handle, ITEM_SIZE[argument.dtype], shape, strides, argument.box)
    if isinstance(argument, tuple):
        word, value = argument
        return float(value) if word.startswith("f") else int(value)
    return argument.handle
