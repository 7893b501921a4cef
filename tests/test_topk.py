"""topk: candidates by (logit, token id), log-probabilities in the full distribution, broken rows marked NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases_for_tests import (
    FLOAT_DTYPES,
    DlpackOnly,
    bits,
    rng,
    rounded,
    same_candidates,
    to_gpu,
    to_torch,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtree
from kdtree import inputs
from kdtree.ref.topk import topk as reference

INF, NAN = math.inf, math.nan


def by_sorting(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """An independent top-k: Python's sort and math.fsum, a row at a time."""
    rows = logits.astype(np.float64).reshape(-1, logits.shape[-1])
    log_probs, token_ids = [], []
    for row in rows:
        order = sorted(range(len(row)), key=lambda v: (math.isnan(row[v]), -row[v] if row[v] == row[v] else 0, v))
        whole = not np.isnan(row).any() and INF not in row and bool((row > -INF).any())
        top = max(row) if whole else 0.0
        total = top + math.log(math.fsum(math.exp(x - top) for x in row)) if whole else NAN
        log_probs.append([row[v] - total for v in order[:k]])
        token_ids.append(order[:k])
    shape = (*logits.shape[:-1], k)
    return np.array(log_probs).reshape(shape), np.array(token_ids, dtype=np.int32).reshape(shape)


# ---- the reference ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", ["smooth", "ties", "hostile"])
@pytest.mark.parametrize("vocab,k", [(1, 1), (2, 1), (37, 8), (37, 37), (199, 31)])
def test_the_reference_agrees_with_a_plain_sort(dtype, kind, vocab, k):
    logits = inputs.logits(rng(vocab), (2, 3, vocab), dtype, kind)
    got, want = reference(logits, k), by_sorting(logits, k)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-12, atol=1e-12)
    assert got[1].dtype == np.int32


def test_equal_logits_stand_by_token_id():
    log_probs, ids = reference(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 5)
    assert ids.tolist() == [1, 2, 4, 0, 3]
    assert (np.diff(log_probs) <= 0).all()


def test_zero_and_minus_zero_tie():
    for backend in ("ref", "numba"):
        ids = kdtree.topk(np.array([[-0.0, 0.0, -1.0, -0.0, 0.0]], dtype=np.float32), 4, backend=backend)[1]
        assert ids.tolist() == [[0, 1, 3, 4]], backend


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_with_a_nan_or_an_infinity_has_no_distribution(bad):
    row = np.array([0.5, bad, -1.0, 2.0])
    log_probs, ids = reference(row, 4)
    assert np.isnan(log_probs).all()
    assert sorted(ids) == [0, 1, 2, 3]
    assert ids.tolist() == ([3, 0, 2, 1] if math.isnan(bad) else [1, 3, 0, 2])


def test_a_row_of_minus_infinities_has_no_distribution():
    log_probs, ids = reference(np.full(5, -INF), 3)
    assert np.isnan(log_probs).all()
    assert ids.tolist() == [0, 1, 2]


def test_impossible_tokens_come_last_with_minus_infinity():
    log_probs, ids = reference(np.array([-INF, 0.0, -INF, 0.0]), 4)
    assert ids.tolist() == [1, 3, 0, 2]
    np.testing.assert_allclose(log_probs[:2], math.log(0.5))
    assert (log_probs[2:] == -INF).all()


def test_a_nan_ranks_below_minus_infinity():
    assert reference(np.array([NAN, -INF, 0.0]), 3)[1].tolist() == [2, 1, 0]


def test_the_log_probs_are_those_of_the_whole_vocabulary():
    logits = rng().standard_normal(199)
    log_probs, _ = reference(logits, 199)
    assert math.fsum(np.exp(log_probs)) == pytest.approx(1.0, abs=1e-12)
    few, _ = reference(logits, 3)
    np.testing.assert_array_equal(few, log_probs[:3])


def test_a_single_token_is_certain():
    assert reference(np.array([[3.0], [-700.0]]), 1)[0].tolist() == [[0.0], [0.0]]


@pytest.mark.filterwarnings("ignore:overflow")
def test_log_probs_never_exceed_zero():
    logits = rounded([[80.0] + [-60.0] * 36, [3e38] + [-3e38] * 36], "float32")
    for backend in ("ref", "numba"):
        assert (kdtree.topk(logits, 2, backend=backend)[0] <= 0).all(), backend


@pytest.mark.parametrize("k", [0, -1, 6])
def test_the_reference_refuses_k_outside_the_vocabulary(k):
    with pytest.raises(ValueError, match=rf"k: got {k}, expected 1\.\.V with V = 5"):
        reference(np.zeros((2, 5)), k)


# ---- the kernel ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("kind", ["smooth", "ties", "hostile"])
def test_the_kernel_agrees_with_the_reference(dtype, kind):
    logits = inputs.logits(rng(7), (4 if kind == "hostile" else 2, 37), dtype, kind)
    same_candidates(kdtree.topk(logits, 9, backend="numba"), reference(logits, 9))


@pytest.mark.parametrize("vocab,k", [(1, 1), (2, 2), (37, 37), (199, 1), (199, 64)])
def test_the_kernel_agrees_at_odd_sizes(vocab, k):
    logits = inputs.logits(rng(vocab + k), (1, vocab), "bfloat16", "ties")
    same_candidates(kdtree.topk(logits, k, backend="numba"), reference(logits, k))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 60.0, -INF, INF, NAN, 1e-40]), min_size=1, max_size=9),
    st.integers(0, 8),
    st.sampled_from(FLOAT_DTYPES),
)
def test_the_kernel_agrees_on_any_mix_of_values(row, k, dtype):
    logits, k = rounded([row], dtype), min(k + 1, len(row))
    same_candidates(kdtree.topk(logits, k, backend="numba"), reference(logits, k))


@pytest.mark.parametrize("shape", [(5,), (2, 1, 5), (0, 5)])
@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_leading_axes_are_kept(shape, backend):
    logits = rng().standard_normal(shape).astype(np.float32)
    log_probs, ids = kdtree.topk(logits, 2, backend=backend)
    assert log_probs.shape == ids.shape == (*shape[:-1], 2)
    assert (log_probs.dtype, ids.dtype) == (np.float32, np.int32)
    same_candidates((log_probs, ids), reference(logits, 2))


# ---- the public function ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_torch_comes_back_as_torch(dtype, backend):
    import torch

    logits = inputs.logits(rng(1), (2, 11), dtype)
    log_probs, ids = kdtree.topk(to_torch(logits), 3, backend=backend)
    assert (log_probs.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert log_probs.device.type == "cpu"
    same_candidates((log_probs, ids), reference(logits, 3))


@pytest.mark.parametrize("backend", ["ref", "numba"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_out_is_filled_and_returned(backend, library):
    logits = inputs.logits(rng(2), (3, 11), "float32")
    out = (np.full((3, 4), np.nan, np.float32), np.full((3, 4), -7, np.int32))
    given = logits
    if library == "torch":
        given, out = to_torch(logits), to_torch(out)
    log_probs, ids = kdtree.topk(given, 4, out=out, backend=backend)
    assert log_probs is out[0] and ids is out[1]
    same_candidates(out, reference(logits, 4))


def test_an_array_with_dlpack_alone_is_read():
    import torch

    logits = inputs.logits(rng(3), (2, 7), "float32")
    for backend in ("auto", "numba"):
        result = kdtree.topk(DlpackOnly(logits), 2, backend=backend)
        assert isinstance(result[0], torch.Tensor)
        same_candidates(result, reference(logits, 2))


def test_the_input_is_left_alone():
    logits = inputs.logits(rng(4), (2, 11), "bfloat16", "hostile")
    before = logits.copy()
    for backend in ("ref", "numba"):
        kdtree.topk(logits, 3, backend=backend)
        np.testing.assert_array_equal(bits(logits), bits(before))


OK = np.zeros((2, 5), dtype=np.float32)
BAD_CALLS = {
    "no array": (lambda: kdtree.topk([[1.0, 2.0]], 1), TypeError, "logits", "list"),
    "float64": (lambda: kdtree.topk(OK.astype(np.float64), 1), TypeError, "logits", "float64"),
    "int32": (lambda: kdtree.topk(OK.astype(np.int32), 1), TypeError, "logits", "int32"),
    "scalar": (lambda: kdtree.topk(np.zeros((), np.float32), 1), ValueError, "logits", "()"),
    "no vocabulary": (lambda: kdtree.topk(OK[:, :0].copy(), 1), ValueError, "logits", "(2, 0)"),
    "strided": (lambda: kdtree.topk(OK.T, 1), ValueError, "logits", "strided"),
    "k 0": (lambda: kdtree.topk(OK, 0), ValueError, "k", "0"),
    "k above V": (lambda: kdtree.topk(OK, 6), ValueError, "k", "6"),
    "k above 512": (lambda: kdtree.topk(np.zeros(600, np.float32), 513), ValueError, "k", "513"),
    "k a float": (lambda: kdtree.topk(OK, 2.0), TypeError, "k", "2.0"),
    "k a bool": (lambda: kdtree.topk(OK, True), TypeError, "k", "True"),
    "out shape": (
        lambda: kdtree.topk(OK, 2, out=(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int32))),
        ValueError,
        "out.log_probs",
        "(2, 3)",
    ),
    "out dtype": (
        lambda: kdtree.topk(OK, 2, out=(np.zeros((2, 2), np.float32), np.zeros((2, 2), np.int64))),
        TypeError,
        "out.token_ids",
        "int64",
    ),
    "out strided": (
        lambda: kdtree.topk(OK, 2, out=(np.zeros((2, 2), np.float32).T, np.zeros((2, 2), np.int32))),
        ValueError,
        "out.log_probs",
        "strided",
    ),
    "backend": (lambda: kdtree.topk(OK, 2, backend="cuda"), ValueError, "backend", "'cuda'"),
    "stream": (lambda: kdtree.topk(OK, 2, stream="main"), TypeError, "stream", "str"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(case):
    call, error, argument, came = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{argument}: got "), text
    assert came in text and "expected" in text, text


# ---- on a GPU ----


def on_device(logits, k: int):
    """(log_probs f64, token ids) by torch on the GPU in float64; rows must be whole."""
    import torch

    exact = logits.double()
    values, order = torch.sort(exact, dim=-1, descending=True, stable=True)
    return values[..., :k] - torch.logsumexp(exact, -1, keepdim=True), order[..., :k].int()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("k", [1, 8, 64, 512])
def test_on_a_gpu_a_whole_vocabulary_agrees_with_torch(dtype, k):
    logits = to_gpu(inputs.logits(rng(k), (2, 7, 163_840), dtype, "ties" if k == 64 else "smooth"))
    result = kdtree.topk(logits, k)
    assert result[0].is_cuda and result[1].is_cuda
    same_candidates(result, on_device(logits, k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("vocab,k", [(1, 1), (37, 37), (199, 31), (5003, 300)])
def test_on_a_gpu_hostile_rows_agree_with_the_reference(dtype, vocab, k):
    for kind in ("ties", "hostile"):
        logits = inputs.logits(rng(vocab), (9, vocab), dtype, kind)
        same_candidates(kdtree.topk(to_gpu(logits), k), reference(logits, k))


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_is_used():
    import torch

    logits = to_gpu(inputs.logits(rng(5), (64, 163_840), "bfloat16"))
    expected = on_device(logits, 8)
    late = torch.zeros_like(logits)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # so that a launch on another stream would read the zeros
        late.copy_(logits)
        result = kdtree.topk(late, 8)
    side.synchronize()
    same_candidates(result, expected)


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_allocated_when_out_is_given():
    import torch

    logits = to_gpu(inputs.logits(rng(6), (4, 5003), "bfloat16"))
    out = kdtree.topk(logits, 8)
    out[0].fill_(float("nan"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    again = kdtree.topk(logits, 8, out=out)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    assert again[0] is out[0]
    assert np.isfinite(wide(out[0])).all()


@pytest.mark.gpu
def test_on_a_gpu_arrays_on_two_devices_are_refused():
    logits = to_gpu(OK)
    out = (to_torch(np.zeros((2, 2), np.float32)), to_torch(np.zeros((2, 2), np.int32)))
    with pytest.raises(ValueError, match="out.log_probs: got an array on cpu, expected cuda:0"):
        kdtree.topk(logits, 2, out=out)
