"""tree_build: the best rank paths by enumeration, ties by path, rows that end early, every derived array."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from cases_for_tests import (
    DlpackOnly,
    all_rank_paths,
    rng,
    same_tree,
    to_gpu,
    to_torch,
    tree_of_paths,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtree
from kdtree import inputs
from kdtree.arrays import to_numpy
from kdtree.ref.tree_build import best_rank_paths
from kdtree.ref.tree_build import tree_build as reference
from kdtree.tree import FIELDS, DraftTree, field_shapes

INF, NAN = math.inf, math.nan


def drafts(batch: int, depth: int, width: int, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """log_probs, token_ids, root_tokens, prefix_lens."""
    numbers = rng(seed)
    log_probs, token_ids = inputs.draft_rows(numbers, batch, depth, width, kind)
    return {
        "log_probs": log_probs,
        "token_ids": token_ids,
        "root_tokens": numbers.randint(0, 97, size=batch).astype(np.int32),
        "prefix_lens": numbers.randint(0, 4096, size=batch).astype(np.int64),
    }


def one(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """(log_probs, token_ids) of one request; token 10·depth + rank."""
    log_probs = np.array([rows], dtype=np.float32)
    depth, width = log_probs.shape[1:]
    return log_probs, (10 * np.arange(depth)[:, None] + np.arange(width))[None].astype(np.int32)


def by_enumeration(case: dict[str, np.ndarray], budget: int) -> DraftTree:
    """An independent builder: all rank paths, one sort, every array from its definition."""
    rows = [
        tree_of_paths(
            all_rank_paths(case["log_probs"][b]),
            case["token_ids"][b],
            budget + 1,
            root=int(case["root_tokens"][b]),
            prefix=int(case["prefix_lens"][b]),
        )
        for b in range(len(case["log_probs"]))
    ]
    arrays = {n: np.stack([row[n] for row in rows]).astype(FIELDS[n]) for n in FIELDS}
    return DraftTree.from_arrays(arrays, case["log_probs"].shape[1])


# ---- the reference ----


@pytest.mark.parametrize("kind", inputs.DRAFT_KINDS)
@pytest.mark.parametrize("depth,width", [(1, 1), (1, 7), (3, 3), (4, 4), (7, 2)])
def test_the_reference_agrees_with_enumerating_all_paths(kind, depth, width):
    case = drafts(3, depth, width, kind, seed=depth * width)
    for budget in (0, 1, 4, 37, 199):
        same_tree(reference(**case, budget=budget), by_enumeration(case, budget))


ROWS = st.lists(st.sampled_from([0.0, -0.25, -0.5, -1.0, -1e-3, -7.0, -INF, NAN]), min_size=1, max_size=3)


def falling(row: list[float], width: int) -> list[float]:
    """The finite values in falling order, the others behind them, filled up with -inf."""
    finite = sorted((x for x in row if math.isfinite(x)), reverse=True)
    rest = [x for x in row if not math.isfinite(x)]
    return (finite + rest + [-INF] * width)[:width]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 30))
def test_the_reference_agrees_with_enumeration_on_ties_and_broken_rows(rows, budget):
    log_probs, token_ids = one([falling(row, 3) for row in rows])
    case = {"log_probs": log_probs, "token_ids": token_ids, "root_tokens": np.array([5]), "prefix_lens": np.array([9])}
    same_tree(reference(**case, budget=budget), by_enumeration(case, budget))


@pytest.mark.parametrize("kind", ["smooth", "ties", "identical", "inf"])
def test_a_small_tree_is_the_beginning_of_any_larger_one(kind):
    case = drafts(2, 4, 5, kind)
    large = reference(**case, budget=60)
    for budget in (0, 1, 7, 31, 32, 59):
        small = reference(**case, budget=budget)
        for name in ("token_ids", "parents", "depths", "scores", "positions"):
            np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:, : budget + 1], err_msg=name)
        words = small.visibility.shape[2]
        np.testing.assert_array_equal(small.visibility, large.visibility[:, : budget + 1, :words])
        np.testing.assert_array_equal(small.n_nodes, np.minimum(large.n_nodes, budget + 1))
        for name in ("first_child", "next_sibling"):
            cut = getattr(large, name)[:, : budget + 1]
            np.testing.assert_array_equal(getattr(small, name), np.where(cut <= budget, cut, -1), err_msg=name)


def test_scores_are_float64_sums():
    # With one row for all depths many sums lie close together: rounded to float32 they would change places.
    case = drafts(4, 7, 8, "identical")
    tree = reference(**case, budget=64)
    for b in range(4):
        paths = best_rank_paths(case["log_probs"][b], 64)
        exact = [math.fsum(float(case["log_probs"][b][d][r]) for d, r in enumerate(path)) for _, path in paths]
        assert [score for score, _ in paths] == exact == sorted(exact, reverse=True)
        assert tree.scores[b, 1:].tolist() == exact
    rounded = tree.scores.astype(np.float32).astype(np.float64)
    assert (rounded != tree.scores).any(), "the case does not tell float32 from float64"


def test_ties_stand_as_tuples_do_a_prefix_before_its_extensions():
    paths = best_rank_paths(np.array([[-1.0, -1.0], [0.0, 0.0]], dtype=np.float32), 6)
    assert [path for _, path in paths] == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert {score for score, _ in paths} == {-1.0}


def test_candidates_with_log_prob_zero_extend_before_anything_else():
    paths = best_rank_paths(np.array([[0.0, -1.0], [0.0, -2.0]], dtype=np.float32), 6)
    assert [path for _, path in paths] == [(0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1)]


def test_fewer_prefixes_than_budget_leave_the_tree_underfull():
    tree = reference(*one([[-0.5, -1.0], [-0.25, -2.0]]), 10)
    assert tree.n_nodes.tolist() == [7]  # V=2, D=2: six nodes and the root
    assert (tree.token_ids[0, 7:] == -1).all() and (tree.parents[0, 7:] == -1).all()
    assert (tree.scores[0, 7:] == -INF).all() and (tree.visibility[0, 7:] == 0).all()
    assert (tree.depths[0, 7:] == 0).all() and (tree.first_child[0, 7:] == -1).all()


def test_minus_infinity_ends_a_row():
    tree = reference(*one([[0.0, -INF, -INF]]), 3)
    assert tree.n_nodes.tolist() == [2]
    assert tree.token_ids[0].tolist() == [-1, 0, -1, -1]


def test_a_finite_value_behind_an_infinite_one_is_not_used():
    for end in (-INF, NAN):
        tree = reference(*one([[-1.0, end, -0.5], [-0.5, -1.0, end]]), 20)
        assert tree.token_ids[0, : tree.n_nodes[0]].tolist() == [-1, 0, 10, 11]


@pytest.mark.parametrize("end", [-INF, NAN, INF])
def test_a_broken_first_candidate_ends_the_tree_at_that_depth(end):
    tree = reference(*one([[-0.5, -1.0], [end, -1.0], [-0.1, -0.2]]), 9)
    assert tree.n_nodes.tolist() == [3]
    assert tree.depths[0, :3].tolist() == [0, 1, 1]


def test_no_budget_gives_the_root_alone():
    case = drafts(3, 4, 2, "smooth")
    tree = reference(**case, budget=0)
    assert tree.n_nodes.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(tree.token_ids[:, 0], case["root_tokens"])
    np.testing.assert_array_equal(tree.positions[:, 0], case["prefix_lens"])
    assert tree.visibility.tolist() == [[[1]], [[1]], [[1]]]


def test_no_depth_gives_the_root_alone():
    for backend in ("ref", "numba"):
        tree = kdtree.tree_build(np.zeros((2, 0, 3), np.float32), np.zeros((2, 0, 3), np.int32), 4, backend=backend)
        assert tree.n_nodes.tolist() == [1, 1]
        assert tree.max_depth == 0
        assert (tree.token_ids == -1).all()


def test_no_candidates_give_the_root_alone():
    for backend in ("ref", "numba"):
        tree = kdtree.tree_build(np.zeros((2, 3, 0), np.float32), np.zeros((2, 3, 0), np.int32), 4, backend=backend)
        assert tree.n_nodes.tolist() == [1, 1]


def test_no_requests_give_an_empty_batch():
    for backend in ("ref", "numba"):
        tree = kdtree.tree_build(np.zeros((0, 3, 2), np.float32), np.zeros((0, 3, 2), np.int32), 4, backend=backend)
        assert {n: a.shape for n, a in tree.arrays().items()} == field_shapes(0, 5)


def test_siblings_with_one_token_stay_apart_and_stand_in_slot_order():
    log_probs, _ = one([[-0.5, -0.75, -1.0]])
    tree = reference(log_probs, np.array([[[7, 7, 7]]]), 3)
    assert tree.token_ids[0].tolist() == [-1, 7, 7, 7]
    assert tree.first_child[0].tolist() == [1, -1, -1, -1]
    assert tree.next_sibling[0].tolist() == [-1, 2, 3, -1]


def test_positions_count_depth_not_slots():
    tree = reference(*one([[-0.1, -0.2, -0.3], [-0.4, -9.0, -9.0]]), 4, prefix_lens=np.array([100]))
    np.testing.assert_array_equal(tree.positions[0], 100 + tree.depths[0])
    assert tree.positions[0].max() == 102


# ---- the kernel ----


@pytest.mark.parametrize("kind", inputs.DRAFT_KINDS)
def test_the_kernel_agrees_with_the_reference(kind):
    case = drafts(2, 3, 4, kind, seed=3)
    case["token_ids"] = inputs.duplicate_siblings(case["token_ids"])
    same_tree(kdtree.tree_build(**case, budget=13, backend="numba"), reference(**case, budget=13))


@pytest.mark.parametrize("budget", [0, 1, 31, 32, 37])
def test_the_kernel_agrees_at_odd_budgets(budget):
    case = drafts(1, 4, 5, "ties", seed=budget)
    same_tree(kdtree.tree_build(**case, budget=budget, backend="numba"), reference(**case, budget=budget))


def test_the_kernel_stops_where_prefixes_run_out():
    log_probs, token_ids = one([[-0.5, -1.0], [-0.25, -2.0]])
    tree = kdtree.tree_build(log_probs, token_ids, 10, backend="numba")
    assert tree.n_nodes.tolist() == [7]
    same_tree(tree, reference(log_probs, token_ids, 10))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(0, 12))
def test_the_kernel_agrees_on_ties_and_broken_rows(rows, budget):
    log_probs, token_ids = one([falling(row, 3) for row in rows])
    built = kdtree.tree_build(log_probs, token_ids, budget, backend="numba", prefix_lens=np.array([3]))
    same_tree(built, reference(log_probs, token_ids, budget, prefix_lens=np.array([3])))


def test_tokens_and_lengths_may_be_int64():
    case = drafts(2, 2, 3, "smooth")
    wide = {n: a if n == "log_probs" else a.astype(np.int64) for n, a in case.items()}
    for backend in ("ref", "numba"):
        same_tree(kdtree.tree_build(**wide, budget=5, backend=backend), reference(**case, budget=5))


def test_a_rising_row_on_a_device_is_not_read_back_and_still_ends():
    # What a device array may hold is not checked: the tree is then another one, but well formed.
    log_probs, token_ids = one([[-3.0, 2.0, -1.0], [5.0, -0.5, NAN]])
    tree = kdtree.tree_build(log_probs, token_ids, 30, backend="numba", validate=False)
    used = int(tree.n_nodes[0])
    assert 1 <= used <= 31
    assert all(0 <= tree.parents[0, i] < i for i in range(1, used))


# ---- the public function ----


@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_torch_comes_back_as_torch(backend):
    import torch

    case = drafts(2, 3, 3, "smooth")
    tree = kdtree.tree_build(**{n: to_torch(a) for n, a in case.items()}, budget=7, backend=backend)
    for name, array in tree.arrays().items():
        assert isinstance(array, torch.Tensor) and array.dtype == getattr(torch, FIELDS[name]), name
    same_tree(tree, reference(**case, budget=7))


@pytest.mark.parametrize("backend", ["ref", "numba"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_out_is_filled_and_returned(backend, library):
    case = drafts(2, 3, 3, "inf", seed=1)
    out = DraftTree.empty(2, 8, 3)
    for array in out.arrays().values():
        array.view(np.uint8)[...] = 0x5A
    given_ = case
    if library == "torch":
        out, given_ = to_torch(out), {n: to_torch(a) for n, a in case.items()}
    tree = kdtree.tree_build(**given_, budget=7, out=out, backend=backend)
    assert all(a is b for a, b in zip(tree.arrays().values(), out.arrays().values(), strict=True))
    same_tree(out, reference(**case, budget=7))


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_out_may_hold_its_mask_words_as_int32(backend):
    case = drafts(1, 3, 4, "smooth")
    out = DraftTree.empty(1, 34, 3)
    out.visibility = out.visibility.view(np.int32)
    kdtree.tree_build(**case, budget=33, out=out, backend=backend)
    np.testing.assert_array_equal(out.visibility.view(np.uint32), reference(**case, budget=33).visibility)


def test_an_array_with_dlpack_alone_is_read():
    case = drafts(1, 2, 3, "smooth")
    same_tree(kdtree.tree_build(**{n: DlpackOnly(a) for n, a in case.items()}, budget=4), reference(**case, budget=4))


LP, IDS = one([[-0.5, -1.0], [-0.25, -2.0]])
RISING, _ = one([[-0.5, -1.0], [-2.0, -0.25]])
POSITIVE, _ = one([[0.5, -1.0], [-0.25, -2.0]])
BAD_CALLS = {
    "no array": (lambda: kdtree.tree_build(object(), IDS, 3), TypeError, "log_probs", "object"),
    "float64": (lambda: kdtree.tree_build(LP.astype(np.float64), IDS, 3), TypeError, "log_probs", "float64"),
    "float16": (lambda: kdtree.tree_build(LP.astype(np.float16), IDS, 3), TypeError, "log_probs", "float16"),
    "two axes": (lambda: kdtree.tree_build(LP[0], IDS, 3), ValueError, "log_probs", "(2, 2)"),
    "strided": (lambda: kdtree.tree_build(LP.transpose(0, 2, 1), IDS, 3), ValueError, "log_probs", "strided"),
    "too deep": (
        lambda: kdtree.tree_build(np.full((1, 32, 2), -1.0, np.float32), np.zeros((1, 32, 2), np.int32), 3),
        ValueError,
        "log_probs.shape[1]",
        "32",
    ),
    "float tokens": (lambda: kdtree.tree_build(LP, LP, 3), TypeError, "token_ids", "float32"),
    "other tokens": (lambda: kdtree.tree_build(LP, IDS[:, :1], 3), ValueError, "token_ids", "(1, 1, 2)"),
    "budget -1": (lambda: kdtree.tree_build(LP, IDS, -1), ValueError, "budget", "-1"),
    "budget 1025": (lambda: kdtree.tree_build(LP, IDS, 1025), ValueError, "budget", "1025"),
    "budget a float": (lambda: kdtree.tree_build(LP, IDS, 3.0), TypeError, "budget", "3.0"),
    "roots": (lambda: kdtree.tree_build(LP, IDS, 3, root_tokens=IDS[0, 0]), ValueError, "root_tokens", "(2,)"),
    "prefix dtype": (
        lambda: kdtree.tree_build(LP, IDS, 3, prefix_lens=np.zeros(1, np.int16)),
        TypeError,
        "prefix_lens",
        "int16",
    ),
    "prefix negative": (
        lambda: kdtree.tree_build(LP, IDS, 3, prefix_lens=np.array([-2])),
        ValueError,
        "prefix_lens",
        "-2",
    ),
    "rising row": (lambda: kdtree.tree_build(RISING, IDS, 3), ValueError, "log_probs", "rises from -2 to -0.25"),
    "positive": (lambda: kdtree.tree_build(POSITIVE, IDS, 3), ValueError, "log_probs", "begins with 0.5"),
    "out slots": (
        lambda: kdtree.tree_build(LP, IDS, 3, out=DraftTree.empty(1, 5, 2)),
        ValueError,
        "out.token_ids",
        "(1, 5)",
    ),
    "out dtype": (
        lambda: kdtree.tree_build(LP, IDS, 3, out=DraftTree.empty(1, 4, 2).map(lambda a: a.astype(np.float32))),
        TypeError,
        "out.token_ids",
        "float32",
    ),
    "backend": (lambda: kdtree.tree_build(LP, IDS, 3, backend="gpu"), ValueError, "backend", "'gpu'"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(case):
    call, error, argument, came = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{argument}: "), text
    assert came in text and "expected" in text, text


def test_rows_are_checked_on_demand_whatever_the_backend():
    for backend in ("ref", "numba"):
        with pytest.raises(ValueError, match=r"row \(0, 1\) rises"):
            kdtree.tree_build(RISING, IDS, 3, backend=backend, validate=True)
        kdtree.tree_build(RISING, IDS, 3, backend=backend, validate=False)


def test_a_row_may_do_anything_behind_its_end():
    log_probs, token_ids = one([[-1.0, NAN, 5.0], [-INF, 3.0, 4.0]])
    assert kdtree.tree_build(log_probs, token_ids, 5).n_nodes.tolist() == [2]


# ---- on a GPU ----


def on_gpu(case: dict[str, np.ndarray]) -> dict:
    return {n: to_gpu(a) for n, a in case.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", inputs.DRAFT_KINDS)
@pytest.mark.parametrize("budget", [0, 1, 37, 64, 199, 256, 1024])
def test_on_a_gpu_the_kernel_agrees_with_the_reference(kind, budget):
    case = drafts(5, 7, 16, kind, seed=budget)
    tree = kdtree.tree_build(**on_gpu(case), budget=budget)
    assert all(a.is_cuda for a in tree.arrays().values())
    same_tree(tree, reference(**case, budget=budget))


@pytest.mark.gpu
@pytest.mark.parametrize("batch,depth,width", [(1, 1, 512), (37, 31, 3), (3, 10, 2), (0, 3, 2), (2, 0, 4), (2, 3, 0)])
def test_on_a_gpu_odd_shapes_agree_with_the_reference(batch, depth, width):
    if width:
        case = drafts(batch, depth, width, "bf16")
    else:
        case = drafts(batch, depth, 1, "smooth")
        case |= {n: case[n][..., :0].copy() for n in ("log_probs", "token_ids")}
    case["token_ids"] = case["token_ids"].astype(np.int64)
    same_tree(kdtree.tree_build(**on_gpu(case), budget=300), reference(**case, budget=300))


@pytest.mark.gpu
def test_on_a_gpu_hostile_rows_end_and_give_a_well_formed_tree():
    numbers = rng(8)
    log_probs = (numbers.standard_normal((64, 7, 8)) * 3).astype(np.float32)
    log_probs[numbers.random_sample(log_probs.shape) < 0.1] = NAN
    log_probs[numbers.random_sample(log_probs.shape) < 0.05] = INF
    token_ids = numbers.randint(-(2**31), 2**31, size=log_probs.shape)
    tree = kdtree.tree_build(to_gpu(log_probs), to_gpu(token_ids), 1024).numpy()
    for b, i in itertools.product(range(64), range(1, 1025)):
        expected = i < tree.n_nodes[b]
        assert (0 <= tree.parents[b, i] < i) == expected


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_is_used():
    import torch

    case = drafts(8, 7, 16, "smooth", seed=2)
    given_ = on_gpu(case)
    late = torch.full_like(given_["log_probs"], NAN)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(given_["log_probs"])
        tree = kdtree.tree_build(**(given_ | {"log_probs": late}), budget=64)
    side.synchronize()
    same_tree(tree, reference(**case, budget=64))


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_allocated_when_out_is_given():
    import torch

    case = drafts(4, 7, 8, "smooth", seed=4)
    given_ = on_gpu(case)
    out = kdtree.tree_build(**given_, budget=32)
    for array in out.arrays().values():
        array.view(torch.uint8).fill_(0x5A)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    tree = kdtree.tree_build(**given_, budget=32, out=out)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    assert tree.scores is out.scores
    same_tree(out, reference(**case, budget=32))


@pytest.mark.gpu
def test_on_a_gpu_validate_reads_the_rows_back():
    with pytest.raises(ValueError, match=r"row \(0, 1\) rises"):
        kdtree.tree_build(to_gpu(RISING), to_gpu(IDS), 3, validate=True)
    kdtree.tree_build(to_gpu(RISING), to_gpu(IDS), 3)


@pytest.mark.gpu
def test_on_a_gpu_host_arrays_are_staged():
    case = drafts(2, 3, 4, "ties")
    tree = kdtree.tree_build(**case, budget=40, backend="numba")
    assert isinstance(to_numpy(tree.scores), np.ndarray) and isinstance(tree.scores, np.ndarray)
    same_tree(tree, reference(**case, budget=40))


@pytest.mark.gpu
def test_on_a_gpu_arrays_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="token_ids: got an array on cpu, expected cuda:0 as log_probs"):
        kdtree.tree_build(to_gpu(LP), to_torch(IDS), 3)
