"""A second opinion on device times: NVIDIA's cuda-bench (NVBench), where it is installed.

It shares nothing with `timing` but the captured graph: it isolates every sample, writes over the L2 before
it, holds the stream until all is enqueued, and decides by itself when it has seen enough. Expect it 1 to 3 µs
above `timing` on a short kernel, since one launch lies between its events and its L2 flush leaves lines to
write back; `timing.agreement` is telling from about 50 µs on.

cuda-bench runs all registered benchmarks once in the life of a process. So several candidates go in one call,
and a second call has nothing to say.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kdtree.measure import graphs
from kdtree.measure.timing import Sample, Thunk

_used = False


@dataclass(frozen=True)
class CrossCheck:
    """Samples by candidate; empty with the reason why when cuda-bench could not run."""

    samples: dict[str, Sample] = field(default_factory=dict)
    reason: str | None = None


def available() -> tuple[bool, str]:
    """Whether cuda-bench can still be used in this process, and why not."""
    try:
        graphs.torch_cuda()
    except graphs.NotMeasurable as error:
        return False, str(error)
    if _used:
        return False, "cuda-bench has run in this process, and runs once"
    # `cuda` may be absent, or a namespace without this part.
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bench") is None:
        return False, "cuda-bench is not installed"
    return True, ""


def cuda_bench_times(candidates: Mapping[str, Thunk], *, min_samples: int = 40, timeout_s: float = 5.0) -> CrossCheck:
    """Cold device time of each candidate by cuda-bench.

    Args:
        candidates: name -> thunk that launches on the current torch stream and that a CUDA graph can capture.
        min_samples: isolated runs at the least.
        timeout_s: seconds per candidate after which it stops, even above its own noise limit.

    Raises CaptureError naming the candidate, RuntimeError for one that failed inside cuda-bench, and any CUDA
    error.
    """
    global _used
    ok, reason = available()
    if not ok:
        return CrossCheck(reason=reason)
    try:
        import cuda.bench as bench

        run = bench.run_all_benchmarks  # its first use loads the extension for the CUDA version that is here
    except ImportError as error:
        return CrossCheck(reason=f"cuda-bench does not load: {error}")
    torch = graphs.torch_cuda()
    device = torch.cuda.current_device()
    replays = {name: _captured(torch, name, thunk) for name, thunk in candidates.items()}
    errors: list[Exception] = []
    for index, graph in enumerate(replays.values()):
        registered = bench.register(_benchmark(torch, graph, device, errors))
        registered.set_name(f"candidate{index}").set_min_samples(min_samples).set_timeout(timeout_s)
    _used = True
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        run(["kdtree", "--quiet", "--devices", str(device), "--jsonbin", str(file)])
        torch.cuda.synchronize()
        if errors:  # cuda-bench turns an exception into a skipped state
            raise errors[0]
        return CrossCheck({name: _read(file, f"candidate{i}", name) for i, name in enumerate(replays)})


def _captured(torch: Any, name: str, thunk: Thunk) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        thunk()
        torch.cuda.synchronize()
        return graphs.capture(name, thunk, stream)


def _benchmark(torch: Any, graph: Any, device: int, errors: list[Exception]) -> Any:
    def benchmark(state: Any) -> None:
        def launch(launch: Any) -> None:
            # A replay neither allocates nor synchronises: either would wait for the stream that is held.
            with torch.cuda.stream(torch.cuda.ExternalStream(launch.get_stream().addressof(), device=device)):
                graph.replay()

        try:
            state.exec(launch, batched=False)
        except Exception as error:
            errors.append(error)
            raise

    return benchmark


def _read(file: Path, label: str, name: str) -> Sample:
    from cuda.bench.results import BenchmarkResult

    (state,) = BenchmarkResult.from_json(file)[label]
    if state.is_skipped or not state.samples:
        raise RuntimeError(f"candidate {name!r}: cuda-bench has no sample ({state.skip_reason or 'no reason given'})")
    low, middle, high = np.percentile(np.asarray(state.samples, dtype=np.float64) * 1e6, [25, 50, 75])
    return Sample(float(middle), float(high - low), len(state.samples), "cold", "cuda-bench")
