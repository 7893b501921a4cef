"""verify_attn: prefix plus visible tree slots, contiguous and paged, and nothing else of the cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases_for_tests import (
    FLOAT_DTYPES,
    TOLERANCE,
    DlpackOnly,
    bits,
    rel_l2,
    rng,
    rounded,
    same_attention,
    to_gpu,
    to_torch,
    wide,
)

import kdtree
from kdtree import attention, inputs
from kdtree.kernels import verify_simt
from kdtree.ref.verify_attn import merge_states
from kdtree.ref.verify_attn import verify_attn as reference
from kdtree.spec import K26_SCALE
from kdtree.tree import DraftTree, dense_visibility, from_parents

INF = math.inf
TINY = {"kv_lora_rank": 8, "rope": 4}
SCALE = 0.3


def case(seed: int = 0, **options) -> dict:
    """Arguments of a tiny case; NaN wherever the cache is not in use."""
    return inputs.attention(
        rng(seed),
        **({"batch": 2, "heads": 2, "n_slots": 5, "prefix_lens": [0, 7], "dtype": "float32"} | TINY | options),
    )


def logical_rows(a: dict, b: int) -> np.ndarray:
    """f64[prefix + used, E] of request b, through the page table if there is one."""
    count = int(a["prefix_lens"][b]) + int(a["tree"].n_nodes[b])
    if a["page_table"] is None:
        return a["kv"][b, :count].astype(np.float64)
    size = a["kv"].shape[1]
    pages = a["page_table"][b][: -(-count // size)]
    return a["kv"][pages].reshape(-1, a["kv"].shape[2])[:count].astype(np.float64)


def dense(a: dict, scale: float, width: int, part: str = "all") -> tuple[np.ndarray, np.ndarray]:
    """An independent attention: einsum over all rows at once under a dense mask. Parts: all, tree, prefix."""
    tree, q = a["tree"], a["q"].astype(np.float64)
    batch, n_slots, heads, _ = q.shape
    out, lse = np.zeros((batch, n_slots, heads, width)), np.full((batch, n_slots, heads), -INF)
    sees = dense_visibility(tree)
    for b in range(batch):
        prefix, used = int(a["prefix_lens"][b]), int(tree.n_nodes[b])
        rows = logical_rows(a, b)
        mask = np.zeros((n_slots, prefix + used), dtype=bool)
        if part != "tree":
            mask[:used, :prefix] = True
        if part != "prefix":
            mask[:used, prefix:] = sees[b, :used, :used]
        if not mask.any():
            continue
        logits = np.where(
            mask[:, None], scale * np.einsum("nhe,re->nhr", np.where(mask.any(1)[:, None, None], q[b], 0), rows), -INF
        )
        peak = np.where(mask.any(1), logits.max(axis=2, initial=-INF).T, 0.0).T[..., None]
        weights = np.exp(logits - peak)
        total = weights.sum(axis=2)
        alive = mask.any(1)
        out[b][alive] = (np.einsum("nhr,rc->nhc", weights, rows[:, :width]) / np.maximum(total, 1e-300)[..., None])[
            alive
        ]
        lse[b][alive] = (peak[..., 0] + np.log(np.maximum(total, 1e-300)))[alive]
    return out, lse


def ref(a: dict, *, scale: float = SCALE, width: int = 8, part: str = "all"):
    return reference(**a, scale=scale, kv_lora_rank=width, part=part)


def numba(a: dict, **options):
    return kdtree.verify_attn(**a, **({"scale": SCALE, "kv_lora_rank": 8, "backend": "numba"} | options))


def plain_tree(n_slots: int, n_nodes: int | None = None) -> DraftTree:
    """One chain of `n_slots` slots, of which `n_nodes` are used."""
    used = n_slots if n_nodes is None else n_nodes
    tree = from_parents(np.zeros((1, n_slots)), np.arange(-1, n_slots - 1)[None], np.array([max(used, 1)]))
    if used == 0:
        tree = DraftTree.empty(1, n_slots, tree.max_depth)
    return tree


# ---- the reference ----


@pytest.mark.parametrize("part", ["all", "tree"])
@pytest.mark.parametrize("page_size", [0, 1, 3, 64])
@pytest.mark.parametrize("heads,n_slots", [(1, 1), (3, 5), (2, 37)])
def test_the_reference_agrees_with_a_dense_softmax(part, page_size, heads, n_slots):
    a = case(heads=heads, n_slots=n_slots, batch=3, prefix_lens=[0, 1, 37], page_size=page_size, ragged=True)
    got, want = ref(a, part=part), dense(a, SCALE, 8, part)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)


@pytest.mark.parametrize("page_size", [0, 4])
def test_prefix_and_tree_parts_merge_to_the_whole(page_size):
    a = case(batch=3, prefix_lens=[0, 5, 11], n_slots=9, page_size=page_size, ragged=True)
    merged = merge_states(*dense(a, SCALE, 8, "prefix"), *ref(a, part="tree"))
    whole = ref(a)
    np.testing.assert_allclose(merged[0], whole[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(merged[1], whole[1], rtol=1e-12)


def test_the_scale_of_k26_is_the_yarn_one():
    assert pytest.approx(0.1446796, abs=5e-8) == K26_SCALE
    assert pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2) == K26_SCALE
    a = case(kv_lora_rank=512, rope=64, batch=1, heads=1, n_slots=3, prefix_lens=[9], dtype="float32")
    right, usual_mistake = (ref(a, scale=s, width=512)[0] for s in (K26_SCALE, 576**-0.5))
    assert rel_l2(usual_mistake, right) > 0.1
    expected = dense(a, 0.1446796, 512)
    np.testing.assert_allclose(right, expected[0], rtol=1e-5, atol=1e-6)


def test_lse_is_the_natural_logarithm():
    row = np.arange(1.0, 5.0)
    q = np.full((1, 2, 1, 4), 0.5)
    tree = plain_tree(2)
    out, lse = reference(q, np.array([[row, row]]), tree, prefix_lens=np.array([0]), scale=2.0, kv_lora_rank=3)
    logit = 2.0 * 0.5 * row.sum()
    np.testing.assert_allclose(lse[0, :, 0], [logit, logit + math.log(2.0)])
    np.testing.assert_allclose(out[0, :, 0], [row[:3], row[:3]])


def test_a_slot_sees_itself_its_ancestors_and_no_other_slot():
    tree = from_parents(np.zeros((1, 4)), np.array([[-1, 0, 0, 1]]), np.array([4]))
    values = np.eye(4)  # out shows which rows were seen
    out, lse = reference(
        np.zeros((1, 4, 1, 4)), values[None], tree, prefix_lens=np.array([0]), scale=1.0, kv_lora_rank=4
    )
    np.testing.assert_allclose(
        out[0, :, 0], [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], np.array([1, 1, 0, 1]) / 3]
    )
    np.testing.assert_allclose(lse[0, :, 0], np.log([1, 2, 2, 3]))


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_unused_slots_and_empty_trees_give_zero_and_minus_infinity(backend):
    a = case(ragged=False)
    a["tree"].n_nodes[:] = [0, 3]
    a["q"][1, 3:] = np.nan
    out, lse = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    for rows in (np.s_[0], np.s_[1, 3:]):
        assert (out[rows].astype(np.float64) == 0).all() and (lse[rows] == -INF).all()
    assert np.isfinite(lse[1, :3]).all() and np.isfinite(wide(out)).all()


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_a_row_with_nothing_visible_gives_zero_and_minus_infinity(backend):
    a = case(batch=1, prefix_lens=[4])
    a["tree"].visibility[0, 2] = 0
    out, lse = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, part="tree", backend=backend)
    assert (wide(out)[0, 2] == 0).all() and (lse[0, 2] == -INF).all()
    assert np.isfinite(lse[0, [0, 1, 3, 4]]).all()
    whole = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    assert np.isfinite(whole[1]).all()  # the prefix is still there


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_nan_in_a_hidden_slot_does_not_reach_those_that_do_not_see_it(backend):
    tree = from_parents(np.zeros((1, 4)), np.array([[-1, 0, 0, 1]]), np.array([4]))
    a = case(batch=1, n_slots=4, prefix_lens=[2], dtype="float32") | {"tree": tree}
    a["kv"] = rounded(rng().standard_normal((1, 6, 12)), "float32")
    clean = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    a["kv"][0, 2 + 2] = np.nan
    out, lse = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    np.testing.assert_array_equal(out[0, [0, 1, 3]], clean[0][0, [0, 1, 3]])
    assert np.isnan(out[0, 2]).all() and np.isnan(lse[0, 2]).all()


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_bits_behind_the_used_slots_are_not_followed(backend):
    a = case(batch=1, prefix_lens=[3], ragged=False)
    a["tree"].n_nodes[0] = 3
    clean = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    a["tree"].visibility[0, :3] |= np.uint32(0xFFFFFFF8)
    a["kv"][0, 6:] = np.nan
    again = kdtree.verify_attn(**a, scale=SCALE, kv_lora_rank=8, backend=backend)
    np.testing.assert_array_equal(bits(again[0]), bits(clean[0]))
    np.testing.assert_array_equal(again[1], clean[1])


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_large_logits_do_not_overflow(backend):
    a = case(batch=1, prefix_lens=[5], dtype="float32")
    a["q"] *= 300.0
    out, lse = kdtree.verify_attn(**a, scale=1.0, kv_lora_rank=8, backend=backend)
    assert np.isfinite(wide(out)).all() and np.isfinite(lse).all() and np.abs(lse).max() > 500
    same_attention((out, lse), ref(a, scale=1.0), "float32")


def test_the_reference_refuses_an_unknown_part():
    with pytest.raises(ValueError, match="part: got 'prefix', expected 'all' or 'tree'"):
        ref(case(), part="prefix")


# ---- the kernel ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("part", ["all", "tree"])
def test_the_kernel_agrees_with_the_reference(dtype, part):
    a = case(dtype=dtype, ragged=True, seed=1, n_slots=3)
    same_attention(numba(a, part=part), ref(a, part=part), dtype)


@pytest.mark.parametrize("page_size", [1, 3])
def test_the_kernel_agrees_on_a_paged_cache(page_size):
    a = case(page_size=page_size, ragged=True, seed=2, n_slots=3, prefix_lens=[0, 5], dtype="bfloat16")
    same_attention(numba(a), ref(a), "bfloat16")


@pytest.mark.parametrize("heads,n_slots,prefix", [(1, 1, 0), (3, 3, 1), (1, 5, 2)])
def test_the_kernel_agrees_at_odd_sizes(heads, n_slots, prefix):
    a = case(batch=1, heads=heads, n_slots=n_slots, prefix_lens=[prefix], kv_lora_rank=5, rope=2)
    same_attention(numba(a, kv_lora_rank=5), ref(a, width=5), "float32")


@pytest.mark.parametrize("splits", [2, 7])
def test_splitting_the_rows_over_blocks_changes_nothing(splits, monkeypatch):
    a = case(batch=2, heads=1, n_slots=2, prefix_lens=[0, 13], ragged=True, seed=3)
    monkeypatch.setattr(verify_simt, "plan_splits", lambda *_: splits)
    same_attention(numba(a), ref(a), "float32")


def test_splits_come_from_shapes_and_never_grow_past_the_cache():
    for capacity in (0, 1, 63, 64, 4096, 262_144):
        for sm_count in (1, 82, 132):
            for batch, rows in ((1, 1), (1, 64 * 33), (37, 8 * 9)):
                splits = verify_simt.plan_splits(batch, rows, capacity, "bfloat16", sm_count)
                assert 1 <= splits <= 64
                assert splits == 1 or capacity // splits >= verify_simt.tile_rows("bfloat16")
    assert verify_simt.plan_splits(1, 8, 262_144, "bfloat16", 132) == 64
    assert verify_simt.plan_splits(64, 64 * 33, 4096, "bfloat16", 132) == 1


def test_lengths_and_pages_may_be_int64_and_mask_words_int32():
    a = case(page_size=3, batch=1, heads=1, n_slots=33, prefix_lens=[0], kv_lora_rank=2, rope=1)
    want = ref(a, width=2)
    a["prefix_lens"], a["page_table"] = a["prefix_lens"].astype(np.int64), a["page_table"].astype(np.int64)
    a["tree"].visibility = a["tree"].visibility.view(np.int32)
    for backend in ("ref", "numba"):
        same_attention(numba(a, backend=backend, kv_lora_rank=2), want, "float32")


def test_a_cache_may_have_no_row_to_spare():
    a = case(batch=1, heads=1, n_slots=2, prefix_lens=[3])
    a["kv"] = a["kv"][:, :5].copy()
    same_attention(numba(a), ref(a), "float32")


@pytest.fixture
def unchecked(monkeypatch):
    """Host arrays as device arrays are taken: their values are not looked at before the launch."""
    monkeypatch.setattr(attention, "_check_lengths", lambda *_: None)


HOSTILE = {
    "negative prefix": ("prefix_lens", -1),
    "smallest prefix": ("prefix_lens", -(2**63)),
    "prefix beyond the cache": ("prefix_lens", 1000),
    "largest prefix": ("prefix_lens", 2**63 - 1),
    "negative n_nodes": ("n_nodes", -3),
    "n_nodes above N": ("n_nodes", 4),
    "largest n_nodes": ("n_nodes", 2**31 - 1),
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("what,page_size", [*((w, 0) for w in HOSTILE), ("largest prefix", 3), ("largest n_nodes", 3)])
def test_lengths_outside_the_cache_give_nan_for_that_request(what, page_size, unchecked):
    a = case(heads=1, n_slots=3, prefix_lens=[2, 3], page_size=page_size)
    want = {part: ref(a, part=part) for part in ("all", "tree")}
    a["prefix_lens"] = a["prefix_lens"].astype(np.int64)
    name, value = HOSTILE[what]
    (a["tree"].n_nodes if name == "n_nodes" else a["prefix_lens"])[0] = value
    for part in ("all", "tree"):
        out, lse = numba(a, part=part)
        assert np.isnan(wide(out)[0]).all() and np.isnan(lse[0]).all()
        same_attention((out[1:], lse[1:]), tuple(x[1:] for x in want[part]), "float32")


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_a_page_outside_the_cache_gives_nan_for_that_request(page, unchecked):
    a = case(heads=1, n_slots=2, prefix_lens=[4, 4], page_size=3)
    want = ref(a)
    a["page_table"][0, 0] = page
    out, lse = numba(a)
    assert np.isnan(wide(out)[0]).all() and np.isnan(lse[0]).all()
    same_attention((out[1:], lse[1:]), tuple(x[1:] for x in want), "float32")


# ---- the public function ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_torch_comes_back_as_torch(dtype, backend):
    import torch

    a = case(dtype=dtype, n_slots=2, batch=1, prefix_lens=[2])
    out, lse = numba({n: to_torch(v) for n, v in a.items()}, backend=backend)
    assert (out.dtype, lse.dtype) == (getattr(torch, dtype), torch.float32)
    assert out.device.type == "cpu" and out.shape == (1, 2, 2, 8)
    same_attention((out, lse), ref(a), dtype)


@pytest.mark.parametrize("backend", ["ref", "numba"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_out_is_filled_and_returned(backend, library):
    a = case(n_slots=2, dtype="float16", ragged=True)
    want = ref(a)
    out = (np.full((2, 2, 2, 8), np.nan, np.float16), np.full((2, 2, 2), np.nan, np.float32))
    if library == "torch":
        a, out = {n: to_torch(v) for n, v in a.items()}, to_torch(out)
    got = numba(a, out=out, backend=backend)
    assert got[0] is out[0] and got[1] is out[1]
    same_attention(out, want, "float16")


def test_an_array_with_dlpack_alone_is_read():
    import torch

    a = case(batch=1, n_slots=2, prefix_lens=[2], dtype="float32")
    lone = {n: v if n in ("tree", "page_table") else DlpackOnly(v) for n, v in a.items()}
    out, lse = kdtree.verify_attn(**lone, scale=SCALE, kv_lora_rank=8)
    assert isinstance(out, torch.Tensor)
    same_attention((out, lse), ref(a), "float32")


def test_the_inputs_are_left_alone():
    a = case(n_slots=3, page_size=3)
    before = {n: bits(v).copy() for n, v in a.items() if n != "tree"}
    for backend in ("ref", "numba"):
        numba(a, backend=backend)
        for name, value in before.items():
            np.testing.assert_array_equal(bits(a[name]), value, err_msg=name)


A = case(n_slots=3, dtype="float32")
P = case(n_slots=3, dtype="float32", page_size=4)


def call(base=A, **changes):
    return lambda: kdtree.verify_attn(**{**base, "scale": SCALE, "kv_lora_rank": 8, **changes})


def changed_tree(**changes) -> DraftTree:
    return DraftTree.from_arrays(A["tree"].arrays() | changes, A["tree"].max_depth)


BAD_CALLS = {
    "q no array": (call(q=[[1.0]]), TypeError, "q", "list"),
    "q float64": (call(q=A["q"].astype(np.float64)), TypeError, "q", "float64"),
    "q three axes": (call(q=A["q"][0]), ValueError, "q", "(3, 2, 12)"),
    "q strided": (call(q=A["q"].transpose(0, 1, 3, 2)), ValueError, "q", "strided"),
    "kv other dtype": (call(kv=A["kv"].astype(np.float16)), TypeError, "kv", "float16"),
    "kv other width": (call(kv=A["kv"][..., :8].copy()), ValueError, "kv", "8)"),
    "kv other batch": (call(kv=A["kv"][:1]), ValueError, "kv", "(1, "),
    "kv strided": (call(kv=np.zeros((2, 9, 24), np.float32)[..., ::2]), ValueError, "kv", "strided"),
    "tree of another batch": (call(tree=plain_tree(3)), ValueError, "tree", "B=1"),
    "tree of other slots": (
        call(case(n_slots=3, dtype="float32") | {"tree": case(n_slots=4)["tree"]}),
        ValueError,
        "tree",
        "N=4",
    ),
    "n_nodes dtype": (
        call(tree=changed_tree(n_nodes=A["tree"].n_nodes.astype(np.int64))),
        TypeError,
        "tree.n_nodes",
        "int64",
    ),
    "visibility dtype": (
        call(tree=changed_tree(visibility=A["tree"].visibility.astype(np.int64))),
        TypeError,
        "tree.visibility",
        "int64",
    ),
    "visibility words": (
        call(tree=changed_tree(visibility=np.zeros((2, 3, 2), np.uint32))),
        ValueError,
        "tree.visibility",
        "(2, 3, 2)",
    ),
    "n_nodes above N": (
        call(tree=changed_tree(n_nodes=np.array([1, 4], np.int32))),
        ValueError,
        "tree.n_nodes",
        "request 1 has 4",
    ),
    "prefix negative": (call(prefix_lens=np.array([0, -1])), ValueError, "prefix_lens", "request 1 has -1"),
    "prefix too long": (call(prefix_lens=np.array([0, 11])), ValueError, "prefix_lens", "request 1 needs 11 + 3"),
    "largest prefix": (call(prefix_lens=np.array([0, 2**63 - 1])), ValueError, "prefix_lens", f"needs {2**63 - 1} + 3"),
    "prefix dtype": (call(prefix_lens=np.array([0.0, 7.0])), TypeError, "prefix_lens", "float64"),
    "prefix shape": (call(prefix_lens=np.array([0])), ValueError, "prefix_lens", "(1,)"),
    "page dtype": (call(P, page_table=P["page_table"].astype(np.int16)), TypeError, "page_table", "int16"),
    "page shape": (call(P, page_table=P["page_table"][0]), ValueError, "page_table", "(3,)"),
    "no pages": (call(P, page_table=P["page_table"][:, :0].copy()), ValueError, "page_table", "0 pages"),
    "page out of range": (call(P, page_table=np.full_like(P["page_table"], 99)), ValueError, "page_table", "is 99"),
    "scale": (call(scale=math.nan), ValueError, "scale", "nan"),
    "scale infinite": (call(scale=INF), ValueError, "scale", "inf"),
    "part": (call(part="prefix"), ValueError, "part", "'prefix'"),
    "impl": (call(impl="wgmma9"), ValueError, "impl", "'wgmma9'"),
    "rank 0": (call(kv_lora_rank=0), ValueError, "kv_lora_rank", "0"),
    "rank above E": (call(kv_lora_rank=13), ValueError, "kv_lora_rank", "13"),
    "rank a float": (call(kv_lora_rank=8.0), TypeError, "kv_lora_rank", "8.0"),
    "out shape": (
        call(out=(np.zeros((2, 3, 2, 12), np.float32), np.zeros((2, 3, 2), np.float32))),
        ValueError,
        "out.out",
        "(2, 3, 2, 12)",
    ),
    "out dtype": (
        call(out=(np.zeros((2, 3, 2, 8), np.float16), np.zeros((2, 3, 2), np.float32))),
        TypeError,
        "out.out",
        "float16",
    ),
    "lse dtype": (
        call(out=(np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 3, 2), np.float64))),
        TypeError,
        "out.lse",
        "float64",
    ),
    "backend": (call(backend="triton"), ValueError, "backend", "'triton'"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(bad):
    run, error, argument, came = BAD_CALLS[bad]
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(f"{argument}: "), text
    assert came in text and "expected" in text, text


def test_unused_page_table_entries_may_hold_anything():
    a = case(page_size=4, n_slots=3, prefix_lens=[0, 5])
    assert (a["page_table"] == 2**31 - 1).any()
    assert np.isfinite(numba(a, backend="ref")[1]).all()


# ---- on a GPU ----


def by_torch(a: dict, part: str = "all", width: int = 512):
    """The same attention in float64 by torch on the GPU; `a` holds CUDA tensors, the tree NumPy arrays."""
    import torch

    tree, kv, q = a["tree"], a["kv"], a["q"]
    batch, n_slots, heads, head_dim = q.shape
    out = torch.zeros(batch, n_slots, heads, width, dtype=torch.float64, device="cuda")
    lse = torch.full((batch, n_slots, heads), -INF, dtype=torch.float64, device="cuda")
    sees = torch.from_numpy(dense_visibility(tree)).cuda()
    for b in range(batch):
        prefix, used = int(a["prefix_lens"][b]), int(tree.n_nodes[b])
        if a["page_table"] is None:
            rows = kv[b, : prefix + used]
        else:
            pages = a["page_table"][b, : -(-(prefix + used) // kv.shape[1])].long()
            rows = kv[pages].reshape(-1, head_dim)[: prefix + used]
        rows = rows.double()
        mask = torch.ones(used, prefix + used, dtype=torch.bool, device="cuda")
        mask[:, prefix:] = sees[b, :used, :used]
        if part == "tree":
            mask[:, :prefix] = False
        logits = K26_SCALE * torch.einsum("nhe,re->nhr", q[b, :used].double(), rows)
        logits = logits.masked_fill(~mask[:, None], -INF)
        lse[b, :used] = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse[b, :used, :, None])
        out[b, :used] = torch.einsum("nhr,rc->nhc", weights, rows[:, :width])
    return out, lse


def on_gpu(**options) -> tuple[dict, dict]:
    """(arguments on the host, the same on the GPU) at K2.6's row width."""
    a = inputs.attention(rng(options.pop("seed", 0)), **options)
    return a, {n: to_gpu(v) for n, v in a.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("heads,n_slots", [(1, 1), (8, 9), (16, 5)])
def test_on_a_gpu_small_ragged_batches_agree_with_the_reference(dtype, page_size, heads, n_slots):
    a, device = on_gpu(
        batch=4, heads=heads, n_slots=n_slots, prefix_lens=[0, 1, 37, 64], dtype=dtype, page_size=page_size, ragged=True
    )
    for part in ("all", "tree"):
        got = kdtree.verify_attn(**device, scale=K26_SCALE, part=part)
        assert got[0].is_cuda and got[0].shape == (4, n_slots, heads, 512)
        same_attention(got, ref(a, scale=K26_SCALE, width=512, part=part), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("heads,n_slots", [(8, 33), (16, 65), (64, 9), (64, 33), (64, 65)])
def test_on_a_gpu_large_ragged_batches_agree_with_torch(dtype, page_size, heads, n_slots):
    a, device = on_gpu(
        batch=3,
        heads=heads,
        n_slots=n_slots,
        prefix_lens=[0, 199, 2048],
        dtype=dtype,
        page_size=page_size,
        ragged=True,
        seed=n_slots,
    )
    for part in ("all", "tree"):
        want = by_torch(device | {"tree": a["tree"]}, part)
        same_attention(kdtree.verify_attn(**device, scale=K26_SCALE, part=part), want, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("heads,n_slots,prefix", [(8, 9, 16_384), (64, 33, 4096), (8, 1025, 37)])
def test_on_a_gpu_one_long_request_is_split_and_agrees_with_torch(heads, n_slots, prefix):
    a, device = on_gpu(batch=1, heads=heads, n_slots=n_slots, prefix_lens=[prefix])
    same_attention(kdtree.verify_attn(**device, scale=K26_SCALE), by_torch(device | {"tree": a["tree"]}), "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("what", HOSTILE)
def test_on_a_gpu_hostile_lengths_give_nan_for_that_request_and_no_fault(what, page_size):
    import torch

    _, device = on_gpu(batch=3, heads=8, n_slots=3, prefix_lens=[37, 64, 1], page_size=page_size)
    want = kdtree.verify_attn(**device, scale=K26_SCALE)
    device["prefix_lens"] = device["prefix_lens"].long()
    name, value = HOSTILE[what]
    (device["tree"].n_nodes if name == "n_nodes" else device["prefix_lens"])[1] = value
    for part in ("all", "tree"):
        out, lse = kdtree.verify_attn(**device, scale=K26_SCALE, part=part)
        torch.cuda.synchronize()
        assert out[1].isnan().all() and lse[1].isnan().all()
        if part == "all":
            for b in (0, 2):
                assert torch.equal(out[b], want[0][b]) and torch.equal(lse[b], want[1][b])


@pytest.mark.gpu
@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("wide_table", [False, True])
def test_on_a_gpu_a_page_outside_the_cache_gives_nan_and_no_fault(page, wide_table):
    import torch

    _, device = on_gpu(batch=2, heads=8, n_slots=3, prefix_lens=[40, 64], page_size=16)
    if wide_table:
        device["page_table"] = device["page_table"].long()
        page *= 2**31
    device["page_table"][0, 1] = page
    out, lse = kdtree.verify_attn(**device, scale=K26_SCALE)
    torch.cuda.synchronize()
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_unused_rows_of_q_and_cache_may_hold_nan():
    a, device = on_gpu(batch=3, heads=16, n_slots=17, prefix_lens=[0, 37, 199], ragged=True)
    assert np.isnan(wide(a["kv"])).any()
    for b, used in enumerate(a["tree"].n_nodes):
        device["q"][b, int(used) :] = float("nan")
    out, lse = kdtree.verify_attn(**device, scale=K26_SCALE)
    for b, used in enumerate(a["tree"].n_nodes):
        assert (out[b, int(used) :] == 0).all() and (lse[b, int(used) :] == -INF).all()
    same_attention((out, lse), ref(a, scale=K26_SCALE, width=512), "bfloat16")


@pytest.mark.gpu
def test_on_a_gpu_addresses_pass_the_32_bit_limit():
    import torch

    free, _ = torch.cuda.mem_get_info()
    length = 2**31 // 576 + 1000  # elements past 2^31 in one request's rows
    if free < 3 * 2 * length * 576:
        pytest.skip("not enough free memory for a cache past 2^31 elements")
    a = inputs.attention(rng(), batch=1, heads=8, n_slots=9, prefix_lens=[4])
    first = length // 4 - 4  # of the last four whole pages
    kv = torch.zeros(1, length, 576, dtype=torch.bfloat16, device="cuda")
    table = to_gpu(np.arange(first, first + 4, dtype=np.int64)[None])
    pages = kv[:, : length // 4 * 4].view(-1, 4, 576)
    pages[first:].view(-1, 576)[:13] = to_gpu(a["kv"])[0, :13]
    device = {n: to_gpu(v) for n, v in a.items()} | {"kv": pages, "page_table": table}
    same_attention(kdtree.verify_attn(**device, scale=K26_SCALE), ref(a, scale=K26_SCALE, width=512), "bfloat16")


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_is_used():
    import torch

    a, device = on_gpu(batch=2, heads=8, n_slots=9, prefix_lens=[37, 64])
    late = torch.zeros_like(device["q"])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(device["q"])
        result = kdtree.verify_attn(**(device | {"q": late}), scale=K26_SCALE)
    side.synchronize()
    same_attention(result, ref(a, scale=K26_SCALE, width=512), "bfloat16")


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_allocated_when_out_is_given():
    import torch

    a, device = on_gpu(batch=2, heads=8, n_slots=9, prefix_lens=[37, 64])
    out = kdtree.verify_attn(**device, scale=K26_SCALE)
    for array in out:
        array.fill_(float("nan"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    free = torch.cuda.mem_get_info()[0]
    again = kdtree.verify_attn(**device, scale=K26_SCALE, out=out)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    assert torch.cuda.mem_get_info()[0] >= free
    assert again[0] is out[0]
    same_attention(out, ref(a, scale=K26_SCALE, width=512), "bfloat16")


@pytest.mark.gpu
def test_on_a_gpu_a_captured_call_follows_its_inputs():
    import torch

    a, device = on_gpu(batch=1, heads=8, n_slots=9, prefix_lens=[2000])
    b, other = on_gpu(batch=1, heads=8, n_slots=9, prefix_lens=[2000], seed=1)
    out = kdtree.verify_attn(**device, scale=K26_SCALE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kdtree.verify_attn(**device, scale=K26_SCALE, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kdtree.verify_attn(**device, scale=K26_SCALE, out=out)
    for name in ("q", "kv"):
        device[name].copy_(other[name])
    device["tree"].visibility.view(torch.int32).copy_(other["tree"].visibility.view(torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    same_attention(out, by_torch(other | {"tree": b["tree"]}), "bfloat16")
    assert not np.array_equal(wide(a["q"]), wide(b["q"]))


@pytest.mark.gpu
def test_on_a_gpu_arrays_on_two_devices_are_refused():
    a, device = on_gpu(batch=1, heads=8, n_slots=3, prefix_lens=[4])
    with pytest.raises(ValueError, match="tree.n_nodes: got an array on cpu, expected cuda:0 as q"):
        kdtree.verify_attn(**(device | {"tree": a["tree"]}), scale=K26_SCALE)


def test_the_tolerances_are_those_agreed():
    assert TOLERANCE == {"bfloat16": 2e-3, "float16": 5e-4, "float32": 1e-5}
