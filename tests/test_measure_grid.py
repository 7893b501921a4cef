"""The grid and the layers of `verify_attn`, its kernels in the sweeps: which rows come, and when there is a time."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import SHAPE, FakeGPU, fake_gpu  # noqa: F401 (a fixture)

from kdtree.device import gpu_available
from kdtree.kernels import launch, verify_mma, verify_plan, verify_simt
from kdtree.measure import families, grid, impls, layers, memory, results, roofline, session, setups, sweep, tasks, twin


def first(case: dict, impl: str = "numba:mma") -> dict:
    flop, moved = roofline.flop_bytes("verify_attn", case)
    return {"op": "verify_attn", "impl": impl, "case": case, "seed": 0, "flop": flop, "bytes": moved}


def by_impl(rows: list[dict]) -> dict[str, dict]:
    """Rows by kernel, each one valid as it would be written."""
    signed = {"host": "h", "run": "r", "source": "s", "simulated": False}
    valid = [results.new_row(**r, **signed) for r in rows]
    assert len({r["impl"] for r in valid}) == len(valid)
    return {r["impl"]: r for r in valid}


def off_by_two_percent(made: dict) -> None:
    made["out"] *= 1.02


# shapes


def test_the_full_grid_is_every_combination_once():
    shapes = [tuple(case[n] for n in ("H", "B", "N", "L")) for case in grid.shapes("full")]
    assert len(shapes) == len(set(shapes)) == 180
    assert all(case["page_size"] == 64 and case["dtype"] == "bfloat16" for case in grid.shapes("full"))
    assert sweep.SMALL in list(grid.shapes("full")) and sweep.LARGE in list(grid.shapes("full"))
    assert set(map(str, grid.shapes("quick"))) <= set(map(str, grid.shapes("full")))
    assert list(grid.shapes("tiny")) == [sweep.REFERENCE["verify_attn"]]


def test_only_attention_has_a_grid_and_layers():
    for metric in ("grid", "layers"):
        with pytest.raises(ValueError, match="family: got 'topk', expected verify_attn"):
            tasks.tasks("topk", metric, "tiny")
    with pytest.raises(ValueError, match="metric: got 'speed', expected one of correctness, latency, memory, grid"):
        tasks.tasks("topk", "speed", "tiny")


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
@pytest.mark.parametrize("metric", ["grid", "layers"])
def test_without_a_gpu_every_row_is_skipped_and_says_why(metric, tmp_path):
    found = families.run("verify_attn", session.open_session(tmp_path, "tiny"), metric=metric)
    assert found.exit_code == 0 and found.rows
    for row in found.rows:
        assert row["status"] == "skipped" and "on a GPU only" in row["reason"] and row["flop"] > 0


# the grid


def test_each_kernel_has_a_checked_cold_time_and_the_dispatched_one_is_marked(fake_gpu):  # noqa: F811
    rows = by_impl(grid.measure(first(SHAPE)))
    assert list(rows) == ["numba:mma", "numba:cluster", "numba:wgmma"]
    for row in rows.values():
        assert row["status"] == "passed" and row["metric"] == "grid" and row["rel_l2"] < 2e-3
        assert row["device_us"]["cache"] == "cold" and row["floor_us"] == 1.0 and row["jit_ms"] >= 0
        assert row["jit_cached"] is True  # the twin compiles nothing
        assert (row["rows"], row["checked_rows"]) == (40, 40)
        assert row["tflops"] == pytest.approx(row["flop"] / row["device_us"]["median"] / 1e6)
    assert [r["dispatched"] for r in rows.values()] == [False, False, True]
    (timed,) = fake_gpu.timed
    assert timed["sets"] > 1 and timed["cache"] == "cold" and "simt" not in fake_gpu.calls


def test_a_kernel_that_is_wrong_or_refuses_has_no_time_and_the_other_one_has(fake_gpu):  # noqa: F811
    fake_gpu.spoil["mma"] = fake_gpu.spoil["cluster"] = off_by_two_percent
    fake_gpu.refuses["wgmma"] = "wgmma needs compute capability 9.0, this GPU has 8.9"
    rows = by_impl(grid.measure(first(SHAPE)))
    assert rows["numba:mma"]["status"] == "failed" and "relative L2 error 0.02" in rows["numba:mma"]["reason"]
    assert rows["numba:wgmma"]["status"] == "skipped" and "this GPU has 8.9" in rows["numba:wgmma"]["reason"]
    assert all(r["device_us"] is None and r.get("jit_ms") is None for r in rows.values()) and not fake_gpu.timed


def test_a_result_that_goes_wrong_while_it_is_timed_has_no_time(fake_gpu):  # noqa: F811
    def spoil_late(made: dict) -> None:
        if fake_gpu.timed:
            off_by_two_percent(made)

    fake_gpu.spoil["wgmma"] = spoil_late
    rows = by_impl(grid.measure(first(SHAPE)))
    assert rows["numba:mma"]["device_us"] is not None
    assert rows["numba:wgmma"]["status"] == "failed" and rows["numba:wgmma"]["reason"].startswith("after timing: ")
    assert rows["numba:wgmma"]["device_us"] is None and rows["numba:wgmma"].get("tflops") is None


def test_other_bits_in_a_second_run_are_wrong(fake_gpu):  # noqa: F811
    def restless(made: dict) -> None:
        made["lse"] += 1e-6 * len(fake_gpu.calls)

    fake_gpu.spoil["mma"] = restless
    rows = by_impl(grid.measure(first(SHAPE)))
    assert rows["numba:mma"]["reason"] == "two runs on the same inputs gave different bits"


def test_a_row_that_was_not_written_is_seen_even_where_it_is_not_compared(fake_gpu, monkeypatch):  # noqa: F811
    def forget(made: dict) -> None:
        made["out"].view(2, 20, 512)[1, 10] = float("nan")

    monkeypatch.setattr(grid, "checked_rows", lambda params: [0, 19])
    fake_gpu.spoil["wgmma"] = forget
    rows = by_impl(grid.measure(first(SHAPE)))
    assert "out: not finite somewhere" in rows["numba:wgmma"]["reason"]
    assert rows["numba:mma"]["status"] == "passed" and rows["numba:mma"]["checked_rows"] == 4


def test_an_error_that_is_no_refusal_is_raised(fake_gpu, monkeypatch):  # noqa: F811
    def broken(*_, **__):
        raise ValueError("q: got nonsense")

    monkeypatch.setattr(FakeGPU, "verify_attn", broken)
    monkeypatch.setattr("kdtree.verify_attn", broken)
    with pytest.raises(ValueError, match="q: got nonsense"):
        grid.measure(first(SHAPE))


def test_the_cache_behind_a_request_is_nan_and_the_rest_is_not(fake_gpu):  # noqa: F811
    setup = setups.make("verify_attn", SHAPE | {"nan_behind": True})
    kv, table = setup.arguments["kv"], setup.arguments["page_table"]
    for b in range(2):
        rows = kv[table[b].long()].reshape(-1, 576)
        assert rows[:75].isfinite().all() and rows[75:].isnan().all() and len(rows) == 128
    assert setups.make("verify_attn", SHAPE).arguments["kv"].isfinite().all()


def test_a_clone_shares_no_memory_and_another_kernel_shares_all(fake_gpu):  # noqa: F811
    setup = setups.make("verify_attn", SHAPE)
    other, twin_setup = setup.by("mma"), setup.clone()
    assert other.arguments is setup.arguments and other.outputs is setup.outputs and other.impl == "mma"
    for name in ("q", "kv", "page_table"):
        assert torch.equal(setup.arguments[name], twin_setup.arguments[name])
        assert setup.arguments[name].data_ptr() != twin_setup.arguments[name].data_ptr()
    assert setup.outputs["out"].data_ptr() != twin_setup.outputs["out"].data_ptr()


# which rows are checked


@pytest.mark.parametrize("n_slots,heads", [(1, 1), (9, 8), (33, 64), (65, 64), (5, 9)])
def test_a_sample_holds_both_sides_of_every_edge_and_the_first_and_last_slots(n_slots, heads):
    count = n_slots * heads
    found = grid.sampled(n_slots, heads)
    assert found == sorted(set(found)) and 0 <= found[0] and found[-1] == count - 1
    assert set(range(heads)) <= set(found) and set(range(count - heads, count)) <= set(found)
    for tile in (16, 32, 64, 128):
        for edge in range(tile, count, tile):
            assert {edge - 1, edge} <= set(found)


def test_rows_are_sampled_only_where_float64_is_slow(monkeypatch):
    monkeypatch.setattr(grid, "float64_rate", lambda: 5e13)
    assert all(len(grid.checked_rows(case)) == case["N"] * case["H"] for case in grid.shapes("full"))
    monkeypatch.setattr(grid, "float64_rate", lambda: 5e11)
    assert len(grid.checked_rows(sweep.SMALL)) == 72
    assert 2 * 64 < len(grid.checked_rows(sweep.LARGE)) < 65 * 64 / 4


def test_the_answer_for_some_rows_is_that_for_all_of_them(fake_gpu):  # noqa: F811
    setup = setups.make("verify_attn", SHAPE | {"nan_behind": True})
    whole, some = (twin.verify_attn(setup.arguments, setup.params, rows) for rows in (None, [0, 7, 19]))
    torch.testing.assert_close(some["out"], whole["out"].view(2, 20, 512)[:, [0, 7, 19]])
    torch.testing.assert_close(some["lse"], whole["lse"].view(2, 20)[:, [0, 7, 19]])


# the sweeps


def test_a_latency_task_has_a_row_for_each_kernel_with_the_hosts_part(fake_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr("kdtree.measure.peers.prepared", lambda *_: [])
    rows = by_impl(sweep._latency({n: v for n, v in first(SHAPE).items() if n not in ("flop", "bytes")}, "quick"))
    assert list(rows) == ["numba:simt", "numba:mma", "numba:cluster", "numba:wgmma"]
    assert {r["host_us"] for r in rows.values()} == {7.5}
    assert [r["dispatched"] for r in rows.values()] == [False, False, False, True]
    assert [t["cache"] for t in fake_gpu.timed] == ["warm", "cold"]


def test_simt_is_timed_at_few_shapes_alone():
    slow = [
        case
        for case in sweep.shapes("verify_attn", "full")
        if sweep._kernels("verify_attn", case, "wgmma")[0][1] != "simt"
    ]
    assert len(slow) > 12 and sweep.REFERENCE["verify_attn"] not in slow and sweep.SMALL not in slow
    assert sweep._kernels("verify_attn", sweep.LARGE, "simt")[0][1] == "simt"  # where it is what a call takes
    assert sweep._kernels("topk", sweep.REFERENCE["topk"], None) == [("numba:simt", None)]


def test_memory_is_asked_of_every_kernel_also_at_the_largest_shape(fake_gpu):  # noqa: F811
    found = sweep.tasks("verify_attn", "memory", "full")
    largest = [t.first["impl"] for t in found if t.first["case"] == sweep.LARGE]
    assert largest == ["numba:simt", "numba:mma", "numba:wgmma"]  # cluster is not made for it
    assert len({t.name for t in found}) == len(found)
    small = [t.first["impl"] for t in found if t.first["case"] == sweep.SMALL]
    assert sorted(small) == sorted(impls.label(name) for name in impls.NAMES)


def test_a_kernel_that_takes_seconds_has_its_memory_predicted_alone(fake_gpu):  # noqa: F811
    asked = {n: v for n, v in first(sweep.LARGE, "numba:simt").items() if n not in ("flop", "bytes")}
    (row,) = by_impl(sweep._memory(asked, "full")).values()
    assert row["status"] == "skipped" and row["memory"]["workspace"] == 4096 and row["memory"]["measured"] is None


# layers


LAYERS = SHAPE | {"n_layers": 3}


def test_both_ways_through_the_layers_are_right_and_timed_side_by_side(fake_gpu):  # noqa: F811
    rows = by_impl(layers.measure(first(LAYERS, impls.AUTO)))
    assert list(rows) == ["numba:auto", "numba:auto+merge"]
    for row in rows.values():
        assert row["status"] == "passed" and row["kernel"] == "wgmma" and row["device_us"]["n"] == 30
    assert rows["numba:auto+merge"]["rel_l2"] > rows["numba:auto"]["rel_l2"]  # rounded once more
    (timed,) = fake_gpu.timed
    assert timed["names"] == list(rows) and fake_gpu.calls.count("merge") == 3 * 3  # twice checked, once timed


def test_a_merge_that_is_wrong_is_seen(fake_gpu, monkeypatch):  # noqa: F811
    def forgetful(out_a, lse_a, out_b, lse_b, *, out, **_):
        out[0].copy_(out_a)
        out[1].copy_(lse_a)

    monkeypatch.setattr("kdtree.merge_states", forgetful)
    rows = by_impl(layers.measure(first(LAYERS, impls.AUTO)))
    assert rows["numba:auto"]["status"] == "passed"
    assert rows["numba:auto+merge"]["status"] == "failed" and rows["numba:auto+merge"]["device_us"] is None


def test_the_prefix_part_sees_the_prefix_and_nothing_of_the_tree(fake_gpu):  # noqa: F811
    stack = layers.Stack.make(LAYERS, 0)
    _, prefix, _, _ = stack.calls[1]
    out, lse = prefix()
    a = stack.sets[1].arguments
    rows = a["kv"][a["page_table"][0].long()].reshape(-1, 576)[:70].double()
    logits = a["q"][0].double().reshape(-1, 576) @ rows.T * a["scale"]
    torch.testing.assert_close(lse[0].reshape(-1).double(), torch.logsumexp(logits, -1), rtol=1e-5, atol=1e-5)
    assert layers.cases("full")[0]["n_layers"] == 61 and len(layers.cases("full")) == 3


# names


def test_labels_name_the_kernel_or_say_that_the_table_chose():
    assert [impls.label(n) for n in impls.NAMES] == ["numba:simt", "numba:mma", "numba:cluster", "numba:wgmma"]
    assert impls.label(None) == ("numba:auto" if gpu_available() else "numba:simt")


@pytest.mark.parametrize("impl", impls.NAMES)
def test_the_scratch_memory_of_a_kernel_is_that_of_its_plan(impl, monkeypatch):
    monkeypatch.setattr(launch, "sm_count", lambda: 132)
    case = sweep.REFERENCE["verify_attn"] | {"B": 1, "H": 8, "N": 9, "L": 16_384}
    planned = {
        "simt": 4 * verify_simt.plan_splits(1, 72, 16_448, "bfloat16", 132) * 72 * 513,
        "mma": verify_mma.plan(1, 9, 8, 16_448, 132).workspace_bytes,
        "cluster": 0,
        "wgmma": verify_plan.plan(1, 72, 16_448, 132).workspace_bytes,
    }
    assert impls.workspace_bytes(impl, case) == planned[impl]
    assert (planned[impl] > 0) == (impl != "cluster")
    assert memory.predicted_bytes("verify_attn", case, impls.label(impl))["workspace"] == planned[impl]


# the command line


def test_a_row_is_a_line_of_text_with_what_it_has(fake_gpu):  # noqa: F811
    from kdtree.measure.__main__ import line

    rows = by_impl(grid.measure(first(SHAPE)))
    text = line(rows["numba:wgmma"])
    assert text.startswith("passed   numba:wgmma") and "12.00 us  cold" in text and text.endswith("dispatched")
    assert "TFLOP/s" in text and "8% of floor" in text and "rel_l2" in text
    held = {"predicted": 9, "measured": 9, "inputs": 1, "workspace": 4, "workspace_measured": 4}
    skipped = rows["numba:mma"] | {"status": "skipped", "reason": "no room", "device_us": None, "memory": held}
    assert line(skipped).endswith("workspace 4  no room") and " us" not in line(skipped)


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
def test_one_family_runs_from_the_command_line(tmp_path, capsys):
    from kdtree.measure.__main__ import main

    assert main(["verify_attn", "--metric", "layers", "--profile", "tiny", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("0 passed, 0 failed, 0 error, 2 skipped\n")
