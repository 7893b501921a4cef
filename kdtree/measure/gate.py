"""The regression gate: accepted numbers of one host, and what a new run says against them.

A verdict needs both an effect and certainty. The effect is the ratio of medians, against MIN_EFFECT; the
certainty comes from an interval around each median, median ± 1.57 · IQR / √n, the half-width at which two
medians whose intervals just touch differ at about the 5 % level.

    slower, faster   the ratio is beyond the effect, and the two intervals do not overlap
    same             the ratio is within the effect, and the interval of the ratio within twice the effect
    ambiguous        anything between, too few samples, or cold against warm: run again; it fails nothing
    new, missing     only in the run, only in the baseline
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtree.measure.results import Key, Row, dumps, key, latest

VERDICTS = ("same", "faster", "slower", "ambiguous", "new", "missing")
MIN_EFFECT = 0.03  # below this, runs of one build on one GPU differ anyway (clocks, temperature)
MIN_SAMPLES = 5  # fewer replays cannot tell an effect from noise
RESOLUTION = 0.0025  # events resolve 0.5 µs of a window of 200 µs, so no median is known better than this
NOTCH = 1.57
EXIT_SLOWER = 3


@dataclass(frozen=True)
class Verdict:
    """What became of one accepted number.

    `ratio` is new / accepted, within `low` .. `high`; all are None for new and missing, and `high` alone is
    None when the accepted time is so noisy that its interval reaches 0.
    """

    key: Key
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def text(self) -> str:
        """One line for a table or a log."""
        _, op, impl, case, _ = self.key
        if self.ratio is None:
            return f"{op} {impl} [{case}]: {self.verdict}"
        high = "unbounded" if self.high is None else f"{self.high:.3f}"
        change = f"{self.ratio:.3f} of the accepted time ({self.low:.3f}-{high})"
        return f"{op} {impl} [{case}]: {self.verdict}, {change}"


def gated(rows: Iterable[Row]) -> dict[Key, Row]:
    """The rows that a gate may hold us to: our own measured device times, last row per key.

    Peers are left out: a new torch is no regression of ours.
    """
    return {
        k: row
        for k, row in latest(rows).items()
        if row["status"] == "passed"
        and not row["simulated"]
        and row.get("device_us")
        and not row["impl"].startswith("peer:")
    }


def store(rows: Iterable[Row], path: str | Path) -> int:
    """Accept the device times of `rows` as the baseline at `path`, replacing what was there.

    Returns how many there are. Raises ValueError for nothing to accept and for rows of several hosts.
    """
    accepted = gated(rows)
    hosts = sorted({row["host"] for row in accepted.values()})
    if len(hosts) != 1:
        found = f"rows of {', '.join(hosts)}" if hosts else "no passed row with a device time"
        raise ValueError(f"rows: {found}, expected device times of one host")
    entries = [
        {"op": k[1], "impl": k[2], "case": row["case"], "metric": k[4], "device_us": row["device_us"]}
        | {name: row[name] for name in ("run", "source", "at")}
        for k, row in sorted(accepted.items())
    ]
    text = ",\n ".join(dumps(entry) for entry in entries)
    _write(Path(path), f'{{"version": 1, "host": {dumps(hosts[0])}, "entries": [\n {text}\n]}}\n')
    return len(entries)


def load_baseline(path: str | Path) -> dict[Key, dict[str, Any]]:
    """Accepted device times by row key; empty when there is no file.

    Raises ValueError for a file that is not a baseline.
    """
    path = Path(path)
    if not path.exists():
        return {}
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
        host, entries = text["host"], text["entries"]
        return {key(entry | {"host": host}): entry["device_us"] for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: not a baseline ({type(error).__name__}: {error})") from error


def compare(rows: Iterable[Row], baseline: Mapping[Key, Mapping[str, Any]]) -> list[Verdict]:
    """One verdict per key of `rows` or `baseline`, in key order.

    `rows` are the current rows of one run. A key of the baseline without a passed time now is `missing`: it
    was not measured, or it failed.
    """
    fresh = gated(rows)
    out = []
    for k in sorted(fresh.keys() | baseline.keys()):
        if k not in baseline:
            out.append(Verdict(k, "new"))
        elif k not in fresh:
            out.append(Verdict(k, "missing"))
        else:
            out.append(_judge(k, fresh[k]["device_us"], baseline[k]))
    return out


def summarise(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """A count per verdict, `status`, `geomean` of the ratios, `exit_code` (3 when any is slower) and `worst`.

    `status` is the word for the whole: slower if anything is, else ambiguous, else faster, else same; "none"
    when nothing could be compared. `worst` holds up to ten texts of the slower ones, slowest first.
    """
    counts: dict[str, Any] = {name: sum(v.verdict == name for v in verdicts) for name in VERDICTS}
    ratios = [v.ratio for v in verdicts if v.ratio is not None]
    slower = sorted((v for v in verdicts if v.verdict == "slower"), key=lambda v: -(v.ratio or 0))
    return counts | {
        "status": next((s for s in ("slower", "ambiguous", "faster", "same") if counts[s]), "none"),
        "geomean": math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None,
        "exit_code": EXIT_SLOWER if slower else 0,
        "worst": [v.text for v in slower[:10]],
    }


def interval(sample: Mapping[str, Any]) -> tuple[float, float]:
    """(low, high) around the median of a device_us object, in µs."""
    half = max(NOTCH * sample["iqr"] / math.sqrt(sample["n"]), RESOLUTION * sample["median"])
    return max(sample["median"] - half, 0.0), sample["median"] + half


def _judge(k: Key, new: Mapping[str, Any], old: Mapping[str, Any]) -> Verdict:
    (new_low, new_high), (old_low, old_high) = interval(new), interval(old)
    ratio = new["median"] / old["median"]
    low, high = new_low / old_high, new_high / old_low if old_low else math.inf
    enough = min(new["n"], old["n"]) >= MIN_SAMPLES and new["cache"] == old["cache"]
    bound = 1 + MIN_EFFECT
    if not enough:
        verdict = "ambiguous"
    elif ratio > bound:
        verdict = "slower" if low > 1 else "ambiguous"
    elif ratio < 1 / bound:
        verdict = "faster" if high < 1 else "ambiguous"
    else:  # no effect seen; the same only if the noise could not hide one
        verdict = "same" if 1 / (1 + 2 * MIN_EFFECT) < low and high < 1 + 2 * MIN_EFFECT else "ambiguous"
    return Verdict(k, verdict, ratio, low, high if math.isfinite(high) else None)


def _write(path: Path, text: str) -> None:
    """Replace `path` in one step: a reader sees the old baseline or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
