"""Figures that explain `verify_attn`: weight absorption, who attends to what, bytes, and FLOP per byte.

None takes a measurement: they show shapes and formulas. Each returns a matplotlib Figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree.measure import memory, roofline
from kdtree.report import fmt
from kdtree.report.plots import INK, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENT, ROPE, VALUE, HEAD = OURS[0], OURS[1], OURS[2], "#8b93a1"
HIDDEN = "#e9ebef"
_RC: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@contextmanager
def _figure(width: float, height: float, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    import matplotlib.pyplot as plt

    with plt.rc_context(_RC):
        yield plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def absorption(heads: int, kv_lora_rank: int = 512, qk_rope: int = 64, qk_nope: int = 128, v_head: int = 128) -> Figure:
    """MLA twice, bars to scale: the cache expanded for every head, and the query projected into the cache's space.

    The arguments are widths; those of K2.6 by default.
    """
    c, r, n, v = kv_lora_rank, qk_rope, qk_nope, v_head
    cached = (f"cache row of a token [{c + r}]: latent and rope", [(c, LATENT, f"{c}"), (r, ROPE, f"{r}")], False)
    with _figure(8.6, 5.0, 2) as (fig, (left, right)):
        _lane(
            left,
            "as written: expand every cached token",
            c + r,
            [
                (*cached, ""),
                (f"query [H, {n + r}]", [(n, HEAD, f"{n}"), (r, ROPE, f"{r}")], True, ""),
                (
                    f"key of a token [H, {n + r}]",
                    [(n, HEAD, f"{n}"), (r, ROPE, f"{r}")],
                    True,
                    f"latent {c} · W_uk for each head and token, rope copied",
                ),
                (
                    f"value of a token [H, {v}]",
                    [(v, HEAD, f"{v}")],
                    True,
                    f"latent {c} · W_uv for each head and token",
                ),
                (f"output [H, {v}]", [(v, HEAD, f"{v}")], True, ""),
            ],
            f"{heads} heads read {heads * (n + r + v):,} numbers a token",
        )
        _lane(
            right,
            "absorbed: project the query instead",
            c + r,
            [
                (*cached, ""),
                (
                    f"query [H, {c + r}]",
                    [(c, LATENT, f"{c}"), (r, ROPE, f"{r}")],
                    True,
                    f"q_nope {n} · W_uk = {c}, once a query",
                ),
                (
                    f"key of a token [{c + r}]",
                    [(c, LATENT, f"{c}: the latent itself"), (r, ROPE, f"{r}")],
                    False,
                    "one row for all heads, as it lies in the cache",
                ),
                (
                    f"value of a token [{c}]",
                    [(c, LATENT, f"{c}: the same numbers")],
                    False,
                    f"the first {c} of that row",
                ),
                (
                    f"output [H, {c}]",
                    [(c, VALUE, f"{c}")],
                    True,
                    f"then · W_uv: {c} to {v}, once a query",
                ),
            ],
            f"{heads} heads read {c + r:,} numbers a token",
        )
    return fig


def _lane(
    ax: Axes,
    title: str,
    width: int,
    rows: Sequence[tuple[str, Sequence[tuple[int, str, str]], bool, str]],
    foot: str,
) -> None:
    """One column of bars: (label, [(width, colour, text)], one per head?, note) from top to bottom."""
    from matplotlib.patches import Rectangle

    ax.set_axis_off()
    ax.set(xlim=(-4, width + 36), ylim=(-0.55, len(rows) + 0.1))
    ax.set_title(title, fontsize=10, loc="left", fontweight="bold")
    for i, (label, pieces, per_head, note) in enumerate(rows):
        y = len(rows) - 1 - i
        ax.text(0, y + 0.62, label, fontsize=8.5, va="bottom")
        for card in (3, 2, 1, 0) if per_head else (0,):  # cards behind cards: the same thing for each head
            at = 0
            for size, colour, text in pieces:
                x, top = at + 7 * card, y + 0.22 + 0.045 * card
                ax.add_patch(Rectangle((x, top), size, 0.26, facecolor=colour, edgecolor="white", linewidth=0.8))
                if card == 0:
                    ax.text(x + size / 2, top + 0.125, text, ha="center", va="center", color="white", fontsize=8)
                at += size
        if note:
            ax.text(0, y + 0.14, note, fontsize=8, va="top", style="italic")
    ax.text(0, -0.42, foot, fontsize=9, fontweight="bold")


def attention_weights(weights: np.ndarray, prefix: int, labels: Sequence[str]) -> Figure:
    """Softmax weights of one head as a picture: a row for each slot, a column for each KV row.

    weights [n, prefix + n], NaN where a slot does not see the row; `labels` names the n slots.
    """
    n = len(labels)
    if weights.shape != (n, prefix + n):
        raise ValueError(f"weights: got shape {weights.shape}, expected {(n, prefix + n)} for {n} labels")
    import matplotlib as mpl

    shades = mpl.colormaps["Blues"].with_extremes(bad=HIDDEN)
    with _figure(2.6 + 0.27 * weights.shape[1], 1.5 + 0.27 * n) as (fig, ax):
        drawn = ax.imshow(weights, cmap=shades, vmin=0, aspect="equal")
        ax.set_xticks(np.arange(-0.5, prefix + n), minor=True)
        ax.set_yticks(np.arange(-0.5, n), minor=True)
        ax.grid(which="minor", color="white", linewidth=1.2)
        ax.tick_params(which="both", length=0)
        ax.axvline(prefix - 0.5, color=INK, linewidth=1.4)
        ax.set_xticks(range(prefix, prefix + n), labels, fontsize=8, rotation=90)
        ax.set_yticks(range(n), labels, fontsize=8)
        ax.set_xlabel(f"{prefix} prefix rows, then a KV row for each slot")
        ax.set_ylabel("query of slot")
        for side in ax.spines.values():
            side.set_visible(False)
        fig.colorbar(drawn, ax=ax, shrink=0.8, label="softmax weight").outline.set_visible(False)
    return fig


def kv_reads(params: Mapping[str, Any], *block_rows: int) -> dict[str, int]:
    """Bytes of KV rows that one call asks for: each (slot, head) row alone, shared by blocks of rows, and once.

    `params` as `roofline.flop_bytes` takes them for verify_attn; L may be ragged.
    """
    n, h = params["N"], params["H"]
    _, width = memory.latent_widths(params)
    size = width * memory.itemsize(params.get("dtype", "bfloat16"))
    once = size * sum(length + n for length in memory.prefix_lens(params))
    return {
        "every row alone": once * n * h,
        **{f"{rows} rows share a tile": once * -(-n * h // rows) for rows in block_rows},
        "once a request": once,
    }


def kv_reads_figure(params: Mapping[str, Any], *block_rows: int) -> Figure:
    """`kv_reads` as bars on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    parts = kv_reads(params, *block_rows)
    with _figure(6.4, 1.0 + 0.3 * len(parts)) as (fig, ax):
        names = list(parts)[::-1]
        ax.barh(names, [parts[n] for n in names], color=[VALUE, *[LATENT] * len(block_rows), HEAD], height=0.6)
        for i, name in enumerate(names):
            ax.annotate(fmt.size(parts[name]), (parts[name], i), (5, 0), textcoords="offset points", va="center")
        ax.set(xscale="log", xlim=(min(parts.values()) / 3, max(parts.values()) * 8))
        ax.set_xlabel("bytes of KV that one call asks for")
        ax.xaxis.set_major_locator(LogLocator(base=16, numticks=8))
        ax.xaxis.set_major_formatter(lambda value, _: fmt.size(value))
        ax.minorticks_off()
    return fig


def intensity(params: Mapping[str, Any], heads: Sequence[int], slots: Sequence[int]) -> dict[int, list[float]]:
    """FLOP per byte of `verify_attn` at `params`, for each number of heads a list over `slots`."""
    found = {}
    for h in heads:
        counts = [roofline.flop_bytes("verify_attn", {**params, "H": h, "N": n}) for n in slots]
        found[h] = [flop / moved for flop, moved in counts]
    return found


def intensity_figure(
    params: Mapping[str, Any], heads: Sequence[int], slots: Sequence[int], knees: Mapping[str, float]
) -> Figure:
    """`intensity` over the number of slots, with the knee of each roofline in `knees` (FLOP per byte) as a line."""
    with _figure(6.4, 3.6) as (fig, ax):
        lines = intensity(params, heads, slots)
        for (h, values), shade in zip(lines.items(), OURS, strict=False):
            ax.plot(slots, values, marker="o", markersize=3.5, color=shade, linewidth=1.6)
            text = f"{h} heads"
            ax.annotate(text, (slots[-1], values[-1]), (6, 0), textcoords="offset points", va="center", color=shade)
        for name, knee in knees.items():
            ax.axhline(knee, color=INK, linewidth=0.9, linestyle=":")
            text, end = f"knee of {name}: {knee:.0f}", (slots[-1] * 1.65, knee)
            ax.annotate(text, end, (0, 2), textcoords="offset points", ha="right", fontsize=8)
        ax.set(xscale="log", yscale="log", xlabel="tree slots N (root included)", ylabel="FLOP per byte")
        ax.set_xlim(slots[0] * 0.93, slots[-1] * 1.7)
        ax.set_xticks(list(slots), [str(n) for n in slots])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        ax.minorticks_off()
    return fig
