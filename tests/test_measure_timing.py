from __future__ import annotations

import array
import ast
import contextlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from kdtree.kernels import cubin_cache
from kdtree.measure import cross_check, graphs, timing

REPLAY_START_US = 1.5  # what a graph takes before its first node, on the fake GPU


class FakeTorch:
    """A GPU made of a clock: thunks enqueue µs by `work`, a graph remembers those that it captured."""

    __version__ = "2.11.0"

    def __init__(self):
        self.cuda = self
        self.device_us = 0.0  # when the device will be idle
        self.stream_now, self.capturing = "default", None
        self.captures, self.replays = [], []
        self.alive = True
        self.noise = lambda: 1.0
        torch = self

        class CUDAGraph:
            def __init__(self, keep_graph=False):
                assert keep_graph
                self.nodes, self.ready = [], False

            def raw_cuda_graph(self):
                return self

            def instantiate(self):
                self.ready = True

            def replay(self):
                assert self.ready, "replayed before it was instantiated"
                torch.replays.append(self)
                torch.device_us += (REPLAY_START_US + sum(self.nodes)) * torch.noise()

            def reset(self):
                self.ready = False

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = torch.device_us

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        class Stream:
            def wait_stream(self, other):
                pass

        self.CUDAGraph, self.Event, self.Stream = CUDAGraph, Event, Stream

    def work(self, us):
        if self.capturing is not None:
            self.capturing.nodes.append(us)
        else:
            self.device_us += us

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    @contextlib.contextmanager
    def graph(self, graph, stream=None, capture_error_mode="global"):
        assert stream is not None and capture_error_mode == "thread_local"
        self.stream_now, self.capturing = stream, graph  # as torch: left behind if ending the capture fails
        try:
            yield
        except Exception:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None
        finally:
            self.capturing = None
        self.captures.append(graph)

    def is_available(self):
        return True

    def current_stream(self):
        return self.stream_now

    def current_device(self):
        return 0

    def synchronize(self):
        if not self.alive:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def get_device_properties(self, _):
        return types.SimpleNamespace(L2_cache_size=60 * 2**20, multi_processor_count=132)


@pytest.fixture
def torch(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(graphs, "require_gpu", lambda: None)
    monkeypatch.setattr(graphs, "n_nodes", lambda graph: len(graph.nodes))
    monkeypatch.setattr(timing, "SPIN_SECONDS", 0.0)
    return fake


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "gpu_available", lambda: False)


@pytest.mark.parametrize(
    "measure",
    [
        lambda fn: timing.time_graphs({"a": [fn]}, cache="warm"),
        lambda fn: timing.time_eager({"a": [fn]}, cache="warm"),
        timing.launch_latency,
        timing.first_call,
        lambda fn: timing.l2_bytes(),
    ],
)
def test_nothing_is_timed_under_the_simulator(no_gpu, measure):
    called = []
    with pytest.raises(timing.NotMeasurable, match="no GPU: times are never taken under the simulator"):
        measure(lambda: called.append(1))
    assert called == []


def test_a_forced_simulator_is_one_even_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "gpu_available", lambda: True)
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    with pytest.raises(timing.NotMeasurable, match="simulator"):
        timing.require_gpu()


def test_a_torch_that_sees_no_gpu_is_named(torch, monkeypatch):
    monkeypatch.setattr(torch, "is_available", lambda: False)
    with pytest.raises(timing.NotMeasurable, match="torch 2.11.0 sees no GPU"):
        timing.torch_cuda()
    assert timing.torch_cuda(required=False) is None
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(timing.NotMeasurable, match="does not import"):
        timing.torch_cuda()


def test_the_time_of_a_call_is_the_window_over_its_calls(torch):
    samples = timing.time_graphs({"a": [lambda: torch.work(4.0)]}, cache="warm", repeats=10)
    assert samples["a"].median == pytest.approx(4.0, rel=0.01)
    assert samples["a"].n == 10 and samples["a"].iqr == pytest.approx(0, abs=1e-9)
    assert (samples["a"].cache, samples["a"].how) == ("warm", "graph")
    assert sum(torch.captures[-1].nodes) >= 200


@pytest.mark.parametrize("us", [0.5, 1.0, 7.3, 199.0, 5000.0])
def test_the_window_is_long_enough_for_the_start_of_a_graph_not_to_show(torch, us):
    samples = timing.time_graphs({"a": [lambda: torch.work(us)]}, cache="warm", repeats=8)
    assert samples["a"].median == pytest.approx(us, rel=0.01)
    assert len(torch.captures) <= 3


def test_each_timed_replay_follows_one_that_is_not_timed(torch):
    timing.time_graphs({"a": [lambda: torch.work(300.0)]}, cache="warm", repeats=10)
    assert len(torch.replays) == 2 * (3 + 10)


def test_all_input_sets_take_part_equally_and_in_turn_when_cold(torch):
    thunks = [lambda us=us: torch.work(us) for us in (10.0, 20.0, 30.0)]
    samples = timing.time_graphs({"a": thunks}, cache="cold", repeats=8)
    assert samples["a"].median == pytest.approx(20.0, rel=0.01)
    nodes = torch.captures[-1].nodes
    assert nodes == [10.0, 20.0, 30.0] * (len(nodes) // 3)


def test_warm_uses_the_first_input_set_only(torch):
    thunks = [lambda us=us: torch.work(us) for us in (10.0, 20.0)]
    assert timing.time_graphs({"a": thunks}, cache="warm")["a"].median == pytest.approx(10.0, rel=0.01)


def test_median_and_iqr_are_of_the_windows(torch):
    drawn = iter(np.tile([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.5], 100))  # every second one is timed
    torch.noise = lambda: next(drawn)
    sample = timing.time_graphs({"a": [lambda: torch.work(400.0)]}, cache="warm", repeats=40)["a"]
    windows = 401.5 * np.array([1.0, 1.0, 1.0, 1.5] * 10)
    assert sample.median == pytest.approx(np.median(windows))
    assert sample.iqr == pytest.approx(np.subtract(*np.percentile(windows, [75, 25])))


def test_candidates_share_drift_because_they_take_turns(torch):
    torch.noise = lambda: 1 + torch.device_us / 1e6  # the GPU gets ever slower
    thunk = [lambda: torch.work(300.0)]
    a, b, c = timing.time_graphs({"a": thunk, "b": thunk, "c": thunk}, cache="warm", repeats=30).values()
    assert a.median == pytest.approx(b.median, rel=0.005) == pytest.approx(c.median, rel=0.005)
    assert a.iqr > 0


def test_over_a_cycle_every_candidate_has_every_position():
    names = ["a", "b", "c", "d"]
    for seed in (0, 1):
        cycle = [timing.turns(names, repeat, seed) for repeat in range(4)]
        assert all(sorted(order) == names for order in cycle)
        assert all(sorted(order[i] for order in cycle) == names for i in range(4))
        assert cycle == [timing.turns(names, repeat, seed) for repeat in range(4)]
    assert timing.turns(names, 0, 0) != timing.turns(names, 4, 0) or timing.turns(names, 8, 0) != names
    assert timing.turns([], 3, 0) == []


def test_a_slow_candidate_gets_fewer_repeats_and_says_so(torch):
    fns = {"slow": [lambda: torch.work(100_000.0)], "fast": [lambda: torch.work(300.0)]}
    samples = timing.time_graphs(fns, cache="warm", repeats=40, max_seconds=1.0)
    assert samples["slow"].n == timing.MIN_REPEATS and samples["fast"].n == 40


def test_a_candidate_that_does_nothing_measurable_is_refused(torch):
    with pytest.raises(timing.WindowTooShort, match="'idle': 4000 calls"):
        timing.time_graphs({"idle": [lambda: torch.work(1e-6)]}, cache="warm")


def test_a_candidate_that_escapes_the_capture_is_refused_by_name(torch):
    with pytest.raises(timing.CaptureError, match="'elsewhere' launched nothing"):
        timing.time_graphs({"elsewhere": [lambda: None]}, cache="warm")


def test_a_candidate_that_cannot_be_captured_is_named_with_its_own_error(torch):
    def synchronises():
        if torch.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    fns = {"good": [lambda: torch.work(300.0)], "bad": [synchronises]}
    with pytest.raises(timing.CaptureError, match="'bad'.*not permitted when stream is capturing.*time_eager"):
        timing.time_graphs(fns, cache="warm")
    assert torch.stream_now == "default"


def test_a_context_that_died_while_capturing_is_a_cuda_error_not_a_capture_error(torch):
    def faults():
        if torch.capturing is not None:
            torch.alive = False
            raise RuntimeError("unspecified launch failure")

    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        timing.time_graphs({"bad": [faults]}, cache="warm")
    assert not isinstance(caught.value, timing.CaptureError)


def test_a_fault_of_our_own_kernel_while_capturing_stays_that_fault(torch, monkeypatch):
    fault = RuntimeError("topk.simt: CUDA_ERROR_LAUNCH_FAILED")
    monkeypatch.setitem(sys.modules, "kdtree.kernels.launch", types.SimpleNamespace(fault=lambda: fault))

    def faults():
        if torch.capturing is not None:
            raise fault

    with pytest.raises(RuntimeError, match="LAUNCH_FAILED") as caught:
        timing.time_graphs({"bad": [faults]}, cache="warm")
    assert caught.value is fault


def test_errors_of_a_replay_come_through(torch):
    calls = []

    def later():
        torch.work(300.0)
        calls.append(1)

    real = torch.Event.elapsed_time
    torch.Event.elapsed_time = lambda self, other: (_ for _ in ()).throw(RuntimeError("CUDA error: x"))
    with pytest.raises(RuntimeError, match="CUDA error: x"):
        timing.time_graphs({"a": [later]}, cache="warm")
    torch.Event.elapsed_time = real


def test_an_error_in_the_warm_up_names_its_candidate(torch):
    def broken():
        raise KeyError("out")

    for measure in (timing.time_graphs, timing.time_eager):
        with pytest.raises(KeyError) as caught:
            measure({"a": [lambda: torch.work(300.0)], "b": [broken]}, cache="warm")
        assert caught.value.__notes__ == ["while candidate 'b' warmed up"]


def test_an_old_torch_is_refused(torch):
    def old(**_):
        raise TypeError("unexpected keyword")

    torch.CUDAGraph = old
    with pytest.raises(timing.NotMeasurable, match="torch 2.8 or later, found 2.11.0"):
        timing.time_graphs({"a": [lambda: torch.work(1.0)]}, cache="warm")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"cache": "hot"}, "cache"),
        ({"cache": "warm", "repeats": 0}, "repeats"),
        ({"cache": "cold"}, "one input set"),
        ({"cache": "cold", "bytes_per_set": 1000}, r"1 input sets of 1000 bytes"),
    ],
)
def test_arguments_that_cannot_give_an_honest_time_are_refused(torch, arguments, named):
    with pytest.raises(ValueError, match=named):
        timing.time_graphs({"a": [lambda: torch.work(1.0)]}, **arguments)
    with pytest.raises(ValueError, match=r"candidates\['a'\]"):
        timing.time_graphs({"a": []}, cache="warm")


def test_one_large_input_set_may_be_cold(torch):
    fns = {"a": [lambda: torch.work(300.0)]}
    assert timing.time_graphs(fns, cache="cold", bytes_per_set=2**30)["a"].cache == "cold"


def test_eager_calls_are_timed_without_capture(torch):
    thunks = [lambda us=us: torch.work(us) for us in (10.0, 30.0)]
    sample = timing.time_eager({"a": thunks}, cache="cold", repeats=12)["a"]
    assert sample == timing.Sample(20.0, 0.0, 12, "cold", "eager")
    assert torch.captures == []


def test_latency_is_longer_than_the_call_alone(torch, monkeypatch):
    ticks = iter(np.cumsum([0.0, 10e-6, 20e-6] * 100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    got = timing.launch_latency(lambda: torch.work(1.0), n=20)
    assert got.host_us == pytest.approx(10) and got.latency_us == pytest.approx(30) and got.n == 20


@pytest.mark.parametrize(
    ("read", "compiled", "cached"), [(0, 2, False), (2, 0, True), (1, 1, True), (0, 0, True)], ids=str
)
def test_a_first_call_says_whether_machine_code_lay_ready(read, compiled, cached, torch, monkeypatch):
    monkeypatch.setattr(cubin_cache, "count", {"read": 5, "compiled": 7})

    def call() -> str:
        cubin_cache.count["read"] += read
        cubin_cache.count["compiled"] += compiled
        return "refused"

    returned, figures = timing.first_call(call)
    assert returned == "refused" and figures["jit_ms"] > 0 and figures["jit_cached"] is cached


@pytest.mark.parametrize(
    ("size", "l2", "free", "sets"),
    [
        (37_700_000, 60 * 2**20, 10**11, 5),  # one K2.6 layer at 32k tokens on an H200
        (37_700_000, 126 * 2**20, 10**11, 8),
        (10**9, 60 * 2**20, 10**11, 1),
        (10**6, 4 * 2**20, 10**11, 161),
        (1000, 60 * 2**20, 10**11, timing.MAX_SETS),
        (37_700_000, 60 * 2**20, 10**8, 2),
    ],
)
def test_a_rotation_exceeds_twice_the_cache_and_fits_the_memory(size, l2, free, sets):
    got = timing.rotation(size, l2, free)
    assert got == sets and got * size <= 0.8 * free
    cold = got * size > max(2 * l2, 160e6)
    assert timing.cache_of(got, size, l2) == ("cold" if cold else "warm")


@pytest.mark.parametrize(("size", "free"), [(0, 10**9), (10**9, 10**9)])
def test_a_rotation_of_nothing_or_without_room_is_refused(size, free):
    with pytest.raises(ValueError, match="bytes_per_set"):
        timing.rotation(size, 2**20, free)


def test_agreement_is_a_ratio():
    a, b = timing.Sample(103.0, 1, 40, "cold"), timing.Sample(100.0, 1, 40, "cold", "cuda-bench")
    assert timing.agreement(a, b) == pytest.approx(1.03)
    assert timing.agreement(a, a) == 1
    assert a.as_dict() == {"median": 103.0, "iqr": 1, "n": 40, "cache": "cold", "how": "graph"}


def _parameters(file, owner, function):
    """Argument names of a method, from the source: importing torch takes longer than all these tests."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == function:
                    return {a.arg for a in (*item.args.args, *item.args.kwonlyargs)}
    raise AssertionError(f"torch has no {owner}.{function}")


def test_the_real_torch_has_the_parts_that_are_used():
    spec = importlib.util.find_spec("torch")
    if spec is None:
        pytest.skip("torch is not installed")
    cuda = Path(spec.submodule_search_locations[0]) / "cuda"
    assert "keep_graph" in _parameters(cuda / "graphs.py", "CUDAGraph", "__new__")
    assert {"stream", "capture_error_mode"} <= _parameters(cuda / "graphs.py", "graph", "__init__")
    for method in ("instantiate", "raw_cuda_graph", "replay", "reset"):
        assert _parameters(cuda / "graphs.py", "CUDAGraph", method) == {"self"}
    assert {"stream_ptr", "device"} <= _parameters(cuda / "streams.py", "ExternalStream", "__new__")
    assert "enable_timing" in _parameters(cuda / "streams.py", "Event", "__new__")


# cuda-bench -----------------------------------------------------------------------------------------------


class FakeBench(types.ModuleType):
    """cuda.bench with the calls that are made to it: registers, runs once, writes NVBench's JSON."""

    def __init__(self, torch):
        super().__init__("cuda.bench")
        self.torch, self.benchmarks, self.names, self.argv = torch, [], [], None

    def register(self, fn):
        self.benchmarks.append(fn)
        module = self

        class Registered:
            def set_name(self, name):
                module.names.append(name)
                return self

            def set_min_samples(self, n):
                return self

            def set_timeout(self, seconds):
                return self

        return Registered()

    def run_all_benchmarks(self, argv):
        assert isinstance(argv, list) and all(isinstance(a, str) for a in argv)
        self.argv, results = argv, []
        stream = types.SimpleNamespace(addressof=lambda: 1234)
        for fn, name in zip(self.benchmarks, self.names, strict=True):
            samples = []

            def execute(launch, batched, samples=samples):
                assert batched is False
                for _ in range(50):
                    before = self.torch.device_us
                    launch(types.SimpleNamespace(get_stream=lambda: stream))
                    samples.append((self.torch.device_us - before) / 1e6)

            skipped = None
            try:
                fn(types.SimpleNamespace(exec=execute))
            except Exception as error:
                skipped = f"Unexpected error: {error}"
            results.append((name, samples, skipped))
        _write_nvbench_json(Path(argv[argv.index("--jsonbin") + 1]), results)


def _write_nvbench_json(path, results):
    folder = path.with_name(path.name + "-bin")
    folder.mkdir()
    benchmarks = []
    for i, (name, samples, skipped) in enumerate(results):
        state = {"name": "Device=0", "device": 0, "is_skipped": skipped is not None, "skip_reason": skipped}
        if samples:
            (folder / f"{i}.bin").write_bytes(array.array("f", samples).tobytes())
            data = [
                {"name": "filename", "type": "string", "value": f"{folder.name}/{i}.bin"},
                {"name": "size", "type": "int64", "value": str(len(samples))},
            ]
            state["summaries"] = [{"tag": "nv/json/bin:nv/cold/sample_times", "name": "t", "data": data}]
        benchmarks.append({"name": name, "devices": [0], "axes": [], "states": [state]})
    path.write_text(json.dumps({"devices": [{"id": 0, "name": "fake"}], "benchmarks": benchmarks}))


@pytest.fixture
def bench(torch, monkeypatch):
    pytest.importorskip("cuda.bench.results")
    fake = FakeBench(torch)
    fake.results = sys.modules["cuda.bench.results"]
    monkeypatch.setitem(sys.modules, "cuda.bench", fake)
    monkeypatch.setattr("cuda.bench", fake, raising=False)
    monkeypatch.setattr(cross_check, "_used", False)
    monkeypatch.setattr(cross_check.importlib.util, "find_spec", lambda name: object())
    torch.ExternalStream = lambda address, device: ("external", address, device)
    return fake


def test_cuda_bench_times_every_candidate_in_one_run(torch, bench):
    check = cross_check.cuda_bench_times({"a": lambda: torch.work(50.0), "b": lambda: torch.work(80.0)})
    assert check.reason is None
    assert check.samples["a"].median == pytest.approx(51.5, rel=1e-5)
    assert check.samples["b"] == timing.Sample(pytest.approx(81.5, rel=1e-5), 0.0, 50, "cold", "cuda-bench")
    assert "--quiet" in bench.argv and bench.argv[bench.argv.index("--devices") + 1] == "0"


def test_cuda_bench_runs_once_a_process(torch, bench):
    assert timing.cuda_bench_time(lambda: torch.work(50.0)).median == pytest.approx(51.5, rel=1e-5)
    assert timing.cuda_bench_time(lambda: torch.work(50.0)) is None
    assert "runs once" in cross_check.cuda_bench_times({}).reason


def test_an_error_inside_cuda_bench_is_not_lost(torch, bench):
    def breaks(address, device):
        raise RuntimeError("CUDA error: misaligned address")

    torch.ExternalStream = breaks
    with pytest.raises(RuntimeError, match="misaligned address"):
        cross_check.cuda_bench_times({"a": lambda: torch.work(50.0)})


def test_a_cuda_bench_that_does_not_load_is_a_reason_not_an_error(torch, bench, monkeypatch):
    monkeypatch.delattr(FakeBench, "run_all_benchmarks")
    bench.__getattr__ = lambda name: (_ for _ in ()).throw(ImportError("No extension for CUDA 11.x"))
    check = cross_check.cuda_bench_times({"a": lambda: torch.work(50.0)})
    assert check == cross_check.CrossCheck({}, "cuda-bench does not load: No extension for CUDA 11.x")


def test_a_state_that_cuda_bench_skipped_is_an_error(torch, bench, monkeypatch):
    monkeypatch.setattr(cross_check, "_benchmark", lambda *a: lambda state: None)
    with pytest.raises(RuntimeError, match="candidate 'a': cuda-bench has no sample"):
        cross_check.cuda_bench_times({"a": lambda: torch.work(50.0)})


def test_without_gpu_or_cuda_bench_there_is_a_reason_and_no_sample(torch, monkeypatch, request):
    monkeypatch.setattr(cross_check.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cross_check, "_used", False)
    assert cross_check.available() == (False, "cuda-bench is not installed")
    monkeypatch.undo()
    request.getfixturevalue("no_gpu")
    assert timing.cuda_bench_time(lambda: None) is None
    assert "no GPU" in cross_check.cuda_bench_times({"a": lambda: None}).reason
