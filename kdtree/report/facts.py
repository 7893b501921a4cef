"""host.json and run.json as lists of (label, text) for the page; what is null is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kdtree.report import fmt

Facts = list[tuple[str, str]]


def _said(pairs: Iterable[tuple[str, str | None]]) -> Facts:
    return [(label, text) for label, text in pairs if text and text != fmt.NONE]


def _of(value: Any, limit: Any, unit: str) -> str | None:
    """``1980 of 1980 MHz``, or what is known of it."""
    if value is None and limit is None:
        return None
    if limit is None or value is None:
        return f"{value if value is not None else limit:g} {unit}"
    return f"{value:g} of {limit:g} {unit}"


def host(info: Mapping[str, Any]) -> Facts:
    """The host card: the GPU, how it was set, and what it sits in."""
    gpu = info.get("gpu") or {}
    clocks, cpu = gpu.get("clocks") or {}, info.get("cpu") or {}
    used, others = gpu.get("memory_used_bytes"), gpu.get("other_processes")
    memory = fmt.size(gpu.get("memory_bytes")) + (f", {fmt.size(used)} in use" if used is not None else "")
    limit, default = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
    power = (
        None
        if limit is None
        else f"{limit:g} W" + (f" (default {default:g} W)" if default not in (None, limit) else "")
    )
    throttle = gpu.get("throttle")
    held = ", ".join(throttle).replace("_", " ") if throttle else "none" if throttle is not None else None
    count = info.get("gpu_count")
    cores = f", {cpu['cores']} cores" if cpu.get("cores") else ""
    return _said(
        [
            ("GPU", gpu.get("name")),
            ("GPUs visible", str(count) if count and count > 1 else None),
            ("compute capability", gpu.get("compute_capability")),
            ("SMs", fmt.plain(gpu.get("sm_count"))),
            ("memory", memory if gpu.get("memory_bytes") is not None else None),
            ("L2", fmt.size(gpu.get("l2_bytes"))),
            ("shared memory per block", fmt.size(gpu.get("shared_per_block_bytes"))),
            ("SM clock", _of(clocks.get("sm_mhz"), clocks.get("sm_max_mhz"), "MHz")),
            ("memory clock", _of(clocks.get("memory_mhz"), clocks.get("memory_max_mhz"), "MHz")),
            ("power limit", power),
            ("temperature", f"{gpu['temperature_c']:g} °C" if gpu.get("temperature_c") is not None else None),
            ("ECC", fmt.plain(gpu.get("ecc"))),
            ("MIG", fmt.plain(gpu.get("mig"))),
            ("clocks held back by", held),
            ("other processes on it", fmt.plain(others)),
            ("driver", info.get("driver")),
            ("CUDA of the driver", info.get("cuda")),
            ("CPU", (cpu.get("model") or fmt.NONE) + cores if cpu else None),
            ("RAM", fmt.size(info.get("ram_bytes"))),
            ("system", info.get("os")),
        ]
    )


def environment(info: Mapping[str, Any], state: Mapping[str, Any]) -> Facts:
    """Versions, where the code came from, and when the run was."""
    libraries = info.get("libraries") or {}
    absent = sorted(name for name, found in libraries.items() if not found)
    return _said(
        [
            ("run", state["run"]),
            ("profile", state["profile"]),
            (
                "commit",
                (state.get("commit") or "unknown")[:12] + (", with changes" if state.get("dirty") else ""),
            ),
            ("source fingerprint", state["source"]),
            ("begun", state["created"]),
            ("last change", state["updated"]),
            ("python", info.get("python")),
            *((name, found) for name, found in libraries.items()),
            ("not installed", ", ".join(absent)),
            ("host fully read", fmt.plain(info.get("complete"))),
        ]
    )
