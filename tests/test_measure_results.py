from __future__ import annotations

import json
import multiprocessing

import numpy as np
import pytest

from kdtree.measure import results

SAMPLE = {"median": 109.2, "iqr": 0.4, "n": 40, "cache": "cold"}
CASE = {"B": 4, "H": 64, "N": 33, "L": [0, 17], "dtype": "bfloat16"}


def row(**changes):
    base = {
        "metric": "latency",
        "status": "passed",
        "host": "nvidia-h200",
        "run": "r1",
        "source": "0123456789ab",
    }
    base |= {"simulated": False}
    op, impl, case = (changes.pop(k, v) for k, v in (("op", "topk"), ("impl", "numba:simt"), ("case", CASE)))
    return results.new_row(op, impl, case, **(base | changes))


def test_a_new_row_has_every_field_and_absent_figures_are_null():
    made = row(device_us=SAMPLE, pid=7)
    assert set(made) == {*results.IDENTITY, *results.FIGURES, "pid"}
    assert made["latency_us"] is None and made["device_us"] == SAMPLE
    assert made["at"].endswith("Z")


@pytest.mark.parametrize("name", ["device_us", "latency_us", "host_us", "jit_ms", "device_us_warm"])
@pytest.mark.parametrize("status", ["failed", "error", "skipped"])
def test_no_time_without_a_pass(name, status):
    time = SAMPLE if name.startswith("device") else 3.0
    with pytest.raises(ValueError, match=f"{name}.*{status}"):
        row(status=status, reason="wrong", **{name: time})


@pytest.mark.parametrize("name", ["device_us", "latency_us", "floor_us"])
def test_a_simulated_row_holds_no_time(name):
    with pytest.raises(ValueError, match=f"{name}: a simulated row"):
        row(simulated=True, **{name: SAMPLE if name == "device_us" else 0.0})


@pytest.mark.parametrize("status", ["failed", "error", "skipped"])
def test_what_did_not_pass_says_why(status):
    with pytest.raises(ValueError, match="reason"):
        row(status=status)
    assert row(status=status, reason="because")["reason"] == "because"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"status": "fine"}, "status"),
        ({"metric": "speed"}, "metric"),
        ({"host": ""}, "host"),
        ({"host": None}, "host"),
        ({"case": None}, "case"),
        ({"simulated": 0}, "simulated"),
        ({"device_us": 3.0}, "device_us"),
        ({"device_us": SAMPLE | {"median": 0.0}}, r"device_us\.median"),
        ({"device_us": SAMPLE | {"iqr": -1}}, r"device_us\.iqr"),
        ({"device_us": SAMPLE | {"n": 0}}, r"device_us\.n"),
        ({"device_us": SAMPLE | {"cache": "hot"}}, r"device_us\.cache"),
        ({"latency_us": -1}, "latency_us"),
        ({"max_abs": float("nan")}, "max_abs"),
        ({"max_abs": np.float32("inf")}, "max_abs"),
        ({"memory": {"predicted": 1, "measured": float("inf")}}, r"memory\.measured"),
        ({"extra": [1, {"x": float("nan")}]}, r"extra\[1\]\.x"),
    ],
)
def test_an_invalid_row_is_refused_by_the_name_of_its_field(changes, named):
    if changes.get("case", 1) is None:
        with pytest.raises((ValueError, TypeError)):
            row(**changes)
        return
    with pytest.raises(ValueError, match=named):
        row(**changes)


@pytest.mark.parametrize("name", [*results.IDENTITY, *results.FIGURES])
def test_a_row_that_lacks_a_field_is_refused(name):
    made = row()
    del made[name]
    with pytest.raises(ValueError, match=name):
        results.validate(made)


def test_rows_come_back_in_order_and_as_they_were(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    rows = [row(seed=i, max_abs=np.float32(0.5), n=np.int64(3)) for i in range(3)]
    for r in rows:
        results.append(path, r)
    back = results.load(path)
    assert back.problems == []
    assert [r["seed"] for r in back.rows] == [0, 1, 2]
    assert back.rows[0]["max_abs"] == 0.5 and back.rows[0]["n"] == 3
    assert path.read_bytes().count(b"\n") == 3
    for line in path.read_text().splitlines():
        assert isinstance(json.loads(line), dict)


def test_an_invalid_row_never_reaches_the_file(tmp_path):
    path = tmp_path / "results.jsonl"
    with pytest.raises(ValueError):
        results.append(path, row() | {"max_abs": float("nan")})
    assert not path.exists()


def test_a_missing_file_holds_no_rows(tmp_path):
    assert results.load(tmp_path / "none.jsonl") == results.Results()


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_torn_last_line_is_reported_and_does_not_take_the_next_row_with_it(tmp_path, cut):
    path = tmp_path / "results.jsonl"
    for seed in (1, 2):
        results.append(path, row(seed=seed))
    path.write_bytes(path.read_bytes()[:-cut])
    torn = results.load(path)
    if cut > 1:
        assert [r["seed"] for r in torn.rows] == [1]
        assert len(torn.problems) == 1 and "line 2 is torn" in torn.problems[0]
    else:  # only the newline was lost: the row is whole
        assert [r["seed"] for r in torn.rows] == [1, 2]
    results.append(path, row(seed=3))
    back = results.load(path)
    assert [r["seed"] for r in back.rows][-1] == 3
    assert len(back.problems) == (1 if cut > 1 else 0)


def test_lines_that_are_no_rows_are_reported_by_number(tmp_path):
    path = tmp_path / "results.jsonl"
    results.append(path, row(seed=1))
    good = path.read_text()
    bad = ["[1]", "{}", "\x00\x01", good.strip().replace('"max_abs": null', '"max_abs": NaN')]
    path.write_bytes((good + "\n".join(bad) + "\n\n").encode() + b"\xff\xfe\n" + good.encode())
    back = results.load(path)
    assert len(back.rows) == 2
    assert [p.split()[2] for p in back.problems] == ["2", "3", "4", "5", "7"]
    assert "NaN is not JSON" in back.problems[3]
    assert not any(str(tmp_path) in p for p in back.problems)


def _write_many(path, first):
    for i in range(25):
        results.append(path, row(seed=first + i, extra="x" * 5000))


def test_writers_in_several_processes_do_not_tear_each_others_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, 100 * k)) for k in range(3)]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    assert [w.exitcode for w in writers] == [0, 0, 0]
    back = results.load(path)
    assert back.problems == [] and len({r["seed"] for r in back.rows}) == 75


def test_the_last_row_of_a_key_counts():
    rows = [row(seed=1), row(seed=2, impl="native:x"), row(seed=3)]
    assert [r["seed"] for r in results.latest(rows).values()] == [3, 2]
    assert len({results.key(row(metric=m)) for m in results.METRICS}) == len(results.METRICS)
    assert results.key(rows[0]) == results.make_key("nvidia-h200", "topk", "numba:simt", CASE, "latency")


def test_a_key_survives_the_file(tmp_path):
    results.append(tmp_path / "r.jsonl", row())
    assert results.key(results.load(tmp_path / "r.jsonl").rows[0]) == results.key(row())


def test_rows_of_another_run_or_source_are_stale_unless_measured_again():
    rows = [
        row(seed=1, run="r0"),
        row(seed=2, impl="a", run="r0"),
        row(seed=3, impl="b", source="other"),
        row(seed=4),
        row(seed=5),
    ]
    mine, stale = results.current(rows, run="r1", source="0123456789ab")
    assert [r["seed"] for r in mine] == [5]
    assert [r["seed"] for r in stale] == [2, 3]


def test_a_sweep_resumes_after_passed_and_skipped_rows_of_its_source_only():
    wanted = results.key(row())
    source = "0123456789ab"
    failed = row(status="failed", reason="wrong")
    skipped = row(status="skipped", reason="does not fit")
    assert results.done([row()], wanted, source)
    assert results.done([failed, skipped], wanted, source)
    assert not results.done([], wanted, source)
    assert not results.done([row(), failed], wanted, source)
    assert not results.done([row()], wanted, "another")
    assert results.done([row(), row(source="another", status="failed", reason="x")], wanted, source)


def test_strict_json_refuses_what_is_not_json():
    with pytest.raises(ValueError):
        results.dumps({"x": float("inf")})
    with pytest.raises(TypeError, match="set"):
        results.dumps({"x": {1}})
