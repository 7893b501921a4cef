"""What the `kdtree` command returns to its shell."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `kdtree`; `worst` orders them, since a run may earn several."""

    OK = 0
    WRONG_RESULT = 1
    USAGE = 2
    SLOWER = 3
    UNTRUSTED = 4
    NO_GPU = 5
    DIED = 6


# A kernel that died says nothing about the results after it, a wrong result makes its time meaningless,
# and a time that cannot be trusted still counts as a time.
_PRIORITY = (
    ExitCode.USAGE,
    ExitCode.NO_GPU,
    ExitCode.DIED,
    ExitCode.WRONG_RESULT,
    ExitCode.SLOWER,
    ExitCode.UNTRUSTED,
    ExitCode.OK,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code to return when a run earned all of `codes`; OK when it earned none."""
    return min(codes, key=_PRIORITY.index, default=ExitCode.OK)
