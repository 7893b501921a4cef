"""May the times of a run be believed? Two snapshots of the host, and what speaks against it as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

# How a healthy GPU spends its time, or what its owner chose.
HARMLESS = {"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"}
CLOCK_TOLERANCE = 0.05
BUSY_PERCENT = 20
THROTTLED_SHARE = 0.1  # of the run; a card at its power limit for a moment is at work, not ill


def trust(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Reasons, as sentences, to distrust what was measured between two `collect` calls; empty for none.

    A simulated run takes no times, so only its tree can be wrong.
    """
    reasons = _distrust_tree(before, after)
    old, new = before.get("gpu"), after.get("gpu")
    if before.get("simulated") and after.get("simulated"):
        return reasons
    if not old or not new:
        return [*reasons, "A GPU was there at only one end of the run."]
    if old.get("name") != new.get("name"):
        reasons.append(f"The GPU changed from {old.get('name')} to {new.get('name')} during the run.")
    for what, gpu in (("before", old), ("after", new)):
        reasons += _distrust_snapshot(what, gpu)
    busy = old.get("utilization_percent")
    if busy is not None and busy > BUSY_PERCENT:
        reasons.append(f"The GPU was {busy} % busy before the run began, more than {BUSY_PERCENT} %.")
    reasons += _distrust_counters(before, after)
    reasons += _distrust_clocks(old, new)
    return reasons


def _distrust_tree(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    reasons = []
    if before.get("dirty") or after.get("dirty"):
        commit = str(after.get("commit") or before.get("commit") or "unknown")[:7]
        reasons.append(f"The tree had changes that commit {commit} does not hold (reports/ aside).")
    if before.get("dirty") is None and after.get("dirty") is None:
        reasons.append("Whether the tree had uncommitted changes could not be read.")
    for name, what in (("commit", "commit"), ("source", "kernel source"), ("driver", "driver")):
        old, new = before.get(name), after.get(name)
        if old != new and None not in (old, new):
            reasons.append(f"The {what} changed during the run, from {str(old)[:12]} to {str(new)[:12]}.")
    return reasons


def _distrust_snapshot(what: str, gpu: Mapping[str, Any]) -> list[str]:
    reasons = []
    if gpu.get("throttle") is None:
        reasons.append(f"Whether the GPU was throttled {what} the run could not be read.")
    slowed = sorted(set(gpu.get("throttle") or ()) - HARMLESS)
    if slowed:
        reasons.append(f"The GPU was held back {what} the run: {', '.join(slowed)}.")
    others = gpu.get("other_processes")
    if others is None:
        reasons.append(f"Whether other processes used the GPU {what} the run could not be read.")
    elif others:
        held = (gpu.get("other_processes_bytes") or 0) / 2**20
        noun = "process" if others == 1 else "processes"
        reasons.append(f"{others} other {noun} used the GPU {what} the run, holding {held:.0f} MiB.")
    return reasons


def _distrust_counters(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = before["gpu"].get("throttle_ns") or {}, after["gpu"].get("throttle_ns") or {}
    try:
        begin, end = (datetime.fromisoformat(str(info["at"]).replace("Z", "+00:00")) for info in (before, after))
    except (KeyError, ValueError):
        return []
    span = (end - begin).total_seconds()
    reasons = []
    for word in sorted(old.keys() & new.keys()):
        if None in (old[word], new[word]) or span <= 0:
            continue
        seconds = (new[word] - old[word]) / 1e9
        if seconds / span > THROTTLED_SHARE:
            reasons.append(f"The GPU spent {seconds:.1f} s of the {span:.0f} s of the run under {word}.")
    return reasons


def _distrust_clocks(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A limit that moved, or working clocks that moved. An idle GPU drops its clocks, which says nothing."""
    pairs = [("power limit", "W", old.get("power_limit_w"), new.get("power_limit_w"))]
    clocks = [gpu.get("clocks") or {} for gpu in (old, new)]
    idle = any(gpu.get("throttle") is None or "gpu_idle" in gpu["throttle"] for gpu in (old, new))
    for kind, word in (("sm", "SM clock"), ("memory", "memory clock")):
        pairs.append((f"highest {word}", "MHz", *(c.get(f"{kind}_max_mhz") for c in clocks)))
        # Not every driver says that a GPU is idle; far below its highest clock it is not at work.
        now_mhz = [c.get(f"{kind}_mhz") or 0 for c in clocks]
        working = all(f >= 0.5 * (c.get(f"{kind}_max_mhz") or 0) for f, c in zip(now_mhz, clocks, strict=True))
        if working and not idle:
            pairs.append((word, "MHz", *now_mhz))
    return [
        f"The {word} moved by {abs(b / a - 1):.0%} during the run, from {a:.0f} to {b:.0f} {unit}."
        for word, unit, a, b in pairs
        if a and b and abs(b / a - 1) > CLOCK_TOLERANCE
    ]
