"""Which kernel of verify_attn a call gets: the table, what each kernel refuses, and how a name overrides it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kdtree
from kdtree import spec
from kdtree.kernels import verify_attn as kernels
from kdtree.kernels.verify_attn import Asked, choose, unfit
from kdtree.tree import random_tree

HOPPER = Asked(capability=(9, 0), dtype="bfloat16", E=576, C=512)
AMPERE = replace(HOPPER, capability=(8, 0))


@pytest.fixture(autouse=True)
def all_shipped(monkeypatch):
    """On a GPU, with all its kernels there."""
    monkeypatch.setattr(kernels, "SIMULATED", False)
    monkeypatch.setattr(kernels, "_LAUNCHERS", dict.fromkeys(kernels.IMPLS))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_every_gpu_but_hopper_takes_mma(capability):
    asked = replace(HOPPER, capability=capability)
    assert choose(asked) == "mma"
    assert unfit("wgmma", asked) == "the device is sm_{}{}, expected sm_90".format(*capability)


def test_hopper_takes_wgmma():
    assert choose(HOPPER) == "wgmma"


def test_hopper_takes_cluster_where_all_clusters_run_at_once_for_a_few_rounds():
    short = replace(HOPPER, H=8, N=9, capacity=320)
    assert (short.row_tiles, short.kv_tiles) == (2, 5)
    assert choose(short) == choose(replace(short, B=2, capacity=1536)) == choose(replace(short, B=14)) == "cluster"
    assert choose(replace(short, capacity=1025)) == "mma"
    assert choose(replace(short, B=2, capacity=1537)) == "mma"
    assert choose(replace(short, B=15)) == choose(replace(short, B=14, capacity=1537)) == "wgmma"
    assert choose(replace(short, capability=(8, 0))) == "mma"


@pytest.mark.parametrize("page_size", [0, 8, 16, 32, 64, 128, 256])
def test_pages_that_tile(page_size):
    for impl in ("cluster", "wgmma"):
        assert unfit(impl, replace(HOPPER, page_size=page_size)) == ""


@pytest.mark.parametrize("page_size", [1, 2, 4, 24, 48, 63, 65, 96])
def test_pages_that_do_not_tile_go_to_mma(page_size):
    asked = replace(HOPPER, page_size=page_size)
    for impl in ("cluster", "wgmma"):
        assert f"pages have {page_size} rows" in unfit(impl, asked)
    assert choose(asked) == "mma"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "q is float32, expected bfloat16 or float16"),
        ({"E": 40}, "rows are 40 wide with a value part of 512, expected 576 and 512"),
        ({"C": 576}, "rows are 576 wide with a value part of 576"),
        ({"aligned": False}, "does not lie at a multiple of 16 bytes"),
    ],
)
def test_what_tensor_cores_cannot_take_goes_to_simt(changes, reason):
    for device in (HOPPER, AMPERE):
        asked = replace(device, **changes)
        assert choose(asked) == "simt"
        assert reason in unfit("mma", asked)
    assert reason in unfit("wgmma", replace(HOPPER, **changes))


def test_an_old_gpu_takes_simt():
    assert choose(replace(HOPPER, capability=(7, 5))) == "simt"


def test_a_kernel_that_is_not_shipped_is_not_chosen(monkeypatch):
    monkeypatch.setattr(kernels, "_LAUNCHERS", {"simt": None})
    assert choose(HOPPER) == "simt"
    assert unfit("wgmma", HOPPER) == "this version does not have it"


def test_every_row_of_the_table_has_a_reason_and_the_last_takes_everything():
    assert {impl for impl, _, _ in kernels.TABLE} == set(kernels.IMPLS)
    assert all(reason for _, _, reason in kernels.TABLE)
    assert kernels.TABLE[-1][0] == "simt"


def test_the_simulator_has_simt_alone(monkeypatch):
    monkeypatch.setattr(kernels, "SIMULATED", True)
    assert choose(replace(HOPPER, capability=(0, 0))) == "simt"
    for impl in ("mma", "cluster", "wgmma"):
        assert "expected simt" in unfit(impl, HOPPER)


# ---- through the public function


def call(impl, backend="numba"):
    tiny, rng = spec.MODELS["tiny"], np.random.RandomState(0)
    q = rng.standard_normal((1, 3, 1, tiny.head_dim)).astype(np.float32)
    kv = rng.standard_normal((1, 8, tiny.head_dim)).astype(np.float32)
    how = {"prefix_lens": np.array([4], np.int32), "scale": 0.5, "kv_lora_rank": tiny.kv_lora_rank}
    return kdtree.verify_attn(q, kv, random_tree(rng, 1, 3), impl=impl, backend=backend, **how)


@pytest.mark.parametrize("impl", ["mma", "cluster", "wgmma"])
def test_a_kernel_asked_for_by_name_that_cannot_take_the_call_says_why(impl, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=f"^impl: got '{impl}', which cannot take this call: "):
        call(impl)


def test_a_name_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="impl: got 'fast', expected one of None, 'simt', 'mma', 'cluster', 'wgmma'"):
        call("fast")


def test_simt_by_name_is_what_the_simulator_takes(monkeypatch):
    monkeypatch.undo()
    for one, other in zip(call("simt"), call(None), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_asked_for_is_launched(monkeypatch):
    import torch

    from kdtree.kernels import launch

    monkeypatch.undo()
    rng = np.random.RandomState(0)
    tree = random_tree(rng, 2, 9).map(lambda a: torch.from_numpy(a.copy()).cuda())
    q = torch.randn(2, 9, 8, 576, device="cuda").bfloat16()
    kv = torch.randn(2, 128, 576, device="cuda").bfloat16()
    lengths = torch.full((2,), 64, dtype=torch.int32, device="cuda")
    asked = replace(HOPPER, capability=launch.capability())
    for impl in kernels.IMPLS:
        if not unfit(impl, asked):
            with launch.recorded() as steps:
                kdtree.verify_attn(q, kv, tree, prefix_lens=lengths, scale=0.1, impl=impl)
            assert steps[0].kernel.name.startswith(f"verify_attn.{impl}["), steps[0].kernel.name
