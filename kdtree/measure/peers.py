"""Peers in a sweep: those that are installed, set up on the same inputs and checked before they are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kdtree.measure.compare import compare
from kdtree.measure.setups import Setup


@dataclass
class Peer:
    """A peer at one case: thunks (one per input set) if it may be timed, else `status` and `note` say why not."""

    name: str
    exact: bool
    capturable: bool
    thunks: list[Callable[[], Any]] = field(default_factory=list)
    status: str = "skipped"
    note: str = ""


def prepared(op: str, sets: list[Setup], want: dict[str, Any]) -> list[Peer]:
    """Every peer of `op` that is installed. A peer that is wrong is not timed."""
    from kdtree import baselines

    found = []
    for baseline in baselines.for_op(op):
        if not baseline.available()[0]:
            continue
        peer = Peer(baseline.name, baseline.exact, baseline.capturable, note=baseline.reason)
        try:
            first = baseline.prepare(sets[0].arguments)
            wrong = _wrong(baseline, sets[0], first(), want)
            if wrong:
                peer.status, peer.note = "failed", wrong
            else:
                ready = [first, *[baseline.prepare(s.arguments) for s in sets[1:]]]
                peer.thunks = [r.run for r in ready]
        except baselines.Unsupported as error:
            peer.note = str(error)
        found.append(peer)
    return found


def _wrong(baseline: Any, setup: Setup, got: Any, want: dict[str, Any]) -> str | None:
    """Why a peer's answer is not the right one, or None."""
    if baseline.check is not None:
        answer = tuple(want[n] for n in ("log_probs", "token_ids")) if setup.op == "topk" else want
        complaints = baseline.check(setup.arguments, got, answer)
        return "; ".join(complaints) or None
    if not baseline.exact:
        from dataclasses import replace

        asked = replace(setup, arguments=baseline.asked(setup.arguments))
        want = asked.want()
    outputs = _by_name(setup.op, got)
    outcome = compare(outputs, {n: w for n, w in want.items() if outputs.get(n) is not None}, setup.params.get("dtype"))
    return outcome.reason


def _by_name(op: str, got: Any) -> dict[str, Any]:
    if op == "verify_attn":
        return dict(zip(("out", "lse"), got, strict=True))
    if op == "tree_build":
        return got.arrays()
    return dict(vars(got)) if hasattr(got, "__dict__") else dict(got)
