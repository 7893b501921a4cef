"""Edit a kernel in a notebook, get its check and its time in one call.

    from kdtree.measure import tryit
    print(tryit.source("tree_accept"))        # the shipped kernel, to copy into a cell and edit
    tryit.run("tree_accept", my_simt)         # every bundle, then the time beside the shipped one

`my_simt` is a factory like the shipped ``kdtree.kernels.<op>.simt``: same arguments, returns a `Kernel`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kdtree.device import gpu_available
from kdtree.kernels.launch import Kernel
from kdtree.measure import cases, sweep
from kdtree.measure.compare import Comparison

SIMT = {"verify_attn": {"impl": "simt"}}  # the op with several kernels: the one that is edited is asked for by name


@dataclass
class Trial:
    """What one edited kernel did: a Comparison per case, and times in µs where there is a GPU."""

    op: str
    outcomes: dict[str, Comparison] = field(default_factory=dict)
    times_us: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Every case right?"""
        return bool(self.outcomes) and all(o.ok for o in self.outcomes.values())

    def __repr__(self) -> str:
        right = sum(o.ok for o in self.outcomes.values())
        lines = [f"{self.op}: {right} of {len(self.outcomes)} cases right"]
        lines += [f"  WRONG {name}: {o.reason}" for name, o in self.outcomes.items() if not o.ok]
        if self.times_us:
            yours, shipped = self.times_us["yours"], self.times_us["shipped"]
            lines.append(f"  yours {yours:.2f} µs, shipped {shipped:.2f} µs, ratio {yours / shipped:.3f}")
        elif self.ok:
            lines.append("  no time: the simulator runs the kernel" if not gpu_available() else "  not timed")
        return "\n".join(lines)


def source(op: str) -> str:
    """The source of the shipped kernel's factory, ready to be copied and edited. ValueError: unknown op."""
    return inspect.getsource(inspect.unwrap(_module(op).simt))


def run(op: str, factory: Callable[..., Kernel], *, limit: int | None = None, time: bool = True) -> Trial:
    """Check `factory`'s kernel on the op's bundles and, if all are right, time it at the op's reference case.

    Args:
        op: which op it stands for.
        factory: takes what ``kdtree.kernels.<op>.simt`` takes, returns a Kernel.
        limit: check only the first so many bundles.
        time: time it beside the shipped kernel where there is a GPU.

    A wrong result is part of the Trial. A CUDA error raises `CudaFault`: restart the notebook's kernel then.
    """
    trial = Trial(op)
    with swapped(op, factory):
        for case in list(cases.bundle_cases(op, large=gpu_available()))[:limit]:
            trial.outcomes[case.name] = cases.check_bundle(case.name, **SIMT.get(op, {}))
    if trial.ok and time and gpu_available():
        trial.times_us = _times(op, factory)
    return trial


@contextmanager
def swapped(op: str, factory: Callable[..., Kernel]) -> Iterator[None]:
    """While open, the op's launcher uses `factory`. Its kernels are compiled once, as the shipped ones are."""
    module, made = _module(op), {}

    def once(*key: Any) -> Kernel:
        if key not in made:
            made[key] = factory(*key)
        return made[key]

    shipped, module.simt = module.simt, once
    try:
        yield
    finally:
        module.simt = shipped


def _times(op: str, factory: Callable[..., Kernel]) -> dict[str, float]:
    from kdtree.measure import setups, timing

    setup = setups.make(op, sweep.REFERENCE[op]).by(SIMT.get(op, {}).get("impl"))
    made: dict[Any, Kernel] = {}

    def yours() -> None:
        with swapped(op, lambda *key: made.setdefault(key, factory(*key)) if key not in made else made[key]):
            setup.run()

    samples = timing.time_graphs({"yours": [yours], "shipped": [setup.run]}, cache="warm", max_seconds=0.5)
    return {name: s.median for name, s in samples.items()}


def _module(op: str) -> Any:
    """The module whose launcher calls the op's `simt`."""
    if op not in cases.FAMILIES:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(cases.FAMILIES)}")
    return importlib.import_module(f"kdtree.kernels.{'verify_simt' if op == 'verify_attn' else op}")
