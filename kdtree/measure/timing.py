"""Device time of small kernels, measured so that the number can be believed.

A candidate is captured into a CUDA graph that runs it many times, over rotating input sets, and the replay is
timed with CUDA events. So the window holds no Python, no launch gap and no cache flush: only the work.
Candidates take turns in an order that changes every repeat, which spreads drifting clocks over all of them.

Nothing here catches a CUDA error. Nothing here runs under the simulator: a time taken there means nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kdtree.measure.graphs import (
    CaptureError,
    NotMeasurable,
    Thunk,
    capture,
    l2_bytes,
    require_gpu,
    torch_cuda,
)

__all__ = [
    "Cache",
    "CaptureError",
    "Latency",
    "NotMeasurable",
    "Sample",
    "Thunk",
    "WindowTooShort",
    "agreement",
    "cache_of",
    "cuda_bench_time",
    "first_call",
    "l2_bytes",
    "launch_latency",
    "require_gpu",
    "rotation",
    "time_eager",
    "time_graphs",
    "torch_cuda",
    "turns",
]

Cache = Literal["cold", "warm"]

MIN_WINDOW_US = 200.0  # events resolve about 0.5 µs, and a graph takes 1 to 2 µs to start: below 1 % of this
MIN_REPEATS = 8  # a candidate over its time budget still gets this many
MAX_CALLS = 4000  # calls in one graph; capturing more takes longer than it teaches
SPIN_SECONDS = 0.05  # of work before anything is judged, so that an idle GPU has raised its clocks
COLD_BYTES = 160e6  # input sets below this may sit in some GPU's L2 even where 2 x L2 is less
MAX_SETS = 1024


class WindowTooShort(RuntimeError):
    """A candidate does so little that its time is not told from that of the events around it."""


@dataclass(frozen=True)
class Sample:
    """Time of one call in µs: median and interquartile range over `n` windows.

    cache  "cold": inputs come from device memory; "warm": they may be in L2
    how    "graph", "eager" or "cuda-bench"
    """

    median: float
    iqr: float
    n: int
    cache: Cache
    how: str = "graph"

    def as_dict(self) -> dict[str, Any]:
        """The object that a row's ``device_us`` holds."""
        return {"median": self.median, "iqr": self.iqr, "n": self.n, "cache": self.cache, "how": self.how}


@dataclass(frozen=True)
class Latency:
    """Host wall time in µs: `latency_us` from call to result, `host_us` of the call alone (medians)."""

    latency_us: float
    host_us: float
    iqr: float
    n: int


@dataclass
class _Runner:
    """Something that is timed: `replay` enqueues `calls` calls; `windows` collects µs per replay."""

    name: str
    replay: Thunk
    calls: int
    windows: list[float] = field(default_factory=list)


def rotation(bytes_per_set: int, l2_bytes: int, free_bytes: int) -> int:
    """How many input sets to rotate over so that each is out of L2 when its turn comes again.

    Their total exceeds twice the L2 and 160 MB, unless MAX_SETS or four fifths of `free_bytes` end it before:
    ask `cache_of` what the result is. Raises ValueError when not even one set fits.
    """
    if bytes_per_set <= 0:
        raise ValueError(f"bytes_per_set: got {bytes_per_set}, expected more than 0")
    room = int(free_bytes * 0.8) // bytes_per_set
    if room < 1:
        raise ValueError(f"bytes_per_set: got {bytes_per_set}, but only {free_bytes} bytes are free")
    return min(int(_cold_total(l2_bytes) // bytes_per_set) + 1, room, MAX_SETS)


def cache_of(n_sets: int, bytes_per_set: int, l2_bytes: int) -> Cache:
    """What rotating over `n_sets` input sets measures: "cold" beyond twice the L2 and 160 MB, else "warm"."""
    return "cold" if n_sets * bytes_per_set > _cold_total(l2_bytes) else "warm"


def time_graphs(
    candidates: Mapping[str, Sequence[Thunk]],
    *,
    cache: Cache,
    repeats: int = 40,
    warmup: int = 3,
    min_window_us: float = MIN_WINDOW_US,
    seed: int = 0,
    max_seconds: float = 4.0,
    bytes_per_set: int | None = None,
) -> dict[str, Sample]:
    """Device time of each candidate through CUDA-graph replays.

    Args:
        candidates: name -> thunks, one per input set. A thunk launches on the current torch stream, and does
            not synchronise or allocate outside torch. ``cache="warm"`` uses the first one only.
        cache: what to measure. "cold" wants several sets, or one that alone exceeds the cache.
        repeats: timed windows per candidate; fewer, but never below 8, for one that has used `max_seconds`.
        warmup: calls of every thunk before capture, so that compilation and allocation are over.
        min_window_us: each graph repeats its thunks until one replay takes at least this long.
        seed: of the order in which candidates take turns.
        bytes_per_set: bytes that one call touches. Given, it is checked that the rotation really is cold.

    Raises NotMeasurable without a GPU, CaptureError naming the candidate, WindowTooShort, ValueError for
    candidates that cannot be what `cache` says, and any CUDA error as it comes.
    """
    torch = torch_cuda()
    sets = _checked(candidates, cache, repeats)
    if cache == "cold":
        _check_cold(sets, bytes_per_set)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runners: list[_Runner] = []
        for name, thunks in sets.items():
            _warm_up(torch, name, thunks, warmup, spin=not runners)
            runners.append(_calibrated(torch, name, thunks, stream, min_window_us))
        # A replay that is not timed goes first: while it runs, the host enqueues the one that is.
        _take_turns(torch, runners, repeats, seed, max_seconds, lead_in=True)
    for runner in runners:
        if np.median(runner.windows) < min_window_us / 4:
            raise WindowTooShort(
                f"candidate {runner.name!r}: {runner.calls} calls took {np.median(runner.windows):.1f} µs, "
                f"expected a window of at least {min_window_us / 4:.0f} µs"
            )
    return {runner.name: _sample(runner, cache, "graph") for runner in runners}


def time_eager(
    candidates: Mapping[str, Sequence[Thunk]],
    *,
    cache: Cache,
    repeats: int = 40,
    warmup: int = 3,
    min_window_us: float = MIN_WINDOW_US,
    seed: int = 0,
    max_seconds: float = 4.0,
) -> dict[str, Sample]:
    """Device time of candidates that cannot be captured, because they synchronise: events around plain calls.

    The gaps in which the GPU waits for the host are in the result, as they are in a decoding step that calls
    such code. Arguments and errors as in `time_graphs`.
    """
    torch = torch_cuda()
    sets = _checked(candidates, cache, repeats)
    runners: list[_Runner] = []
    for name, thunks in sets.items():
        _warm_up(torch, name, thunks, warmup, spin=not runners)
        once = _Runner(name, _calls(thunks, 1), len(thunks))
        rounds = max(1, math.ceil(min_window_us / max(_window_us(torch, once, lead_in=False), 1e-3)))
        rounds = min(rounds, max(1, MAX_CALLS // len(thunks)))
        runners.append(_Runner(name, _calls(thunks, rounds), rounds * len(thunks)))
    _take_turns(torch, runners, repeats, seed, max_seconds, lead_in=False)
    return {runner.name: _sample(runner, cache, "eager") for runner in runners}


def launch_latency(fn: Thunk, n: int = 50) -> Latency:
    """Host wall time of `fn` on an idle GPU over `n` calls: until the result is there, and of the call alone.

    Call `fn` once before, or its compilation is measured. Raises NotMeasurable without a GPU.
    """
    torch = torch_cuda()
    torch.cuda.synchronize()
    whole, call = [], []
    for _ in range(n):
        start = time.perf_counter()
        fn()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - start) * 1e6)
        call.append((returned - start) * 1e6)
    low, high = np.percentile(whole, [25, 75])
    return Latency(float(np.median(whole)), float(np.median(call)), float(high - low), n)


def first_call(fn: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """(What `fn` returns, fields of a row), timed until its result is visible.

    jit_ms: milliseconds, with what had to be compiled. jit_cached: True where that is not everything, because machine
    code lay ready from an earlier call or process; see `kernels.cubin_cache`, also for how to turn that off.
    """
    from kdtree.kernels import cubin_cache

    torch = torch_cuda()
    torch.cuda.synchronize()
    before, start = dict(cubin_cache.count), time.perf_counter()
    returned = fn()
    torch.cuda.synchronize()
    jit_ms = (time.perf_counter() - start) * 1e3
    new = {name: count - before[name] for name, count in cubin_cache.count.items()}
    return returned, {"jit_ms": jit_ms, "jit_cached": new["read"] > 0 or new["compiled"] == 0}


def turns(names: Sequence[str], repeat: int, seed: int) -> list[str]:
    """Order of the candidates in one repeat: shuffled every len(names) repeats, rotated by one in between.

    Over such a cycle every candidate runs once at every position.
    """
    cycle, shift = divmod(repeat, max(len(names), 1))
    order = list(names)
    random.Random(f"{seed}/{cycle}").shuffle(order)
    return order[shift:] + order[:shift]


def cuda_bench_time(fn: Thunk) -> Sample | None:
    """Cold time of `fn` by NVIDIA's cuda-bench, an independent check; None where that cannot run.

    Once a process: see `kdtree.measure.cross_check`, which times several candidates and says why there
    is none.
    """
    from kdtree.measure import cross_check

    return cross_check.cuda_bench_times({"fn": fn}).samples.get("fn")


def agreement(a: Sample, b: Sample) -> float:
    """How far two ways of timing one thing agree: median of `a` over median of `b`; 1 is full agreement."""
    return a.median / b.median


def _cold_total(l2: int) -> float:
    return max(2.0 * l2, COLD_BYTES)


def _checked(candidates: Mapping[str, Sequence[Thunk]], cache: str, repeats: int) -> dict[str, list[Thunk]]:
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache: got {cache!r}, expected 'cold' or 'warm'")
    if repeats < 1:
        raise ValueError(f"repeats: got {repeats}, expected at least 1")
    sets = {name: list(thunks)[: 1 if cache == "warm" else None] for name, thunks in candidates.items()}
    for name, thunks in sets.items():
        if not thunks:
            raise ValueError(f"candidates[{name!r}]: got no thunk, expected one per input set")
    return sets


def _check_cold(sets: Mapping[str, list[Thunk]], bytes_per_set: int | None) -> None:
    l2 = l2_bytes()
    for name, thunks in sets.items():
        if bytes_per_set is None and len(thunks) == 1:
            raise ValueError(f"candidates[{name!r}]: one input set, expected several or bytes_per_set for a cold time")
        if bytes_per_set is not None and cache_of(len(thunks), bytes_per_set, l2) != "cold":
            raise ValueError(
                f"candidates[{name!r}]: {len(thunks)} input sets of {bytes_per_set} bytes, expected more "
                f"than {_cold_total(l2):.0f} bytes in all for a cold time"
            )


def _calls(thunks: Sequence[Thunk], rounds: int) -> Thunk:
    def run() -> None:
        for _ in range(rounds):
            for thunk in thunks:
                thunk()

    return run


def _warm_up(torch: Any, name: str, thunks: Sequence[Thunk], warmup: int, *, spin: bool) -> None:
    """Compile and allocate; the first candidate also keeps the GPU at work until it has raised its clocks."""
    try:
        end = time.perf_counter() + SPIN_SECONDS * spin
        _calls(thunks, max(warmup, 1))()
        torch.cuda.synchronize()
        while time.perf_counter() < end:
            _calls(thunks, 1)()
            torch.cuda.synchronize()
    except Exception as error:
        error.add_note(f"while candidate {name!r} warmed up")
        raise


def _calibrated(torch: Any, name: str, thunks: list[Thunk], stream: Any, min_window_us: float) -> _Runner:
    """A graph of `thunks`, repeated until one replay takes `min_window_us`."""
    rounds, limit = 1, max(1, MAX_CALLS // len(thunks))
    while True:
        graph = capture(name, _calls(thunks, rounds), stream)
        runner = _Runner(name, graph.replay, rounds * len(thunks))
        window = min(_window_us(torch, runner, lead_in=True) for _ in range(3))
        if window >= min_window_us or rounds == limit:
            return runner
        # A little more than it takes, for part of the window is the start of the graph.
        rounds = min(limit, max(rounds + 1, math.ceil(rounds * 1.1 * min_window_us / max(window, 1e-3))))
        graph.reset()


def _window_us(torch: Any, runner: _Runner, *, lead_in: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead_in:
        runner.replay()
    start.record()
    runner.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _take_turns(
    torch: Any, runners: list[_Runner], repeats: int, seed: int, max_seconds: float, *, lead_in: bool
) -> None:
    by_name = {runner.name: runner for runner in runners}
    for repeat in range(repeats):
        for name in turns(list(by_name), repeat, seed):
            runner = by_name[name]
            spent = sum(runner.windows) * (2 if lead_in else 1) / 1e6
            if spent > max_seconds and len(runner.windows) >= MIN_REPEATS:
                continue
            runner.windows.append(_window_us(torch, runner, lead_in=lead_in))


def _sample(runner: _Runner, cache: Cache, how: str) -> Sample:
    low, middle, high = np.percentile(runner.windows, [25, 50, 75]) / runner.calls
    return Sample(float(middle), float(high - low), len(runner.windows), cache, how)
