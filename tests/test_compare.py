"""The judge: what `compare` and the guard bands let pass, and what they do not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtree.measure import invoke, twin
from kdtree.measure.compare import TOLERANCE, compare
from kdtree.measure.guard import BAND, GuardedOutputs
from kdtree.ref.topk import topk as ref_topk
from kdtree.ref.verify_attn import verify_attn as ref_verify_attn

INF, NAN = np.inf, np.nan


def out(*values: float) -> dict[str, np.ndarray]:
    return {"out": np.array(values, dtype=np.float64)}


def test_equal_outputs_pass_with_zero_errors():
    result = compare(out(1.0, -2.0, 0.0), out(1.0, -2.0, 0.0), "float32")
    assert (result.ok, result.rel_l2, result.max_abs) == (True, 0.0, 0.0)


@pytest.mark.parametrize(("dtype", "limit"), TOLERANCE.items())
def test_the_tolerance_of_each_dtype_is_a_limit(dtype, limit):
    want = np.ones(100)
    assert compare({"out": want * (1 + 0.9 * limit)}, {"out": want}, dtype).ok
    assert not compare({"out": want * (1 + 1.1 * limit)}, {"out": want}, dtype).ok


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_never_passes_for_one_that_is(bad):
    assert not compare(out(1.0, bad), out(1.0, 2.0), "bfloat16").ok
    assert not compare(out(1.0, 2.0), out(1.0, bad), "bfloat16").ok
    assert compare(out(1.0, bad), out(1.0, bad), "bfloat16").ok


def test_infinities_of_another_sign_differ():
    assert not compare({"lse": np.array([INF])}, {"lse": np.array([-INF])}, None).ok


def test_integers_are_compared_exactly_and_the_first_difference_is_named():
    result = compare({"path": np.array([[0, 1], [0, 3]])}, {"path": np.array([[0, 1], [0, 2]])}, None)
    assert result.reason == "path: 1 of 4 differ, first at (1, 1): 3, expected 2"


def test_scores_are_compared_bit_for_bit():
    want = np.array([-1.0])
    assert not compare({"scores": np.nextafter(want, 0)}, {"scores": want}, None).ok


def test_another_shape_fails():
    assert "shape" in compare(out(1.0), out(1.0, 2.0), "float32").reason


def test_moved_rows_are_compared_as_bits_but_any_nan_is_nan():
    want = np.array([1.0, NAN], dtype=ml_dtypes.bfloat16)
    got = want.copy()
    assert compare({"kv": got}, {"kv": want}, None).ok
    got[0] = 1.0078125
    assert not compare({"kv": got}, {"kv": want}, None).ok


def test_torch_and_numpy_give_the_same_judgement():
    torch = pytest.importorskip("torch")
    rng = np.random.RandomState(0)
    want = rng.standard_normal((5, 7))
    got = want + 1e-4 * rng.standard_normal((5, 7))
    a = compare({"out": got}, {"out": want}, "bfloat16")
    b = compare({"out": torch.from_numpy(got)}, {"out": torch.from_numpy(want)}, "bfloat16")
    assert a.rel_l2 == pytest.approx(b.rel_l2)
    assert a.max_rel == pytest.approx(b.max_rel)


def test_guarded_outputs_begin_poisoned():
    guarded = GuardedOutputs({"a": ("float32", (3,)), "b": ("int32", (2, 2)), "c": ("bfloat16", (4,))}, "cpu")
    assert np.isnan(guarded.arrays["a"]).all()
    assert (guarded.arrays["b"] == -1).all()
    assert np.isnan(guarded.arrays["c"].astype(np.float32)).all()
    assert guarded.stray_writes() is None


@pytest.mark.parametrize(("place", "side"), [(BAND - 1, "in front of"), (BAND + 12, "behind")])
def test_a_write_beside_an_output_is_seen(place, side):
    guarded = GuardedOutputs({"a": ("float32", (3,))}, "cpu")
    guarded._buffers["a"][place] = 0
    assert guarded.stray_writes() == f"1 bytes written {side} a: outside the array"


def test_an_output_of_no_elements_is_guarded_too():
    assert GuardedOutputs({"a": ("float64", (2, 0))}, "cpu").stray_writes() is None


def attention_case(page_size: int) -> tuple[dict, dict]:
    from kdtree import inputs

    arguments = inputs.attention(
        np.random.RandomState(1),
        batch=3,
        heads=2,
        n_slots=37,
        prefix_lens=[0, 9, 70],
        kv_lora_rank=32,
        rope=8,
        page_size=page_size,
        ragged=True,
    )
    return arguments, {"kv_lora_rank": 32, "scale": 0.16}


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("part", ["all", "tree"])
def test_the_attention_twin_is_the_reference(page_size, part):
    torch = pytest.importorskip("torch")
    from kdtree.arrays import from_numpy_to_torch
    from kdtree.tree import DraftTree

    arguments, params = attention_case(page_size)
    table = arguments["page_table"]
    want = ref_verify_attn(
        arguments["q"],
        arguments["kv"],
        arguments["tree"],
        prefix_lens=arguments["prefix_lens"],
        scale=0.16,
        page_table=table,
        part=part,
        kv_lora_rank=32,
    )

    def move(value):
        if isinstance(value, DraftTree):
            return value.map(move)
        return None if value is None else from_numpy_to_torch(np.ascontiguousarray(value))

    got = twin.verify_attn({n: move(v) for n, v in arguments.items()}, params | {"part": part})
    np.testing.assert_allclose(got["out"], want[0], atol=1e-12)
    np.testing.assert_allclose(got["lse"], want[1], atol=1e-12)
    assert isinstance(got["out"], torch.Tensor)


def test_the_topk_twin_is_the_reference():
    torch = pytest.importorskip("torch")
    logits = np.round(np.random.RandomState(2).standard_normal((4, 199)) * 2).astype(np.float32)
    want = ref_topk(logits, 37)
    got = twin.topk(torch.from_numpy(logits), 37)
    np.testing.assert_array_equal(got["token_ids"], want[1])
    np.testing.assert_allclose(got["log_probs"], want[0], atol=1e-12)


def test_output_shapes_name_every_output():
    from kdtree.measure import cases

    for op in cases.FAMILIES:
        case = next(cases.bundle_cases(op, large=False))
        bundle = __import__("kdtree.fixtures", fromlist=["get"]).get(case.name)
        shapes = invoke.output_shapes(op, cases.arguments_of(bundle), bundle.params)
        assert {n: s for n, (_, s) in shapes.items()} == {n: a.shape for n, a in bundle.outputs.items()}
