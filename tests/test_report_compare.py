"""Hosts beside each other: listed, compared case by case, never averaged."""

from __future__ import annotations

import pytest
from test_report_support import HOST, RUN, make_run, many_rows, row, timed

from kdtree.report import compare, html, index, runstate
from kdtree.report.offline import find_external_urls
from kdtree.report.render import render

CASE = {"B": 4, "H": 64, "N": 33, "L": 4096}


@pytest.fixture(scope="module", autouse=True)
def without_figures():
    """The figures of a run's own page have tests of their own, and take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "draw", lambda *_: ([], []))
        yield


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two measured hosts, a simulated one, and a host that failed; rendered."""
    out = tmp_path_factory.mktemp("reports")
    render(make_run(out, many_rows()))
    render(make_run(out, many_rows(seed=1), host="nvidia-other"))
    render(make_run(out, many_rows(simulated=True), host="simulated-x86_64", simulated=True))
    failed = [
        row("topk"),
        timed("verify_attn", "numba:mma", CASE, 99.0, seq=1),
        row("kv_compact", status="failed", seq=2),
    ]
    render(make_run(out, failed, host="nvidia-broken"))
    return out


def test_the_list_of_hosts_shows_every_verdict(reports):
    page = index.write(reports).read_text()
    assert find_external_urls(page) == []
    for host in (HOST, "nvidia-other", "simulated-x86_64", "nvidia-broken"):
        assert f'href="{host}/{RUN}/index.html"' in page
    lines = {line.split("/2026")[0].split('href="')[-1]: line for line in page.split("<tr>") if "href=" in line}
    assert "SIMULATED" in lines["simulated-x86_64"] and "µs" not in lines["simulated-x86_64"]
    assert "SIMULATED" not in lines[HOST]
    assert "failed" in lines["nvidia-broken"] and "1 wrong" in lines["nvidia-broken"]
    assert "not right" in lines["nvidia-broken"]


def test_only_the_newest_run_of_a_host_stands_for_it(tmp_path):
    make_run(tmp_path, [row(status="failed")], run="2026-11-01-aaaaaaa", created="2026-11-01T00:00:00Z")
    make_run(tmp_path, [row()], run="2026-12-01-bbbbbbb", created="2026-12-01T00:00:00Z")
    for run in ("2026-11-01-aaaaaaa", "2026-12-01-bbbbbbb"):
        render(tmp_path / HOST / run)
    page = (tmp_path / "index.html").read_text()
    first = page.split("<tbody>")[1].split("</tbody>")[0]
    assert "2026-12-01-bbbbbbb" in first and "2026-11-01-aaaaaaa" not in first
    assert "1 earlier run" in page and "2026-11-01-aaaaaaa" in page


def test_an_empty_folder_has_a_page_too(tmp_path):
    assert "No run yet" in index.write(tmp_path).read_text()


def test_two_hosts_stand_side_by_side(reports):
    found = compare.compare(HOST, "nvidia-other", reports=reports)
    assert found.page == reports / "compare" / f"{HOST}-vs-nvidia-other.html"
    page = found.page.read_text()
    assert find_external_urls(page) == []
    assert page.count('<svg class="plot"') == 3
    lines = [x for x in found.lines if x["op"] == "verify_attn" and x["impl"] == "numba:mma"]
    assert len(lines) == 24
    line = lines[0]
    assert line["ratio_value"] == pytest.approx(line["cells"][1]["value"] / line["cells"][0]["value"])
    assert HOST in found.text.splitlines()[0] and "verify_attn" in found.text


def test_what_one_side_lacks_reads_na_and_what_has_no_time_reads_a_dash(reports):
    found = compare.compare("simulated-x86_64", "nvidia-broken", reports=reports)
    by_key = {(x["op"], x["impl"], x["case"]): [c["time"] for c in x["cells"]] for x in found.lines}
    assert by_key[("verify_attn", "numba:mma", "B=4 H=64 N=33 L=4096")] == ["n/a", "99.0"]
    assert by_key[("topk", "numba:simt", "B=1 K=8")] == ["n/a", "—"]
    assert all(x["ratio"] == "—" for x in found.lines)
    assert "FAILED" in found.page.read_text()


def test_no_average_anywhere(reports):
    text = compare.compare(HOST, "nvidia-other", reports=reports).page.read_text().lower()
    assert "geomean" not in text and "mean" not in text.replace("“", "")


def test_runs_are_found_by_path_host_and_name(reports):
    run_dir = reports / HOST / RUN
    for name in (run_dir, HOST, f"{HOST}/{RUN}"):
        assert compare.find_run(name, reports).resolve() == run_dir.resolve()
    with pytest.raises(FileNotFoundError, match="nvidia-other"):
        compare.find_run("nothing", reports)


def test_two_runs_of_one_host_can_be_told_apart(tmp_path):
    for run in ("2026-11-01-aaaaaaa", "2026-12-01-bbbbbbb"):
        render(make_run(tmp_path, [timed("topk", "numba:simt", {"K": 8}, 5.0)], run=run))
    found = compare.compare(f"{HOST}/2026-11-01-aaaaaaa", f"{HOST}/2026-12-01-bbbbbbb", reports=tmp_path)
    assert "2026-11-01-aaaaaaa" in found.text and "2026-12-01-bbbbbbb" in found.page.name


def test_a_run_that_is_still_going_is_listed_as_such(tmp_path):
    make_run(tmp_path, [row()], status=runstate.RUNNING)
    assert "running" in index.write(tmp_path).read_text()
