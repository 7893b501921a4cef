"""Correctness cases of the kernels of `verify_attn` by name: what they cover and notice, when they are skipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_gpu import FakeGPU, fake_gpu  # noqa: F401 (a fixture)

from kdtree.device import gpu_available
from kdtree.measure import attention_cases, cases, impls, invoke, sanitize, tasks, tryit
from kdtree.measure.guard import GuardedOutputs

SMALL = attention_cases.BASE | {"impl": "mma", "B": 3, "L": [0, 5, 17], "H": 2, "N": 3} | attention_cases.WIDTHS


@pytest.fixture
def guarded(fake_gpu, monkeypatch):  # noqa: F811
    """Guarded outputs as torch tensors of the CPU, filled by the fake kernel."""

    def run(op, host, params, *, moved, **_):
        made = GuardedOutputs(invoke.output_shapes(op, host, params), "cpu")
        out = {
            n: torch.empty(a.shape, dtype=moved["q"].dtype if n == "out" else torch.float32)
            for n, a in made.arrays.items()
        }
        invoke.call(op, moved, params, out)
        return out, None

    monkeypatch.setattr(invoke, "run_guarded", run)
    return fake_gpu


# what they cover


@pytest.mark.parametrize("impl", impls.TENSOR_CORES)
def test_every_kernel_meets_every_size_of_tree_up_to_65_and_the_largest(impl):
    every = list(attention_cases.params("full", attention_cases.TAKEN[impl]))
    assert {p["N"] for p in every} >= {*range(1, 66), 129, 1025}
    assert {p["H"] for p in every} >= {1, 8, 9, 16, 64, 128}
    seen = {(p["dtype"], p["page_size"], p.get("part", "all")) for p in every if p["L"] == attention_cases.RAGGED}
    assert len(seen) == 2 * 4 * 2 + 3 and 0 in attention_cases.RAGGED
    assert {p["damage"] for p in every if p.get("damage")} == set(attention_cases.DAMAGE)
    for n_slots in (129, 1025):
        assert {p["H"] for p in every if p["N"] == n_slots} == set(attention_cases.HEADS)
    for heads in attention_cases.HEADS:  # small trees meet all dtypes and pages at each number of heads
        met = {(p["dtype"], p["page_size"]) for p in every if p["H"] == heads}
        assert len(met) >= 8, heads


@pytest.mark.parametrize("profile,count", [("tiny", 1), ("quick", 30), ("full", 115)])
def test_names_are_unique_and_both_kernels_have_their_cases(profile, count):
    found = list(attention_cases.kernels(profile))
    assert len({name for _, name, _, _ in found}) == len(found) >= 2 * count
    assert {impl for impl, _, _, _ in found} == set(impls.TENSOR_CORES) | ({"simt"} if profile != "tiny" else set())
    assert all(params["impl"] == impl and params["kv_lora_rank"] == 512 for impl, _, params, _ in found)


def test_a_case_is_listed_under_its_kernel():
    found = [c for c in cases.family("verify_attn", "tiny") if c.params.get("impl")]
    assert [(c.impl, c.params["impl"]) for c in found] == [(f"numba:{n}", n) for n in ("mma", "cluster", "wgmma")]


# what they notice


def test_a_right_kernel_passes(guarded):
    outcome = attention_cases.check(SMALL, 1)
    assert outcome.ok and 0 < outcome.rel_l2 < 2e-3 and guarded.calls == ["mma", "mma"]


@pytest.mark.parametrize("damage", attention_cases.DAMAGE)
def test_the_broken_request_must_be_nan_and_the_others_right(guarded, damage):
    case = SMALL | {"ragged": False, "damage": damage, "L": [2, 5, 17]}
    broken: list[int] = []

    def nan_there(made: dict) -> None:
        for array in made.values():
            for b in broken:
                array[b] = float("nan")

    guarded.spoil["mma"] = nan_there
    original = attention_cases.break_request

    def spare_the_twin(moved, want, what):
        """Note what would be broken; the fake kernel could not follow it."""
        original({n: v.clone() if torch.is_tensor(v) else v.map(torch.clone) for n, v in moved.items()}, want, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cases, "break_request", spare_the_twin)
        assert "NaN" in attention_cases.check(case, 1).reason  # the kernel went on as if nothing were
        broken.append(attention_cases.DAMAGED)
        assert attention_cases.check(case, 1).ok
        broken.append(0)
        assert not attention_cases.check(case, 1).ok  # another request suffered


def test_other_bits_and_stray_writes_are_wrong(guarded, monkeypatch):
    guarded.spoil["mma"] = lambda made: made["lse"].add_(1e-6 * len(guarded.calls))
    assert attention_cases.check(SMALL, 1).reason == "two runs on the same inputs gave different bits"
    guarded.spoil.clear()
    inner = invoke.run_guarded
    monkeypatch.setattr(invoke, "run_guarded", lambda *a, **k: (inner(*a, **k)[0], "3 bytes written behind out"))
    assert attention_cases.check(SMALL, 1).reason == "3 bytes written behind out"


def test_a_kernel_that_refuses_is_skipped_with_its_reason(guarded):
    guarded.refuses["mma"] = "mma needs compute capability 8.0, this GPU has 7.5"
    with pytest.raises(tasks.NotHere, match="this GPU has 7.5"):
        attention_cases.check(SMALL, 1)
    case = cases.CheckCase("verify_attn", "c", SMALL, 1, lambda: attention_cases.check(SMALL, 1), "numba:mma")
    (row,) = tasks.of_check(case).run()
    assert row["status"] == "skipped" and row["reason"].endswith("this GPU has 7.5") and row["impl"] == "numba:mma"


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
def test_without_a_gpu_a_case_is_skipped_and_says_why():
    for _, _, _, run in attention_cases.kernels("tiny"):
        with pytest.raises(tasks.NotHere, match="needs a GPU"):
            run(0)


def test_rising_rows_keep_their_nan_and_grow():
    case = SMALL | {"L": [40, 0, 3], "page_size": 16, "ragged": False, "heat": 6.0}
    plain, risen = (attention_cases.arguments(case | {"rising": r}, np.random.RandomState(0)) for r in (False, True))
    assert np.array_equal(np.isnan(plain["kv"].astype(np.float32)), np.isnan(risen["kv"].astype(np.float32)))
    rows = risen["kv"].astype(np.float32)[risen["page_table"][0]].reshape(-1, 576)[:43]
    size = np.linalg.norm(rows, axis=1)
    assert size[-5:].mean() > 3 * size[:5].mean()
    assert np.abs(risen["q"].astype(np.float32)).max() > 12


# by name elsewhere


def test_the_sanitizer_runs_every_kernel_at_the_width_that_it_takes():
    assert sanitize.kernels_of("verify_attn") == ("simt", "mma", "cluster", "wgmma")
    assert sanitize.kernels_of("topk") == (None,)
    for impl in impls.TENSOR_CORES:
        found = sanitize._small_cases("verify_attn", impl)
        assert {a["q"].shape[-1] for _, a, _ in found} == {576}
        assert {p["dtype"] for _, _, p in found} == {"bfloat16", "float16"}
        assert {p["page_size"] for _, _, p in found} == {0, 1, 16, 64}
    assert len(sanitize._small_cases("verify_attn", "simt")) == 11


@pytest.mark.skipif(gpu_available(), reason="there is a GPU")
def test_the_sanitizer_skips_a_kernel_that_cannot_run_here(capsys):
    assert sanitize.main(["--inner", "verify_attn", "--impl", "wgmma"]) == sanitize.NO_GPU
    assert sanitize.CANNOT + "impl: " in capsys.readouterr().err


def test_an_edited_simt_is_the_one_that_runs():
    from kdtree.kernels import verify_simt

    shipped = verify_simt.simt

    def factory(*key):
        raise RuntimeError("mine")

    with tryit.swapped("verify_attn", factory), pytest.raises(RuntimeError, match="mine"):
        cases.check_bundle("verify_attn_tiny", impl="simt")
    assert verify_simt.simt is shipped
    assert "def simt(" in tryit.source("verify_attn")
