"""merge_states: two attention results over disjoint rows become one, empty parts included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases_for_tests import (
    FLOAT_DTYPES,
    DlpackOnly,
    rng,
    rounded,
    same_attention,
    to_gpu,
    to_torch,
    wide,
)

import kdtree
from kdtree.ref.verify_attn import merge_states as reference

INF, NAN = math.inf, math.nan
NAMES = ("out_a", "lse_a", "out_b", "lse_b")


def attend(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Softmax attention of one query over some rows, by definition."""
    if not len(logits):
        return np.zeros(values.shape[1]), -INF
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum(), float(logits.max() + np.log(weights.sum()))


def states(dtype: str, shape: tuple[int, ...] = (2, 3, 37), seed: int = 0) -> list[np.ndarray]:
    """out_a, lse_a, out_b, lse_b; among the first rows: both parts empty, each one empty with NaN in it."""
    numbers, found = rng(seed), []
    for _ in "ab":
        found.append(rounded(numbers.standard_normal(shape), dtype))
        found.append((numbers.standard_normal(shape[:-1]) * 4).astype(np.float32))
    if math.prod(shape[:-1]) >= 4:
        out_a, lse_a, out_b, lse_b = (
            x.reshape(-1, shape[-1]) if x.ndim == len(shape) else x.reshape(-1) for x in found
        )
        lse_a[:2], out_a[:2] = -INF, NAN
        lse_b[[0, 2]], out_b[[0, 2]] = -INF, NAN
    return found


# ---- the reference ----


@pytest.mark.parametrize("cut", [0, 1, 5, 11])
def test_merging_two_parts_is_attending_to_all_rows(cut):
    logits, values = rng(cut).standard_normal(11) * 5, rng(cut + 1).standard_normal((11, 3))
    a, b = attend(logits[:cut], values[:cut]), attend(logits[cut:], values[cut:])
    out, lse = reference(a[0][None], np.array([a[1]]), b[0][None], np.array([b[1]]))
    want = attend(logits, values)
    np.testing.assert_allclose(out[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(lse[0], want[1], rtol=1e-12)


def test_order_does_not_matter():
    a, la, b, lb = states("float32")
    for x, y in zip(reference(a, la, b, lb), reference(b, lb, a, la), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-14)


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_two_empty_parts_give_an_empty_one(backend):
    empty = np.full((1, 5), NAN, np.float32), np.full(1, -INF, np.float32)
    out, lse = kdtree.merge_states(*empty, *empty, backend=backend)
    assert out.tolist() == [[0.0] * 5] and lse.tolist() == [-INF]


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_an_empty_part_leaves_the_other_as_it_was(backend):
    part = rng().standard_normal((2, 5)).astype(np.float32), np.array([-3.0, 700.0], np.float32)
    empty = np.full((2, 5), NAN, np.float32), np.full(2, -INF, np.float32)
    for arguments in ((*part, *empty), (*empty, *part)):
        out, lse = kdtree.merge_states(*arguments, backend=backend)
        np.testing.assert_array_equal(out, part[0])
        np.testing.assert_array_equal(lse, part[1])


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_the_lse_is_natural(backend):
    one = np.ones((1, 2), np.float32), np.zeros(1, np.float32)
    assert kdtree.merge_states(*one, *one, backend=backend)[1][0] == pytest.approx(math.log(2.0))


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_lses_far_apart_do_not_overflow(backend):
    a, b = np.ones((1, 3), np.float32), np.full((1, 3), 2.0, np.float32)
    lses = np.array([-3000.0], np.float32), np.array([3000.0], np.float32)
    for first, second in ((lses[0], lses[1]), (lses[1], lses[0])):
        out, lse = kdtree.merge_states(a, first, b, second, backend=backend)
        assert lse[0] == 3000.0
        assert (out == (b if second[0] > 0 else a)).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_a_nan_part_that_is_not_empty_shows(backend):
    part = np.ones((1, 2), np.float32), np.zeros(1, np.float32)
    for lse in (NAN, 0.0):
        broken = np.full((1, 2), NAN, np.float32), np.full(1, lse, np.float32)
        for arguments in ((*part, *broken), (*broken, *part)):
            assert np.isnan(kdtree.merge_states(*arguments, backend=backend)[0]).all()


# ---- the kernel ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 37), (1, 1), (5, 2)])
def test_the_kernel_agrees_with_the_reference(dtype, shape):
    arguments = states(dtype, shape, seed=3)
    same_attention(kdtree.merge_states(*arguments, backend="numba"), reference(*arguments), dtype)


def test_no_rows_are_no_launch():
    out, lse = kdtree.merge_states(*states("float32", (0, 4)), backend="numba")
    assert out.shape == (0, 4) and lse.shape == (0,)


# ---- the public function ----


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_torch_comes_back_as_torch(dtype, backend):
    import torch

    arguments = states(dtype)
    out, lse = kdtree.merge_states(*to_torch(arguments), backend=backend)
    assert (out.dtype, lse.dtype) == (getattr(torch, dtype), torch.float32)
    same_attention((out, lse), reference(*arguments), dtype)


@pytest.mark.parametrize("backend", ["ref", "numba"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("target", ["own", "a", "b"])
def test_out_is_filled_and_returned_and_may_be_an_input(backend, library, target):
    arguments = states("float16")
    want = reference(*arguments)
    if library == "torch":
        arguments = to_torch(arguments)
    own = states("float16", seed=9)[:2]
    out = {"own": tuple(to_torch(own) if library == "torch" else own), "a": arguments[:2], "b": arguments[2:]}[target]
    got = kdtree.merge_states(*arguments, out=tuple(out), backend=backend)
    assert got[0] is out[0] and got[1] is out[1]
    same_attention(out, want, "float16")


def test_an_array_with_dlpack_alone_is_read():
    arguments = states("float32")
    same_attention(kdtree.merge_states(*map(DlpackOnly, arguments)), reference(*arguments), "float32")


S = dict(zip(NAMES, states("float32"), strict=True))


def call(**changes):
    return lambda: kdtree.merge_states(**(S | changes))


BAD_CALLS = {
    "no array": (call(out_a=None), TypeError, "out_a", "NoneType"),
    "float64": (call(out_a=S["out_a"].astype(np.float64)), TypeError, "out_a", "float64"),
    "one axis": (call(out_a=np.zeros(3, np.float32)), ValueError, "out_a", "(3,)"),
    "strided": (call(out_a=np.zeros((2, 3, 74), np.float32)[..., ::2]), ValueError, "out_a", "strided"),
    "another dtype": (call(out_b=S["out_b"].astype(np.float16)), TypeError, "out_b", "float16"),
    "another shape": (call(out_b=S["out_b"][:1]), ValueError, "out_b", "(1, 3, 37)"),
    "lse dtype": (call(lse_a=S["lse_a"].astype(np.float16)), TypeError, "lse_a", "float16"),
    "lse shape": (call(lse_b=S["lse_b"][..., None]), ValueError, "lse_b", "(2, 3, 1)"),
    "out shape": (call(out=(S["out_a"][:1], S["lse_a"])), ValueError, "out.out", "(1, 3, 37)"),
    "out dtype": (call(out=(S["out_a"].astype(np.float16), S["lse_a"])), TypeError, "out.out", "float16"),
    "backend": (call(backend=None), ValueError, "backend", "None"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(bad):
    run, error, argument, came = BAD_CALLS[bad]
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(f"{argument}: got "), text
    assert came in text and "expected" in text, text


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("shape", [(4, 65, 64, 512), (37, 1), (2, 9, 8, 199), (0, 512)])
def test_on_a_gpu_the_kernel_agrees_with_float64(dtype, shape):
    import torch

    arguments = states(dtype, shape)
    device = to_gpu(arguments)
    got = kdtree.merge_states(*device)
    a, la, b, lb = (x.double() for x in device)
    lse = torch.logaddexp(la, lb)
    weights = [torch.where(part == -INF, 0.0, torch.exp(part - lse))[..., None] for part in (la, lb)]
    out = sum(w * torch.where(w == 0, 0.0, x) for w, x in zip(weights, (a, b), strict=True))
    same_attention(got, (out, lse), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["a", "b"])
def test_on_a_gpu_an_input_may_be_the_output_and_nothing_is_allocated(target):
    import torch

    arguments = states("bfloat16", (4, 9, 8, 512))
    device = to_gpu(arguments)
    kdtree.merge_states(*device)
    torch.cuda.synchronize()
    out = tuple(device[:2] if target == "a" else device[2:])
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    got = kdtree.merge_states(*device, out=out)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    assert got[0] is out[0]
    same_attention(out, reference(*arguments), "bfloat16")


@pytest.mark.gpu
def test_on_a_gpu_the_current_stream_is_used():
    import torch

    arguments = states("float32", (64, 512))
    device = to_gpu(arguments)
    late = torch.zeros_like(device[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(device[0])
        result = kdtree.merge_states(late, *device[1:])
    side.synchronize()
    same_attention(result, reference(*arguments), "float32")


@pytest.mark.gpu
def test_on_a_gpu_prefix_and_tree_parts_of_other_kernels_merge():
    arguments = states("bfloat16", (3, 17, 8, 512), seed=4)
    arguments[1][:] = -INF  # an empty prefix everywhere
    arguments[0][:] = NAN
    out, lse = kdtree.merge_states(*to_gpu(arguments))
    same_attention((out, lse), reference(*arguments), "bfloat16")
    assert np.isfinite(wide(out)).all()
