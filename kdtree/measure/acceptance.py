"""How many draft tokens a tree of a given size has accepted, on the captured text of a real model.

A tree of budget n is the first n + 1 slots of a larger one, so one capture of the target's predictions answers for
every smaller budget.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kdtree import captured, ref_outputs
from kdtree.arrays import to_numpy
from kdtree.measure import invoke
from kdtree.measure.compare import compare
from kdtree.measure.tasks import Task, figures
from kdtree.ref.tree_build import tree_build

BUDGETS = (1, 2, 4, 8, 16, 32)


def walk_arguments(corpus: str, budget: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arguments, params) of `tree_accept` for the captured drafts of `corpus` and trees of `budget` nodes."""
    tensors, _ = captured.read(corpus)
    drafts = {n: tensors[n] for n in ("log_probs", "token_ids")}
    tree = tree_build(**drafts, budget=budget, root_tokens=tensors["root_tokens"], prefix_lens=tensors["prefix_lens"])
    wanted = np.ascontiguousarray(tensors["predictions"][:, : budget + 1])
    return {"tree": tree, "predictions": wanted}, {"corpus": corpus, "budget": budget}


def tasks() -> list[Task]:
    """A task per corpus and budget; its row carries `mean_accepted`, draft tokens a step."""
    found = []
    for corpus in captured.CORPORA:
        for budget in BUDGETS:
            case = {"corpus": f"smollm2_{corpus}", "budget": budget}
            first = {"op": "tree_accept", "impl": "numba:simt", "case": case, "seed": 0}
            run = partial(_run, first, corpus, budget)
            found.append(Task(f"acceptance_{corpus}_{budget}", first, "correctness", run))
    return found


def _run(first: dict[str, Any], corpus: str, budget: int) -> list[dict[str, Any]]:
    arguments, params = walk_arguments(corpus, budget)
    got, stray = invoke.run_guarded("tree_accept", arguments, params)
    outcome = compare(got, ref_outputs.reference("tree_accept", arguments, params), None)
    row = first | {"metric": "correctness"} | figures(outcome)
    if stray:
        row |= {"status": "failed", "reason": stray}
    if row["status"] == "passed":
        row["mean_accepted"] = float(np.mean(to_numpy(got["n_accepted"])))
    return [row]
