"""A kernel's way to machine code: Numba types and lowers it, NVVM makes PTX, the PTX is finished, ptxas assembles.

Numba has no type for a CUtensorMap passed by value, which is how the copy engine wants it. The kernel declares an int64
in its place; the declaration is turned into 128 bytes in the PTX. Nothing here needs a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kdtree.kernels import cubin_cache
from kdtree.kernels.toolchain import tool

TENSOR_MAP = "tmap"  # the argument word of a tensor map
_PLACEHOLDER = re.compile(r"\bkdtree_parameter_(\d+)\b")  # see `ptx.tensor_map_address`


def target_of(capability: tuple[int, int]) -> tuple:
    """The target to compile for on a device, as Numba writes it: with Hopper's own instructions on Hopper alone."""
    return (9, 0, "a") if tuple(capability) == (9, 0) else tuple(capability)


def target_name(target: tuple) -> str:
    """``sm_90a`` for ``(9, 0, "a")``."""
    return "sm_" + "".join(str(part) for part in target)


def library(kernel: Any, words: tuple[str, ...], target: tuple) -> Any:
    """Numba's code library of a `launch.Kernel`: typed and lowered once, it makes the PTX of any target."""
    from numba.cuda import compiler
    from numba.cuda.core.compiler_lock import global_compiler_lock

    from kdtree.kernels.launch import signature

    bounds = (kernel.threads, kernel.min_blocks) if kernel.min_blocks else None
    # What `cuda.compile` does, but with the library kept.
    with global_compiler_lock:
        found, _ = compiler._compile_pyfunc_with_fixup(
            kernel.function,
            signature(words),
            device=False,
            abi="numba",
            cc=target,
            fastmath=kernel.fastmath,
            launch_bounds=bounds,
        )
    return found


def ptx(code: Any, kernel: Any, words: tuple[str, ...], target: tuple) -> str:
    """Finished PTX of `library`'s code for one target."""
    (text,) = code.get_asm_strs(cc=target)
    return finished(text, code._entry_name, words, kernel.max_registers, kernel.name)


def finished(text: str, entry: str, words: tuple[str, ...], max_registers: int | None, name: str) -> str:
    """PTX with the tensor maps among its parameters declared and named, and with the register limit.

    Raises ValueError where the kernel takes the address of a parameter that is none, or the PTX looks otherwise than
    Numba writes it.
    """
    for index, word in enumerate(words):
        if word == TENSOR_MAP:
            parameter = f"{entry}_param_{index}"
            declared = re.compile(rf"\.param \.u64 {re.escape(parameter)}(?=[\s,)])")
            text, count = declared.subn(lambda _, p=parameter: f".param .align 64 .b8 {p}[128]", text)
            if count != 1:
                raise ValueError(f"{name}: found {count} declarations of parameter {index} in its PTX, expected 1")

    def place(match: re.Match) -> str:
        index = int(match.group(1))
        if index >= len(words) or words[index] != TENSOR_MAP:
            word = words[index] if index < len(words) else "missing"
            raise ValueError(f"{name}: takes the address of parameter {index}, which is {word}, expected {TENSOR_MAP}")
        return f"{entry}_param_{index}"

    text = _PLACEHOLDER.sub(place, text)
    if max_registers:
        start = text.index("{", text.index(f".entry {entry}("))
        text = f"{text[:start]}.maxnreg {max_registers}\n{text[start:]}"
    return text


def machine_code(kernel: Any, words: tuple[str, ...], target: tuple) -> tuple[bytes, str]:
    """(cubin, name of the entry) of a `launch.Kernel`, compiled here or by an earlier process."""

    def compile() -> tuple[bytes, str]:
        code = library(kernel, words, target)
        return cubin(ptx(code, kernel, words, target), target, kernel.name), code._entry_name

    return cubin_cache.machine_code(kernel, words, target, compile)


def kept_ptx(kernel: Any, words: tuple[str, ...], target: tuple) -> tuple[str, str]:
    """(finished PTX, name of the entry), made here or by an earlier process."""

    def compile() -> tuple[bytes, str]:
        code = library(kernel, words, target)
        return ptx(code, kernel, words, target).encode(), code._entry_name

    text, entry = cubin_cache.machine_code(kernel, words, (*target, "ptx"), compile)
    return text.decode(), entry


def keep_ptx(kernel: Any, words: tuple[str, ...], target: tuple, text: str, entry: str) -> None:
    """Put PTX that was made otherwise where `kept_ptx` finds it."""
    cubin_cache.keep(kernel, words, (*target, "ptx"), text.encode(), entry)


def cubin(text: str, target: tuple, name: str) -> bytes:
    """Machine code of a PTX text; where there is no ptxas the text itself, which the driver assembles on loading.

    Not through nvJitLink: it makes code that other code could be linked to, for which ptxas ignores ``setmaxnreg`` and
    lets one wgmma wait for the one before. Raises ValueError with ptxas's words for PTX that cannot be assembled.
    """
    try:
        ptxas = tool("ptxas")
    except FileNotFoundError:
        return text.encode() + b"\0"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [ptxas, f"-arch={target_name(target)}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().replace(str(source), "kernel.ptx")
            raise ValueError(f"{name}: cannot be assembled for {target_name(target)}: {said}")
        return made.read_bytes()
