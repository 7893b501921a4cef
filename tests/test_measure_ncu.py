"""Hardware counters: what is asked of ncu, what is read from its answer, what is said where there is none."""

from __future__ import annotations

import json
import subprocess
import types

import pytest

from kdtree.device import gpu_available
from kdtree.measure import ncu, one_call, session, sweep

TIME, TENSOR = ncu.FIGURES["time, ns"][0], ncu.FIGURES["tensor cores at work, %"][1]
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
)
HEAD += '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'


def line(number: int, kernel: str, metric: str, value: str) -> str:
    middle = '"7","python3.12","127.0.0.1"', f'"{kernel}"', '"1","7","(384, 1, 1)","(132, 1, 1)","0","9.0"'
    return f'"{number}",{middle[0]},{middle[1]},{middle[2]},"Command line profiler metrics","{metric}","x","{value}"'


FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"
OURS = "kdtree::kernels::verify_wgmma::wgmma::_3clocals_3e::verify_attn_wgmma[abi:v1][abi:cw51](long long)"
SIMT = "_ZN6kdtree16verify_attn_simtB2v1Ev"
CALLS = (("wgmma", sweep.REFERENCE["verify_attn"]), ("mma", sweep.SMALL), ("simt", sweep.SMALL))
LOG = [
    "==PROF== Connected to process 7",
    HEAD,
    line(0, FILL, TIME, "1,024"),
    line(1, OURS, TIME, "409,120.5"),
    line(1, OURS, TENSOR, "81.25"),
    line(1, OURS, "launch__grid_size", "n/a"),
    "==PROF== something in between",
    line(2, FILL, TIME, "1,000"),  # mma did not take its case
    line(3, FILL, TIME, "1,000"),
    line(4, SIMT, TIME, "900"),
    line(5, SIMT.replace("simt", "combine"), TIME, "90"),
    "==WARNING== the end",
]


def test_records_belong_to_the_call_whose_marker_came_before():
    found = ncu.records(LOG, CALLS)
    assert [(r["impl"], r["kernel"], r["case"]["L"]) for r in found] == [
        ("numba:wgmma", "verify_attn_wgmma", 4096),
        ("numba:simt", "verify_attn_simt", 256),
        ("numba:simt", "verify_attn_combine", 256),
    ]
    assert found[0]["metrics"] == {TIME: 409_120.5, TENSOR: 81.25}


@pytest.mark.parametrize(
    "lines", [[], ["==ERROR== ERR_NVGPUCTRPERM"], [HEAD], ['"a","b"'], [HEAD, '"x"'], [HEAD, '"1","2"']]
)
def test_an_answer_without_a_table_has_no_records(lines):
    assert ncu.records(lines, CALLS) == []


def test_only_metrics_that_the_gpu_has_are_asked_for():
    query = "Device NVIDIA H200 (GH100)\n---\nsm__cycles_elapsed     cycle    # of cycles\ngpu__time_duration  ns  x\n"
    asked = ncu.known(query)
    assert {"gpu__time_duration.sum", "sm__cycles_elapsed.max", "launch__grid_size"} <= set(asked)
    assert not any(m.startswith(("dram__", "smsp__")) for m in asked)
    assert ncu.known("ncu: command not understood") == ncu.wanted()


def test_figures_take_the_first_metric_that_is_there_and_stalls_are_shares():
    record = ncu.records(LOG, CALLS)[0]
    assert ncu.figure(record, "tensor cores at work, %") == 81.25 and ncu.figure(record, "L2, %") is None
    assert ncu.stalls(record) == []
    states = {"gmma": 3.0, "selected": 1.0, "barrier": 4.0, "long_scoreboard": 0.5, "wait": 1.5}
    record["metrics"] |= {ncu.STALL.format(s): v for s, v in states.items()}
    assert ncu.stalls(record) == [("barrier", 0.4), ("gmma", 0.3), ("wait", 0.15)]


def test_what_is_written_is_read_again_and_is_strict_json(tmp_path):
    found = ncu.nothing("") | {"reason": None, "tool": "ncu 2025.3.1", "records": ncu.records(LOG, CALLS)}
    ncu.write(tmp_path / ncu.FILE, found)
    assert ncu.read(tmp_path) == found == json.loads((tmp_path / ncu.FILE).read_text())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "records": []}', '{"version": 1, "records": {}}'])
def test_a_file_that_cannot_be_read_is_a_reason(tmp_path, text):
    assert ncu.read(tmp_path)["reason"] == "no hardware counters were taken in this run"
    (tmp_path / ncu.FILE).write_text(text)
    found = ncu.read(tmp_path)
    assert found["records"] == [] and "cannot be read" in found["reason"]


@pytest.fixture
def tool(monkeypatch):
    """An ncu that writes LOG, or fails as `said` says."""
    fake = types.SimpleNamespace(said=None, commands=[])

    def run(command, **_):
        fake.commands.append(command)
        if "--version" in command:
            return types.SimpleNamespace(stdout="Copyright\nVersion 2025.3.1.0 (build 1)\n", stderr="", returncode=0)
        if "--query-metrics" in command:
            return types.SimpleNamespace(stdout="", stderr="", returncode=1)
        if fake.said == "timeout":
            raise subprocess.TimeoutExpired(command, 1)
        if fake.said is None:
            with open(command[command.index("--log-file") + 1], "w") as file:
                file.write("\n".join(LOG))
        return types.SimpleNamespace(stdout=fake.said or "", stderr="", returncode=int(fake.said is not None))

    monkeypatch.setattr(ncu, "gpu_available", lambda: True)
    monkeypatch.setattr(ncu.shutil, "which", lambda name: "ncu")
    monkeypatch.setattr(ncu.subprocess, "run", run)
    monkeypatch.setattr(ncu.host, "collect", lambda: {"gpu": {"name": "NVIDIA H200"}})
    return fake


def test_a_full_run_takes_them_once(tool, tmp_path):
    here = session.Session(tmp_path / "run", "h", "r", "s", False, "full")
    found = ncu.measure(here)
    assert found["tool"] == "ncu 2025.3.1.0" and found["gpu"] == "NVIDIA H200" and found["records"]
    (asked,) = [c for c in tool.commands if "--csv" in c]
    assert asked[asked.index("--clock-control") + 1] == "none"
    assert [one_call.parsed(word) for word in asked[asked.index("kdtree.measure.one_call") + 1 :]] == list(ncu.CALLS)
    again = len(tool.commands)
    assert ncu.measure(here) == found and len(tool.commands) == again


@pytest.mark.parametrize(
    "said,reason",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "no permission"),
        ("timeout", "not done within"),
        ("?", "nothing said"),
    ],
)
def test_what_ncu_cannot_do_is_a_reason_not_an_error(tool, tmp_path, said, reason):
    tool.said = said
    found = ncu.measure(session.Session(tmp_path, "h", "r", "s", False, "full"))
    assert found["records"] == [] and reason in found["reason"]


def test_other_profiles_and_machines_without_a_gpu_take_none(tmp_path, monkeypatch):
    here = session.Session(tmp_path, "h", "r", "s", True, "tiny")
    if not gpu_available():
        assert "need a GPU" in ncu.measure(here)["reason"]
    monkeypatch.setattr(ncu, "gpu_available", lambda: True)
    assert ncu.measure(here)["reason"] == "hardware counters are taken in the full profile, this is tiny"
    assert not (tmp_path / ncu.FILE).exists()


def test_a_call_is_written_and_read():
    for call in ncu.CALLS:
        assert one_call.parsed(one_call.written(*call)) == call
    assert one_call.parsed("mma:B=1,L=9") == ("mma", sweep.REFERENCE["verify_attn"] | {"B": 1, "L": 9})
    for bad in ("cute:B=1", "B=1", "mma:Q=1", "mma:B=x"):
        with pytest.raises(ValueError):
            one_call.parsed(bad)
