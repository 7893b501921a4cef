"""PTX text as a program: registers, basic blocks, instructions. What is understood is what our kernels compile to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

DTYPES = {
    "pred": "bool", "b8": "uint8", "u8": "uint8", "s8": "int8", "b16": "uint16", "u16": "uint16", "s16": "int16",
    "b32": "uint32", "u32": "uint32", "s32": "int32", "f32": "float32", "b64": "uint64", "u64": "uint64",
    "s64": "int64", "f64": "float64",
}  # fmt: skip
STORED = {"s16": "b16", "u16": "b16", "s32": "b32", "u32": "b32", "s64": "b64", "u64": "b64"}  # how a register is kept

# Instructions that a warp executes together, or that wait: each begins a basic block of its own, where lanes meet.
TOGETHER = ("shfl.", "vote.", "elect.", "bar.", "barrier.", "ldmatrix.", "stmatrix.", "mma.", "wgmma.", "setmaxnreg.")
WAITS = ("bar.", "barrier.", "mbarrier.try_wait", "ld.acquire", "wgmma.wait_group", "cp.async.bulk.wait_group")

_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)")
_RANGE = re.compile(r"(%\w+)<(\d+)>")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_TOKEN = re.compile(r"[{}\[\]]|[^,{}\[\]]+")


@dataclass
class Instruction:
    """`op` without operands, e.g. ``ld.shared.v4.b32``; operands as nested lists: braces and brackets make a list."""

    op: str
    operands: list
    guard: str = ""  # the register of its predicate
    negated: bool = False
    line: int = 0
    text: str = ""

    @property
    def parts(self) -> list[str]:
        """The opcode at its dots."""
        return self.op.split(".")


@dataclass
class Program:
    """One entry of a PTX module."""

    name: str
    parameters: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of a parameter
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # -> number of the block
    shared: dict[str, int] = field(default_factory=dict)  # symbol -> offset in shared memory
    static_shared: int = 0


def _operands(text: str) -> list:
    """``{a, b}, [c+4]`` -> [["a", "b"], ["c+4"]]; brackets nest."""
    stack: list[list] = [[]]
    for token in _TOKEN.findall(text):
        token = token.strip()
        if token in ("{", "["):
            stack[-1].append([])
            stack.append(stack[-1][-1])
        elif token in ("}", "]"):
            stack.pop()
        elif token:
            stack[-1].append(token)
    return stack[0]


def _statements(body: str, first_line: int) -> list[tuple[int, str]]:
    """(line, statement) of the body; an opening or closing scope is a statement of its own."""
    found, line, start = [], first_line, 0
    text = re.sub(r"//[^\n]*", "", body)
    current, depth = "", 0  # depth: of braces within an instruction
    for char in text:
        if char == "\n":
            line += 1
            if current.strip().endswith(":"):
                found.append((line, current.strip()))
                current = ""
                continue
        if char == "{" and not current.strip():
            found.append((line, "{"))
        elif char == "}" and depth == 0:
            found.append((line, "}"))
            current = ""
        elif char == ";" and depth == 0:
            if current.strip():
                found.append((start or line, current.strip()))
            current, start = "", 0
        else:
            depth += {"{": 1, "}": -1}.get(char, 0)
            if not current.strip() and char.strip():
                start = line
            current += char
    return found


class Unsupported(ValueError):
    """PTX that the emulator does not know."""


def parse(text: str, entry: str) -> Program:
    """The entry `entry` of a PTX module. Raises Unsupported for what is not understood, with its line."""
    program = Program(entry)
    at = text.index(f".entry {entry}(")
    head, _, rest = text[at:].partition("\n{")
    for size, name, count in re.findall(r"\.param (?:\.align \d+ )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?", head):
        program.parameters.append(name)
        program.sizes[name] = int(count) if count else int(size[1:]) // 8
    _shared(text, program)
    body = rest[: _end(rest)]
    scopes: list[dict[str, str]] = [{}]
    fresh = 0
    block: list[Instruction] = []
    program.blocks.append(block)

    def new_block() -> list[Instruction]:
        if program.blocks[-1]:
            program.blocks.append([])
        return program.blocks[-1]

    for line, statement in _statements(body, text[: at + len(head)].count("\n") + 1):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            block = new_block()
            program.labels[statement[:-1].strip()] = len(program.blocks) - 1
        elif statement.startswith(".reg"):
            kind, names = _REGISTERS.match(statement).groups()
            for name in names.split(","):
                many = _RANGE.fullmatch(name.strip())
                if many:
                    for i in range(int(many.group(2))):
                        program.registers[f"{many.group(1)}{i}"] = kind
                else:
                    fresh += 1
                    inner = f"%{name.strip().lstrip('%')}@{fresh}"
                    scopes[-1][name.strip()] = inner
                    program.registers[inner] = kind
        elif statement.startswith("."):
            continue  # .loc, .pragma
        else:
            instruction = _instruction(statement, scopes, line)
            alone = instruction.op.startswith((*TOGETHER, *WAITS))
            if alone:
                block = new_block()
            block.append(instruction)
            if alone or instruction.op.split(".")[0] in ("bra", "ret", "exit"):
                block = new_block()
    return program


def _end(rest: str) -> int:
    depth = 1
    for i, char in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            return i
    raise Unsupported("the entry does not end")


def _shared(text: str, program: Program) -> None:
    offset = 0
    for extern, align, kind, name, count in re.findall(
        r"(\.extern )?\.shared (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d*)\])?;", text
    ):
        if not extern:
            offset = -(-offset // int(align or 1)) * int(align or 1)
            program.shared[name] = offset
            offset += int(count or 1) * (int(kind[1:]) // 8)
    offset = -(-offset // 16) * 16
    for name in re.findall(r"\.extern \.shared [^;]*?([\w$]+)\[\];", text):
        program.shared[name] = offset
    program.static_shared = offset


def _instruction(statement: str, scopes: list[dict[str, str]], line: int) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement)
    if match is None:
        raise Unsupported(f"line {line}: {statement}")
    negated, guard, op, text = match.groups()
    names = {name: inner for scope in scopes for name, inner in scope.items()}

    def named(operand: object) -> object:
        if isinstance(operand, list):
            return [named(o) for o in operand]
        if "|" in operand:
            return "|".join(names.get(p, p) for p in operand.split("|"))
        return names.get(operand, operand)

    return Instruction(
        op, named(_operands(text)), names.get(guard, guard) if guard else "", bool(negated), line, statement
    )
