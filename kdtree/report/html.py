"""index.html of one run: everything the rows say, on one page that needs no network."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kdtree
from kdtree.report import cycles, elsewhere, facts, fmt, grid, plots, plots_grid, series, tables
from kdtree.report.notebooks import COMPLETED
from kdtree.report.offline import find_external_urls as find_external_urls
from kdtree.report.verdict import Judged, Row, counts, is_peer, score

TEMPLATES = Path(__file__).parent / "templates"
MAX_PAGE = 4 * 2**20  # bytes of one page
MAX_FAILURES = 60
MAX_DETAILS = 800  # correctness and memory lines


@functools.cache
def environment() -> Any:
    """The jinja2 environment of all report pages; autoescape is on."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals["css"] = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    env.globals["version"] = getattr(kdtree, "__version__", "")
    return env


def page(template: str, **context: Any) -> str:
    """Render `template` of templates/."""
    return environment().get_template(template).render(**context)


def report(
    verdict: Mapping[str, Any],
    judged: Judged,
    *,
    host: Mapping[str, Any],
    state: Mapping[str, Any],
    against: Sequence[Any] = (),
    roofs: Mapping[str, Any] | None = None,
    agreement: Mapping[str, Any] | None = None,
    counters: Mapping[str, Any] | None = None,
    notebook_pages: Mapping[str, str] | None = None,
) -> str:
    """The page of one run as HTML.

    `verdict`, `host` and `state` are verdict.json, host.json and run.json; `against` holds the gate's
    verdicts on single times; `roofs`, `agreement` and `counters` are roofs.json, agreement.json and ncu.json;
    `notebook_pages` maps a notebook to its page.
    """
    rows = judged.believed
    shown = {(v.key[1], v.key[3], v.key[2]): v.verdict for v in against if v.key[4] not in tables.OWN_SECTION}
    lines = tables.main_table(rows, shown)
    right, memory = tables.correctness_table(rows), tables.memory_table(rows)
    books = _notebooks(state, notebook_pages or {})
    over_grid = grid.summary(rows, elsewhere.for_gpu((host.get("gpu") or {}).get("name")))
    figures, undrawn = draw(rows, host, roofs, over_grid)
    return page(
        "report.html.j2",
        v=verdict,
        score=score(verdict),
        commit=(verdict["commit"] or "unknown")[:7] + (" with uncommitted changes" if verdict["dirty"] else ""),
        headline=headline(verdict),
        baseline=baseline_chip(verdict),
        slower=slower_lines(against)[:MAX_FAILURES],
        failures=verdict["failures"][:MAX_FAILURES],
        broken=[b for b in books if b["status"] != COMPLETED],
        problems=verdict["problems"][:20],
        host_facts=facts.host(host),
        missing=", ".join(f"{k} ({v})" for k, v in (host.get("missing") or {}).items()),
        command=command(verdict),
        tiles=tables.tiles(rows, judged.after_fault),
        lines=lines[: tables.MAX_TABLE_ROWS],
        left_out=max(0, len(lines) - tables.MAX_TABLE_ROWS),
        grid=_grid(over_grid),
        layers=cycles.layer_table(rows),
        counters=cycles.counter_table(counters or {}),
        tool=(counters or {}).get("tool"),
        figures=figures,
        undrawn=undrawn,
        right=right[:MAX_DETAILS],
        right_total=len(right),
        right_summary=_right_summary(rows),
        stale=verdict["stale"][:MAX_FAILURES],
        after_fault=verdict["not_believed"][:MAX_FAILURES],
        agreement=_agreement(agreement),
        memory=memory[:MAX_DETAILS],
        memory_total=len(memory),
        environment=facts.environment(host, state),
        notebooks=books,
        script=(TEMPLATES / "report.js").read_text(encoding="utf-8"),
    )


def command(verdict: Mapping[str, Any]) -> str:
    """Shell lines that measure the same again."""
    checkout = f"git checkout {verdict['commit'][:12]}\n" if verdict.get("commit") else ""
    return f"{checkout}python -m kdtree report --profile {verdict['profile']} --overwrite"


def baseline_chip(verdict: Mapping[str, Any]) -> dict[str, str]:
    """Text and colour of the comparison with the baseline."""
    summary = verdict.get("baseline")
    if verdict["simulated"]:
        return {"text": "no times to compare", "state": "mute"}
    if not summary:
        return {"text": "none stored for this host", "state": "mute"}
    words = ("slower", "faster", "ambiguous", "same", "missing", "new")
    text = ", ".join(f"{summary[w]} {w}" for w in words if summary.get(w)) or "nothing to compare"
    doubt = summary.get("ambiguous") or summary.get("missing")
    return {"text": text, "state": "bad" if summary.get("slower") else "warn" if doubt else "good"}


def headline(verdict: Mapping[str, Any]) -> dict[str, str]:
    """The large word of the verdict strip, what qualifies it, and its colour."""
    if verdict["status"] != "passed":
        return {"word": "FAILED", "but": "", "state": "bad"}
    buts = []
    if (verdict["baseline"] or {}).get("slower"):
        buts.append("slower than its baseline")
    if not verdict["trust"]["ok"] and not verdict["simulated"]:
        buts.append("times not to be trusted")
    return {
        "word": "PASSED",
        "but": ("but " + " and ".join(buts)) if buts else "",
        "state": "warn" if buts else "good",
    }


def slower_lines(verdicts: Sequence[Any]) -> list[dict[str, str]]:
    """The gate's verdicts that say slower, slowest first, as table lines."""
    slower = sorted((v for v in verdicts if v.verdict == "slower"), key=lambda v: -v.ratio)
    return [
        {
            "op": v.key[1],
            "impl": v.key[2],
            "case": v.key[3],
            "change": f"{100 * (v.ratio - 1):+.1f} %",
            "range": f"{100 * (v.low - 1):+.1f} to {100 * (v.high - 1):+.1f} %",
        }
        for v in slower
    ]


def _right_summary(rows: Sequence[Row]) -> str:
    parts = []
    for who, peers in (("Ours", False), ("Peers", True)):
        tally = counts(r for r in rows if r.get("metric") == "correctness" and is_peer(r) == peers)
        said = ", ".join(f"{n} {status}" for status, n in tally.items() if n)
        if said or not peers:
            parts.append(f"{who}: {said or 'none'}.")
    return " ".join(parts)


def _agreement(found: Mapping[str, Any] | None) -> dict[str, Any]:
    """The independent check of our timing: lines of op, case and both times, or why there is none."""
    cases = (found or {}).get("cases") or []
    lines = [
        {
            "op": c["op"],
            "case": c["case"],
            "cache": c.get("cache"),
            "ours": fmt.us(c["graph_us"]),
            "theirs": fmt.us(c["cuda_bench_us"]),
            "ratio": fmt.ratio(c["ratio"]),
        }
        for c in cases
    ]
    return {"lines": lines, "reason": (found or {}).get("reason")}


def _notebooks(state: Mapping[str, Any], pages: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "status": r["status"],
            "reason": r["reason"],
            "took": fmt.duration(r["seconds"]),
            "href": pages.get(name),
        }
        for name, r in sorted(state["notebooks"].items())
    ]


def roofs_of(host: Mapping[str, Any], measured: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Roofs by label, measured first; the datasheet's where this GPU is known."""
    from kdtree.measure import roofline

    found: dict[str, Mapping[str, Any]] = {}
    if measured:
        found["measured"] = measured
    sheet = roofline.datasheet((host.get("gpu") or {}).get("name"))
    if sheet is not None:
        found["datasheet"] = sheet.as_dict()
    return found


def _grid(found: grid.Summary) -> dict[str, Any] | None:
    """Tables of the grid of shapes; None for a run without it."""
    if not found.by_impl:
        return None
    kernels = [impl for impl in found.by_impl if impl != grid.CHOSEN]
    return {
        "goals": grid.goal_table(found),
        "lines": grid.line_table(found),
        "shapes": grid.shape_table(found),
        "kernels": kernels,
        "said": found.peers.said if found.peers else None,
    }


def draw(
    rows: Sequence[Row],
    host: Mapping[str, Any],
    roofs: Mapping[str, Any] | None,
    over_grid: grid.Summary | None = None,
) -> tuple[list[dict[str, str]], list[str]]:
    """(figures, undrawn): what the rows have data for as inline SVG, and why the others are absent."""
    figures: list[dict[str, str]] = []
    absent: dict[str, list[str]] = {}  # reason -> titles

    def add(name: str, title: str, caption: str, alt: str, figure: Any) -> None:
        if figure.axes and figure.axes[0].axison:
            svg = plots.to_svg(figure, name)
            figures.append({"id": name, "title": title, "caption": caption, "alt": alt, "svg": svg})
        else:
            why = figure.axes[0].texts[0].get_text() if figure.axes else "nothing to draw"
            absent.setdefault(why, []).append(title)
            plots.close(figure)

    for op in ("verify_attn", "tree_build", "tree_accept", "kv_compact"):
        part = series.cut(rows, op, series.tree_size, ("N", "budget"))
        if part.lines or op == "verify_attn":
            title = f"{op}: time against tree size"
            add(
                f"size-{op}",
                title,
                "Dotted: the floor.",
                _alt(title, part),
                plots.time_by_tree_size(rows, op),
            )
    part = series.cut(rows, "verify_attn", series.prefix_length, ("L",))
    title = "verify_attn: time against prefix length"
    add("prefix", title, "Dotted: the floor.", _alt(title, part), plots.time_by_prefix(rows))
    if over_grid is not None and over_grid.by_impl:
        for impl in over_grid.by_impl:
            title = f"verify_attn over the grid: {impl.removeprefix('numba:')}"
            text = "Each panel a number of heads and requests, each line a tree size."
            (found,) = [x for x in grid.line_table(over_grid) if x["kernel"] == impl]
            sums = "; ".join(f"{k} {v}" for k, v in found.items())
            add(
                f"grid-{impl.removeprefix('numba:')}",
                title,
                text,
                f"{text} {sums}",
                plots_grid.over_mask_free(over_grid, impl),
            )
        text = "Each kernel at two shapes: many rows and long prefixes, and one small request."
        add("ladder", "The ladder of verify_attn", text, text, plots_grid.rungs(rows, plots_grid.LADDER))
    under = roofs_of(host, roofs)
    text = "Achieved rate against arithmetic intensity, under the measured and the datasheet roof."
    add("roofline", "Roofline", text, text, plots.roofline(rows, under))
    parts = plots.step_parts(rows)
    sums = "; ".join(
        f"{side}: " + ", ".join(f"{op} {fmt.us(v)} µs" for op, v in p.items()) for side, p in parts.items()
    )
    text = "The ops of one step, each timed alone; verification in every layer."
    add("step", "One decoding step", text, f"{text} {sums}", plots.step_breakdown(rows))
    text = "Draft tokens accepted a step, by tree size."
    add("acceptance", "Acceptance", text, text, plots.acceptance(rows))
    text = "Relative L2 error of our results against their references."
    add("errors", "Errors", text, text, plots.error_histogram(rows))
    text = "Measured peak against the formula’s bytes."
    add("memory-fit", "Memory", text, text, plots.memory_fit(rows))
    return figures, [f"{', '.join(titles)} ({why})" for why, titles in absent.items()]


def _alt(title: str, part: series.Slice) -> str:
    """A figure's lines in words: where each begins and ends."""
    ends = []
    for impl, line in part.lines.items():
        (x0, first), (x1, last) = line[0], line[-1]
        begin = f"{fmt.us(tables.median(first))} µs at {x0:g}"
        ends.append(f"{impl} {begin} to {fmt.us(tables.median(last))} µs at {x1:g}")
    return f"{title}, {part.caption}: " + "; ".join(ends)
