"""Figures of `verify_attn` over the grid of shapes, and of the ladder of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kdtree.measure import sweep
from kdtree.measure.grid import BATCHES, HEADS, LENGTHS, SLOTS, case
from kdtree.measure.impls import label
from kdtree.report import fmt
from kdtree.report.elsewhere import MASK_FREE, Shape
from kdtree.report.grid import CHOSEN, Summary, ladder, ratios
from kdtree.report.plots import NOT_MEASURED
from kdtree.report.style import INK, OURS, RC, SIZE, blank, close, colour, figure
from kdtree.report.tables import median, of_floor
from kdtree.report.verdict import Row
from kdtree.spec import case_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LADDER", "close", "over_mask_free", "rungs"]

PANELS = (7.4, 6.0)  # inches of the small multiples
LADDER = (sweep.REFERENCE["verify_attn"], case(8, 1, 9, 4096))  # shapes that every kernel is timed at, simt too


def over_mask_free(found: Summary, impl: str = CHOSEN) -> Figure:
    """Our time over FlashMLA's without a mask, a panel for each H and B, a line a tree size; 1 is as fast.

    Without times of FlashMLA for this GPU: our share of the floor.
    """
    at = found.by_impl.get(impl, {})
    if not at:
        return blank(NOT_MEASURED)
    if found.peers:
        return _panels(ratios(at, found.peers.mask_free), f"time over {MASK_FREE}, measured elsewhere", 1.0)
    return _panels({shape: share for shape, row in at.items() if (share := of_floor(row))}, "share of the floor", 1.0)


def _panels(values: Mapping[Shape, float], what: str, line: float) -> Figure:
    import matplotlib.pyplot as plt

    with plt.rc_context(RC):
        fig, axes = plt.subplots(
            len(HEADS), len(BATCHES), figsize=PANELS, layout="constrained", sharex=True, sharey=True
        )
        for i, heads in enumerate(HEADS):
            for j, batch in enumerate(BATCHES):
                _panel(axes[i][j], {s: v for s, v in values.items() if s[:2] == (heads, batch)}, line)
                axes[i][j].set_title(f"H = {heads}, B = {batch}", fontsize=8.5, loc="left")
        for ax in axes[-1]:
            ax.set_xlabel("prefix length L")
            ax.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS], rotation=45)
            ax.minorticks_off()
        axes[1][0].set_ylabel(what)
        axes[0][0].set_ylim(min([line, *values.values()]) / 1.15, max([line, *values.values()]) * 1.15)  # shared
        handles, labels = max((ax.get_legend_handles_labels() for ax in axes.flat), key=lambda found: len(found[0]))
        fig.legend(handles, labels, loc="outside lower center", ncols=len(SLOTS))
    return fig


def _panel(ax: Axes, values: Mapping[Shape, float], line: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    ax.axhline(line, color=INK, linewidth=1.0, linestyle=":")
    for shade, n_slots in zip(OURS, SLOTS, strict=False):
        points = sorted((shape[3], value) for shape, value in values.items() if shape[2] == n_slots)
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", markersize=3, color=shade, label=f"N = {n_slots}")
    ax.set(xscale="log", yscale="log")
    ax.set_yticks([0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def rungs(rows: Sequence[Row], cases: Sequence[Mapping[str, Any]]) -> Figure:
    """TFLOP/s of each kernel of the ladder, a group of bars a case; a kernel that was not timed has no bar."""
    found = {case_key(_words(wanted)): ladder(rows, wanted) for wanted in cases}
    bars = {k: {n: r for n, r in rungs.items() if r is not None and r.get("flop")} for k, rungs in found.items()}
    bars = {k: rungs for k, rungs in bars.items() if rungs}
    if not bars:
        return blank(NOT_MEASURED)
    with figure((SIZE[0], 1.1 + 0.95 * len(bars))) as (fig, ax):
        names = list(next(iter(found.values())))
        for name in names:
            shade = colour(label(name), [label(n) for n in names])  # as in the other figures
            here = [(i, rungs[name]) for i, rungs in enumerate(bars.values()) if name in rungs]
            if not here:
                continue
            at = [i + 0.26 * (names.index(name) - 1) for i, _ in here]
            rates = [row["flop"] / (median(row) or 1.0) / 1e6 for _, row in here]
            ax.barh(at, rates, height=0.24, color=shade, label=name)
            for y, rate in zip(at, rates, strict=True):
                ax.annotate(fmt.number(rate), (rate, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        ax.set_yticks(range(len(bars)), list(bars))
        ax.invert_yaxis()
        ax.set(xlabel="TFLOP/s", xscale="log")
        ax.set_xlim(right=ax.get_xlim()[1] * 2)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        ax.grid(axis="y", visible=False)
        fig.legend(loc="outside lower center", ncols=len(names))
    return fig


def _words(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one case of the grid from another."""
    return {name: wanted[name] for name in ("H", "B", "N", "L")}
