"""A call repeated: the launches that an equal call made, on the pointers of this one.

A public function checks its arguments, plans and launches; in Python that takes 150 µs and more. The second call with
arrays of the same shapes, dtypes and device would find the same. So the first one is recorded, and the next ones only
compare, write their pointers into the parameter buffers, and launch: a few µs, without an allocation or a
synchronisation, also while a CUDA graph is captured.

Recorded are calls with torch tensors, whose library can compare many at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree.kernels.replay import Replay

KEYS_KEPT = 1024
REPLAYS_A_KEY = 8

# Key of a call -> what was recorded under it. Cleared when scratch memory is freed: recorded launches point to it.
known: dict[tuple, list[Replay]] = {}


def _unknown_stream(device: int) -> int:
    raise AttributeError("no call is known yet")


# Device -> handle of the stream that torch launches on now: torch's own function, once a call is known.
current_stream: Callable[[int], int] = _unknown_stream


def repeat(replays: Sequence[Replay], tensors: tuple[Any, ...]) -> bool:
    """Launch on `tensors` what one of `replays` did on such tensors. False, and nothing done, if none did.

    Raises CudaFault.
    """
    for found in reversed(replays):
        if found.repeats(tensors):
            return True
    return False


def keep(key: tuple, steps: list[Any], arrays: dict[str, Any], **how: Any) -> None:
    """Remember what a call launched on a GPU; the oldest are forgotten.

    `arrays` maps the call's arguments to what was given, None for nothing; their order is that of `repeat`'s tensors.
    `how` is the rest of what `kernels.replay.Replay` takes.
    """
    global current_stream
    given = {n: a for n, a in arrays.items() if a is not None}
    if {type(a).__module__.partition(".")[0] for a in given.values()} != {"torch"}:
        return
    from kdtree.kernels import launch
    from kdtree.kernels.replay import Replay

    torch = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_getDevice") or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return
    current_stream = torch._C._cuda_getCurrentRawStream
    if known.clear not in launch.on_release:
        launch.on_release.append(known.clear)
    if len(known) >= KEYS_KEPT:
        known.clear()
    replays = known.setdefault(key, [])
    replays.append(Replay(steps, given, **how))
    del replays[:-REPLAYS_A_KEY]
