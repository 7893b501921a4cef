"""The command line: exit codes, what is printed, and how fast help is."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_report_support import HOST, RUN, host_info, make_run, row, timed

from kdtree import cli
from kdtree.report import doctor
from kdtree.report.exit_codes import ExitCode
from kdtree.report.render import render

REPO = Path(cli.__file__).parents[1]


@pytest.fixture
def reports(tmp_path):
    render(make_run(tmp_path, [row(), timed("topk", "numba:simt", {"B": 1, "K": 8}, 10.0, seq=1)]))
    return tmp_path


def run(*words):
    return cli.main([str(word) for word in words])


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, time; from kdtree import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit as exc: assert exc.code == 0\n"
        "heavy = {'numba', 'torch', 'matplotlib', 'papermill', 'nbformat', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 1, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit codes: 0 fine" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["report", "--profile", "huge"],
        ["compare", "a"],
        ["baseline", "drop", "x"],
        ["report", "--overwrite", "--render"],
    ],
)
def test_usage_errors_exit_2(words, capsys):
    with pytest.raises(SystemExit) as exc:
        run(*words)
    assert exc.value.code == ExitCode.USAGE
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "no", "such"],
        ["baseline", "store", "no"],
        ["report", "--host", "no", "--render"],
        ["report", "--notebooks", "no"],
    ],
)
def test_what_is_not_there_exits_2_with_a_sentence(words, tmp_path, capsys):
    flag = "--out" if words[0] == "report" else "--reports"
    assert run(*words, flag, tmp_path) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith("kdtree: ") and "Traceback" not in said


def test_a_report_prints_its_verdict_and_returns_its_code(reports, capsys, monkeypatch):
    from kdtree.measure import host

    monkeypatch.setattr(host, "collect", host_info)
    assert run("report", "--render", "--host", HOST, "--out", reports) == ExitCode.OK
    said = capsys.readouterr().out
    assert "PASSED: 2 of 2 results passed (MEASURED on NVIDIA H200 (made up))" in said
    assert f"{HOST}/{RUN}/index.html" in said
    make_run(
        reports,
        [row(status="failed", reason="off by 7"), row("tree_build", status="error", reason="died", pid=3)],
    )
    assert run("report", "--render", "--host", HOST, "--out", reports) == ExitCode.DIED
    said = capsys.readouterr().out
    assert said.startswith("FAILED: 0 passed, 1 wrong, 1 died or raised")
    assert "topk numba:simt [B=1 K=8]: off by 7" in said


def test_a_gpu_that_is_demanded_and_absent_exits_5(tmp_path, capsys, monkeypatch):
    from kdtree.measure import host

    monkeypatch.setattr(host, "collect", lambda: host_info(simulated=True))
    monkeypatch.setattr("kdtree.device.gpu_available", lambda: False)
    assert run("report", "--require-gpu", "--out", tmp_path) == ExitCode.NO_GPU
    assert "there is none" in capsys.readouterr().err
    monkeypatch.setattr(doctor, "CHECKS", [c for c in doctor.CHECKS if c[0] != "torch"])  # slow to import
    assert run("doctor", "--require-gpu") == ExitCode.NO_GPU
    assert run("doctor") == ExitCode.OK


def test_a_baseline_is_stored_and_held_against_a_later_run(reports, capsys):
    assert run("baseline", "check", HOST, "--reports", reports) == ExitCode.USAGE
    assert "no baseline" in capsys.readouterr().err
    assert run("baseline", "store", HOST, "--reports", reports) == ExitCode.OK
    assert (reports / "baselines" / f"{HOST}.json").is_file()
    assert run("baseline", "check", HOST, "--reports", reports) == ExitCode.OK
    capsys.readouterr()
    make_run(
        reports,
        [timed("topk", "numba:simt", {"B": 1, "K": 8}, 15.0)],
        run="2027-01-01-abc1234",
        created="2027-01-01",
    )
    assert run("baseline", "check", HOST, "--reports", reports) == ExitCode.SLOWER
    said = capsys.readouterr().out
    assert "topk numba:simt [B=1 K=8]: slower" in said and "1 slower" in said


def test_compare_prints_a_table_and_names_the_page(reports, tmp_path, capsys):
    target = tmp_path / "here.html"
    assert run("compare", HOST, f"{HOST}/{RUN}", "--reports", reports, "-o", target) == ExitCode.OK
    said = capsys.readouterr().out
    assert "topk" in said and str(target) in said and target.is_file()


def test_fixtures_gets_its_words_untouched(monkeypatch):
    got = []
    fake = types.ModuleType("kdtree.fixtures")
    fake.main = lambda words: got.append(words) or 3
    monkeypatch.setitem(sys.modules, "kdtree.fixtures", fake)
    import kdtree

    monkeypatch.setattr(kdtree, "fixtures", fake, raising=False)
    assert run("fixtures", "--check", "-x", "--help") == 3
    assert got == [["--check", "-x", "--help"]]


def test_the_doctor_gets_to_the_end_whatever_breaks(monkeypatch):
    def breaks():
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(doctor, "CHECKS", (*doctor.CHECKS[:2], ("odd", breaks)))
    found = doctor.examine()
    assert [f.what for f in found] == ["python", "numpy", "odd"]
    assert (found[2].state, found[2].found) == (doctor.BAD, "RuntimeError: no")
    assert "1 thing to put right" in doctor.as_text(found)


@pytest.mark.parametrize(("version", "state"), [("2.4.6", doctor.OK), ("2.5.0", doctor.BAD), (None, doctor.BAD)])
def test_the_doctor_knows_which_numpy_numba_can_take(monkeypatch, version, state):
    monkeypatch.setattr(doctor, "version", lambda name: version)
    found = doctor._numpy()
    assert found.state == state
    assert state == doctor.OK or "numpy<2.5" in found.advice


def test_the_doctor_compares_fixtures_with_their_manifest(tmp_path):
    assert "no MANIFEST" in doctor.check_fixtures(tmp_path).found
    (tmp_path / "a.kdtr").write_bytes(b"abc")
    pins = {"a": {"sha256": hashlib.sha256(b"abc").hexdigest()}, "big": {"sha256": "0" * 64, "large": True}}
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"bundles": pins}))
    found = doctor.check_fixtures(tmp_path)
    assert (found.state, found.found) == (doctor.OK, "1 match MANIFEST.json, 1 made on demand")
    (tmp_path / "a.kdtr").write_bytes(b"abd")
    assert "1 differ" in doctor.check_fixtures(tmp_path).found
    (tmp_path / "a.kdtr").unlink()
    assert "1 absent: a" in doctor.check_fixtures(tmp_path).found
    (tmp_path / "MANIFEST.json").write_text("[")
    assert "no manifest" in doctor.check_fixtures(tmp_path).found


def test_an_error_of_the_file_system_is_usage_and_any_other_is_no_wrong_result(monkeypatch, capsys):
    from kdtree import cli

    for error, code in ((FileNotFoundError("no such folder"), 2), (RuntimeError("broken"), 6)):

        def fail(argv, error=error):
            raise error

        monkeypatch.setattr(cli, "_fixtures", fail)
        assert cli.main(["fixtures"]) == code
    assert "no such folder" in capsys.readouterr().err
