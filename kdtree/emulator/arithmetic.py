"""PTX arithmetic on 32 lanes at a time, as NumPy expressions.

`expression` writes one instruction down as Python source over arrays of 32 elements: integers wrap, floats are rounded
once (fma in float64, which rounds twice in cases that do not matter here), approximations are exact. Registers are kept
unsigned; what is signed is viewed.
"""

from __future__ import annotations

import numpy as np

from kdtree.emulator.program import DTYPES, STORED, Instruction, Unsupported

_SETP = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ROUND = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
LANES = 32


def width(kind: str) -> int:
    """Bits of a PTX type."""
    return int(kind[1:])


def shifted_left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """PTX shl: a shift by the width or more gives 0."""
    bits = a.dtype.itemsize * 8
    n = n.astype(a.dtype)
    return np.where(n < bits, a << np.minimum(n, bits - 1), a.dtype.type(0))


def shifted_right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
    """PTX shr: a shift by the width or more gives 0 or the sign."""
    bits = a.dtype.itemsize * 8
    shift = np.minimum(n, bits - 1).astype(a.dtype)
    return a >> shift if a.dtype.kind == "i" else np.where(n < bits, a >> shift, a.dtype.type(0))


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product."""
    bits = a.dtype.itemsize * 8
    return np.array([(int(x) * int(y)) >> bits for x, y in zip(a, b, strict=True)]).astype(a.dtype)


def inserted(a: np.ndarray, b: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
    """PTX bfi: the low `length` bits of a over b's from bit `at` on."""
    one = b.dtype.type(1)
    mask = shifted_left(one.repeat(LANES), length) - one
    mask = np.where(length >= b.dtype.itemsize * 8, ~b.dtype.type(0), mask)
    return (b & ~shifted_left(mask, at)) | shifted_left(a & mask, at)


def extracted(a: np.ndarray, at: np.ndarray, length: np.ndarray) -> np.ndarray:
    """PTX bfe, unsigned."""
    mask = shifted_left(a.dtype.type(1).repeat(LANES), length) - a.dtype.type(1)
    mask = np.where(length >= a.dtype.itemsize * 8, ~a.dtype.type(0), mask)
    return shifted_right(a, at) & mask


def bits_set(a: np.ndarray) -> np.ndarray:
    """PTX popc."""
    return np.bitwise_count(a).astype(np.uint32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """PTX clz."""
    bits = a.dtype.itemsize * 8
    return np.array([bits - int(x).bit_length() for x in a], dtype=np.uint32)


def rounded_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bits of bfloat16, to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def packed_bf16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16x2.f32."""
    return (rounded_bf16(high) << np.uint32(16)) | rounded_bf16(low)


def packed_f16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.f16x2.f32."""
    a, b = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low))
    return (a << np.uint32(16)) | b


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.f32."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def to_integer(x: np.ndarray, dtype: type, how: str) -> np.ndarray:
    """Float to integer: rounded as told, clamped to the range, NaN gives 0."""
    rounded = getattr(np, _ROUND[how])(x.astype(np.float64))
    info = np.iinfo(dtype)
    return np.where(np.isnan(x), 0, np.clip(rounded, float(info.min), float(info.max))).astype(dtype)


def converted(instruction: Instruction, source: str, to: str, of: str) -> str:
    """cvt."""
    parts = instruction.parts
    to_float, of_float = to[0] == "f", of[0] == "f"
    target = f"np.{DTYPES[to]}"
    if to == "f16" or of == "f16":
        if of == "f16":
            return f"{source}.view(np.float16).astype({target})"
        return f"{source}.astype(np.float16).view(np.uint16)"
    if of_float and to_float and parts[1] in _ROUND:
        return f"np.{_ROUND[parts[1]]}({source})"
    if of_float and not to_float:
        return f"to_integer({source}, {target}, {parts[1]!r})"
    return f"{source}.astype({target})"


def expression(instruction: Instruction, value) -> tuple[str, str] | None:  # noqa: ANN001 (value: operand, type -> source)
    """(source, PTX type of the result) of a pure instruction, or None if it is not one.

    `value(operand, type)` gives the source of an operand as an array of that type.
    """
    parts = instruction.parts
    name, kind = parts[0], parts[-1]
    args = instruction.operands[1:]

    def v(i: int, as_kind: str = kind) -> str:
        return value(args[i], as_kind)

    if name == "mov" and not isinstance(args[0], list) and not isinstance(instruction.operands[0], list):
        return v(0), kind
    if name == "cvta":
        return v(0), kind
    if name in ("add", "sub"):
        return f"{v(0)} {'+' if name == 'add' else '-'} {v(1)}", kind
    if name == "mul":
        if "wide" in parts:
            wide = f"{kind[0]}{2 * width(kind)}"
            return f"{v(0)}.astype(np.{DTYPES[wide]}) * {v(1)}.astype(np.{DTYPES[wide]})", wide
        if "hi" in parts:
            return f"high_product({v(0)}, {v(1)})", kind
        return f"{v(0)} * {v(1)}", kind
    if name == "mad":
        if "wide" in parts:
            wide = f"{kind[0]}{2 * width(kind)}"
            return f"{v(0)}.astype(np.{DTYPES[wide]}) * {v(1)}.astype(np.{DTYPES[wide]}) + {v(2, wide)}", wide
        return f"{v(0)} * {v(1)} + {v(2)}", kind
    if name == "fma":
        if kind == "f64":
            return f"{v(0)} * {v(1)} + {v(2)}", kind
        return f"fused({v(0)}, {v(1)}, {v(2)})", kind
    if name == "div":
        if kind[0] == "f":
            return f"{v(0)} / {v(1)}", kind
        if kind[0] == "u":
            return f"{v(0)} // np.maximum({v(1)}, 1)", kind
    if name == "rem" and kind[0] == "u":
        return f"{v(0)} % np.maximum({v(1)}, 1)", kind
    if name == "neg":
        return f"-{v(0)}", kind
    if name == "abs":
        return f"np.abs({v(0)})", kind
    if name == "not":
        return f"~{v(0)}", kind
    if name in _BITS:
        return f"{v(0)} {_BITS[name]} {v(1)}", kind
    if name == "shl":
        return f"shifted_left({v(0)}, {v(1, 'u32')})", kind
    if name == "shr":
        return f"shifted_right({v(0)}, {v(1, 'u32')})", kind
    if name in ("min", "max"):
        function = {"min": "minimum", "max": "maximum"}[name] if kind[0] != "f" else "f" + name
        return f"np.{function}({v(0)}, {v(1)})", kind
    if name == "selp":
        return f"np.where({v(2, 'pred')}, {v(0)}, {v(1)})", kind
    if name == "setp":
        return _comparison(parts[1], v(0), v(1)), "pred"
    if name == "cvt":
        if parts[-2] in ("bf16x2", "f16x2"):
            return f"packed_{parts[-2][:-2]}({v(0, 'f32')}, {v(1, 'f32')})", "b32"
        return converted(instruction, value(args[0], "b16" if parts[-1] == "f16" else parts[-1]), parts[-2], kind), (
            "b16" if parts[-2] == "f16" else parts[-2]
        )
    if name == "popc":
        return f"bits_set({v(0)})", "u32"
    if name == "clz":
        return f"leading_zeros({v(0)})", "u32"
    if name == "bfi":
        return f"inserted({v(0)}, {v(1)}, {v(2, 'u32')}, {v(3, 'u32')})", kind
    if name == "bfe" and kind[0] == "u":
        return f"extracted({v(0)}, {v(1, 'u32')}, {v(2, 'u32')})", kind
    if name == "ex2":
        return f"np.exp2({v(0)})", kind
    if name == "lg2":
        return f"np.log2({v(0)})", kind
    if name == "rcp":
        return f"np.float32(1) / {v(0)}", kind
    if name == "sqrt":
        return f"np.sqrt({v(0)})", kind
    return None


def _comparison(how: str, a: str, b: str) -> str:
    if how in _SETP:
        # Of NaN every ordered comparison is false; NumPy's != is true, which PTX calls neu.
        found = f"({a} {_SETP[how]} {b})"
        return f"({found} & ({a} == {a}) & ({b} == {b}))" if how == "ne" else found
    if how == "nan":
        return f"(({a} != {a}) | ({b} != {b}))"
    if how == "num":
        return f"(({a} == {a}) & ({b} == {b}))"
    if how.endswith("u") and how[:-1] in _SETP:
        return f"(({a} {_SETP[how[:-1]]} {b}) | ({a} != {a}) | ({b} != {b}))"
    unsigned = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    if how in unsigned:
        return f"({a} {unsigned[how]} {b})"
    raise Unsupported(f"setp.{how}")


def stored(kind: str) -> str:
    """The type in which a register of this one is kept."""
    return STORED.get(kind, kind)
