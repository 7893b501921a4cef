"""A GPU for tests of measurement: torch on the CPU, the float64 twin for kernels of `verify_attn`, made-up times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases_for_tests import to_torch

import kdtree
from kdtree.measure import attention_cases, grid, impls, invoke, layers, memory, setups, sweep, timing, twin
from kdtree.measure.roofline import Roofs

ROOFS = Roofs(copy_gbs=4300, bf16_tflops=787, empty_us=1.0, l2_bytes=60 * 2**20, sm_count=132)
SHAPE = {"B": 2, "H": 4, "N": 5, "L": 70, "dtype": "bfloat16", "page_size": 64}


class FakeGPU:
    """`spoil[impl]` changes what that kernel writes, `refuses[impl]` is why it takes no call, `us` its time."""

    def __init__(self) -> None:
        self.spoil: dict[str | None, Callable[[dict[str, Any]], None]] = {}
        self.refuses: dict[str, str] = {}
        self.us = {"simt": 900.0, "mma": 30.0, "cluster": 20.0, "wgmma": 12.0}
        self.calls: list[str | None] = []
        self.timed: list[dict[str, Any]] = []

    def verify_attn(self, q: Any, kv: Any, tree: Any, *, out: Any = None, impl: str | None = None, **how: Any) -> Any:
        if impl in self.refuses:
            raise ValueError(f"impl: {self.refuses[impl]}")
        self.calls.append(impl)
        given = {"q": q, "kv": kv, "tree": tree, "prefix_lens": how["prefix_lens"], "page_table": how.get("page_table")}
        params = {"kv_lora_rank": how["kv_lora_rank"], "scale": how["scale"], "part": how.get("part", "all")}
        made = twin.verify_attn(given, params)
        if impl in self.spoil:
            self.spoil[impl](made)
        out = out or (torch.empty(made["out"].shape, dtype=q.dtype), torch.empty(made["lse"].shape))
        for target, value in zip(out, made.values(), strict=True):
            target.copy_(value)
        return out

    def merge_states(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any, **_: Any) -> Any:
        self.calls.append("merge")
        a, b = lse_a.double(), lse_b.double()
        total = torch.logaddexp(a, b)
        weights = [torch.where(total.isfinite(), torch.exp(x - total), 0.0)[..., None] for x in (a, b)]
        out[0].copy_(weights[0] * out_a.double() + weights[1] * out_b.double())
        out[1].copy_(total)
        return out

    def time_graphs(self, candidates: dict[str, Any], *, cache: str, **limits: Any) -> dict[str, timing.Sample]:
        self.timed.append({"names": list(candidates), "sets": len(next(iter(candidates.values()))), "cache": cache})
        for thunks in candidates.values():
            thunks[0]()
        us = [self.us.get(name.removeprefix("numba:"), 50.0) for name in candidates]
        return {n: timing.Sample(t, 0.1, 30, cache) for n, t in zip(candidates, us, strict=True)}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """Measurement code believes that it runs on a GPU on which the dispatch table takes wgmma."""
    fake = FakeGPU()
    for module in (attention_cases, grid, impls, layers, sweep):
        monkeypatch.setattr(module, "gpu_available", lambda: True)
    monkeypatch.setattr(setups, "DEVICE", "cpu")
    monkeypatch.setattr(invoke, "to_device", lambda given: {n: to_torch(v) for n, v in given.items()})
    for name in ("verify_attn", "merge_states"):
        monkeypatch.setattr(kdtree, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(memory, "free_bytes", lambda: 64 << 30)
    monkeypatch.setattr(timing, "torch_cuda", lambda: torch)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 1 << 20)
    monkeypatch.setattr(timing, "COLD_BYTES", 1e6)
    monkeypatch.setattr(timing, "time_graphs", fake.time_graphs)
    monkeypatch.setattr(timing, "launch_latency", lambda call: timing.Latency(20.0, 7.5, 0.2, 50))
    monkeypatch.setattr(grid, "float64_rate", lambda: 1e12)
    monkeypatch.setattr(impls, "dispatched", lambda params: "wgmma")
    monkeypatch.setattr(impls, "workspace_bytes", lambda name, params: 4096)
    for name in impls.NAMES:
        monkeypatch.setitem(memory.WORKSPACE, ("verify_attn", impls.label(name)), lambda params: 4096)
    monkeypatch.setattr(sweep, "_roofs", [ROOFS])
    monkeypatch.setattr(sweep, "SLOWEST_CALL", 60.0)  # a call here takes as long as a busy CPU likes
    return fake
