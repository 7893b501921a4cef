"""A parsed program as Python: one function a basic block, over all 32 lanes at once.

Each block is compiled twice, for a warp whose lanes are all here and for one of which some are elsewhere (``M`` is the
mask). A function returns None to go on with the next block, a bool array where a conditional branch is taken, or True.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree.emulator import arithmetic
from kdtree.emulator.arithmetic import LANES, expression, stored
from kdtree.emulator.memory import SHARED_BASE
from kdtree.emulator.program import DTYPES, TOGETHER, Instruction, Program, Unsupported

_NOTHING = ("bar.warp.sync", "wgmma.fence.sync.aligned")
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid|laneid|warpid|clock|cluster_ctarank|cluster_ctaid|smid|globaltimer)")


@dataclass
class Block:
    """A basic block as functions (warp, registers, mask); `target` is where a branch goes."""

    full: Any
    partial: Any
    target: int = -1
    ends: bool = False
    together: bool = False
    line: int = 0


class Compiler:
    """Turns instructions into source. Constants are arrays of 32, shared by name."""

    def __init__(self, program: Program):
        self.program = program
        self.index = {name: i for i, name in enumerate(program.registers)}
        self.constants: dict[str, np.ndarray] = {}
        self.parameters = {name: i for i, name in enumerate(program.parameters)}

    def register(self, name: str) -> int:
        """Number of a register."""
        if name not in self.index:
            raise Unsupported(f"register {name}")
        return self.index[name]

    def value(self, operand: str, kind: str) -> str:
        """Source of an operand as an array of a PTX type."""
        dtype = DTYPES[kind]
        if operand in self.index:
            kept = DTYPES[stored(self.program.registers[operand])]
            source = f"R[{self.index[operand]}]"
            if kept == dtype:
                return source
            if np.dtype(kept).itemsize < np.dtype(dtype).itemsize:
                raise Unsupported(f"{operand} as {kind}")
            if np.dtype(kept).itemsize > np.dtype(dtype).itemsize:
                return f"{source}.astype(np.{dtype})"
            return f"{source}.view(np.{dtype})"
        if _SPECIAL.match(operand):
            return f"w.special[{operand!r}].astype(np.{dtype})"
        if operand in self.parameters:
            return f"w.block.parameter_addresses[{self.parameters[operand]}]"
        if operand in self.program.shared:
            return self.constant(SHARED_BASE + self.program.shared[operand], dtype)
        return self.constant(self.number(operand), dtype)

    def number(self, text: str) -> Any:
        """An immediate."""
        if text.startswith("0f"):
            return struct.unpack(">f", bytes.fromhex(text[2:]))[0]
        if text.startswith("0d"):
            return struct.unpack(">d", bytes.fromhex(text[2:]))[0]
        try:
            return int(text, 0)
        except ValueError:
            raise Unsupported(f"operand {text}") from None

    def constant(self, number: Any, dtype: str) -> str:
        """Name of an array of 32 times a number."""
        if dtype == "bool":
            made = np.full(LANES, bool(number))
        elif np.dtype(dtype).kind in "ui":
            bits = np.dtype(dtype).itemsize * 8
            made = np.full(LANES, number & ((1 << bits) - 1), dtype=f"uint{bits}").view(dtype)
        else:
            made = np.full(LANES, number, dtype=dtype)
        made.setflags(write=False)
        name = "K" + re.sub(r"\W", "_", f"{dtype}_{made.view(np.uint8).tobytes()[: made.itemsize].hex()}")
        self.constants[name] = made
        return name

    def address(self, operand: list, kind: str) -> str:
        """Source of ``[register+offset]``."""
        text = "".join(operand) if all(isinstance(o, str) for o in operand) else operand[0]
        base, sign, offset = re.match(r"([%\w$@]+)\s*([+-]?)\s*(\w*)", text).groups()
        source = self.value(base, kind)
        if offset:
            extra = int(offset, 0) * (-1 if sign == "-" else 1)
            source = f"({source} + {self.constant(extra, DTYPES[kind])})"
        return source

    # ---- one instruction

    def lines(self, instruction: Instruction, masked: bool) -> list[str]:
        """Python source of one instruction; a `masked` one leaves the other lanes alone."""
        mask = "M" if masked else "None"
        before = []
        if instruction.guard:
            guard = self.value(instruction.guard, "pred")
            before = [f"G = {'~' if instruction.negated else ''}{guard}" + (" & M" if masked else "")]
            mask, masked = "G", True
        pure = expression(instruction, self.value)
        if pure is not None:
            source, kind = pure
            return [*before, self.assign(instruction.operands[0], source, kind, mask if masked else None)]
        return [*before, *self.special(instruction, mask)]

    def assign(self, register: str, source: str, kind: str, mask: str | None) -> str:
        """``R[i] = …``, in the type the register is kept in."""
        i = self.register(register)
        kept = stored(self.program.registers[register])
        if DTYPES[kept] != DTYPES[kind]:
            if np.dtype(DTYPES[kept]).itemsize != np.dtype(DTYPES[kind]).itemsize:
                source = f"({source}).astype(np.{DTYPES[kept]})"  # e.g. a 16-bit load into a 32-bit register
            else:
                source = f"({source}).view(np.{DTYPES[kept]})"
        return f"R[{i}] = {source}" if mask is None else f"R[{i}] = np.where({mask}, {source}, R[{i}])"

    def targets(self, operands: list) -> str:
        """Tuple of register numbers."""
        return "(" + "".join(f"{self.register(o)}, " for o in operands) + ")"

    def values(self, operands: list, kind: str) -> str:
        """Tuple of operands."""
        return "(" + "".join(f"{self.value(o, kind)}, " for o in operands) + ")"

    def special(self, instruction: Instruction, mask: str) -> list[str]:
        """Instructions with effects: calls of the warp's methods."""
        op, parts, ops, line = instruction.op, instruction.parts, instruction.operands, instruction.line
        name, kind = parts[0], parts[-1]
        rest = f"{mask}, {line}"
        if name == "ld" and "param" in parts:
            return [f"R[{self.register(ops[0])}] = w.block.parameters[{self.parameters[ops[1][0]]}]"]
        if name in ("ld", "st") and ({"shared", "shared::cta", "shared::cluster", "global"} & set(parts)):
            shared = "global" not in parts
            data = ops[0] if name == "ld" else ops[1]
            data = data if isinstance(data, list) else [data]
            where = self.address(ops[1] if name == "ld" else ops[0], "u32" if shared else "u64")
            space, bytes_ = ("shared" if shared else "global"), arithmetic.width(kind) // 8
            if "shared::cluster" in parts:
                rest += ", window=True"
            if name == "ld":
                return [f"w.load_{space}({self.targets(data)}, {where}, {bytes_}, {rest})"]
            return [f"w.store_{space}({self.values(data, stored(kind))}, {where}, {bytes_}, {rest})"]
        if name == "mov" and isinstance(ops[0], list):  # a register in halves
            source = self.value(ops[1], "u32")
            return [f"{self.assign(r, f'({source} >> np.uint32({16 * i})).astype(np.uint16)', 'u16', None)}"
                    for i, r in enumerate(ops[0])]  # fmt: skip
        if name == "atom":
            where = self.address(ops[1], "u64")
            return [f"w.atomic({self.targets(ops[:1])}, {where}, {self.value(ops[2], 'u32')}, {parts[1]!r}, {rest})"]
        if name == "shfl":
            return [
                f"w.shuffle({self.register(ops[0].split('|')[0])}, {parts[2]!r}, {self.value(ops[1], 'b32')}, "
                f"{self.value(ops[2], 'u32')}, {rest})"
            ]
        if name == "vote":
            return [f"w.vote({self.register(ops[0])}, {parts[2]!r}, {self.value(ops[1], 'pred')}, {rest})"]
        if name == "elect":
            return [f"w.elect({self.register(ops[0].split('|')[1])}, {rest})"]
        if op in ("bar.sync", "bar.arrive", "barrier.sync"):
            count = self.value(ops[1], "u32") if len(ops) > 1 else "w.block.all_threads"
            return [f"w.barrier({self.value(ops[0], 'u32')}, {count}, {op != 'bar.arrive'}, {rest})"]
        if name == "mapa":
            address, rank = self.value(ops[1], "u32"), self.value(ops[2], "u32")
            return [f"w.map_shared({self.register(ops[0])}, {address}, {rank}, {rest})"]
        if op.startswith("barrier.cluster"):
            how = "_relaxed" if "relaxed" in parts else ""
            return [f"w.cluster_{parts[2]}{how}({rest})"]
        if name == "mbarrier":
            return self.mbarrier(parts, ops, rest)
        if op.startswith("fence.proxy.async"):
            return [f"w.fence_proxy({rest})"]
        if name in ("fence", "membar", "nanosleep", "setmaxnreg") or "prefetch" in parts or op in _NOTHING:
            return ["pass"]  # where lanes have to meet, they have
        if name == "ldmatrix":
            where = self.address(ops[1], "u32")
            return [f"w.load_matrix({self.targets(ops[0])}, {where}, {'trans' in parts}, {rest})"]
        if name == "stmatrix":
            return [f"w.store_matrix({self.address(ops[0], 'u32')}, {self.values(ops[1], 'b32')}, {rest})"]
        if name == "mma":
            d, a, b, c = ops
            return [
                f"w.mma({self.targets(d)}, {self.values(a, 'b32')}, {self.values(b, 'b32')}, {self.values(c, 'f32')}, "
                f"{parts[-2]!r}, {rest})"
            ]
        if name == "wgmma":
            return self.wgmma(parts, ops, rest)
        if name == "cp":
            return self.copy(op, parts, ops, rest)
        raise Unsupported(f"line {line}: {instruction.text}")

    def mbarrier(self, parts: list[str], ops: list, rest: str) -> list[str]:
        """mbarrier.*"""
        if parts[1] == "init":
            return [f"w.mbarrier_init({self.address(ops[0], 'u32')}, {self.value(ops[1], 'u32')}, {rest})"]
        if parts[1] == "arrive":
            extra = self.value(ops[2], "u32") if "expect_tx" in parts else "None"
            return [f"w.mbarrier_arrive({self.address(ops[1], 'u32')}, {extra}, {rest})"]
        if parts[1] == "try_wait":
            where = self.address(ops[1], "u32")
            return [f"w.mbarrier_try_wait({self.register(ops[0])}, {where}, {self.value(ops[2], 'u32')}, {rest})"]
        raise Unsupported(".".join(parts))

    def wgmma(self, parts: list[str], ops: list, rest: str) -> list[str]:
        """wgmma.*"""
        if parts[1] == "commit_group":
            return [f"w.wgmma_commit({rest})"]
        if parts[1] == "wait_group":
            return [f"w.wgmma_wait({int(ops[0])}, {rest})"]
        shape = next(p for p in parts if p.startswith("m64"))
        n = int(re.match(r"m64n(\d+)k16", shape).group(1))
        in_registers = isinstance(ops[1], list)
        a = self.values(ops[1], "b32") if in_registers else self.value(ops[1], "u64")
        b, adds, tail = self.value(ops[2], "u64"), self.value(ops[3], "pred"), [int(o) for o in ops[4:]]
        scales, majors = tail[:2], tail[2:]
        if scales != [1, 1] or (not in_registers and majors[0] != 0):
            raise Unsupported("wgmma with a scale or a transposed A")
        return [f"w.wgmma({self.targets(ops[0])}, {a}, {b}, {adds}, {n}, {parts[-1]!r}, {bool(majors[-1])}, {rest})"]

    def copy(self, op: str, parts: list[str], ops: list, rest: str) -> list[str]:
        """cp.async, by threads and in bulk."""
        if op.startswith("cp.async.bulk.shared::cluster.shared::cta"):
            to, of, barrier = (self.address(ops[i], "u32") for i in (0, 1, 3))
            return [f"w.bulk_send({to}, {of}, {self.value(ops[2], 'u32')}, {barrier}, {rest})"]
        if op.startswith("cp.async.bulk.tensor"):
            if parts[5] == "global":  # a store
                (name, coordinates), source = ops[0], ops[1]
                return [
                    f"w.bulk_store({self.value(name, 'u64')}, {self.values(coordinates, 'b32')}, "
                    f"{self.address(source, 'u32')}, {rest})"
                ]
            name, coordinates = ops[1]
            return [
                f"w.bulk_load({self.address(ops[0], 'u32')}, {self.value(name, 'u64')}, "
                f"{self.values(coordinates, 'b32')}, {self.address(ops[2], 'u32')}, {rest})"
            ]
        if op.startswith("cp.async.bulk.commit"):
            return [f"w.bulk_commit({rest})"]
        if op.startswith("cp.async.bulk.wait_group"):
            return [f"w.bulk_wait({int(ops[0])}, {rest})"]
        if op.startswith("cp.async.commit"):
            return ["w.copy_commit()"]
        if op.startswith("cp.async.wait_group"):
            return [f"w.copy_wait({int(ops[0])}, {rest})"]
        if op.startswith("cp.async.cg") or op.startswith("cp.async.ca"):
            real = self.value(ops[3], "u32") if len(ops) > 3 else self.constant(int(ops[2]), "uint32")
            to, of = self.address(ops[0], "u32"), self.address(ops[1], "u64")
            return [f"w.copy({to}, {of}, {int(ops[2])}, {real}, {rest})"]
        raise Unsupported(op)

    # ---- blocks

    def blocks(self) -> list[Block]:
        """All basic blocks, compiled."""
        made, source = [], ["def build():"]
        for number, block in enumerate(self.program.blocks):
            last = block[-1] if block else None
            jump = last if last is not None and last.op.split(".")[0] in ("bra", "ret", "exit") else None
            for masked in (False, True):
                source.append(f"    def b{number}_{int(masked)}(w, R, M):")
                for instruction in block:
                    if instruction is jump:
                        continue
                    source += [f"        {line}" for line in self.lines(instruction, masked)]
                if jump is None:
                    source.append("        return None")
                elif jump.guard:
                    guard = self.value(jump.guard, "pred")
                    source.append(f"        return {'~' if jump.negated else ''}{guard}")
                else:
                    source.append("        return True")
            target = self.program.labels[jump.operands[0]] if jump and jump.op.startswith("bra") else -1
            made.append((target, jump is not None and target < 0, block[0].line if block else 0,
                         bool(block) and block[0].op.startswith(TOGETHER)))  # fmt: skip
        numbers = ", ".join(f"(b{i}_0, b{i}_1)" for i in range(len(made)))
        source.append(f"    return [{numbers}]")
        scope: dict[str, Any] = {"np": np, **vars(arithmetic), **self.constants}
        exec(compile("\n".join(source), f"<{self.program.name[:40]}>", "exec"), scope)
        return [
            Block(full, partial, target, ends, together, line)
            for (full, partial), (target, ends, line, together) in zip(scope["build"](), made, strict=True)
        ]
