"""The parameters of one launch, laid out once: a buffer that the driver reads, and pointers to each parameter in it."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from kdtree.kernels import driver

# Argument word -> format of `struct` and bytes. A pointer has any word that begins with a star.
_FORMATS = {"i32": "i", "u32": "I", "f32": "f", "i64": "q", "f64": "d", "tmap": "128s"}
POINTER = "Q"


def format_of(word: str) -> str:
    """Format of one argument in the buffer."""
    return POINTER if word.startswith("*") else _FORMATS[word]


class Launch:
    """One kernel on one grid and stream, with a parameter buffer of its own.

    Args:
        function: handle of the loaded function.
        name: of the kernel, for errors.
        words: the kernel's argument words.
        config: see `driver.launch_config`.

    `lock` is held by whoever fills the buffer, until the launch is done. ``call(*given)`` launches and returns the
    driver's status.
    """

    def __init__(self, function: int, name: str, words: tuple[str, ...], config: driver.LaunchConfig):
        self.name = name
        self.lock = threading.Lock()
        self.offsets, layout, size = [], "<", 0
        for word in words:
            width = struct.calcsize("<" + format_of(word))
            gap = -size % min(width, 8)
            self.offsets.append(size + gap)
            layout += f"{gap}x" * bool(gap) + format_of(word)
            size += gap + width
        self.buffer = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(self.buffer)
        self._places = (ctypes.c_void_p * max(len(words), 1))(*[base + offset for offset in self.offsets])
        self._pack = struct.Struct(layout).pack_into
        self._config = config  # the driver reads it at each launch
        self.call = driver.load().cuLaunchKernelEx
        self.given = (ctypes.byref(config), ctypes.c_void_p(function), self._places, None)

    def fill(self, values: tuple[Any, ...]) -> None:
        """Write all parameters, in the kernel's order."""
        self._pack(self.buffer, 0, *values)

    def point(self, index: int, address: int) -> None:
        """From now on parameter `index` is read from `address` on the host."""
        self._places[index] = address

    def go(self) -> None:
        """Launch. Raises DriverError."""
        status = self.call(*self.given)
        if status:
            driver.check(status, self.name)
