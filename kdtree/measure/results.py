"""Rows of results.jsonl: one measured fact a line, only ever appended.

A row is a plain dict. It holds no time unless its result passed, and no time at all when it comes from the
simulator; an absent figure is null. A later row of the same key replaces an earlier one when read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kdtree.spec import case_key

STATUSES = ("passed", "failed", "error", "skipped")
METRICS = ("correctness", "latency", "memory", "grid", "layers")
TIMED = ("latency", "grid", "layers")  # whose rows come from device times: one process at a time takes them
CACHES = ("cold", "warm")

# Must be in every row and hold text, a number or an object; the figures must be there too but may be null.
IDENTITY = ("op", "impl", "case", "metric", "status", "host", "run", "source", "simulated", "at")
FIGURES = (
    "reason",
    "max_abs",
    "max_rel",
    "rel_l2",
    "seed",
    "device_us",
    "latency_us",
    "floor_us",
    "flop",
    "bytes",
    "memory",
    "peer_of",
)
MEASURED_TIMES = (
    "device_us",
    "device_us_warm",
    "latency_us",
    "host_us",
    "jit_ms",
)  # the last three may be absent
TIMES = (*MEASURED_TIMES, "floor_us")  # a floor comes from measured roofs, so the simulator has none either

Row = dict[str, Any]
Key = tuple[str, str, str, str, str]


@dataclass
class Results:
    """What a results file holds: believable rows in file order, and a sentence per line that is not one."""

    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def now() -> str:
    """The time as rows carry it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_key(host: str, op: str, impl: str, case: Mapping[str, Any], metric: str) -> Key:
    """The key of a row that need not exist yet: (host, op, impl, case key, metric)."""
    return (str(host), str(op), str(impl), case_key(dict(case)), str(metric))


def key(row: Mapping[str, Any]) -> Key:
    """(host, op, impl, case key, metric): of rows with equal keys, the last one counts."""
    return make_key(row["host"], row["op"], row["impl"], row["case"], row["metric"])


def new_row(
    op: str,
    impl: str,
    case: Mapping[str, Any],
    *,
    metric: str,
    status: str,
    host: str,
    run: str,
    source: str,
    simulated: bool,
    **figures: Any,
) -> Row:
    """A valid row, the figures that are not given null. Raises ValueError as `validate` does.

    `figures` may hold more than FIGURES names (``pid``, ``seq``, ``exact``, ``device_us_warm``); all are
    kept.
    """
    row: Row = {"op": op, "impl": impl, "case": dict(case), "metric": metric, "status": status}
    row |= dict.fromkeys(FIGURES) | figures
    row |= {
        "host": host,
        "run": run,
        "source": source,
        "simulated": simulated,
        "at": figures.get("at") or now(),
    }
    validate(row)
    return row


def validate(row: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the field, for a row that must not be written."""
    missing = [name for name in (*IDENTITY, *FIGURES) if name not in row]
    if missing:
        raise ValueError(f"row: lacks {', '.join(missing)}")
    for name in IDENTITY:
        kind = {"case": Mapping, "simulated": bool}.get(name, str)
        if not isinstance(row[name], kind) or row[name] == "":
            raise ValueError(f"{name}: got {row[name]!r}, expected {_kind(kind)}")
    for name, allowed in (("status", STATUSES), ("metric", METRICS)):
        if row[name] not in allowed:
            raise ValueError(f"{name}: got {row[name]!r}, expected one of {', '.join(allowed)}")
    if row["status"] != "passed" and not row["reason"]:
        raise ValueError(f"reason: missing, expected a sentence because status is {row['status']}")
    _validate_times(row)
    bad = _not_finite(row)
    if bad:
        raise ValueError(f"{bad}: not a finite number; write null and say why in reason")


def dumps(value: Any) -> str:
    """`value` as strict one-line JSON: NaN and infinity raise ValueError, NumPy scalars become numbers."""
    return json.dumps(value, allow_nan=False, default=_plain)


def append(path: str | Path, row: Mapping[str, Any]) -> None:
    """Validate `row` and add it to `path` as one line that survives the process.

    Writers of one file wait for each other. A torn last line, left by a process that died while it wrote, is
    closed first, so that it stays one bad line. Raises ValueError as `validate` does, OSError from the disk.
    """
    from filelock import FileLock

    validate(row)
    line = (dumps(row) + "\n").encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=60):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        finally:
            os.close(handle)


def load(path: str | Path) -> Results:
    """Every valid row of `path` in file order; lines that are not valid rows are reported, never guessed at.

    A missing file holds no rows and is no problem.
    """
    path, found = Path(path), Results()
    if not path.exists():
        return found
    text = path.read_bytes()
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        torn = number == len(lines)  # whatever follows the last newline
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(row, dict):
                raise ValueError(f"row: got {type(row).__name__}, expected an object")
            validate(row)
        except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            what = "is torn" if torn else "is not a valid row"
            found.problems.append(f"{path.name}: line {number} {what} and is ignored ({error})")
        else:
            found.rows.append(row)
    return found


def latest(rows: Iterable[Row]) -> dict[Key, Row]:
    """The last row of each key, in the order in which the keys first appeared."""
    return {key(row): row for row in rows}


def current(rows: Iterable[Row], *, run: str, source: str) -> tuple[list[Row], list[Row]]:
    """(rows, stale): the last row per key of this run and source, and the last of each key that has none.

    A row of another run or source that was measured again since is neither: it was replaced.
    """
    rows = list(rows)
    mine = latest(row for row in rows if row["run"] == run and row["source"] == source)
    others = latest(row for row in rows if row["run"] != run or row["source"] != source)
    return list(mine.values()), [row for k, row in others.items() if k not in mine]


def done(rows: Iterable[Row], wanted: Key, source: str) -> bool:
    """True when a sweep need not measure `wanted`: its last row of this source passed or was skipped."""
    last = None
    for row in rows:
        if row["source"] == source and key(row) == wanted:
            last = row
    return last is not None and last["status"] in ("passed", "skipped")


def _validate_times(row: Mapping[str, Any]) -> None:
    for name in TIMES:
        if row.get(name) is None:
            continue
        if row["simulated"]:
            raise ValueError(f"{name}: a simulated row holds no time, got {row[name]!r}")
        if name in MEASURED_TIMES and row["status"] != "passed":
            raise ValueError(f"{name}: got a time with status {row['status']}, expected a time only with passed")
    for name in ("device_us", "device_us_warm"):
        if row.get(name) is not None:
            _validate_sample(name, row[name])
    for name in ("latency_us", "host_us", "jit_ms", "floor_us"):
        value = row.get(name)
        if value is not None and not (_is_number(value) and value >= 0):
            raise ValueError(f"{name}: got {value!r}, expected a number of at least 0 or null")


def _validate_sample(name: str, sample: Any) -> None:
    if not isinstance(sample, Mapping) or not {"median", "iqr", "n", "cache"} <= sample.keys():
        raise ValueError(f"{name}: got {sample!r}, expected an object with median, iqr, n and cache")
    if not (_is_number(sample["median"]) and sample["median"] > 0):
        raise ValueError(f"{name}.median: got {sample['median']!r}, expected a number above 0")
    if not (_is_number(sample["iqr"]) and sample["iqr"] >= 0):
        raise ValueError(f"{name}.iqr: got {sample['iqr']!r}, expected a number of at least 0")
    if not (_is_number(sample["n"]) and sample["n"] >= 1):
        raise ValueError(f"{name}.n: got {sample['n']!r}, expected a count of at least 1")
    if sample["cache"] not in CACHES:
        raise ValueError(f"{name}.cache: got {sample['cache']!r}, expected one of {', '.join(CACHES)}")


def _not_finite(value: Any, name: str = "row") -> str | None:
    """Dotted name of the first NaN or infinity inside `value`, or None."""
    if isinstance(value, Mapping):
        pairs = ((f"{name}.{k}" if name != "row" else str(k), v) for k, v in value.items())
    elif isinstance(value, list | tuple):
        pairs = ((f"{name}[{i}]", v) for i, v in enumerate(value))
    else:
        value = _plain(value) if hasattr(value, "item") else value
        return name if isinstance(value, float) and not math.isfinite(value) else None
    return next((bad for n, v in pairs if (bad := _not_finite(v, n))), None)


def _is_number(value: Any) -> bool:
    value = value.item() if hasattr(value, "item") else value
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a NumPy or torch scalar
        return value.item()
    raise TypeError(f"row: {type(value).__name__} is not JSON: {value!r}")


def _kind(kind: type) -> str:
    return {str: "text", bool: "true or false", Mapping: "an object"}[kind]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
