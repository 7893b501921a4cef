"""Argument checks of the public functions: each error names the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kdtree.arrays import View
from kdtree.tree import FIELDS, DraftTree, field_shapes

FLOATS = ("bfloat16", "float16", "float32")
INTS = ("int32", "int64")
FLOAT32_MAX = 3.4028234e38
INT32 = (-(2**31), 2**31 - 1)
MAX_PREFIX = 2**40  # tokens; far beyond any context, and positions stay far from the end of int64


def dtype(v: View, name: str, allowed: Iterable[str]) -> None:
    """TypeError unless the dtype is one of `allowed`."""
    if v.dtype not in tuple(allowed):
        raise TypeError(f"{name}: got dtype {v.dtype}, expected {' or '.join(allowed)}")


def shape(v: View, name: str, expected: tuple[int | str, ...]) -> None:
    """ValueError unless the shape is `expected`; a str in it stands for any extent and names the axis."""
    same = len(v.shape) == len(expected) and all(
        isinstance(e, str) or e == got for e, got in zip(expected, v.shape, strict=True)
    )
    if not same:
        wanted = ", ".join(str(e) for e in expected)
        raise ValueError(f"{name}: got shape {v.shape}, expected ({wanted})")


def array(v: View, name: str, allowed: Iterable[str], expected: tuple[int | str, ...]) -> None:
    """Dtype, shape and C-contiguity in one."""
    dtype(v, name, allowed)
    shape(v, name, expected)
    if not v.contiguous:
        raise ValueError(f"{name}: got a strided array of shape {v.shape}, expected a C-contiguous one")


def integer(value: object, name: str, low: int, high: int) -> int:
    """`value` as int, or TypeError / ValueError unless it is an integer in low..high."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int")
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected {low}..{high}")
    return int(value)


def number(value: object, name: str) -> float:
    """`value` as float, or TypeError / ValueError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a finite number")
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError(f"{name}: got {value}, expected a finite float32")
    return float(value)


def values(array: np.ndarray, name: str, low: int, high: int) -> None:
    """ValueError unless every integer of `array` lies in low..high."""
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise ValueError(f"{name}: got values {array.min()}..{array.max()}, expected {low}..{high}")


def apart(outputs: dict[str, View]) -> None:
    """ValueError where two outputs share memory: what is left in them would depend on who wrote last."""
    spans = sorted((v.ptr, v.ptr + v.nbytes, name) for name, v in outputs.items() if v.nbytes)
    for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError(f"{second}: got memory that overlaps {first}, expected outputs apart from each other")


def instance(value: object, name: str, kind: type) -> None:
    """TypeError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a {kind.__name__}")


def by_name(out: object, names: Sequence[str]) -> dict[str, Any]:
    """The arrays of `out=` by name, or TypeError / ValueError unless it is a tuple or list of that many."""
    wanted = ", ".join(names)
    if not isinstance(out, tuple | list):
        raise TypeError(f"out: got {type(out).__name__}, expected a tuple ({wanted})")
    if len(out) != len(names):
        raise ValueError(f"out: got {len(out)} arrays, expected {len(names)} ({wanted})")
    return dict(zip(names, out, strict=True))


def writable(v: View, name: str) -> None:
    """ValueError for an array that cannot be written."""
    if v.kind == "numpy" and not v.obj.flags.writeable:
        raise ValueError(f"{name}: got a read-only array, expected a writable one")


def choice(value: object, name: str, allowed: Iterable[object]) -> None:
    """ValueError unless `value` is one of `allowed`."""
    if value not in tuple(allowed):
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(repr(a) for a in allowed)}")


def same_device(views: dict[str, View]) -> None:
    """ValueError unless all arrays are on one device."""
    first_name, first = next(iter(views.items()))
    for name, v in views.items():
        if v.device != first.device:
            raise ValueError(f"{name}: got an array on {v.device}, expected {first.device} as {first_name}")


def tree_views(tree: DraftTree, views: dict[str, View], name: str = "tree") -> None:
    """Dtype and shape of the tree's arrays that are in `views` (keys ``tree.<field>``)."""
    shapes = field_shapes(tree.batch, tree.n_slots)
    for field, v in views.items():
        short = field.removeprefix(f"{name}.")
        if short in FIELDS:
            # Engines that predate torch's unsigned types hold the mask words as int32: same bits.
            allowed = ("uint32", "int32") if short == "visibility" else (FIELDS[short],)
            array(v, field, allowed, shapes[short])


def log_probs(values: np.ndarray) -> None:
    """ValueError unless each row f32[B,D,K] is <= 0 and non-increasing up to its first entry that is not finite."""
    for index in np.ndindex(*values.shape[:2]):
        row = values[index].astype(np.float64)
        finite = np.isfinite(row)
        row = row[: len(row) if finite.all() else int(np.argmin(finite))]
        if len(row) and row[0] > 0:
            raise ValueError(f"log_probs: row {index} begins with {row[0]:g}, expected log-probabilities <= 0")
        rising = np.nonzero(np.diff(row) > 0)[0]
        if len(rising):
            r = int(rising[0])
            raise ValueError(
                f"log_probs: row {index} rises from {row[r]:g} to {row[r + 1]:g} at candidate {r + 1}, "
                "expected a non-increasing row"
            )


def cache_rows(
    prefix_lens: np.ndarray,  # int[B]
    n_nodes: np.ndarray,  # i32[B]
    n_slots: int,
    capacity: int,
) -> None:
    """ValueError unless every request's prefix and tree rows lie inside the cache."""
    for b, (prefix, used) in enumerate(zip(prefix_lens.tolist(), n_nodes.tolist(), strict=True)):
        if prefix < 0:
            raise ValueError(f"prefix_lens: request {b} has {prefix}, expected >= 0")
        if not 0 <= used <= n_slots:
            raise ValueError(f"tree.n_nodes: request {b} has {used}, expected 0..N with N = {n_slots}")
        if prefix + used > capacity:
            raise ValueError(
                f"prefix_lens: request {b} needs {prefix} + {used} cache rows, expected at most {capacity}"
            )


def pages(
    page_table: np.ndarray,  # int[B,max_pages]
    rows: np.ndarray,  # int[B] rows in use
    page_size: int,
    n_pages: int,
) -> None:
    """ValueError unless every page that holds a row in use exists."""
    for b, used in enumerate(rows):
        for slot in range(-(-int(used) // page_size)):
            page = int(page_table[b][slot])
            if not 0 <= page < n_pages:
                raise ValueError(f"page_table: request {b} entry {slot} is {page}, expected 0..{n_pages - 1}")
