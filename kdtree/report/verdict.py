"""verdict.json: may this run be believed, what passed, what did not, and the exit code that follows.

Loud by construction: a run passes only when every row that counts is passed or skipped, something passed,
every notebook ran to its end, and nothing died. What is not counted is listed, never dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdtree.measure.results import STATUSES, key
from kdtree.report.exit_codes import ExitCode, worst
from kdtree.report.notebooks import COMPLETED, OPS_OF
from kdtree.spec import case_key

OPS = ("topk", "tree_build", "verify_attn", "merge_states", "tree_accept", "kv_compact", "decode_step")
_FAULT = re.compile(r"^(died|timeout)|\bCUDA|cuda_?error|illegal (memory|address|instruction)", re.IGNORECASE)

Row = Mapping[str, Any]


def op_order(op: str) -> tuple[int, str]:
    """Sort key that keeps the ops in the order of a decoding step."""
    return (OPS.index(op) if op in OPS else len(OPS), op)


def is_peer(row: Row) -> bool:
    """True for a row of something that is not ours: compared with, never counted."""
    return str(row.get("impl", "")).startswith("peer:")


def is_fault(row: Row) -> bool:
    """True for a row that ended its process: died, timed out, or a CUDA error."""
    return row.get("status") == "error" and bool(_FAULT.search(str(row.get("reason") or "")))


@dataclass
class Judged:
    """The rows of a results file, sorted by what may be made of them. `believed` holds one row per key."""

    believed: list[Row] = field(default_factory=list)
    stale: list[Row] = field(default_factory=list)
    after_fault: list[Row] = field(default_factory=list)


def split_at_faults(rows: Sequence[Row], sessions: Collection[int] = ()) -> tuple[list[Row], list[Row]]:
    """(before, after): rows that their own process wrote after a fault in it go to `after`.

    A process is its pid, or its op where a row has none. A pid is given again: to a process of a later
    session (`sessions` are the indices of their first rows), or to one whose `seq` begins anew. That one
    starts clean.
    """
    before: list[Row] = []
    after: list[Row] = []
    last_seq: dict[Any, int] = {}
    faulted: set[Any] = set()
    for index, row in enumerate(rows):
        if index in sessions:
            faulted.clear()
            last_seq.clear()
        process = ("pid", row["pid"]) if row.get("pid") is not None else ("op", row.get("op"))
        seq = row.get("seq")
        if seq is not None:
            if process in last_seq and seq < last_seq[process]:
                faulted.discard(process)
            last_seq[process] = seq
        # The parent's word on how a process ended is not the process's own.
        own = not str(row.get("reason") or "").startswith(("died", "timeout"))
        (after if process in faulted and own else before).append(row)
        if is_fault(row):
            faulted.add(process)
    return before, after


def judge(rows: Sequence[Row], *, run: str, source: str, sessions: Sequence[int] = ()) -> Judged:
    """Sort `rows` (in file order) into believed, stale (another run or source) and after a fault.

    `sessions` are the indices at which a call of `kdtree report` began.
    """
    stale = [r for r in rows if r.get("run") != run or r.get("source") != source]
    foreign = {id(r) for r in stale}
    current = [r for r in rows if id(r) not in foreign]
    before, after = ([r for r in part if id(r) not in foreign] for part in split_at_faults(rows, set(sessions)))
    # A key whose last word came after a fault has no last word: an older pass does not stand in for it.
    last = {key(r): r for r in current}
    after = [r for r in after if last[key(r)] is r]  # measured again since: forgiven
    silenced = {key(r) for r in after}
    believed = {key(r): r for r in before}
    # A row that was measured again is no loss; only keys without a current row are listed as stale.
    stale = list({key(r): r for r in stale if key(r) not in last}.values())
    return Judged([r for k, r in believed.items() if k not in silenced or r["status"] != "passed"], stale, after)


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many of `rows` have each status."""
    tally = Counter(str(r.get("status")) for r in rows)
    return {status: tally.get(status, 0) for status in STATUSES}


def _brief(row: Row) -> dict[str, Any]:
    return {
        "op": row.get("op"),
        "impl": row.get("impl"),
        "case": case_key(row.get("case") or {}),
        "metric": row.get("metric"),
        "status": row.get("status"),
        "seed": row.get("seed"),
        "reason": row.get("reason"),
    }


def build(
    judged: Judged,
    *,
    state: Mapping[str, Any],
    host: Mapping[str, Any],
    baseline: Mapping[str, Any] | None = None,
    problems: Sequence[str] = (),
    refused: int = 0,
    fail_untrusted: bool = False,
) -> dict[str, Any]:
    """verdict.json as a dict.

    `state` is run.json, `host` is host.json, `baseline` the summary of `gate` (a count per verdict) or None,
    `problems` what loading results.jsonl complained about, `refused` how many whole rows in it are not valid:
    what they said is unknown, so they fail the run.
    """
    ours = [r for r in judged.believed if not is_peer(r)]
    peers = [r for r in judged.believed if is_peer(r)]
    tally = counts(ours)
    books = state["notebooks"]
    broken = {name: rec for name, rec in books.items() if rec["status"] != COMPLETED}
    failures = [_brief(r) for r in ours if r["status"] in ("failed", "error")]
    failures += [_brief(r) for r in peers if is_fault(r)]
    failures.sort(key=lambda f: (op_order(f["op"]), f["impl"], f["case"], f["metric"]))
    silent = _ops_without_a_pass(books, ours)
    died = sum(f["status"] == "error" for f in failures)

    reasons: list[tuple[ExitCode, str]] = []
    if broken:
        # A notebook's own assertion speaks of results; whatever else stopped it is an accident.
        asserted = all("raised AssertionError" in (r["reason"] or "") for r in broken.values())
        names = ", ".join(sorted(broken))
        code = ExitCode.WRONG_RESULT if asserted else ExitCode.DIED
        reasons.append((code, f"{_n(len(broken), 'notebook')} did not run to the end: {names}"))
    if state.get("status") in ("running", "interrupted"):
        reasons.append((ExitCode.DIED, "the run was interrupted; run the same command again to go on with it"))
    if died:
        reasons.append((ExitCode.DIED, f"{_n(died, 'case')} died or raised"))
    if judged.after_fault:
        n = len(judged.after_fault)
        reasons.append(
            (
                ExitCode.DIED,
                f"{_n(n, 'result')} came after a fault in the same process and {_is(n)} not believed",
            )
        )
    if tally["failed"]:
        reasons.append((ExitCode.WRONG_RESULT, f"{_n(tally['failed'], 'case')} gave a wrong result"))
    if refused:
        reasons.append((ExitCode.WRONG_RESULT, f"{_n(refused, 'row')} of results.jsonl cannot be believed (see below)"))
    if not tally["passed"]:
        reasons.append(
            (ExitCode.WRONG_RESULT, "nothing passed: no result of this run and source was recorded as passed")
        )
    if silent:
        reasons.append((ExitCode.WRONG_RESULT, f"no passed result for {', '.join(silent)}, although the notebook ran"))
    codes = [code for code, _ in reasons]
    if baseline and baseline.get("slower"):
        codes.append(ExitCode.SLOWER)
    distrust = list(state.get("trust") or [])
    if distrust and fail_untrusted:
        codes.append(ExitCode.UNTRUSTED)
    code = worst(codes)
    return {
        "status": "failed" if reasons else "passed",
        "exit_code": int(code),
        "exit_name": code.name,
        "reasons": [text for _, text in reasons],
        "incomplete": bool(broken) or state.get("status") in ("running", "interrupted"),
        "counts": {**tally, "stale": len(judged.stale), "after_fault": len(judged.after_fault)},
        "by_op": {op: counts(r for r in ours if r["op"] == op) for op in sorted({r["op"] for r in ours}, key=op_order)},
        "peers": counts(peers),
        "simulated": bool(state.get("simulated")),
        "trust": {"ok": not distrust, "reasons": distrust},
        "baseline": dict(baseline) if baseline else None,
        "failures": failures,
        "notebooks": {name: {"status": r["status"], "reason": r["reason"]} for name, r in sorted(books.items())},
        "stale": [_brief(r) for r in judged.stale],
        "not_believed": [_brief(r) for r in judged.after_fault],
        "problems": list(problems),
        "run": state["run"],
        "host": state["host"],
        "gpu": (host.get("gpu") or {}).get("name"),
        "profile": state["profile"],
        "commit": state.get("commit"),
        "dirty": bool(state.get("dirty")),
        "source": state["source"],
        "at": state["updated"],
    }


def score(verdict: Mapping[str, Any]) -> str:
    """The count of results in words. Only a run that passed reads "n of n"; others say what else there is."""
    tally = verdict["counts"]
    if verdict["status"] == "passed":
        return f"{tally['passed']} of {tally['passed']} results passed"
    words = {"passed": "passed", "failed": "wrong", "error": "died or raised", "after_fault": "not believed"}
    said = [f"{tally[name]} {word}" for name, word in words.items() if tally[name] or name == "passed"]
    return ", ".join(said) + (", the rest unknown" if verdict["incomplete"] else "")


def _ops_without_a_pass(books: Mapping[str, Any], ours: Sequence[Row]) -> list[str]:
    passed = {r["op"] for r in ours if r["status"] == "passed"}
    owed = [op for name in sorted(books) if books[name]["status"] == COMPLETED for op in OPS_OF.get(name, ())]
    return [op for op in owed if op not in passed]


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
