"""Failure is loud: each injected fault gives its exit code, its row, and nothing "passed" behind it in its process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdtree.measure import families, host
from kdtree.measure.session import Session
from kdtree.measure.worker import DIED, OK, WRONG

HERE = Path(__file__).parent
SOURCE = host.source_fingerprint()


@pytest.fixture(autouse=True)
def importable_faults(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.syspath_prepend(str(HERE))


def session(run_dir: Path, source: str = SOURCE) -> Session:
    state = {"run": "test", "host": "host", "source": source, "profile": "tiny"}
    (run_dir / "run.json").write_text(json.dumps(state))
    return Session(run_dir, "host", "test", source, simulated=True, profile="tiny")


def run(tmp_path: Path, fault: str, **options) -> tuple[families.FamilyResult, dict[str, dict]]:
    found = families.run(f"faults:{fault}", session(tmp_path), **options)
    return found, {row["case"]["fault"]: row for row in found.rows}


@pytest.mark.parametrize("fault", ["out_of_bounds", "killed", "cuda_error"])
def test_a_fault_gets_an_error_row_and_exit_code_6_and_the_rest_runs_in_another_process(tmp_path, fault):
    found, rows = run(tmp_path, fault)
    assert found.exit_code == DIED
    assert rows["before"]["status"] == "passed"
    assert rows[fault]["status"] == "error"
    assert rows[fault]["reason"].startswith("died: ")
    # What comes behind the fault is believed only because another process made it.
    assert rows["behind"]["status"] == "passed"
    assert rows["behind"]["pid"] != rows[fault]["pid"] == rows["before"]["pid"]


def test_a_kernel_that_never_returns_is_killed_at_its_deadline(tmp_path):
    found, rows = run(tmp_path, "never_returns", case_deadline=6.0)
    assert found.exit_code == DIED
    assert rows["never_returns"]["status"] == "error"
    assert rows["never_returns"]["reason"] == "timeout: no result within 6 s"
    assert rows["before"]["status"] == rows["behind"]["status"] == "passed"
    assert not list(tmp_path.glob("inflight-*"))


@pytest.mark.parametrize(
    ("fault", "word"),
    [("wrong_result", "expected"), ("unwritten", "differ"), ("just_outside", "outside the array")],
)
def test_a_wrong_result_fails_with_exit_code_1_and_says_where(tmp_path, fault, word):
    found, rows = run(tmp_path, fault)
    assert found.exit_code == WRONG
    assert rows[fault]["status"] == "failed"
    assert word in rows[fault]["reason"]
    assert rows["before"]["status"] == rows["behind"]["status"] == "passed"


def test_a_family_that_keeps_dying_is_stopped_and_the_rest_is_said_to_be_not_run(tmp_path):
    found, rows = run(tmp_path, "always_faulty")
    assert found.exit_code == DIED
    assert [rows[f"fault{i}"]["status"] for i in range(6)] == ["error"] * 3 + ["skipped"] * 3
    assert "stopped after 3 faults" in rows["fault5"]["reason"]


def test_rows_from_before_a_fault_are_kept_and_resumed(tmp_path):
    run(tmp_path, "wrong_result")
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    again, rows = run(tmp_path, "wrong_result")
    new = (tmp_path / "results.jsonl").read_text().splitlines()[len(lines) :]
    # Only the case that had not passed ran again.
    assert [json.loads(line)["case"]["fault"] for line in new] == ["wrong_result"]
    assert again.exit_code == WRONG
    assert rows["before"]["status"] == "passed"


def test_results_of_earlier_sources_do_not_count(tmp_path):
    old = session(tmp_path, "111111111111")
    for name in ("before", "wrong_result", "behind"):
        case = {"op": "tree_accept", "impl": "numba:simt", "case": {"fault": name}, "metric": "correctness", "seed": 7}
        old.append(case | {"status": "passed"})
    found, rows = run(tmp_path, "wrong_result")
    assert found.exit_code == WRONG
    assert {name: row["status"] for name, row in rows.items()} == {
        "before": "passed",
        "wrong_result": "failed",
        "behind": "passed",
    }
    assert {row["source"] for row in rows.values()} == {SOURCE}


def test_sources_that_changed_under_a_run_stop_it(tmp_path):
    with pytest.raises(RuntimeError, match="the sources changed under this run"):
        families.run("merge_states", session(tmp_path, "222222222222"))
    assert not (tmp_path / "results.jsonl").exists()


def test_after_a_cuda_error_every_launch_of_the_process_is_refused(monkeypatch):
    from kdtree.kernels import launch

    monkeypatch.setattr(launch, "_fault", None)

    def illegal():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(launch.CudaFault, match="verify_attn: CUDA error"):
        launch.guard(illegal, "verify_attn")
    with pytest.raises(launch.CudaFault, match="topk: refused"):
        launch.guard(lambda: 1, "topk")
    assert str(launch.fault()).startswith("verify_attn")


def test_a_good_family_exits_0(tmp_path):
    found = families.run("merge_states", session(tmp_path))
    assert found.exit_code == OK
    assert found.counts == {"passed": 2, "failed": 0, "error": 0, "skipped": 0}


def test_an_unknown_family_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="family: got op 'flash'"):
        families.run("flash", session(tmp_path))
