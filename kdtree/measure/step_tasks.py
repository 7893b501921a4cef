"""The decoding step as tasks: checked op by op and as one replayed graph, timed whole and in parts.

``families.run(step_tasks.family(profile, metric), session, metric=metric)`` runs them in a process of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kdtree.device import gpu_available, why_no_gpu
from kdtree.measure import impls, memory, roofline
from kdtree.measure.step import K26_STEP, OP, TINY_STEP, Step
from kdtree.measure.tasks import Task, figures
from kdtree.spec import MODELS, case_key


def flop_bytes(params: dict[str, Any]) -> tuple[float, float]:
    """(FLOP, bytes) that the ops of one step cannot avoid: those of the five ops, attention once a layer."""
    model = MODELS[params["model"]]
    widths = {"kv_lora_rank": model.kv_lora_rank, "qk_rope_head_dim": model.qk_rope_head_dim}
    full = {"V": model.vocab_size} | params | widths | {"N": params["budget"] + 1}
    total = np.zeros(2)
    for op in ("topk", "tree_build", "verify_attn", "tree_accept", "kv_compact"):
        total += np.array(roofline.flop_bytes(op, full)) * (params["n_layers"] if op == "verify_attn" else 1)
    return float(total[0]), float(total[1])


def step_bytes(params: dict[str, Any]) -> int:
    """Bytes of a step's buffers, near enough to say whether they fit: cache, queries, outputs, logits."""
    model, size = MODELS[params["model"]], memory.itemsize(params["dtype"])
    lengths, n_slots = memory.prefix_lens(params), params["budget"] + 1
    cache = params["B"] * (max(lengths) + n_slots) * model.head_dim * size
    queries = params["B"] * n_slots * params["H"] * (model.head_dim + model.kv_lora_rank + 2) * size
    # A copy of the cache is held while the step is checked.
    return params["n_layers"] * (2 * cache + queries) + params["B"] * params["D"] * model.vocab_size * 4


def cases(profile: str, metric: str) -> list[dict[str, Any]]:
    """Parameters of the steps of a profile. ValueError for an unknown one."""
    if profile not in ("tiny", "quick", "full") or metric not in ("correctness", "latency"):
        raise ValueError(
            f"cases: got {profile!r}, {metric!r}; expected tiny, quick or full, and correctness or latency"
        )
    if profile == "tiny":
        return [TINY_STEP]
    found = [K26_STEP]
    if metric == "correctness":
        ragged = {"B": 3, "K": 8, "budget": 32, "L": [1, 63, 700], "n_layers": 2}
        found += [TINY_STEP, K26_STEP | ragged, K26_STEP | ragged | {"page_size": 64}]
    if profile == "full":
        found += [K26_STEP | {"budget": n} for n in (16, 32)] + [K26_STEP | {"L": 4096}, K26_STEP | {"B": 4}]
        found += [K26_STEP | {"model": "k2.6-tp1", "H": 64, "n_layers": 8}]
    return found


def tasks(profile: str, metric: str) -> list[Task]:
    """One task per step of the profile."""
    found = []
    for params in cases(profile, metric):
        first = {"op": OP, "impl": impls.label(None), "case": params, "seed": 0}
        work = partial(_correctness if metric == "correctness" else _latency, first)
        found.append(Task(f"{metric}_{OP}_{case_key(params)}", first, metric, work))
    return found


def family(profile: str, metric: str = "correctness") -> str:
    """The name that `families.run` takes: ``families.run(step.family(p, m), session, metric=m)``."""
    cases(profile, metric)
    return f"{__name__}:{profile}_{metric}"


tiny_correctness = partial(tasks, "tiny", "correctness")
tiny_latency = partial(tasks, "tiny", "latency")
quick_correctness = partial(tasks, "quick", "correctness")
quick_latency = partial(tasks, "quick", "latency")
full_correctness = partial(tasks, "full", "correctness")
full_latency = partial(tasks, "full", "latency")


def _correctness(first: dict[str, Any]) -> list[dict[str, Any]]:
    """Op by op; on a GPU also as one replayed graph."""
    step = Step(first["case"], first["seed"])
    outcome = step.check()
    if outcome.ok and step.device != "cpu":
        step.capture()
        outcome = step.check(step.replay)
        if not outcome.ok:
            outcome = replace(outcome, reason=f"replayed: {outcome.reason}")
    return [first | {"metric": "correctness"} | figures(outcome)]


def _latency(first: dict[str, Any]) -> list[dict[str, Any]]:
    """The step as one graph, each op alone, and what launching op by op from Python costs."""
    params = first["case"]
    flop, moved = flop_bytes(params)
    row = first | {"metric": "latency", "flop": flop, "bytes": moved}
    if not gpu_available():
        reason: str | None = f"latency is measured on a GPU only, and {why_no_gpu()}"
    else:
        reason = memory.fits(step_bytes(params), memory.free_bytes())
    if reason:
        return [row | {"status": "skipped", "reason": reason}]
    from kdtree.measure import sweep, timing

    step = Step(params, first["seed"])
    _, first_call = timing.first_call(step.run)
    before = step.check()
    if not before.ok:
        return [row | figures(before)]
    cache, limit = timing.cache_of(1, int(moved), timing.l2_bytes()), {"repeats": 20, "max_seconds": 1.5}
    whole = timing.time_graphs({OP: [step.run]}, cache=cache, bytes_per_set=int(moved), **limit)
    alone = timing.time_graphs({n: [part] for n, part in step.parts().items()}, cache="warm", **limit)
    step.capture()
    replayed, eager = timing.launch_latency(step.replay, 20), timing.launch_latency(step.run, 20)
    after = step.check(step.replay)
    if not after.ok:
        return [row | figures(replace(after, reason=f"after timing: {after.reason}"))]
    times = {
        "device_us": whole[OP].as_dict(),
        "parts": {name: sample.median for name, sample in alone.items()},
        "latency_us": replayed.latency_us,
        "host_us": replayed.host_us,
        "eager": {"latency_us": eager.latency_us, "host_us": eager.host_us},
        **first_call,
        "floor_us": sweep.floor_us(flop, moved),
    }
    return [row | figures(before) | times | {"case_name": "reference" if params == K26_STEP else None}]
