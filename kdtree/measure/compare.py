"""Is a result right? Positions of NaN and inf first, then values; integers exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdtree.arrays import kind_of, to_numpy

# Relative L2 error allowed against float64, by the dtype of the output.
TOLERANCE = {"bfloat16": 2e-3, "float16": 5e-4, "float32": 1e-5}
LOG_TOLERANCE = 2e-5  # of log-probabilities and LSEs, relative to max(1, |value|): float32 sums of many terms
BITWISE = ("kv",)  # outputs that are moved, not computed
LOGARITHMS = ("log_probs", "lse")


@dataclass(frozen=True)
class Comparison:
    """How far an op's outputs are from the reference. Errors cover its computed float outputs; None without any."""

    ok: bool
    reason: str | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    rel_l2: float | None = None


def compare(got: dict[str, Any], want: dict[str, Any], dtype: str | None, *, roundings: int = 1) -> Comparison:
    """Compare all outputs of one call by name. `dtype` is that of the op's float output, None if it has none.

    Arrays may be NumPy or torch; large torch pairs are compared where they lie. `roundings` is how often values were
    rounded to `dtype` on the way: once by any op, twice where the parts of an output are rounded before they are
    joined. Errors of independent roundings add up as their squares do.
    """
    worst: dict[str, float] = {}
    for name, expected in want.items():
        result = got[name]
        if tuple(result.shape) != tuple(expected.shape):
            return Comparison(False, f"{name}: shape {tuple(result.shape)}, expected {tuple(expected.shape)}")
        floating = name in ("out", *LOGARITHMS)
        if not floating:
            wrong = _mismatch(to_numpy(result), to_numpy(expected))
            if wrong:
                return Comparison(False, f"{name}: {wrong}", **worst)
            continue
        errors, wrong = _float_errors(result, expected, logarithm=name in LOGARITHMS)
        if wrong is None:
            for key, value in errors.items():
                worst[key] = max(worst.get(key, 0.0), value)
            limit = LOG_TOLERANCE if name in LOGARITHMS else TOLERANCE[dtype or "float32"] * roundings**0.5
            figure = errors["scaled"] if name in LOGARITHMS else errors["rel_l2"]
            if not figure <= limit:
                kind = "error" if name in LOGARITHMS else "relative L2 error"
                wrong = f"{kind} {figure:.3g}, allowed {limit:.3g}"
        if wrong:
            worst.pop("scaled", None)
            return Comparison(False, f"{name}: {wrong}", **worst)
    worst.pop("scaled", None)
    return Comparison(True, None, **worst)


def _mismatch(got: np.ndarray, want: np.ndarray) -> str | None:
    """Where two arrays differ, bit for bit except that any NaN equals any other."""
    if got.dtype.kind == "V" or got.dtype.name == "bfloat16":
        got, want = got.view(np.uint16), want.view(np.uint16)
    if got.dtype != want.dtype and got.dtype.itemsize == want.dtype.itemsize:
        got = got.view(want.dtype)
    same = (got == want) | ((got != got) & (want != want))
    if same.all():
        return None
    place = tuple(int(i) for i in np.argwhere(~same)[0])
    return f"{int((~same).sum())} of {same.size} differ, first at {place}: {got[place]}, expected {want[place]}"


def _float_errors(got: Any, want: Any, *, logarithm: bool) -> tuple[dict[str, float], str | None]:
    if kind_of(want) == "torch":
        return _errors(got.double(), want.double(), __import__("torch"))
    return _errors(to_numpy(got).astype(np.float64), to_numpy(want).astype(np.float64), np)


def _errors(got: Any, want: Any, xp: Any) -> tuple[dict[str, float], str | None]:
    """Errors over the finite entries, or why the entries that are not finite differ."""
    if not got.shape or 0 in got.shape:
        return {"max_abs": 0.0, "max_rel": 0.0, "rel_l2": 0.0, "scaled": 0.0}, None
    for test, what in (
        (xp.isnan, "NaN"),
        (lambda x: x == math.inf, "+inf"),
        (lambda x: x == -math.inf, "-inf"),
    ):
        differing = int((test(got) != test(want)).sum())
        if differing:
            return {}, f"{what} in {differing} places where the reference has none, or the other way round"
    finite = xp.isfinite(want)
    zero = xp.zeros_like(want)
    reference = xp.where(finite, want, zero)
    difference = xp.abs(xp.where(finite, got, zero) - reference)
    size = xp.abs(reference)
    norm = float((reference * reference).sum()) ** 0.5
    error = float((difference * difference).sum()) ** 0.5
    one = xp.ones_like(want)
    return {
        "max_abs": float(difference.max()),
        "max_rel": float((difference / xp.where(size > 1e-6, size, one)).max()),
        "rel_l2": error / norm if norm else error,
        "scaled": float((difference / xp.where(size > 1.0, size, one)).max()),
    }, None
