"""Baseline (what a peer is), Prepared (a peer ready to run), Unsupported (a peer that does not take a case).

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Unsupported(ValueError):
    """This peer does not take this case; the message says why. A sweep records it as skipped, not failed."""


def _as_is(raw: Any) -> Any:
    return raw


@dataclass(frozen=True)
class Prepared:
    """A peer set up for one set of inputs.

    `run()` is what a serving engine does every layer or every step, and what is timed. `finish(raw)` turns
    its result into the form of our own op (views, -1 padding, LSE base) and is not timed. Calling the
    object does both.
    """

    run: Callable[[], Any]
    finish: Callable[[Any], Any] = _as_is

    def __call__(self) -> Any:
        return self.finish(self.run())


@dataclass(frozen=True)
class Baseline:
    """What a user would run instead of one of our ops.

    Attributes:
        name: ``peer:<name>``, the `impl` of a results row.
        op: the public op it answers.
        prepare: (inputs) -> Prepared. `inputs` are keyword arguments of the public op, as torch tensors.
            Raises Unsupported. Runs whatever an engine does once a step or less: planning, mask expansion,
            compiling.
        available: () -> (yes, why not), for this process.
        timed: one sentence on what `run` contains and what it does not.
        capturable: `run` can be captured in a CUDA graph (it does not wait for the GPU).
        exact: it answers the op's own question. False: `reason` says what it leaves out.
        asked: (inputs) -> inputs of the reference whose answer this peer must give; only where not `exact`.
        tie_order: equal candidates come in the op's order. False: `check` accepts their permutations.
        check: (inputs, got, want) -> complaints, empty when right; where comparing arrays would be wrong.
    """

    name: str
    op: str
    prepare: Callable[[dict[str, Any]], Prepared]
    available: Callable[[], tuple[bool, str]]
    timed: str
    capturable: bool
    exact: bool = True
    reason: str = ""
    asked: Callable[[dict[str, Any]], dict[str, Any]] = _as_is
    tie_order: bool = True
    check: Callable[[dict[str, Any], Any, Any], list[str]] | None = None


def importable(module: str) -> tuple[bool, str]:
    """(True, "") when `module` imports, else (False, why), also for a broken shared library."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return False, f"{module} does not import: {error}"
    return True, ""


def needs_cuda(module: str = "torch", *, major: tuple[int, ...] | None = None) -> tuple[bool, str]:
    """(True, "") when torch sees a GPU of a compute capability in `major`, and `module` imports."""
    ok, why = importable("torch")
    if not ok:
        return ok, why
    import torch

    if not torch.cuda.is_available():
        return False, "torch sees no GPU"
    have = torch.cuda.get_device_capability()[0]
    if major is not None and have not in major:
        return (
            False,
            f"needs compute capability {' or '.join(f'{m}.x' for m in major)}, this GPU has {have}.x",
        )
    return importable(module)
