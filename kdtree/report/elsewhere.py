"""Times of other attention kernels that were measured apart from this suite, on one model of GPU.

They are there so that a page can say how far our times are from those kernels without their being installed. They are
only ever shown as ratios and under the sentence that says when and how they were taken, and only on a page of the same
GPU. What is installed is measured by the suite itself, in the same run.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
# By the word of the driver's name for the GPU, which must not go on with the words behind the bar.
FILES = {"H200": ("verify_attn-h200-peers.csv", "NVL|laptop")}
MASK_FREE = "flashmla-full"  # the fastest kernel we know of, without the tree
EXACT = (
    *("torch-bmm", "torch-compile", "sdpa-memeff", "flex", "sgl-extend", "sgl-decode-tree"),
    *("flashmla+torchmerge", "flashmla+compilemerge"),
)

Shape = tuple[int, int, int, int]  # H, B, N, L


@dataclass(frozen=True)
class Peers:
    """`times[shape][peer]` is a device time in µs; `said` is what the file says of itself, a sentence or more."""

    times: Mapping[Shape, Mapping[str, float]]
    said: str

    def mask_free(self, shape: Shape) -> float | None:
        """µs of MASK_FREE, which computes a little less than a tree needs."""
        return self.times.get(shape, {}).get(MASK_FREE)

    def best_exact(self, shape: Shape) -> tuple[str, float] | None:
        """The fastest kernel that answers the same question, and its µs."""
        found = {name: us for name, us in self.times.get(shape, {}).items() if name in EXACT}
        name = min(found, key=lambda n: found[n], default=None)
        return None if name is None else (name, found[name])


def for_gpu(name: str | None) -> Peers | None:
    """The times taken on a GPU of this driver name, or None. Whole words: a GH200 is no H200."""
    for word, (file, other) in FILES.items():
        if name and re.search(rf"(?<!\w){word}(?!\w)", name) and not re.search(other, name, re.IGNORECASE):
            return read(DATA / file)
    return None


@functools.cache
def read(path: Path) -> Peers:
    """A file of DATA: comment lines, then a table with the columns H, B, N, L and one for each peer.

    Raises ValueError for a cell that is no positive number.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    said = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    times: dict[Shape, dict[str, float]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        shape = shape_of({name: int(row.pop(name)) for name in "HBNL"})
        assert shape is not None
        times[shape] = {peer: _time(path, peer, text) for peer, text in row.items() if text}
    return Peers(times, said)


def _time(path: Path, peer: str, text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{path.name}: {peer} has {text!r}, expected a time above 0")
    return value


def shape_of(case: Mapping[str, Any]) -> Shape | None:
    """(H, B, N, L) of a case of the grid; None for one that has other things besides."""
    shape = tuple(case.get(name) for name in "HBNL")
    if not all(isinstance(n, int) for n in shape) or case.get("part", "all") != "all":
        return None
    return shape  # type: ignore[return-value]
