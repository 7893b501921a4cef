"""Pictures of one draft tree: the tree with its words, who sees whom, and which cache rows move.

Data coordinates are inches: texts are measured before anything is placed, so that nothing overlaps.
Each function returns a matplotlib Figure. Times have no place here; see `plots`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kdtree.report.style import INK, OURS
from kdtree.tree import DraftTree, dense_visibility

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = OURS[:3]
HIDDEN, SOFT = "#e9ecf1", "#8b93a1"
FONT, SMALL = 8.5, 6.5  # points
ROW = 0.235  # inches a line of a tree takes
GAP = 0.34  # inches between two depths, for the links
PAD = 0.05  # inches between a word and its frame
MARGIN = 0.12
CELL = 0.21  # inches a slot takes in a mask
DPI = 130
_WHITE = {"\n": "↵", "\t": "⇥", "\r": "␍"}


def token_text(text: str) -> str:
    """A token with its white space shown: ``·`` a space, ``·×n`` more than two of them, ``↵`` a line break.

    Characters that no font draws (control characters, half a UTF-8 sequence) become ``\\xNN`` escapes.
    """
    text = re.sub(r" {3,}", lambda m: f"·×{len(m[0])}", text).replace(" ", "·")
    shown = (_WHITE.get(c) or (c if c.isprintable() and c != "\ufffd" else ascii(c)[1:-1]) for c in text)
    return "".join(shown) or "∅"


def labels(tree: DraftTree, b: int = 0, words: Mapping[int, str] | None = None) -> list[str]:
    """What to write at each used slot of request `b`: its word, or ``#id`` for a token that `words` lacks."""
    words = words or {}
    tokens = [int(t) for t in tree.token_ids[b][: int(tree.n_nodes[b])]]
    return [token_text(words[t]) if t in words else ("root" if t < 0 else f"#{t}") for t in tokens]


def lines_of(parents: Sequence[int]) -> list[int]:
    """The line that each slot stands on. A first child stands on its parent's line, its siblings below it.

    The most probable path reads as one line of text. Raises ValueError unless ``parents[i]`` is in 0..i-1.
    """
    children: list[list[int]] = [[] for _ in parents]
    for slot, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < slot:
            raise ValueError(f"parents: slot {slot} has parent {parent}, expected 0..{slot - 1}")
        children[parent].append(slot)
    lines, free, todo = [0] * len(parents), 0, [0]
    while todo:
        slot = todo.pop()
        if slot and children[parents[slot]][0] == slot:
            lines[slot] = lines[parents[slot]]
        elif slot:
            free += 1
            lines[slot] = free
        todo += reversed(children[slot])
    return lines


def accepted_words(drawn: DraftTree, b: int, path: Sequence[int], words: Mapping[int, str]) -> str:
    """The accepted slots of a path as text, the root left out."""
    tokens = np.asarray(drawn.token_ids[b])
    return " ".join(token_text(words.get(int(tokens[s]), f"#{int(tokens[s])}")) for s in path if s > 0)


def percent(probability: float) -> str:
    """A probability as short as it can be read: ``64%``, ``2.1%``, ``<0.1%``."""
    value = 100 * probability
    return f"{value:.0f}%" if value >= 9.95 else f"{value:.1f}%" if value >= 0.1 else "<0.1%"


def tree(
    drawn: DraftTree,
    b: int = 0,
    *,
    words: Mapping[int, str] | None = None,
    path: Sequence[int] = (),
    bonus: int | None = None,
    probabilities: bool = True,
    title: str = "",
) -> Figure:
    """Request `b` of host trees, root on the left, each deeper draft position a column further right.

    The more probable, the bluer a frame and the thicker a link; small print is the probability of the whole path from
    the root. Without `probabilities` all look alike. Slots of `path` (-1 ends it) are green; `bonus` is the token that
    follows the last.

    Raises ValueError for a tree without a root or a slot whose parent does not come before it.
    """
    used = int(drawn.n_nodes[b])
    if not 1 <= used <= drawn.n_slots:
        raise ValueError(f"n_nodes: request {b} has {used}, expected 1..{drawn.n_slots}")
    parents = [int(p) for p in drawn.parents[b][:used]]
    texts = labels(drawn, b, words)
    odds = [math.exp(min(0.0, float(s))) if probabilities else 0.0 for s in drawn.scores[b][:used]]
    small = [percent(p) if probabilities and i else "" for i, p in enumerate(odds)]
    accepted = [int(s) for s in path if s >= 0]
    if bonus is not None and accepted:
        parents.append(accepted[-1])
        texts.append(token_text(words[bonus]) if words and bonus in words else f"#{bonus}")
        small.append("bonus")
    lines = lines_of(parents)
    depths = [0] * len(parents)
    for slot, parent in enumerate(parents[1:], 1):
        depths[slot] = depths[parent] + 1
    frames = [_width(t) + 2 * PAD for t in texts]
    widths = [f + (_width(s, SMALL) + 2 * PAD if s else 0) for f, s in zip(frames, small, strict=True)]
    left = [MARGIN]
    for depth in range(max(depths)):
        left.append(left[-1] + GAP + max(w for w, d in zip(widths, depths, strict=True) if d == depth))
    ends = [left[d] + w for d, w in zip(depths, widths, strict=True)]
    fig, ax = _canvas(max(ends) + MARGIN, (max(lines) + 1) * ROW + 2 * MARGIN, title)
    for slot, parent in enumerate(parents):
        y = _y(lines[slot])
        extra, good = slot >= used, slot in accepted
        if slot:
            share = odds[slot] / odds[parent] if slot < used and odds[parent] else 0.0
            shade = ORANGE if extra else GREEN if good else SOFT
            style = {"color": shade, "linewidth": 2.4 if good else 1.4 if extra else 0.5 + 1.8 * share}
            turn = left[depths[slot]] - GAP
            _link(ax, (ends[parent], turn, left[depths[slot]]), (_y(lines[parent]), y), style, dashed=extra)
        face = "#d5d9e0" if not slot else GREEN if good else "none" if extra else BLUE
        strength = 1.0 if not slot or extra else 0.5 if good else 0.08 + 0.5 * math.sqrt(odds[slot])
        edge = ORANGE if extra else GREEN if good else SOFT
        _frame(ax, (left[depths[slot]], y), frames[slot], texts[slot], face, strength, edge, dashed=extra)
        ax.text(left[depths[slot]] + frames[slot] + PAD, y, small[slot], fontsize=SMALL, color=INK, va="center")
    return fig


def visibility(
    drawn: DraftTree,
    b: int = 0,
    *,
    words: Mapping[int, str] | None = None,
    bits: bool = False,
    title: str = "",
) -> Figure:
    """Who sees whom in request `b`: a row a slot, a column a slot it may look at; the prefix is seen by all.

    With `bits` each row ends with the 32-bit words that hold it, lowest slots first.
    """
    used = int(drawn.n_nodes[b])
    seen = dense_visibility(drawn)[b, :used, :used]
    texts = [f"{word}  {slot}" for slot, word in enumerate(labels(drawn, b, words))]
    packed = [" ".join(f"{int(w):08x}" for w in row) if bits else "" for row in drawn.visibility[b][:used]]
    x0 = MARGIN + max(_width(t) for t in texts) + PAD
    wide = 3 * CELL
    x1 = x0 + wide + PAD
    right = x1 + used * CELL + (max(map(len, packed)) * 0.075 + 2 * PAD if bits else 0)
    fig, ax = _canvas(right + MARGIN, (used + 1) * CELL + 2 * MARGIN, title)
    for slot in range(used):
        y = -MARGIN - (slot + 1.5) * CELL
        ax.text(x0 - PAD, y, texts[slot], fontsize=FONT - 1, color=INK, ha="right", va="center")
        ax.text(
            x1 + used * CELL + PAD,
            y,
            packed[slot],
            fontsize=FONT - 1.5,
            color=INK,
            va="center",
            family="monospace",
        )
        ax.text(
            x1 + (slot + 0.5) * CELL,
            -MARGIN - 0.5 * CELL,
            slot,
            fontsize=SMALL,
            color=INK,
            ha="center",
            va="center",
        )
        _cell(ax, x0, y, wide, BLUE)
        for other in range(used):
            shade = "#174a84" if other == slot else BLUE if seen[slot, other] else HIDDEN
            _cell(ax, x1 + other * CELL, y, CELL, shade)
    ax.text(
        x0 + wide / 2,
        -MARGIN - 0.5 * CELL,
        "prefix",
        fontsize=SMALL + 0.5,
        color=INK,
        ha="center",
        va="center",
    )
    return fig


def moves(
    path: Sequence[int],
    n_nodes: int,
    *,
    texts: Sequence[str] | None = None,
    prefix: int | None = None,
    title: str = "",
) -> Figure:
    """Cache rows of one request before and after `kv_compact`: rows `path` of the tree part go to its front.

    `path` holds slots, root first; -1 ends it. `texts` are written into the rows instead of slot numbers.
    Raises ValueError for a path that does not start at slot 0 or does not rise below `n_nodes`.
    """
    slots = [int(s) for s in path if s >= 0]
    if slots[:1] != [0] or any(a >= b for a, b in zip(slots, slots[1:], strict=False)) or slots[-1] >= n_nodes:
        raise ValueError(f"path: got {list(path)}, expected 0 first, then rising slots below {n_nodes}")
    names = [str(t) for t in (texts if texts is not None else range(n_nodes))]
    step = max(0.34, max(_width(n) for n in names[:n_nodes]) + 3 * PAD)
    rest = "prefix" if prefix is None else f"prefix, {prefix} rows"
    x0 = MARGIN + 0.5
    x1 = x0 + max(1.1, _width(rest) + 4 * PAD)
    top, height, drop = -MARGIN - 0.34, 0.26, 0.95
    fig, ax = _canvas(x1 + n_nodes * step + MARGIN, drop + height + 0.5 + 2 * MARGIN, title)
    for y, word in ((top, "before"), (top - drop, "after")):
        ax.text(MARGIN, y, word, fontsize=FONT, color=INK, va="center")
        _cell(ax, x0, y, x1 - x0, "#d5d9e0", height, rest)
    after = [names[s] for s in slots] + names[len(slots) : n_nodes]
    for i in range(n_nodes):
        x = x1 + i * step
        ax.text(x + step / 2, top + 0.25, i, fontsize=SMALL, color=SOFT, ha="center", va="center")
        _cell(ax, x, top, step, "#a5d8c3" if i in slots else HIDDEN, height, names[i])
        _cell(
            ax,
            x,
            top - drop,
            step,
            "#a5d8c3" if i < len(slots) else "#f6f7f9",
            height,
            after[i],
            stale=i >= len(slots),
        )
    for i, slot in enumerate(slots):
        ends = (
            (x1 + (slot + 0.5) * step, top - height / 2 - 0.02),
            (x1 + (i + 0.5) * step, top - drop + height / 2 + 0.02),
        )
        style = {"color": SOFT, "lw": 0.9, "ls": ":"} if slot == i else {"color": GREEN, "lw": 1.6}
        arrow = dict(arrowstyle="-" if slot == i else "-|>", shrinkA=0, shrinkB=0, **style)
        ax.annotate("", ends[1], ends[0], arrowprops=arrow)
    end, foot = x1 + len(slots) * step, top - drop - height / 2
    ax.plot([end, end], [foot - 0.12, foot + height + 0.06], color=ORANGE, linewidth=2)
    ax.text(end, foot - 0.22, "the next prefix ends here", fontsize=FONT - 1, color=INK, ha="center", va="center")
    return fig


def _canvas(width: float, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure whose data coordinates are inches, y from 0 at the top downwards to -height."""
    import matplotlib.pyplot as plt

    head = 0.2 if title else 0.0
    width = max(width, MARGIN * 2 + _width(title))
    fig = plt.figure(figsize=(width, height + head), dpi=DPI)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(-height, head))
    if title:
        ax.text(MARGIN, head / 2 - 0.04, title, fontsize=FONT, color=INK, va="center", weight="bold")
    return fig, ax


def _width(text: str, size: float = FONT) -> float:
    """Inches that `text` takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    if not text:
        return 0.0
    return TextToPath().get_text_width_height_descent(_plain(text), FontProperties(size=size), False)[0] / 72


def _plain(text: str) -> str:
    """`text` so that matplotlib takes no dollar sign for the start of a formula."""
    return text.replace("$", r"\$")


def _y(line: int) -> float:
    return -MARGIN - (line + 0.5) * ROW


def _link(
    ax: Axes,
    x: tuple[float, float, float],
    y: tuple[float, float],
    style: Mapping[str, object],
    *,
    dashed: bool,
) -> None:
    """From a parent along its line to where the gap begins, then over to the child."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    middle = (x[1] + x[2]) / 2
    points = [(x[0], y[0]), (x[1], y[0]), (middle, y[0]), (middle, y[1]), (x[2], y[1])]
    codes = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    ax.add_patch(PathPatch(Path(points, codes), fill=False, linestyle=":" if dashed else "-", zorder=1, **style))


def _frame(
    ax: Axes,
    at: tuple[float, float],
    width: float,
    text: str,
    face: str,
    strength: float,
    edge: str,
    *,
    dashed: bool,
) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch

    height = ROW - 0.06
    fill = to_rgba(face, strength) if face != "none" else "none"
    box = f"round,pad=0,rounding_size={height / 3}"
    corner = (at[0], at[1] - height / 2)
    ax.add_patch(
        FancyBboxPatch(
            corner, width, height, boxstyle=box, facecolor=fill, edgecolor=edge,
            linewidth=0.7, linestyle="--" if dashed else "-", zorder=2,
        )
    )  # fmt: skip
    ax.text(at[0] + PAD, at[1], _plain(text), fontsize=FONT, color=INK, va="center", zorder=3)


def _cell(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    shade: str,
    height: float = CELL,
    text: str = "",
    stale: bool = False,
) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y - height / 2), width, height, facecolor=shade, edgecolor="white", linewidth=0.8))
    colour = SOFT if stale else INK
    ax.text(x + width / 2, y, _plain(text), fontsize=FONT - 0.5, color=colour, ha="center", va="center")
