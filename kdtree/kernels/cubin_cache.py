"""Machine code kept between processes: Numba takes seconds for a kernel, half a minute for the largest.

A file is found by a fingerprint of everything that the code follows from: the sources of this package, the kernel's
own bytecode with all that it closes over, its options, and the versions of the compilers. What cannot be told from its
value (an open file in a kernel's closure, say) has no fingerprint, and the kernel is compiled each time.

``KDTREE_CUBIN_CACHE=0`` in the environment turns it off, to measure what compiling takes.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from kdtree.kernels.toolchain import version

FILES_KEPT = 200  # of about 100 KiB each; the oldest go first
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "numpy", "nvidia-nvvm")
_KNOWN_MODULES = ("kdtree", "numba", "numpy", "math", "operator", "llvmlite")  # sources or versions are in the key
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


count = {"read": 0, "compiled": 0}  # kernels of this process, by where their machine code came from


class NoFingerprintError(Exception):
    """A value that says nothing reliable of itself."""


def machine_code(
    kernel: Any, words: tuple[str, ...], target: tuple, compile: Callable[[], tuple[bytes, str]]
) -> tuple[bytes, str]:
    """(cubin, entry) of a `launch.Kernel` from the cache, or from `compile` into the cache."""
    path = _path(kernel, words, target)
    found = path and _read(path)
    count["read" if found else "compiled"] += 1
    if not found:
        found = compile()
        if path:
            _write(path, *found)
    return found


def keep(kernel: Any, words: tuple[str, ...], target: tuple, code: bytes, entry: str) -> None:
    """Put what was compiled otherwise where `machine_code` finds it."""
    if path := _path(kernel, words, target):
        _write(path, code, entry)


def folder() -> Path:
    """Where the files lie."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kdtree" / "cubins"


def _path(kernel: Any, words: tuple[str, ...], target: tuple) -> Path | None:
    if os.environ.get("KDTREE_CUBIN_CACHE") == "0":
        return None
    options = (kernel.name, kernel.threads, kernel.fastmath, kernel.min_blocks, kernel.max_registers)
    try:
        text = f"{_surroundings()} {options} {words} {target} {fingerprint(kernel.function)}"
        return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"
    except (NoFingerprintError, RuntimeError):  # RuntimeError: no home folder
        return None


@functools.cache
def _surroundings() -> str:
    """Sources of the package's kernels, and versions and settings of the compilers."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parent
    for path in sorted([*package.glob("*.py"), package.parent / "spec.py", package.parent / "_cuda.py"]):
        digest.update(path.name.encode() + path.read_bytes())
    options = {name: value for name, value in os.environ.items() if name.startswith("NUMBA_")}
    digest.update(repr(sorted(options.items())).encode())
    for name in _COMPILERS:
        try:
            digest.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:  # part of a CUDA toolkit, perhaps
            digest.update(f"{name} not installed".encode())
    digest.update(version("ptxas").encode())
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """A text that differs where the code compiled from `value` may. Raises NoFingerprintError where none can be had."""
    return hashlib.sha256(_text(value, ()).encode()).hexdigest()


def _text(value: Any, above: tuple[int, ...]) -> str:
    if id(value) in above:
        return "itself"
    above = (*above, id(value))

    def each(values: Any) -> str:
        return "[" + ",".join(_text(v, above) for v in values) + "]"

    root = type(value).__module__.partition(".")[0]
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return type(value).__name__ + each(value)
    if isinstance(value, set | frozenset):
        return "set [" + ",".join(sorted(_text(v, above) for v in value)) + "]"
    if isinstance(value, dict):
        return "dict" + each(value.items())
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _KNOWN_MODULES:
        return f"module {value.__name__}"
    if isinstance(value, type | BuiltinFunctionType):
        return f"name {value.__module__}.{value.__qualname__}"
    if isinstance(value, CodeType):
        names = (value.co_code, value.co_names, value.co_varnames, value.co_argcount, value.co_flags)
        return f"code {names} {each(value.co_consts)}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        seen = {n: value.__globals__[n] for n in sorted(_names(value.__code__)) if n in value.__globals__}
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, cells, seen)
        return f"function {value.__qualname__} {each(parts)}"
    if root == "numba" and hasattr(value, "py_func"):  # a device function
        return f"device {each((value.py_func, value.targetoptions))}"
    if root == "numba" and hasattr(value, "_defn"):  # an intrinsic
        return f"intrinsic {_text(value._defn, above)}"
    if root in ("numba", "llvmlite") and " at 0x" not in str(value):  # a type
        return f"{type(value).__name__} {value}"
    raise NoFingerprintError(f"{type(value).__name__} {value!r}")


def _names(code: CodeType) -> set[str]:
    """Names that the code, and what is defined in it, may read from its module."""
    return set(code.co_names).union(*[_names(c) for c in code.co_consts if isinstance(c, CodeType)])


def _read(path: Path) -> tuple[bytes, str] | None:
    """(cubin, entry) of an intact file."""
    try:
        entry, digest, code = path.read_bytes().split(b"\n", 2)
        path.touch()  # the oldest go first
    except (OSError, ValueError):
        return None
    return (code, entry.decode()) if hashlib.sha256(code).hexdigest().encode() == digest else None


def _write(path: Path, code: bytes, entry: str) -> None:
    """Keep a file; where that cannot be done, the next process compiles again."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(f"{entry}\n{hashlib.sha256(code).hexdigest()}\n".encode() + code)
        partial.replace(path)
        for old in sorted(path.parent.glob("*.cubin"), key=lambda p: p.stat().st_mtime)[:-FILES_KEPT]:
            old.unlink()
    except OSError:
        pass
