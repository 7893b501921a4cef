from __future__ import annotations

import json
import math
import random

import pytest

from kdtree.measure import gate, results


def row(impl="numba:simt", median=100.0, iqr=1.0, n=40, cache="cold", **changes):
    sample = {"median": median, "iqr": iqr, "n": n, "cache": cache}
    base = {
        "metric": "latency",
        "status": "passed",
        "host": "h",
        "run": "r",
        "source": "s",
        "simulated": False,
    }
    base |= {"device_us": sample} | changes
    return results.new_row("topk", impl, {"B": 1}, **base)


def verdict(new, old):
    baseline = {results.key(old): old["device_us"]}
    (only,) = gate.compare([new], baseline)
    return only


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({}, "same"),
        ({"median": 102.0}, "same"),
        ({"median": 104.0}, "slower"),
        ({"median": 200.0}, "slower"),
        ({"median": 96.0}, "faster"),
        ({"median": 104.0, "iqr": 30.0}, "ambiguous"),
        ({"median": 96.0, "iqr": 30.0}, "ambiguous"),
        ({"median": 100.0, "iqr": 40.0}, "ambiguous"),
        ({"median": 200.0, "n": 3}, "ambiguous"),
        ({"median": 200.0, "cache": "warm"}, "ambiguous"),
        ({"median": 102.0, "iqr": 0.0}, "same"),
    ],
)
def test_a_verdict_needs_effect_and_certainty(new, expected):
    got = verdict(row(**new), row())
    assert got.verdict == expected
    assert got.ratio == pytest.approx(new.get("median", 100.0) / 100.0)
    assert got.low <= got.ratio <= got.high


def test_a_baseline_too_noisy_to_bound_is_ambiguous_and_json_able():
    got = verdict(row(), row(iqr=1000.0, n=5))
    assert got.verdict == "ambiguous" and got.high is None
    assert "unbounded" in got.text
    results.dumps(gate.summarise([got]))


def test_new_and_missing_keys_have_no_ratio():
    old, new = row(impl="numba:old"), row(impl="numba:new")
    verdicts = gate.compare([new], {results.key(old): old["device_us"]})
    assert {(v.key[2], v.verdict, v.ratio) for v in verdicts} == {
        ("numba:new", "new", None),
        ("numba:old", "missing", None),
    }


def test_a_row_that_fails_now_is_missing_not_same():
    rows = [row(), row(status="failed", reason="wrong", device_us=None)]
    (only,) = gate.compare(rows, {results.key(row()): row()["device_us"]})
    assert only.verdict == "missing"


def test_peers_and_simulated_rows_are_not_gated():
    rows = [row(impl="peer:torch"), row(simulated=True, device_us=None, impl="numba:sim")]
    assert gate.compare(rows, {}) == []


def test_a_baseline_comes_back_from_its_file(tmp_path):
    path = tmp_path / "baselines" / "h.json"
    assert gate.store([row(), row(impl="native:x"), row(impl="peer:y")], path) == 2
    baseline = gate.load_baseline(path)
    assert set(baseline) == {results.key(row()), results.key(row(impl="native:x"))}
    assert [v.verdict for v in gate.compare([row(), row(impl="native:x")], baseline)] == ["same", "same"]
    assert json.loads(path.read_text())["host"] == "h"
    assert [p.name for p in path.parent.iterdir()] == ["h.json"]


def test_a_missing_baseline_makes_everything_new(tmp_path):
    baseline = gate.load_baseline(tmp_path / "none.json")
    verdicts = gate.compare([row()], baseline)
    assert [v.verdict for v in verdicts] == ["new"]
    assert gate.summarise(verdicts)["status"] == "none"
    assert gate.summarise(verdicts)["exit_code"] == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": "h", "entries": [{}]}', "{"])
def test_a_file_that_is_no_baseline_is_refused(tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ValueError, match="b.json: not a baseline"):
        gate.load_baseline(tmp_path / "b.json")


@pytest.mark.parametrize("rows", [[], [row(impl="peer:y")], [row(), row(host="other")]])
def test_only_device_times_of_one_host_become_a_baseline(tmp_path, rows):
    with pytest.raises(ValueError, match="device time"):
        gate.store(rows, tmp_path / "b.json")
    assert list(tmp_path.iterdir()) == []


def test_the_summary_counts_and_exits_3_when_anything_is_slower():
    baseline = {results.key(row(impl=f"numba:{i}")): row()["device_us"] for i in range(4)}
    medians = [100.0, 90.0, 120.0, 150.0]
    verdicts = gate.compare([row(impl=f"numba:{i}", median=m) for i, m in enumerate(medians)], baseline)
    summary = gate.summarise(verdicts)
    assert (summary["same"], summary["faster"], summary["slower"], summary["missing"]) == (1, 1, 2, 0)
    assert summary["status"] == "slower" and summary["exit_code"] == 3
    assert summary["geomean"] == pytest.approx(math.prod(m / 100 for m in medians) ** 0.25)
    assert [t.split()[1] for t in summary["worst"]] == ["numba:3", "numba:2"]


def test_nothing_compared_is_no_status():
    summary = gate.summarise([])
    assert summary["status"] == "none" and summary["geomean"] is None and summary["exit_code"] == 0


def test_noise_alone_is_never_called_a_change_and_rarely_ambiguous():
    rng = random.Random(1)
    tally = {}
    for _ in range(300):
        pair = []
        for _ in range(2):
            drawn = sorted(rng.gauss(100, 1.5) for _ in range(40))
            pair.append(row(median=(drawn[19] + drawn[20]) / 2, iqr=drawn[29] - drawn[9]))
        tally[verdict(*pair).verdict] = tally.get(verdict(*pair).verdict, 0) + 1
    assert tally.get("slower", 0) == tally.get("faster", 0) == 0
    assert tally["same"] > 290
