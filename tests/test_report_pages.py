"""The pages: offline, complete, honest about what was not measured, and below their size limit."""

from __future__ import annotations

import html as htmllib
import re
from html.parser import HTMLParser

import nbformat
import pytest
from test_report_support import HOST, host_info, make_run, many_rows, row, timed

from kdtree.report import fmt, html, nbhtml, plots, runstate, series, tables
from kdtree.report.offline import find_external_urls, strip_external
from kdtree.report.render import render


def text_of(page):
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return htmllib.unescape(re.sub(r"<[^>]+>", " ", body))


class Balance(HTMLParser):
    """Fails on an element that is closed but was not opened; collects ids."""

    VOID = {"meta", "link", "br", "input", "img", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [v for k, v in attrs if k == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [v for k, v in attrs if k == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """(measured page, simulated page, their verdicts, the list of hosts)."""
    reports = tmp_path_factory.mktemp("reports")
    measured = make_run(reports, many_rows())
    runstate.write_json(measured / "roofs.json", {"copy_gbs": 4300, "bf16_tflops": 787, "empty_us": 1.0})
    check = {
        "op": "topk",
        "case": "B=1",
        "cache": "cold",
        "graph_us": 5.0,
        "cuda_bench_us": 5.1,
        "ratio": 0.98,
    }
    runstate.write_json(measured / "agreement.json", {"reason": None, "cases": [check]})
    simulated = make_run(reports, many_rows(simulated=True), host="simulated-x86_64", simulated=True)
    verdicts = [render(measured), render(simulated)]
    texts = [(d / "index.html").read_text() for d in (measured, simulated)]
    return (*texts, verdicts, (reports / "index.html").read_text())


def test_pages_ask_nothing_of_the_network(pages):
    for page in (pages[0], pages[1], pages[3]):
        assert find_external_urls(page) == []
        assert len(page.encode()) < html.MAX_PAGE


def test_pages_are_well_formed_and_ids_are_unique(pages):
    for page in (pages[0], pages[1], pages[3]):
        balance = Balance()
        balance.feed(page)
        assert balance.open == []
        assert len(balance.ids) == len(set(balance.ids))


def test_sections_come_in_the_order_of_the_design(pages):
    order = [
        "verdict",
        "host",
        "ops",
        "table",
        "figures",
        "correctness",
        "memory",
        "method",
        "environment",
        "notebooks",
    ]
    assert re.findall(r'<section id="([a-z]+)"', pages[0]) == order


def test_a_measured_page_says_so_and_draws_its_figures(pages):
    text = text_of(pages[0])
    assert "MEASURED" in text and "SIMULATED" not in text
    assert "python -m kdtree report --profile quick --overwrite" in text
    assert pages[0].count('<svg class="plot"') == 10
    for op in ("topk", "tree_build", "verify_attn", "tree_accept", "kv_compact", "decode_step"):
        assert f"<h3>{op}</h3>" in pages[0]
    assert "measured: 787 TFLOP/s" in pages[0] and "datasheet: 989 TFLOP/s" in pages[0]
    assert "beside NVIDIA’s cuda-bench" in pages[0] and "0.98×" in pages[0]


def test_a_simulated_page_has_a_banner_and_no_time(pages):
    text = text_of(pages[1])
    assert "SIMULATED." in text and "MEASURED" not in text
    assert "not measured: times are taken on a GPU only" in text
    big = re.findall(r'<p class="big">\s*([^<]*?)\s*</p>', pages[1])
    assert len(big) == 5 and set(big) == {"—"}
    assert pages[1].count("not timed") == 5
    main = pages[1].split('<table id="main">')[1].split("</table>")[0]
    cells = re.findall(r'<td class="num"[^>]*>([^<]*)</td>', main)
    assert len(cells) > 50
    for line in (cells[i : i + 9] for i in range(0, len(cells), 9)):
        assert set(line[:8]) == {"—"}  # the ninth is the error


def test_tables_and_figures_are_accessible(pages):
    page = pages[0]
    tables_of_page = re.findall(r"<table.*?</table>", page, flags=re.S)
    assert all("<caption>" in t and 'scope="col"' in t for t in tables_of_page)
    labels = re.findall(r'<div role="img" aria-label="([^"]*)"', page)
    assert len(labels) == page.count("<figure") and all(len(label) > 20 for label in labels)
    assert any("µs at 9 to" in label for label in labels)


def test_a_failed_run_says_so_first_and_names_case_and_notebook(tmp_path):
    rows = [
        row(seq=0),
        row("verify_attn", case={"B": 2, "N": 33}, status="failed", reason="off at [0,1] <b>", seq=1),
        row("topk", case={"B": 5}, status="error", reason="died: signal 11", seq=2),
        row("topk", case={"B": 77}, seq=3),
        row("kv_compact", case={"B": 99}, source="f" * 12),
    ]
    done = {"status": "completed", "reason": None, "seconds": 1.0}
    books = {
        "00_host": done,
        "20_verify_attn": {"status": "failed", "reason": "its kernel died", "seconds": 2.0},
    }
    run_dir = make_run(tmp_path, rows, notebooks=books, status=runstate.BROKEN)
    render(run_dir)
    page = (run_dir / "index.html").read_text()
    strip = page.split('<section id="verdict"')[1].split("</section>")[0]
    assert "FAILED" in strip and "PASSED" not in page.split("<main>")[1]
    for words in (
        "B=2 N=33",
        "off at [0,1] &lt;b&gt;",
        "died: signal 11",
        "20_verify_attn",
        "its kernel died",
    ):
        assert words in strip
    assert "<title>FAILED" in page
    main = page.split('<table id="main">')[1].split("</table>")[0]
    assert "B=77" not in main and "B=99" not in main  # after the fault; stale
    assert "B=1 K=8" in main  # what was measured before is kept


def test_a_slower_run_does_not_look_like_a_plain_pass(tmp_path):
    from kdtree.measure import gate

    case = {"B": 1, "K": 8}
    gate.store([timed("topk", "numba:simt", case, 10.0)], tmp_path / "baselines" / f"{HOST}.json")
    run_dir = make_run(tmp_path, [row(), timed("topk", "numba:simt", case, 13.0, seq=1)])
    found = render(run_dir)
    assert (found["exit_name"], found["baseline"]["slower"]) == ("SLOWER", 1)
    strip = (run_dir / "index.html").read_text().split('<section id="verdict"')[1].split("</section>")[0]
    assert "but slower than its baseline" in strip and "+30.0 %" in strip


def test_host_facts_leave_out_what_is_not_known():
    from kdtree.report import facts

    labels = dict(facts.host(host_info()))
    assert labels["SM clock"] == "1980 of 1980 MHz"
    assert labels["memory"].startswith("140 GiB")
    assert "GPU" not in dict(facts.host(host_info(simulated=True)))
    assert facts.host({}) == []
    bare = {"gpu": {"name": "X", "clocks": {"sm_max_mhz": 100}, "throttle": ["sw_power_cap"]}}
    assert dict(facts.host(bare)) == {
        "GPU": "X",
        "SM clock": "100 MHz",
        "clocks held back by": "sw power cap",
    }


def test_a_speed_up_is_over_the_fastest_exact_peer_at_the_same_case():
    case = {"B": 4, "D": 7, "K": 8, "budget": 32}
    rows = [
        timed("tree_build", "numba:simt", case, 10.0),
        timed("tree_build", "numba:warp", case, 5.0),
        timed("tree_build", "peer:slow", case, 100.0),
        timed("tree_build", "peer:fast", case, 20.0),
        timed("tree_build", "peer:unfair", case, 1.0, exact=False),
        timed("tree_build", "peer:other", case | {"B": 1}, 2.0),
    ]
    (tile,) = tables.tiles(rows)
    assert (tile["time"], tile["impl"], tile["speedup"], tile["peer"]) == (
        "5.00",
        "numba:warp",
        "4.00×",
        "fast",
    )


def test_the_reference_case_is_the_marked_one_or_the_nearest():
    far, near = {"B": 1, "N": 9, "L": 64}, {"B": 4, "H": 64, "N": 33, "L": 8192}
    rows = [timed("verify_attn", "numba:simt", far, 9.0), timed("verify_attn", "numba:simt", near, 99.0)]
    assert tables.reference_case("verify_attn", [row("verify_attn")]) is None  # passed, but not timed
    assert tables.reference_case("verify_attn", rows) == "B=4 H=64 N=33 L=8192"
    rows[0]["case_name"] = "reference"
    assert tables.reference_case("verify_attn", rows) == "B=1 N=9 L=64"


def test_a_slice_holds_all_but_one_parameter_fixed():
    part = series.cut(many_rows(), "verify_attn", series.tree_size, ("N", "budget"))
    assert part.fixed == {"B": 4, "H": 64, "L": 4096, "dtype": "bfloat16", "page_size": 64}
    assert all([x for x, _ in line] == sorted(x for x, _ in line) for line in part.lines.values())
    assert all(r["case"]["L"] == 4096 for line in part.lines.values() for _, r in line)
    assert series.cut(many_rows(simulated=True), "verify_attn", series.tree_size, ("N",)).lines == {}


def test_times_of_simulated_or_failed_rows_are_never_shown():
    assert tables.median(row(simulated=True) | {"device_us": {"median": 3.0}}) is None
    assert tables.median(row(status="failed") | {"device_us": {"median": 3.0}}) is None


@pytest.mark.parametrize(
    "draw",
    [plots.time_by_tree_size, plots.time_by_prefix, plots.roofline, plots.step_breakdown, plots.memory_fit],
)
def test_a_figure_of_simulated_rows_has_no_axes(draw):
    figure = draw(many_rows(simulated=True))
    assert not figure.axes[0].axison
    assert figure.axes[0].texts
    plots.close(figure)


def test_a_figure_is_inline_svg_that_follows_the_theme():
    svg = plots.to_svg(plots.time_by_tree_size(many_rows()), "one")
    assert svg.startswith("<svg ") and plots.INK not in svg and "currentColor" in svg
    assert not re.search(r'<svg[^>]* width="', svg)
    assert svg == plots.to_svg(plots.time_by_tree_size(many_rows()), "one")


def test_a_step_is_set_beside_peers_of_its_own_shapes():
    rows = many_rows()
    parts = plots.step_parts(rows)
    assert list(parts) == ["this suite", "best peers"]
    assert parts["this suite"]["verify_attn"] == 8591.0  # measured over all layers
    (peer,) = [
        r["device_us_warm"]["median"]
        for r in rows
        if r["impl"] == "peer:torch-bmm" and r["metric"] == "latency" and (r["case"]["N"], r["case"]["L"]) == (33, 4096)
    ]
    assert parts["best peers"]["verify_attn"] == pytest.approx(61 * peer)  # measured for one
    assert "kv_compact" not in parts["best peers"]
    assert plots.step_parts([r for r in rows if r["op"] != "decode_step"]) == {}


def test_several_steps_are_named_by_what_tells_them_apart():
    rows = [timed("decode_step", "numba:simt", {"B": 1, "L": n}, 9.0, parts={"topk": 1.0}) for n in (64, 128)]
    assert list(plots.step_parts(rows)) == ["L=64", "L=128"]


def test_a_line_is_skipped_only_when_all_of_it_is():
    case = {"B": 1}
    skipped = row(case=case, metric="latency", status="skipped", reason="no GPU")
    assert tables.main_table([row(case=case), skipped])[0]["status"] == "passed"
    assert tables.main_table([skipped])[0]["status"] == "skipped"
    assert tables.main_table([row(case=case, status="failed"), skipped])[0]["status"] == "failed"


@pytest.mark.parametrize(
    ("value", "text"), [(None, "—"), (float("nan"), "—"), (0.5, "0.50"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_microseconds(value, text):
    assert fmt.us(value) == text


def test_other_numbers():
    assert [fmt.ratio(v) for v in (None, 1.834, 17.04, 153.2)] == ["—", "1.83×", "17.0×", "153×"]
    assert [fmt.percent(v) for v in (None, 0.024, 0.69)] == ["—", "2.4 %", "69 %"]
    assert [fmt.size(v) for v in (None, 12, 2048, 150e9)] == ["—", "12 B", "2.0 KiB", "140 GiB"]
    assert [fmt.duration(v) for v in (None, 3.21, 42, 185)] == ["—", "3.2 s", "42 s", "3 min 05 s"]
    assert fmt.plain({"a": None, "b": [True, 1.5]}) == "a —, b yes, 1.500"


EXTERNAL = [
    '<script src="https://cdn.example/x.js"></script>',
    '<link rel="stylesheet" href="//cdn.example/x.css">',
    "<img src=http://example.org/a.png>",
    '<img srcset="https://example.org/a.png 2x">',
    '<a href="https://example.org">docs</a>',
    '<div style="background: url(https://example.org/a.png)">x</div>',
    "<style>@import 'https://example.org/a.css';</style>",
    '<style>@font-face { src: url("//example.org/f.woff") }</style>',
    '<svg><image xlink:href="https://example.org/a.png"/></svg>',
]


@pytest.mark.parametrize("fragment", EXTERNAL)
def test_what_a_browser_would_fetch_is_found_and_taken_out(fragment):
    assert len(find_external_urls(fragment)) == 1
    assert find_external_urls(strip_external(fragment)) == []


def test_text_that_mentions_a_url_is_left_alone():
    for text in (
        '<pre>href="https://example.org"</pre>',
        "<p>see https://example.org</p>",
        '<a href="a//b.html">x</a>',
    ):
        assert find_external_urls(text) == []
        assert strip_external(text).replace('"', "&quot;") == text.replace('"', "&quot;")
    assert find_external_urls('<svg xmlns="http://www.w3.org/2000/svg"></svg>') == []


def test_a_link_becomes_its_text_and_its_address():
    assert strip_external('see <a href="https://example.org/x?a=1&b=2">the <em>docs</em></a>.') == (
        'see <span class="ext">the <em>docs</em></span> <span class="ext-url">(https://example.org/x?a=1&amp;b=2)</span>.'
    )
    assert "onclick" not in strip_external('<b onclick="go()">x</b>')
    assert strip_external("a<script>1 < 2</script>b") == "ab"


def test_a_notebook_page_is_offline_and_loud(tmp_path):
    nb = nbformat.v4.new_notebook()
    nb.cells = [
        nbformat.v4.new_markdown_cell(
            "# Title\n\nSee [docs](https://example.org) and $a_b$, ![pic](https://example.org/p.png)"
        ),
        nbformat.v4.new_code_cell(
            "print('<b>')",
            execution_count=1,
            outputs=[
                nbformat.v4.new_output("stream", text="\x1b[31mred\x1b[0m <b>"),
                nbformat.v4.new_output(
                    "display_data",
                    {"text/html": '<table><tr><td>7</td></tr></table><script src="//x/y"></script>'},
                ),
                nbformat.v4.new_output("display_data", {"application/javascript": "alert(1)"}),
                nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"]),
            ],
        ),
    ]
    source, target = tmp_path / "10_x.ipynb", tmp_path / "10_x.html"
    nbformat.write(nb, source)
    nbhtml.convert(source, target, title="10_x", status="failed", reason="cell [1] raised <ValueError>")
    page = target.read_text()
    assert find_external_urls(page) == []
    assert "<script" not in page
    for words in (
        "FAILED",
        "raised &lt;ValueError&gt;",
        "<td>7</td>",
        "a_b",
        "(https://example.org)",
        "ValueError: no",
        "ansi-red-fg",
    ):
        assert words in page
    balance = Balance()
    balance.feed(page)
    assert balance.open == []


def test_a_huge_output_is_cut_so_that_the_page_stays_small(tmp_path):
    nb = nbformat.v4.new_notebook()
    nb.cells = [
        nbformat.v4.new_code_cell(
            "1", execution_count=1, outputs=[nbformat.v4.new_output("stream", text="x" * (5 << 20))]
        )
    ]
    source, target = tmp_path / "a.ipynb", tmp_path / "a.html"
    nbformat.write(nb, source)
    nbhtml.convert(source, target, title="a", status="completed", reason=None)
    assert target.stat().st_size < html.MAX_PAGE
    assert "the rest is in the notebook" in target.read_text()


def test_an_unreadable_notebook_still_gets_a_page(tmp_path):
    source = tmp_path / "a.ipynb"
    source.write_text('{"cells": [')
    nbhtml.convert(source, tmp_path / "a.html", title="a", status="failed", reason="torn")
    assert "cannot be read" in (tmp_path / "a.html").read_text()
