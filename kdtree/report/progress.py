"""One progress bar over all notebooks that says which notebook and which cell is running."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdtree.report import fmt


class Progress:
    """A context manager around a tqdm bar on stderr; silent when not `enabled`.

    Counts code cells. On a terminal the bar is redrawn; elsewhere (a log) there is a line per notebook.
    """

    def __init__(self, sources: Sequence[Path], *, enabled: bool = True) -> None:
        self._cells = {path: _code_cells(path) for path in sources}
        self._enabled = enabled
        self._bar: Any = None
        self._base = 0
        self._began = 0.0
        self._name = ""

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        self._bar = tqdm(
            total=sum(self._cells.values()),
            unit="cell",
            disable=None if self._enabled else True,  # None: tqdm looks whether stderr is a terminal
            dynamic_ncols=True,
            smoothing=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def start(self, source: Path) -> None:
        """Notebook `source` begins."""
        self._name, self._began = source.stem, time.monotonic()
        self._bar.set_description(f"{self._name} starting")

    def cell(self, done: int, total: int) -> None:
        """`done` of `total` code cells of the current notebook have run."""
        self._bar.set_description(f"{self._name} cell {min(done + 1, total)}/{total}", refresh=False)
        self._move(self._base + done)

    def finish(self, source: Path, status: str, reason: str | None) -> None:
        """Notebook `source` ended."""
        took = fmt.duration(time.monotonic() - self._began)
        self._line(f"{source.stem}: {status} in {took}" + (f" - {reason}" if reason else ""))
        self._next(source)

    def skip(self, source: Path) -> None:
        """Notebook `source` was done in an earlier session."""
        self._line(f"{source.stem}: done before")
        self._next(source)

    def _next(self, source: Path) -> None:
        self._base += self._cells[source]
        self._move(self._base)

    def _move(self, n: int) -> None:
        self._bar.n = min(n, self._bar.total or n)
        self._bar.refresh()

    def _line(self, text: str) -> None:
        if self._enabled:
            self._bar.write(text, file=sys.stderr)


def _code_cells(path: Path) -> int:
    import nbformat

    try:
        nb = nbformat.read(path, as_version=4)
    except Exception:  # running it will say what is wrong with it
        return 0
    declared = sum(c.cell_type == "code" and bool(c.source.strip()) for c in nb.cells)
    return declared + 1  # papermill adds one that sets the parameters
