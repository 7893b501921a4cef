"""Running notebooks: what breaks is loud, what is done is kept, and a run that stopped is gone on with.

Kernels take a second or two to start, so one broken run is made once and looked at by many tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from test_report_support import SOURCE, host_info, make_run, notebook, row

from kdtree.report import html, runstate
from kdtree.report import notebooks as books
from kdtree.report import run as runs
from kdtree.report.engine import end_processes
from kdtree.report.exit_codes import ExitCode
from kdtree.report.offline import find_external_urls
from kdtree.report.progress import Progress
from kdtree.report.scrub import for_run

# A cell that records one result as a worker would; `spec` is "op status" or "op status reason".
RECORD = """
import json, os, pathlib
from kdtree.measure import results
state = json.loads((pathlib.Path(run_dir) / "run.json").read_text())
def record(op, status="passed", reason=None, source=None, pid=None, seq=0, **case):
    row = results.new_row(op, "numba:simt", case or {"B": 1}, metric="correctness", status=status,
        reason=reason, host=state["host"], run=state["run"], source=source or state["source"],
        simulated=state["simulated"], seed=0, rel_l2=0.0, pid=pid or os.getpid(), seq=seq)
    results.append(pathlib.Path(run_dir) / "results.jsonl", row)
"""


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    """The same host for every run, whatever this machine has, and no figures, which take time."""
    from kdtree.measure import host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "collect", lambda: host_info(simulated=True))
        patch.setattr(host, "source_fingerprint", lambda: SOURCE)
        patch.setattr(html, "draw", lambda *_: ([], []))
        yield


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run of notebooks that break in every way, and its result."""
    root = tmp_path_factory.mktemp("broken")
    folder = root / "books"
    good = "import sys\nprint(run_dir, sys.prefix)\nrecord('topk', B=1)"
    litter = "(pathlib.Path(run_dir) / 'inflight-topk-correctness.json').write_text('{}')"
    notebook(folder / "00_good.ipynb", RECORD, litter, good, "# a comment alone", "1 + 1")
    # A child that outlives its kernel would hold the GPU.
    child = (
        "import subprocess, sys\ncommand = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        "child = subprocess.Popen(command, start_new_session=True)\n"
        "(pathlib.Path(run_dir) / 'child').write_text(str(child.pid))"
    )
    notebook(
        folder / "10_dies.ipynb",
        RECORD,
        child,
        "record('topk', B=2)\nos.kill(os.getpid(), 9)",
        "print('never')",
    )
    notebook(folder / "20_raises.ipynb", "open('/nonexistent/' + run_dir)", "print('never')")
    notebook(folder / "30_exits.ipynb", "raise SystemExit(0)", "print('never')")
    notebook(folder / "40_hangs.ipynb", "import time\ntime.sleep(60)")
    notebook(folder / "50_other.ipynb", "print(1)", parameters="run_dir = '.'\nsize = 'tiny'")
    notebook(
        folder / "60_wrong.ipynb",
        RECORD,
        "record('verify_attn', 'failed', 'off by 7', B=3)\nrecord('kv_compact', source='f' * 12)",
    )
    notebook(folder / "90_compare.ipynb", "1 / 0")
    patch = pytest.MonkeyPatch()
    patch.setitem(books.CELL_TIMEOUT, "tiny", 3.0)
    result = runs.run(out=root / "reports", notebooks=folder, progress=False)
    patch.undo()
    return root, folder, result


def test_a_broken_run_fails_with_the_gravest_code(broken):
    result = broken[2]
    assert result.exit_code is ExitCode.DIED
    assert result.verdict["status"] == "failed"
    assert result.run_dir.parent.name == "simulated-x86_64"
    assert runstate.load(result.run_dir)["status"] == runstate.BROKEN


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("00_good", "completed", None),
        ("10_dies", "failed", "its kernel died"),
        ("20_raises", "failed", "raised FileNotFoundError"),
        ("30_exits", "failed", "raised SystemExit"),
        ("40_hangs", "failed", "timeout"),
        ("50_other", "failed", "no such parameter: profile"),
        ("60_wrong", "completed", None),
    ],
)
def test_each_notebook_says_what_became_of_it(broken, name, status, reason):
    found = broken[2].verdict["notebooks"][name]
    assert found["status"] == status
    assert reason is None and found["reason"] is None or reason in found["reason"]


def test_the_notebook_that_compares_hosts_is_not_run(broken):
    assert "90_compare" not in broken[2].verdict["notebooks"]


def test_results_from_before_and_after_the_breakage_are_kept(broken):
    verdict = broken[2].verdict
    assert verdict["counts"]["passed"] == 2  # of 00_good, and of 10_dies before it died
    assert [(f["op"], f["reason"]) for f in verdict["failures"]] == [("verify_attn", "off by 7")]
    assert [r["op"] for r in verdict["stale"]] == ["kv_compact"]


def test_pages_name_what_failed_and_need_no_network(broken):
    run_dir = broken[2].run_dir
    page = (run_dir / "index.html").read_text()
    assert "FAILED" in page and "SIMULATED" in page
    for name in ("10_dies", "20_raises", "30_exits", "40_hangs", "50_other", "off by 7"):
        assert name in page.split("</section>")[0]
    pages = sorted(run_dir.glob("**/*.html"))
    assert len(pages) >= 6
    assert all(find_external_urls(p.read_text()) == [] for p in pages)
    assert "FAILED" in (run_dir / "notebooks" / "10_dies.html").read_text()
    assert "failed" in (broken[0] / "reports" / "index.html").read_text()


def test_nothing_kept_holds_an_absolute_path(broken):
    run_dir = broken[2].run_dir
    scrubber = for_run(run_dir, books.repo_root())
    kept = [p for p in run_dir.rglob("*") if p.suffix in (".html", ".ipynb", ".json")]
    assert len(kept) > 12
    for path in kept:
        assert str(broken[0]) not in path.read_text(), path
        assert scrubber.clean(path.read_text()), path
    nb = nbformat.read(run_dir / "notebooks" / "00_good.ipynb", as_version=4)
    assert nb.metadata.papermill.output_path == "<run>/notebooks/00_good.ipynb"
    assert any("<run> <python>" in o.text for c in nb.cells for o in c.get("outputs", []) if "text" in o)


def test_a_process_that_outlives_its_kernel_is_ended(broken):
    pid = int((broken[2].run_dir / "child").read_text())
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child of a dead kernel is still running")


def test_no_temporary_file_or_lock_is_left(broken):
    names = {p.name for p in broken[2].run_dir.iterdir()}
    assert {"run.json", "host.json", "verdict.json", "results.jsonl", "index.html", "notebooks"} <= names
    assert not [n for n in names if n.endswith((".tmp", ".lock")) or n.startswith("inflight")]


def test_the_same_command_goes_on_where_the_run_broke(broken):
    """The last test on the broken run: it mends two notebooks, drops the hopeless ones, and runs again."""
    root, folder, first = broken
    output = first.run_dir / "notebooks" / "00_good.ipynb"
    before = output.stat().st_mtime_ns
    for name in ("20_raises", "30_exits", "40_hangs", "50_other", "60_wrong"):
        (folder / f"{name}.ipynb").unlink()
    notebook(folder / "10_dies.ipynb", RECORD, "record('verify_attn', B=3)")
    second = runs.run(out=root / "reports", notebooks=folder, progress=False)
    assert second.run_dir == first.run_dir
    assert output.stat().st_mtime_ns == before  # done before, not run again
    assert set(second.verdict["notebooks"]) == {"00_good", "10_dies"}
    assert (second.exit_code, second.verdict["status"]) == (ExitCode.OK, "passed")


def executed(path: Path, *cells: dict) -> Path:
    nb = nbformat.v4.new_notebook()
    for i, cell in enumerate(cells, 1):
        fields = {"source": "x", "execution_count": i, "outputs": []} | cell
        meta = {"papermill": {"status": fields.pop("status", "completed")}}
        nb.cells.append(nbformat.v4.new_code_cell(metadata=meta, **fields))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


def test_a_complete_notebook_is_complete(tmp_path):
    books.assert_complete(
        executed(tmp_path / "a.ipynb", {}, {"source": "  ", "execution_count": None}, {"execution_count": 7})
    )


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ([{}, {"execution_count": None}], "code cell 2 of 2 never ran"),
        (
            [{"outputs": [nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[])]}],
            "raised E: v",
        ),
        ([{}, {"status": "failed"}], "marked failed"),
        ([{"execution_count": 2}, {"execution_count": 1}], "not one run"),
        ([], "no code cell"),
    ],
)
def test_an_incomplete_notebook_is_found_out(tmp_path, cells, reason):
    with pytest.raises(books.Incomplete, match=reason):
        books.assert_complete(executed(tmp_path / "a.ipynb", *cells))


def test_a_truncated_notebook_is_found_out(tmp_path):
    path = executed(tmp_path / "a.ipynb", {}, {})
    path.write_text(path.read_text()[:-40])
    with pytest.raises(books.Incomplete, match="cannot be read"):
        books.assert_complete(path)
    with pytest.raises(books.Incomplete, match="cannot be read"):
        books.assert_complete(tmp_path / "absent.ipynb")


def test_the_digest_of_a_notebook_ignores_outputs_and_sees_sources_and_tags(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "1 + 1")
    first = books.digest(path)
    nb = nbformat.read(path, as_version=4)
    nb.cells[1].execution_count = 5
    nbformat.write(nb, path)
    assert books.digest(path) == first
    nb.cells[0].metadata.tags = []
    nbformat.write(nb, path)
    assert books.digest(path) != first


def test_usage_errors(tmp_path):
    folder = notebook(tmp_path / "books" / "00_a.ipynb", "1").parent
    for arguments, words in (
        ({"profile": "huge"}, "profile"),
        ({"profile": "full", "notebooks": folder}, "expected tiny"),
        ({"host": "../x", "notebooks": folder}, "host"),
        ({"notebooks": tmp_path / "nothing"}, "notebooks"),
        ({"only_render": True}, "no run"),
    ):
        with pytest.raises(runs.UsageError, match=words):
            runs.run(out=tmp_path / "reports", progress=False, **arguments)


def test_a_gpu_that_is_demanded_and_absent_runs_nothing(tmp_path):
    result = runs.run(out=tmp_path / "reports", require_gpu=True, progress=False)
    assert result.exit_code is ExitCode.NO_GPU
    assert not (tmp_path / "reports").exists()


def test_rendering_again_runs_nothing(tmp_path):
    run_dir = make_run(tmp_path, [row(simulated=True)], host="simulated-x86_64", simulated=True)
    result = runs.run(out=tmp_path, only_render=True, progress=False)
    assert (result.run_dir, result.exit_code) == (run_dir, ExitCode.OK)
    assert (run_dir / "index.html").is_file()


def test_which_directory_a_run_goes_to(tmp_path):
    same = {"commit": "a" * 40, "dirty": False, "source": SOURCE, "profile": "tiny"}
    today = runstate.base_id("a" * 40, False)
    assert runstate.choose(tmp_path, **same) == (today, None)

    def put(name, status, **fields):
        state = {"created": fields.pop("created", "2026-01-01T00:00:00Z"), "status": status} | same | fields
        (tmp_path / name).mkdir()
        runstate.save(tmp_path / name, state)

    put("2026-01-01-aaaaaaa", runstate.FINISHED)
    assert runstate.choose(tmp_path, **same) == (today, None)  # finished on another day
    put("2026-01-02-aaaaaaa", runstate.INTERRUPTED)
    assert runstate.choose(tmp_path, **same)[0] == "2026-01-02-aaaaaaa"
    assert runstate.choose(tmp_path, **(same | {"source": "f" * 12})) == (today, None)
    put(today, runstate.FINISHED, created="2026-01-03T00:00:00Z")
    assert runstate.choose(tmp_path, **same)[0] == today
    assert runstate.choose(tmp_path, **same, resume=False) == (f"{today}-2", None)
    assert runstate.choose(tmp_path, **(same | {"profile": "quick"})) == (f"{today}-2", None)
    assert runstate.base_id(None, True).endswith("-nogit")
    assert runstate.base_id("b" * 40, True).endswith("-bbbbbbb-dirty")


def test_a_notebook_with_an_error_row_is_run_again(tmp_path):
    run_dir = make_run(tmp_path, [row(), row("kv_compact", status="error", seq=1)])
    state = runstate.load(run_dir)
    state["notebooks"] = {"a": {"rows_from": 0, "rows_to": 1}, "b": {"rows_from": 1, "rows_to": 2}}
    path = run_dir / "results.jsonl"
    assert [runs._has_errors(path, state, name) for name in ("a", "b")] == [False, True]


def test_a_second_process_is_refused(tmp_path):
    lock = tmp_path / "lock"
    with runs._alone(lock, "taken"), pytest.raises(runs.UsageError, match="taken"):
        with runs._alone(lock, "taken"):
            pass
    assert not lock.exists()
    with runs._alone(lock, "taken"):  # and free again
        pass


def test_only_processes_of_the_kernel_are_ended():
    others = {**os.environ, "KDTREE_KERNEL_TOKEN": "not-this-one"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=others)
    try:
        assert end_processes("another-one") == 0
        assert child.poll() is None
        assert end_processes("not-this-one") == 1
        assert child.wait(5) == -signal.SIGKILL
    finally:
        child.kill()


def test_ctrl_c_leaves_a_consistent_run_and_a_report(tmp_path):
    folder = tmp_path / "books"
    notebook(folder / "00_a.ipynb", "1")
    notebook(folder / "10_b.ipynb", "import time\nopen(run_dir + '/started', 'w').close()\ntime.sleep(120)")

    def interrupt():
        for _ in range(5000):
            if list(tmp_path.glob("r/*/*/started")):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.05)

    # What a shell starts in the background ignores SIGINT, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        result = runs.run(out=tmp_path / "r", notebooks=folder, progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.exit_code, result.verdict["status"]) == (ExitCode.DIED, "failed")
    state = json.loads((result.run_dir / "run.json").read_text())
    assert state["status"] == runstate.INTERRUPTED
    assert {k: v["status"] for k, v in state["notebooks"].items()} == {
        "00_a": "completed",
        "10_b": "interrupted",
    }
    assert "interrupted" in (result.run_dir / "index.html").read_text()
    assert str(tmp_path) not in (result.run_dir / "notebooks" / "10_b.ipynb").read_text()
    assert not (result.run_dir / ".lock").exists()


def test_overwrite_runs_everything_again_and_loses_nothing(tmp_path, monkeypatch):
    ran = []

    def execute(source, target, **_):
        ran.append(source.stem)
        executed(target, {})
        return books.COMPLETED, None, 0.1

    monkeypatch.setattr(books, "execute", execute)
    folder = notebook(tmp_path / "books" / "00_a.ipynb", "1").parent
    first = runs.run(out=tmp_path / "r", notebooks=folder, progress=False)
    (first.run_dir / "results.jsonl").write_text(json.dumps(row(run=first.run_dir.name)) + "\n")
    assert runs.run(out=tmp_path / "r", notebooks=folder, progress=False).run_dir == first.run_dir
    assert ran == ["00_a"]
    again = runs.run(out=tmp_path / "r", notebooks=folder, progress=False, overwrite=True)
    assert (again.run_dir, ran) == (first.run_dir, ["00_a", "00_a"])
    assert "topk" in (first.run_dir / "results.superseded.jsonl").read_text()
    assert not (first.run_dir / "results.jsonl").exists()
    notebook(folder / "00_a.ipynb", "2")  # another text is another notebook
    runs.run(out=tmp_path / "r", notebooks=folder, progress=False)
    assert len(ran) == 3
    fresh = runs.run(out=tmp_path / "r", notebooks=folder, progress=False, resume=False)
    assert fresh.run_dir != first.run_dir


def test_progress_says_what_became_of_each_notebook_and_can_be_silent(tmp_path, capsys):
    paths = [notebook(tmp_path / f"{name}.ipynb", "1", "2") for name in ("00_a", "10_b")]
    for enabled in (True, False):
        with Progress(paths, enabled=enabled) as bar:
            bar.skip(paths[0])
            bar.start(paths[1])
            bar.cell(1, 4)
            bar.finish(paths[1], "failed", "its kernel died")
        said = capsys.readouterr().err
        assert ("00_a: done before" in said and "- its kernel died" in said) == enabled
        assert enabled or said == ""
