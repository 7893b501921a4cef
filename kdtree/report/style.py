"""How the figures of a report look, and how they get onto a page.

Text is drawn in one sentinel colour that `to_svg` turns into `currentColor`, so that figures follow the
theme of the page, light or dark.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # becomes currentColor
OURS = ("#2f7ed8", "#e07b28", "#1f9d6b", "#b455c4", "#c8a415")
PEERS = ("#8b93a1", "#a58268", "#7d9a86", "#a08bb0")
SIZE = (5.4, 3.7)  # inches; 389 SVG units wide, so 9-unit text stays readable on a phone

RC: dict[str, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#808080",
    "grid.alpha": 0.22,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
}


@contextmanager
def figure(size: tuple[float, float] = SIZE) -> Iterator[tuple[Figure, Axes]]:
    """A new figure of `size` inches and its axes, in the style of the report."""
    import matplotlib.pyplot as plt

    plt.draw_if_interactive()  # loads the backend: within rc_context a notebook's would be undone on leaving
    with plt.rc_context(RC):
        fig, ax = plt.subplots(figsize=size, layout="constrained")
        yield fig, ax


def blank(why: str) -> Figure:
    """A figure without axes that says why there is nothing to draw."""
    with figure((SIZE[0], 1.2)) as (fig, ax):
        ax.set_axis_off()
        ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes)
    return fig


def colour(impl: str, impls: Sequence[str]) -> str:
    """A colour that stays with `impl` among `impls`: vivid for ours, muted for peers."""
    pool = PEERS if impl.startswith("peer:") else OURS
    same = sorted({i for i in impls if i.startswith("peer:") == impl.startswith("peer:")})
    return pool[same.index(impl) % len(pool)]


_SVG_HEAD = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_SVG_META = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def to_svg(fig: Figure, name: str) -> str:
    """`fig` as an inline ``<svg>`` that scales with its container and takes its text colour from the page.

    `name` keeps the ids of several figures on a page apart and the bytes reproducible. Closes the figure.
    """
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    with plt.rc_context({**RC, "svg.hashsalt": name}):
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(fig)
    text = _SVG_META.sub("", _SVG_HEAD.sub("", buffer.getvalue()))
    for side in ("width", "height"):  # the viewBox says it all
        text = re.sub(rf'(<svg\b[^>]*?) {side}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="(?!m[0-9a-f]{6}|p[0-9a-f]{6})([^"]+)"', rf'id="{name}-\1"', text)
    return text.replace(INK, "currentColor").replace("<svg ", '<svg class="plot" aria-hidden="true" ', 1)


def to_png_uri(fig: Figure, dpi: int = 110) -> str:
    """`fig` as a PNG data URI. Closes the figure."""
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=dpi)
    plt.close(fig)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def close(fig: Figure) -> None:
    """Release `fig`, which pyplot keeps until told."""
    import matplotlib.pyplot as plt

    plt.close(fig)
