"""Sums over the grid of shapes, goals, times from elsewhere, the ladder: on made-up rows, none of them measured."""

from __future__ import annotations

import math

import pytest
from test_report_pages import Balance
from test_report_support import host_info, make_run, row, timed

from kdtree.measure import grid as measured
from kdtree.measure import layers, ncu, roofline, sweep
from kdtree.report import cycles, elsewhere, grid, html, plots_grid, render, runstate, tables
from kdtree.report.offline import find_external_urls

PEERS = elsewhere.for_gpu("NVIDIA H200")
RATE = {"numba:mma": 250e6, "numba:wgmma": 700e6, "numba:simt": 2.4e6}  # FLOP a µs


def grid_rows(over: dict[str, float] | None = None, profile: str = "full") -> list[dict]:
    """A row for each kernel and shape of the grid: `over` times FlashMLA's time, or a made-up rate."""
    out = []
    for case in measured.shapes(profile):
        flop, moved = roofline.flop_bytes("verify_attn", case)
        floor = max(flop / 787e6, moved / 4.3e6, 1.0)
        for impl in ("numba:mma", "numba:wgmma"):
            us = flop / RATE[impl] + 3.0
            if over:
                us = over[impl] * PEERS.mask_free(elsewhere.shape_of(case))
            figures = {"flop": flop, "bytes": moved, "floor_us": floor, "latency_us": None}
            figures |= {"dispatched": impl == "numba:wgmma", "rows": 8, "checked_rows": 8}
            out.append(timed("verify_attn", impl, case, round(us, 3), metric="grid", **figures))
    return out


# times from elsewhere


def test_times_from_elsewhere_are_for_the_gpu_that_they_were_taken_on():
    assert PEERS is not None and len(PEERS.times) == 180
    for other in ("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "H2000", None, ""):
        assert elsewhere.for_gpu(other) is None
    assert elsewhere.for_gpu("NVIDIA H200 (made up)") is PEERS


def test_times_from_elsewhere_say_when_and_on_what_they_were_taken():
    for word in (
        "2026-11-30",
        "driver 580.159.04",
        "CUDA 13.0",
        "torch 2.11.0",
        "triton 3.6.0",
        "µs",
        "apart from this",
    ):
        assert word in PEERS.said


def test_the_grid_is_that_of_the_times_from_elsewhere():
    assert {elsewhere.shape_of(case) for case in measured.shapes("full")} == set(PEERS.times)
    assert PEERS.mask_free((64, 4, 33, 16_384)) == pytest.approx(409, abs=5)
    assert all(PEERS.best_exact(shape) and PEERS.mask_free(shape) for shape in PEERS.times)


def test_the_published_mean_of_the_best_exact_peer_comes_out_again():
    ratios = [PEERS.best_exact(s)[1] / PEERS.mask_free(s) for s in PEERS.times]
    assert grid.geomean(ratios) == pytest.approx(2.17, abs=0.01)


def test_a_cell_that_is_no_time_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("# said\nH,B,N,L,x,flex\n8,1,9,256,,0\n")
    with pytest.raises(ValueError, match="flex has '0'"):
        elsewhere.read(path)
    path.with_name("b.csv").write_text("# said so\n# twice\nH,B,N,L,flashmla-full,flex\n8,1,9,256,,2.5\n")
    found = elsewhere.read(path.with_name("b.csv"))
    assert found.said == "said so twice" and found.mask_free((8, 1, 9, 256)) is None
    assert found.best_exact((8, 1, 9, 256)) == ("flex", 2.5) and found.best_exact((8, 1, 9, 1)) is None


# sums


def test_means_and_counts_are_over_shapes_that_have_both_times():
    found = grid.summary(grid_rows({"numba:wgmma": 0.9, "numba:mma": 2.0}), PEERS)
    lines = {one.impl: one for one in found.lines}
    assert list(lines) == [grid.CHOSEN, "numba:mma", "numba:cluster", "numba:wgmma"]
    assert lines[grid.CHOSEN].over_mask_free == pytest.approx(0.9, rel=1e-3)
    assert lines["numba:mma"].over_mask_free == pytest.approx(2.0, rel=1e-3)
    assert lines["numba:mma"].over_best_exact == pytest.approx(2.0 / 2.17, rel=5e-3)
    assert lines[grid.CHOSEN].shapes == lines[grid.CHOSEN].compared == 180
    below = sum(0.9 * PEERS.mask_free(s) < PEERS.best_exact(s)[1] for s in PEERS.times)
    assert lines[grid.CHOSEN].below_best_exact == below > 170


def test_without_times_from_elsewhere_there_is_no_ratio_and_no_word_on_goals_that_need_one():
    found = grid.summary(grid_rows(), None)
    assert all(one.over_mask_free is None and one.compared == 0 for one in found.lines)
    met = {g["what"]: g["met"] for g in found.goals}
    assert met["our time over FlashMLA without a tree mask, geometric mean"] is None
    assert met["H=64 B=4 N=33 L=16384"] is not None


def goal(found: grid.Summary, what: str) -> dict:
    (one,) = [g for g in found.goals if g["what"] == what]
    return one


def test_goals_are_met_or_missed_by_their_own_measure():
    rows = grid_rows({"numba:wgmma": 0.95, "numba:mma": 2.4})
    found = grid.summary(rows, PEERS)
    assert goal(found, "our time over FlashMLA without a tree mask, geometric mean")["met"] is True
    rate = goal(found, "H=64 B=4 N=33 L=16384")
    flop, _ = roofline.flop_bytes("verify_attn", measured.case(64, 4, 33, 16_384))
    assert rate["met"] is True and rate["value"] == pytest.approx(
        flop / (0.95 * PEERS.mask_free((64, 4, 33, 16_384))) / 1e6, rel=1e-3
    )
    assert goal(found, "mma at H=64 B=4 N=33 L=16384")["value"] == pytest.approx(rate["value"] * 0.95 / 2.4, rel=1e-3)
    assert goal(found, "H=8 B=1 N=9 L=256")["met"] is False  # 0.95 of 11.5 µs
    assert goal(found, "mma: our time over the best exact peer’s, geometric mean")["met"] is False  # 2.4 / 2.17
    assert goal(found, "all 180 shapes right: relative L2 error ≤ 0.002, the same bits twice")["met"] is True
    assert goal(found, "workspace at H=64 B=32 N=65 L=65536")["met"] is None
    assert goal(found, "host time of a call with out=")["met"] is None


def test_a_grid_with_holes_or_wrong_results_does_not_meet_goals_over_all_shapes():
    rows = grid_rows({"numba:wgmma": 0.9, "numba:mma": 2.0})
    short = [r for r in rows if r["case"]["L"] != 256]
    found = grid.summary(short, PEERS)
    assert goal(found, "our time over FlashMLA without a tree mask, geometric mean")["met"] is None
    assert goal(found, "all 180 shapes right: relative L2 error ≤ 0.002, the same bits twice")["met"] is None
    broken = rows[:-1] + [
        row("verify_attn", "numba:wgmma", rows[-1]["case"], metric="grid", status="failed", reason="off")
    ]
    found = grid.summary(broken, PEERS)
    assert goal(found, "all 180 shapes right: relative L2 error ≤ 0.002, the same bits twice")["met"] is False
    assert goal(found, "our time over FlashMLA without a tree mask, geometric mean")["met"] is None


def test_either_bandwidth_or_rate_meets_the_goal_of_the_memory_bound_shape():
    case = measured.case(8, 32, 9, 65_536)
    flop, moved = roofline.flop_bytes("verify_attn", case)
    for us, met in ((moved / 3.1e6, True), (flop / 481e6, True), (max(moved / 2.9e6, flop / 470e6), False)):
        rows = [timed("verify_attn", "numba:wgmma", case, us, metric="grid", dispatched=True, flop=flop, bytes=moved)]
        one = goal(grid.summary(rows, PEERS), "H=8 B=32 N=9 L=65536")
        assert one["met"] is met
        assert one["measured"] == f"{moved / us / 1e6:.2f} TB/s, {flop / us / 1e6:.0f} TFLOP/s"


def test_workspace_and_host_time_come_from_the_rows_of_other_metrics():
    memory = {"predicted": 200, "measured": 210, "inputs": 0, "workspace": 36_000_000, "workspace_measured": 36_100_000}
    rows = [row("verify_attn", "numba:wgmma", sweep.LARGE, metric="memory", memory=memory)]
    rows.append(
        row("verify_attn", "numba:simt", sweep.LARGE, metric="memory", memory=memory | {"workspace_measured": 9e9})
    )
    for case, host in ((sweep.SMALL, 9.5), (sweep.REFERENCE["verify_attn"], 12.5)):
        rows.append(timed("verify_attn", "numba:wgmma", case, 9.0, host_us=host, dispatched=True))
        rows.append(timed("verify_attn", "numba:simt", case, 9.0, host_us=500.0, dispatched=False))
    found = grid.summary(rows, PEERS)
    assert goal(found, "workspace at H=64 B=32 N=65 L=65536")["measured"] == "36.1 MB"
    assert goal(found, "host time of a call with out=") | {"what": ""} == {
        "what": "",
        "target": "≤ 12 µs",
        "value": 12.5,
        "measured": "12.5 µs",
        "met": False,
    }


def test_nothing_measured_reads_dashes():
    found = grid.summary([row("verify_attn", metric="grid", status="skipped", reason="no GPU")], PEERS)
    assert found.by_impl == {} and [one.shapes for one in found.lines] == [0, 0, 0, 0]
    assert {v for one in grid.line_table(found) for k, v in one.items() if k not in ("kernel", "shapes")} == {"—"}
    assert {(g["measured"], g["met"]) for g in grid.goal_table(found)} == {("—", "—")}
    assert plots_grid.over_mask_free(found).axes[0].texts[0].get_text().startswith("not measured")
    assert plots_grid.rungs([], plots_grid.LADDER).axes[0].texts[0].get_text().startswith("not measured")


def test_the_shape_table_has_a_line_a_shape_with_all_kernels_beside_the_chosen_one():
    found = grid.summary(grid_rows({"numba:wgmma": 0.9, "numba:mma": 2.0}), PEERS)
    lines = grid.shape_table(found)
    assert len(lines) == 180 and lines[0]["shape"] == {"H": 8, "B": 1, "N": 9, "L": 256}
    assert lines[0]["impl"] == "numba:wgmma" and lines[0]["over_mask_free"] == "0.900"
    assert lines[0]["times"] == {"numba:mma": "23.0", "numba:wgmma": "10.3"} and lines[0]["exact"] == "torch-compile"
    assert lines[0]["checked"] == "8 of 8"


# figures


def test_small_multiples_have_a_panel_for_heads_and_batch_and_a_line_a_tree():
    found = grid.summary(grid_rows({"numba:wgmma": 0.9, "numba:mma": 2.0}), PEERS)
    fig = plots_grid.over_mask_free(found, "numba:mma")
    assert len(fig.axes) == 9
    for ax in fig.axes:
        lines = [line for line in ax.get_lines() if len(line.get_xdata()) == 5]
        assert len(lines) == 4 and all(math.isclose(y, 2.0, rel_tol=1e-3) for line in lines for y in line.get_ydata())
    plots_grid.close(fig)
    alone = plots_grid.over_mask_free(grid.summary(grid_rows(), None))
    assert alone.axes[3].get_ylabel() == "share of the floor"
    plots_grid.close(alone)


def test_the_ladder_has_a_bar_for_each_kernel_that_was_timed():
    wanted = plots_grid.LADDER[0]
    flop, moved = roofline.flop_bytes("verify_attn", wanted)
    rows = [timed("verify_attn", impl, wanted, flop / rate, flop=flop, bytes=moved) for impl, rate in RATE.items()]
    rungs = grid.ladder(rows, wanted)
    assert [name for name, row in rungs.items() if row] == ["simt", "mma", "wgmma"]
    assert list(rungs) == ["simt", "mma", "cluster", "wgmma"]
    fig = plots_grid.rungs(rows[:2], plots_grid.LADDER)
    assert [round(bar.get_width() * 1e6) for bar in fig.axes[0].patches] == [250_000_000, 700_000_000]
    plots_grid.close(fig)


def test_every_kernel_is_timed_at_the_shapes_of_the_ladder():
    shapes = list(sweep.shapes("verify_attn", "full"))
    for wanted in plots_grid.LADDER:
        assert wanted in shapes
        found = [name for _, name in sweep._kernels("verify_attn", wanted, "wgmma")]
        assert [name for name in found if name != "cluster"] == ["simt", "mma", "wgmma"]
        assert ("cluster" in found) == (wanted["B"] == 1)


# the page


def layer_rows() -> list[dict]:
    case = layers.cases("full")[0]
    both = [("numba:auto", 700.0), ("numba:auto" + layers.MERGED, 1310.0)]
    return [timed("verify_attn", impl, case, us, metric="layers", kernel="wgmma", floor_us=400.0) for impl, us in both]


def counters() -> dict:
    metrics = {ncu.FIGURES["time, ns"][0]: 409_000.0, ncu.FIGURES["tensor cores at work, %"][1]: 81.25}
    metrics |= {ncu.STALL.format("gmma"): 3.0, ncu.STALL.format("selected"): 1.0, ncu.STALL.format("barrier"): 6.0}
    record = {"impl": "numba:wgmma", "kernel": "verify_attn_wgmma", "case": ncu.CALLS[0][1], "metrics": metrics}
    return ncu.nothing("") | {"reason": None, "tool": "ncu 2025.3.1", "records": [record]}


def test_the_page_has_the_grid_the_layers_and_the_counters(tmp_path):
    run_dir = make_run(tmp_path, [*grid_rows({"numba:wgmma": 0.9, "numba:mma": 2.0}), *layer_rows()])
    ncu.write(run_dir / ncu.FILE, counters())
    verdict = render.render(run_dir)
    page = (run_dir / "index.html").read_text()
    assert verdict["counts"]["passed"] == 362
    assert '<section id="grid">' in page and '<a href="#grid">' in page
    for said in ("All 180 shapes", "times that were not taken in this run", "2026-11-30", "0.900", "1.87×"):
        assert said in page, said
    assert "ncu 2025.3.1" in page and "81.2" in page and "barrier 60 %" in page
    for name in ("grid-dispatch", "grid-mma", "grid-wgmma"):
        assert f'id="{name}-t"' in page
    assert len(page) < html.MAX_PAGE
    reader = Balance()
    reader.feed(page)
    assert reader.open == [] and len(reader.ids) == len(set(reader.ids))
    assert find_external_urls(page) == []


def test_a_page_without_a_grid_does_not_mention_one(tmp_path):
    run_dir = make_run(tmp_path, [row()])
    render.render(run_dir)
    assert 'id="grid"' not in (run_dir / "index.html").read_text()


def test_another_gpus_page_shows_no_times_from_elsewhere(tmp_path):
    run_dir = make_run(tmp_path, grid_rows(profile="quick"))
    info = host_info()
    info["gpu"]["name"] = "NVIDIA RTX PRO 6000"
    runstate.write_json(run_dir / "host.json", info)
    render.render(run_dir)
    page = (run_dir / "index.html").read_text()
    assert "no published times of other kernels for this GPU" in page and "2026-11-30, on" not in page


def test_rows_of_the_grid_stay_out_of_the_main_table_and_the_tiles():
    rows = [*grid_rows(), *layer_rows()]
    assert tables.main_table(rows) == []
    assert tables.tiles(rows)[0]["time"] == "—"
    wanted = sweep.REFERENCE["verify_attn"]
    rows += [
        timed("verify_attn", "numba:mma", wanted, 5.0),
        timed("verify_attn", "numba:wgmma", wanted, 6.0, dispatched=True),
    ]
    (tile,) = tables.tiles(rows)
    assert tile["impl"] == "numba:wgmma" and tile["time"] == "6.00"  # what a call takes, not the fastest


def test_counters_are_a_line_a_figure_and_what_was_waited_for():
    table = cycles.counter_table(counters())
    assert table[0] == ["", "verify_attn_wgmma H=64 B=4 N=33 L=16384"]
    assert ["time, ns", "409,000"] in table and ["tensor cores at work, %", "81.2"] in table
    assert table[-1] == ["warps waited for", "barrier 60 %, gmma 30 %"]
    assert cycles.counter_table({}) == []


def test_layers_are_a_line_a_case_with_what_the_second_way_adds():
    (line,) = cycles.layer_table(layer_rows())
    assert (line["one"], line["two"], line["ratio"], line["more"]) == ("700.0", "1,310", "1.87×", "10.0")
    assert line["of_floor"] == "57 %" and line["kernel"] == "wgmma"
    (alone,) = cycles.layer_table(layer_rows()[:1])
    assert alone["two"] == alone["ratio"] == "—"
