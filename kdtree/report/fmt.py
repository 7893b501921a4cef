"""Numbers as a reader wants them: three digits, a unit, and an em dash for what was not measured."""

from __future__ import annotations

import math
from typing import Any

NONE = "—"


def number(value: float | None, digits: int = 3) -> str:
    """`value` to `digits` significant digits without an exponent between 1e-3 and 1e6; a dash for None."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def us(value: float | None) -> str:
    """Microseconds, one decimal from 10 up and two below; thousands are set apart."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A ratio as a whole percentage (one decimal below 10 %)."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{100 * value:.1f} %" if value < 0.0995 else f"{100 * value:.0f} %"


def ratio(value: float | None) -> str:
    """A ratio as ``1.83×``, three digits."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}×" if value >= 99.95 else f"{value:.1f}×" if value >= 9.995 else f"{value:.2f}×"


def size(value: float | None) -> str:
    """Bytes in the binary unit that leaves one to four digits."""
    if value is None or not math.isfinite(value):
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def error(value: float | None) -> str:
    """An error figure: two significant digits with an exponent, 0 exact."""
    if value is None or not math.isfinite(value):
        return NONE
    return "0" if value == 0 else f"{value:.1e}"


def duration(seconds: float | None) -> str:
    """Seconds as ``42 s`` or ``3 min 05 s``."""
    if seconds is None:
        return NONE
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def plain(value: Any) -> str:
    """Any JSON value as short text for a table of facts."""
    if value is None or value == "" or value == [] or value == {}:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, list):
        return ", ".join(plain(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {plain(v)}" for k, v in value.items())
    return str(value)
