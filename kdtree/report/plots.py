"""Figures of a report. Each function takes rows and returns a matplotlib Figure.

Times are drawn for measured rows alone: without any, a figure has no axes and says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdtree.report import fmt, series
from kdtree.report.style import INK, OURS, PEERS, RC, SIZE, blank, close, colour, figure, to_png_uri, to_svg
from kdtree.report.tables import is_upper_reference, median, timed, warm
from kdtree.report.verdict import Row, is_peer, op_order
from kdtree.spec import MODELS, case_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SERIES = 9
MAX_STEPS = 4  # bars of our own in a figure of decoding steps
NOT_MEASURED = "not measured: times are taken on a GPU only"

__all__ = [
    "INK",
    "OURS",
    "acceptance",
    "blank",
    "close",
    "error_histogram",
    "memory_fit",
    "roofline",
    "step_breakdown",
    "step_parts",
    "time_by_prefix",
    "time_by_tree_size",
    "to_png_uri",
    "to_svg",
]


def _label(row: Row) -> str:
    name = str(row["impl"]).removeprefix("peer:")
    return f"{name} (no tree mask)" if is_upper_reference(row) else name


def _lines(part: series.Slice, xlabel: str) -> Figure:
    with figure() as (fig, ax):
        impls = list(part.lines)
        for impl, line in part.lines.items():
            x = [at for at, _ in line]
            y = [median(row) for _, row in line]
            spread = [row["device_us"]["iqr"] / 2 for _, row in line]
            peer = impl.startswith("peer:")
            ax.errorbar(
                x, y, yerr=spread, marker="s" if peer else "o", linestyle="--" if peer else "-", capsize=2,
                color=colour(impl, impls), label=_label(line[0][1]), zorder=2 if peer else 3,
            )  # fmt: skip
        floor = series.floors(part)
        if floor:
            ax.plot(*zip(*floor, strict=True), color=INK, linestyle=":", linewidth=1.2, label="floor", zorder=1)
        ax.set(xscale="log", xlabel=xlabel, ylabel="device time, µs")
        ticks = sorted({at for line in part.lines.values() for at, _ in line})
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], rotation=45 if len(ticks) > 7 else 0)
        ax.minorticks_off()
        _time_axis(
            ax,
            [median(row) or 1.0 for line in part.lines.values() for _, row in line] + [f for _, f in floor],
        )
        ax.set_title(part.caption, fontsize=8.5)
        fig.legend(loc="outside lower center", ncols=3)
    return fig


def _time_axis(ax: Axes, times: Sequence[float]) -> None:
    """A y axis from zero for times of one size, a logarithmic one for times of many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if max(times) < 8 * min(times):
        ax.set_ylim(0, 1.1 * max(times))
        return
    ax.set_yscale("log")
    decades = math.log10(max(times) / min(times))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))


def time_by_tree_size(rows: Sequence[Row], op: str = "verify_attn") -> Figure:
    """Device time of `op` against the number of tree slots, all else fixed."""
    part = series.cut(rows, op, series.tree_size, ("N", "budget"))
    return _lines(part, "tree slots N (root included)") if part.lines else blank(NOT_MEASURED)


def time_by_prefix(rows: Sequence[Row], op: str = "verify_attn") -> Figure:
    """Device time of `op` against prefix length, all else fixed."""
    part = series.cut(rows, op, series.prefix_length, ("L",))
    return _lines(part, "prefix length L, tokens") if part.lines else blank(NOT_MEASURED)


def roofline(rows: Sequence[Row], roofs: Mapping[str, Mapping[str, float | None]] | None = None) -> Figure:
    """Achieved TFLOP/s against FLOP per byte under each roof, for ops that run on matrix units.

    `roofs` maps a label ("measured", "datasheet") to ``copy_gbs`` (GB/s) and ``bf16_tflops``. Ops below one
    FLOP a byte have no place here: their share of the floor says it all.
    """
    points = [r for r in timed(rows) if r.get("flop") and r.get("bytes") and r["flop"] >= r["bytes"]]
    points = [r for r in points if r["op"] in ("verify_attn", "merge_states") and r.get("metric") != "layers"]
    if not points:
        return blank(NOT_MEASURED)
    with figure() as (fig, ax):
        x = [r["flop"] / r["bytes"] for r in points]
        low, high = min(x) / 2, max(x) * 2
        for style, (label, roof) in zip(("-", ":"), (roofs or {}).items(), strict=False):
            gbs, peak = roof.get("copy_gbs"), roof.get("bf16_tflops")
            if not gbs or not peak:
                continue
            ridge = peak * 1e3 / gbs
            low, high = min(low, ridge / 4), max(high, ridge * 4)
            text = f"{label}: {peak:,.0f} TFLOP/s, {gbs:,.0f} GB/s"
            heights = [min(peak, v * gbs / 1e3) for v in (low, ridge, high)]
            ax.plot((low, ridge, high), heights, linestyle=style, color=INK, linewidth=1.2, label=text)
        impls = sorted({str(r["impl"]) for r in points}, key=lambda name: (name.startswith("peer:"), name))
        for impl in impls[:MAX_SERIES]:
            here, peer = [r for r in points if r["impl"] == impl], impl.startswith("peer:")
            ax.scatter(
                [r["flop"] / r["bytes"] for r in here],
                [r["flop"] / (median(r) or math.inf) / 1e6 for r in here],
                s=15, marker="s" if peer else "o", alpha=0.8, linewidths=0,
                color=colour(impl, impls), label=_label(here[0]), zorder=2 if peer else 3,
            )  # fmt: skip
        ax.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda v, _: f"{v:,g}")
        fig.legend(loc="outside lower center", ncols=2)
    return fig


def step_parts(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """µs of each op of a decoding step: of each measured one, and of the fastest peers at the first's shapes.

    A step's rows hold `parts`, its ops timed alone; verify_attn there is the target's pass, all layers. Peers
    have times of one layer, and perhaps not of every op.
    """
    steps = [r for r in timed(rows) if r["op"] == "decode_step" and r.get("parts") and not is_peer(r)]
    if not steps:
        return {}
    sides = {_step_name(r, steps[:MAX_STEPS]): {k: float(v) for k, v in r["parts"].items()} for r in steps[:MAX_STEPS]}
    case, peers = steps[0]["case"], {}
    for row in timed(rows):
        if is_peer(row) and not is_upper_reference(row) and row["op"] in steps[0]["parts"] and _fits(row, case):
            layers = case.get("n_layers", 1) if row["op"] == "verify_attn" else 1
            time = (warm(row) or median(row) or math.inf) * layers
            peers[row["op"]] = min(time, peers.get(row["op"], math.inf))
    return sides | ({"best peers": peers} if peers else {})


def _step_name(row: Row, steps: Sequence[Row]) -> str:
    if len(steps) == 1:
        return "this suite"
    shown = {k: v for k, v in row["case"].items() if any(s["case"].get(k) != v for s in steps)}
    return case_key(shown) or "this suite"


def _fits(row: Row, step: Mapping[str, Any]) -> bool:
    """True when the case of `row` has the shapes of a decoding step; what a step leaves open is any."""
    vocabulary = MODELS[step["model"]].vocab_size if step.get("model") in MODELS else None
    said = {"V": vocabulary, **step, "N": step["budget"] + 1 if step.get("budget") is not None else None}
    return all(said[k] == v for k, v in (row.get("case") or {}).items() if said.get(k) is not None)


def step_breakdown(rows: Sequence[Row]) -> Figure:
    """Stacked bars: where the time of a decoding step goes, with and without attention, ours and peers."""
    sides = step_parts(rows)
    if not sides:
        return blank(NOT_MEASURED)
    import matplotlib.pyplot as plt

    ops = sorted({op for parts in sides.values() for op in parts}, key=op_order)
    rest = [op for op in ops if op != "verify_attn"]
    panels = [("whole step", ops)]
    if rest and len(rest) < len(ops):
        panels.append(("all but verify_attn", rest))
    with plt.rc_context(RC):
        height = 1.0 + len(panels) * (0.65 + 0.3 * len(sides))
        fig, axes = plt.subplots(len(panels), figsize=(SIZE[0], height), layout="constrained", squeeze=False)
        for ax, (title, shown) in zip(axes.flat, panels, strict=True):
            _bars(ax, sides, shown, ops)
            ax.set_title(title, fontsize=8.5, loc="left")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=3)
    return fig


def _bars(ax: Axes, sides: Mapping[str, Mapping[str, float]], shown: Sequence[str], ops: Sequence[str]) -> None:
    names = list(sides)[::-1]
    left = dict.fromkeys(names, 0.0)
    total = max(sum(sides[n].get(op, 0.0) for op in shown) for n in names)
    scale, unit = (1e3, "ms") if total >= 10_000 else (1.0, "µs")
    for op in shown:
        widths = [sides[n].get(op, 0.0) / scale for n in names]
        label = op + (", all layers" if op == "verify_attn" else "")
        shade = OURS[ops.index(op) % len(OURS)]
        ax.barh(names, widths, left=list(left.values()), height=0.6, color=shade, label=label)
        left = {n: left[n] + w for n, w in zip(names, widths, strict=True)}
    for name, width in left.items():
        missing = [op for op in shown if op not in sides[name]]
        note = f", no {', '.join(missing)}" if missing else ""
        ax.annotate(
            f"{fmt.us(width)}{note}",
            (width, names.index(name)),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.set_xlim(0, (total or 1.0) / scale * 1.35)
    ax.set_xlabel(f"device time, {unit}")
    ax.grid(axis="y", visible=False)


def acceptance(rows: Sequence[Row]) -> Figure:
    """Mean accepted tokens a step against tree size, a line per setting; needs rows with `mean_accepted`."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        case = row.get("case") or {}
        at = series.tree_size(case)
        if row.get("status") == "passed" and isinstance(row.get("mean_accepted"), int | float) and at is not None:
            name = " ".join(f"{k}={v}" for k, v in case.items() if k not in ("N", "budget"))
            lines.setdefault(name or row["op"], []).append((at, float(row["mean_accepted"])))
    if not lines:
        return blank("no row says how many tokens a step accepts")
    with figure() as (fig, ax):
        for i, (name, points) in enumerate(sorted(lines.items())[: len(OURS)]):
            ax.plot(*zip(*sorted(points), strict=True), marker="o", color=OURS[i], label=name)
        ticks = sorted({at for points in lines.values() for at, _ in points})
        ax.set(
            xscale="log",
            xlabel="tree slots N (root included)",
            ylabel="accepted draft tokens a step",
            ylim=(0, None),
        )
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.minorticks_off()
        fig.legend(loc="outside lower center", ncols=1)
    return fig


def error_histogram(rows: Sequence[Row]) -> Figure:
    """How far results are from their reference: a histogram of the relative L2 error per implementation."""
    found: dict[str, list[float]] = {}
    exact = 0
    for row in rows:
        if row.get("metric") == "correctness" and not is_peer(row) and isinstance(row.get("rel_l2"), int | float):
            if row["rel_l2"] > 0:
                found.setdefault(f"{row['op']} {row['impl']}", []).append(math.log10(row["rel_l2"]))
            else:
                exact += 1
    if not found:
        return blank(f"{exact} results equal their reference exactly" if exact else "no result with an error figure")
    with figure() as (fig, ax):
        every = [v for values in found.values() for v in values]
        low, high = math.floor(min(every)), math.ceil(max(every) + 1e-9)
        bins = [low + i / 4 for i in range(4 * max(1, high - low) + 1)]
        names = sorted(found, key=lambda n: op_order(n.split()[0]))
        colours = [(OURS + PEERS)[i % len(OURS + PEERS)] for i in range(len(names))]
        ax.hist([found[n] for n in names], bins=bins, stacked=True, label=names, color=colours)
        ax.set(xlabel="relative L2 error", ylabel="cases")
        ax.set_xticks(range(low, max(high, low + 1) + 1), [f"1e{e}" for e in range(low, max(high, low + 1) + 1)])
        ax.yaxis.get_major_locator().set_params(integer=True)
        if exact:
            ax.set_title(f"{exact} further results equal their reference exactly", fontsize=8.5)
        fig.legend(loc="outside lower center", ncols=2)
    return fig


def memory_fit(rows: Sequence[Row]) -> Figure:
    """Measured peak against predicted bytes; points on the diagonal were predicted exactly."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        memory = row.get("memory") or {}
        predicted, measured = memory.get("predicted"), memory.get("measured")
        predicted = predicted.get("total") if isinstance(predicted, Mapping) else predicted
        if predicted and measured and not row.get("simulated"):
            points.setdefault(row["op"], []).append((float(predicted), float(measured)))
    if not points:
        return blank("no measured peak: it is read on a GPU only")
    from matplotlib.ticker import LogLocator

    with figure() as (fig, ax):
        ops = sorted(points, key=op_order)
        every = [v for pairs in points.values() for pair in pairs for v in pair]
        ends = [min(every) / 1.5, max(every) * 1.5]
        ax.plot(ends, ends, color=INK, linestyle=":", linewidth=1.2, label="as predicted")
        for i, op in enumerate(ops):
            ax.scatter(*zip(*points[op], strict=True), s=16, alpha=0.85, color=OURS[i % len(OURS)], label=op)
        ax.set(xscale="log", yscale="log", xlabel="predicted", ylabel="measured peak")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(base=16 if ends[1] < 16**4 * ends[0] else 256, numticks=8))
            axis.set_major_formatter(lambda v, _: fmt.size(v))
        ax.minorticks_off()
        fig.legend(loc="outside lower center", ncols=3)
    return fig
