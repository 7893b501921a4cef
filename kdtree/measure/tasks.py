"""What a worker process does: tasks of one family and metric, each giving rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdtree.measure.compare import Comparison
from kdtree.measure.results import METRICS


class NotHere(Exception):
    """A case that cannot run on this machine; the message says why. Its row is skipped, not failed."""


@dataclass(frozen=True)
class Task:
    """One unit of work with a name. `run` returns unsigned rows; `first` is the row's identity before it ran.

    first: {op, impl, case, seed} as a row has them, for the error row should the task kill its process.
    """

    name: str
    first: dict[str, Any]
    metric: str
    run: Callable[[], list[dict[str, Any]]] = field(compare=False, repr=False)


def of_check(case: Any) -> Task:
    """A correctness task of a `cases.CheckCase`."""
    first = {"op": case.op, "impl": case.impl, "case": case.params, "seed": case.seed}

    def run() -> list[dict[str, Any]]:
        try:
            outcome = case.run()
        except NotHere as why:
            return [skipped(first, "correctness", str(why))]
        return [first | {"metric": "correctness"} | figures(outcome)]

    return Task(case.name, first, "correctness", run)


def skipped(first: dict[str, Any], metric: str, reason: str) -> dict[str, Any]:
    """The row of a task that did not run."""
    return first | {"metric": metric, "status": "skipped", "reason": reason}


def figures(outcome: Comparison) -> dict[str, Any]:
    """The part of a row that a Comparison gives."""
    return {
        "status": "passed" if outcome.ok else "failed",
        "reason": outcome.reason,
        "max_abs": outcome.max_abs,
        "max_rel": outcome.max_rel,
        "rel_l2": outcome.rel_l2,
    }


def tasks(family: str, metric: str, profile: str) -> list[Task]:
    """The tasks of an op's family, or of ``module:function``, which returns CheckCases or Tasks (tests use it).

    Raises ValueError for an unknown family or metric.
    """
    if ":" in family:
        module, _, function = family.partition(":")
        found = getattr(importlib.import_module(module), function)()
        return [t if isinstance(t, Task) else of_check(t) for t in found]
    if metric == "correctness":
        from kdtree.measure import acceptance, cases

        found = [of_check(c) for c in cases.family(family, profile)]
        return found + (acceptance.tasks() if family == "tree_accept" else [])
    from kdtree.measure import grid, layers, sweep

    if metric in sweep.METRICS:
        return sweep.tasks(family, metric, profile)
    found = {"grid": grid.tasks, "layers": layers.tasks}.get(metric)
    if found is None:
        raise ValueError(f"metric: got {metric!r}, expected one of {', '.join(METRICS)}")
    if family != "verify_attn":
        raise ValueError(f"family: got {family!r}, expected verify_attn, which alone has the metric {metric}")
    return found(profile)
