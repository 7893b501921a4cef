"""Arrays of any library come in and the same kind goes out; what is none is named; backends are what was asked."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest
from cases_for_tests import DlpackOnly, bits, rng, to_gpu, to_torch

import kdtree
from kdtree import arrays, checks
from kdtree.arrays import View
from kdtree.call import Call
from kdtree.native import BackendUnavailable
from kdtree.tree import DraftTree, from_parents, random_tree


class Fake:
    """Neither NumPy, torch nor CuPy, and without an interface."""

    shape, dtype = (2, 5), np.dtype("float32")


class Interface:
    """Device memory by `__cuda_array_interface__`."""

    def __init__(self, shape, typestr="<f4", strides=None):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "strides": strides,
            "version": 3,
        }


# ---- what a view says ----


@pytest.mark.parametrize("dtype", [*arrays.ITEM_SIZE])
def test_a_numpy_array_is_seen_as_it_is(dtype):
    array = np.zeros((3, 37), arrays.numpy_dtype(dtype))
    v = arrays.view(array, "x")
    assert (v.kind, v.shape, v.dtype, v.device, v.contiguous) == ("numpy", (3, 37), dtype, "cpu", True)
    assert v.ptr == array.ctypes.data and v.nbytes == array.nbytes and not v.on_gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "uint32", "int64", "bool"])
def test_a_torch_tensor_is_seen_as_it_is(dtype):
    import torch

    tensor = torch.zeros((3, 37), dtype=getattr(torch, dtype))
    v = arrays.view(tensor, "x")
    assert (v.kind, v.shape, v.dtype, v.device, v.contiguous) == ("torch", (3, 37), dtype, "cpu", True)
    assert v.ptr == tensor.data_ptr() and v.nbytes == tensor.nbytes


def test_strided_arrays_are_seen_as_such():
    import torch

    for array in (np.zeros((3, 4)), torch.zeros(3, 4)):
        assert arrays.view(array, "x").contiguous
        assert not arrays.view(array.T, "x").contiguous
        assert not arrays.view(array[:, :2], "x").contiguous
        assert arrays.view(array[1:], "x").contiguous


def test_bytes_in_foreign_order_are_no_known_dtype():
    swapped = np.zeros((2, 5), np.dtype(np.float32).newbyteorder())
    with pytest.raises(TypeError, match="logits: got dtype .*expected bfloat16 or float16 or float32"):
        kdtree.topk(swapped, 2)


@pytest.mark.parametrize(
    "shape,strides,contiguous", [((3, 4), None, True), ((3, 4), (16, 4), True), ((3, 4), (4, 12), False)]
)
def test_a_cuda_array_interface_is_device_memory(shape, strides, contiguous, monkeypatch):
    monkeypatch.setattr(arrays, "_current_device", lambda: 1)
    v = arrays.view(Interface(shape, strides=strides), "x")
    assert (v.kind, v.shape, v.dtype, v.device) == ("numba", shape, "float32", "cuda:1")
    assert v.on_gpu and v.ptr == 4096 and v.contiguous == contiguous


def test_cupy_is_known_by_its_module_without_being_imported(monkeypatch):
    device = types.SimpleNamespace(id=2)
    made = type("ndarray", (), {"__module__": "cupy._core.core"})()
    vars(made).update(
        shape=(3,),
        dtype=np.dtype("int32"),
        device=device,
        data=types.SimpleNamespace(ptr=64),
        flags=types.SimpleNamespace(c_contiguous=True),
        get=lambda: np.arange(3, dtype=np.int32),
    )
    v = arrays.view(made, "x")
    assert (v.kind, v.dtype, v.device, v.ptr) == ("cupy", "int32", "cuda:2", 64)
    np.testing.assert_array_equal(arrays.to_numpy(made), [0, 1, 2])
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=77)))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert arrays.current_stream(v) == 77


def test_dlpack_alone_becomes_torch():
    import torch

    values = rng().standard_normal((2, 3)).astype(np.float32)
    v = arrays.view(DlpackOnly(values), "x")
    assert isinstance(v.obj, torch.Tensor) and v.ptr == values.ctypes.data


def test_dlpack_without_torch_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        TypeError, match="logits: got DlpackOnly, whose only interface is DLPack; reading it needs torch"
    ):
        arrays.view(DlpackOnly(np.zeros(3)), "logits")


@pytest.mark.parametrize("thing", [Fake(), [1.0], (1.0,), 3, "text", object(), {"a": 1}, np.float32(1.0)])
def test_what_is_no_array_is_named(thing):
    with pytest.raises(TypeError, match=rf"^here: got {type(thing).__name__}, expected a NumPy, torch or CuPy array"):
        arrays.view(thing, "here")


def test_a_torch_tensor_that_is_nowhere_is_refused():
    import torch

    with pytest.raises(TypeError, match="logits: got a torch tensor on meta, expected cpu or cuda"):
        kdtree.topk(torch.zeros(2, 5, device="meta"), 2)


# ---- there and back ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "uint32", "int64"])
def test_to_torch_and_back_keeps_every_bit(dtype):
    values = rng().randint(0, 255, size=(3, 8 * arrays.ITEM_SIZE[dtype])).astype(np.uint8)
    values = values.view(arrays.numpy_dtype(dtype))
    back = arrays.to_numpy(arrays.from_numpy_to_torch(values.copy()))
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(bits(back), bits(values))


def test_host_memory_is_shared_and_not_copied():
    import torch

    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        host = arrays.to_numpy(tensor)
        host[1] = 7
        assert tensor[1] == 7
    array = np.zeros(3)
    assert arrays.to_numpy(array) is array


def test_a_tensor_that_needs_a_gradient_is_read():
    import torch

    logits = torch.tensor([[0.0, 1.0]], requires_grad=True)
    for backend in ("ref", "numba"):
        assert kdtree.topk(logits, 1, backend=backend)[1].tolist() == [[1]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "uint32", "float64", "int64"])
def test_new_arrays_are_of_the_kind_of_the_lead(dtype):
    import torch

    like = arrays.view(np.zeros(1), "x")
    made = arrays.empty((2, 3), dtype, like)
    assert isinstance(made, np.ndarray) and made.shape == (2, 3) and made.dtype == arrays.numpy_dtype(dtype)
    made = arrays.empty((2, 3), dtype, arrays.view(torch.zeros(1), "x"))
    assert isinstance(made, torch.Tensor) and made.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_results_are_cast_to_the_target(dtype):
    values = np.array([[1.5, -2.0], [0.0, 3.0]])
    target = np.zeros((2, 2), arrays.numpy_dtype(dtype))
    tensor = to_torch(target)
    for array in (target, tensor):
        arrays.copy_into(array, values, "x")
        np.testing.assert_array_equal(arrays.to_numpy(array), values.astype(target.dtype))


def test_bfloat16_is_that_of_ml_dtypes():
    assert arrays.numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert arrays.numpy_dtype("float16") == np.float16


# ---- streams ----


@pytest.mark.parametrize(
    "stream,handle",
    [
        (None, 0),
        (0, 0),
        (12345, 12345),
        (types.SimpleNamespace(cuda_stream=7), 7),
        (types.SimpleNamespace(ptr=8), 8),
        (types.SimpleNamespace(__cuda_stream__=lambda: (0, 9)), 9),
        (types.SimpleNamespace(handle=types.SimpleNamespace(value=10)), 10),
        (types.SimpleNamespace(handle=types.SimpleNamespace(value=None)), 0),
        (types.SimpleNamespace(handle=11), 11),
    ],
)
def test_a_stream_may_come_from_any_library(stream, handle):
    assert arrays.stream_handle(stream, arrays.view(np.zeros(1), "x")) == handle


@pytest.mark.parametrize("stream", ["main", 1.5, object()])
def test_what_is_no_stream_is_named(stream):
    with pytest.raises(TypeError, match=f"stream: got {type(stream).__name__}, expected None, an int handle"):
        arrays.stream_handle(stream, arrays.view(np.zeros(1), "x"))


# ---- checks ----


def seen(device: str) -> View:
    return View(None, "torch", (3,), "float32", device, True, 0)


def test_arrays_on_several_devices_are_refused_by_name():
    checks.same_device({"q": seen("cuda:1"), "kv": seen("cuda:1")})
    for other in ("cpu", "cuda:0"):
        with pytest.raises(ValueError, match=f"kv: got an array on {other}, expected cuda:1 as q"):
            checks.same_device({"q": seen("cuda:1"), "kv": seen(other)})


def test_numpy_and_torch_on_the_host_may_be_mixed_and_the_first_leads():
    import torch

    tree = random_tree(rng(), 1, 3)
    predictions = np.zeros((1, 3), np.int32)
    assert isinstance(kdtree.tree_accept(tree, to_torch(predictions)).path, np.ndarray)
    assert isinstance(kdtree.tree_accept(to_torch(tree), predictions).path, torch.Tensor)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_numpy_integers_are_integers(value):
    found = checks.integer(value, "k", 1, 5)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.float32(3), np.array([3])])
def test_other_things_are_no_integers(value):
    with pytest.raises(TypeError, match="k: got .* expected an int"):
        checks.integer(value, "k", 1, 5)


@pytest.mark.parametrize("value", [0, 6, -(2**63), 2**70])
def test_integers_out_of_range_are_named(value):
    with pytest.raises(ValueError, match=rf"k: got {value}, expected 1\.\.5"):
        checks.integer(value, "k", 1, 5)


# ---- every public function alike ----


def calls() -> dict:
    """Public function -> (function, arguments of a small valid call)."""
    tree = from_parents(np.zeros((1, 2)), np.array([[-1, 0]]), np.array([2]))
    kv = rng().standard_normal((1, 4, 3)).astype(np.float32)
    lengths = np.array([1], np.int32)
    out, lse = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
    accepted = kdtree.Accepted(np.array([[0, 1]], np.int32), *(np.array([1], np.int32) for _ in range(3)))
    q = np.zeros((1, 2, 1, 3), np.float32)
    return {
        "topk": (kdtree.topk, {"logits": np.zeros((1, 3), np.float32), "k": 2}),
        "tree_build": (
            kdtree.tree_build,
            {"log_probs": np.full((1, 1, 2), -1, np.float32), "token_ids": np.zeros((1, 1, 2), np.int32), "budget": 2},
        ),
        "verify_attn": (
            kdtree.verify_attn,
            {"q": q, "kv": kv, "tree": tree, "prefix_lens": lengths, "scale": 0.1, "kv_lora_rank": 2},
        ),
        "merge_states": (kdtree.merge_states, {"out_a": out, "lse_a": lse, "out_b": out.copy(), "lse_b": lse.copy()}),
        "tree_accept": (kdtree.tree_accept, {"tree": tree, "predictions": np.zeros((1, 2), np.int32)}),
        "kv_compact": (kdtree.kv_compact, {"kv": kv, "tree": tree, "accepted": accepted, "prefix_lens": lengths}),
    }


OPS = list(calls())
REQUIRED = [
    (op, name) for op, (_, arguments) in calls().items() for name in arguments if name not in ("kv_lora_rank", "scale")
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["auto", "ref", "numba"])
def test_the_small_call_works(op, backend):
    function, arguments = calls()[op]
    assert function(**arguments, backend=backend) is not None


@pytest.mark.parametrize("op", OPS)
def test_the_native_backend_is_refused_and_not_replaced(op):
    function, arguments = calls()[op]
    with pytest.raises(BackendUnavailable, match="backend: got 'native', but .* use backend='numba'"):
        function(**arguments, backend="native")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["gpu", "", None, 1, "REF"])
def test_an_unknown_backend_is_named_with_those_known(op, backend):
    function, arguments = calls()[op]
    with pytest.raises(ValueError, match=r"backend: got .*expected one of 'auto', 'ref', 'numba', 'native'"):
        function(**arguments, backend=backend)


@pytest.mark.parametrize("op,name", REQUIRED)
@pytest.mark.parametrize("thing", [None, Fake()])
def test_an_argument_that_is_none_or_no_array_is_named(op, name, thing):
    function, arguments = calls()[op]
    with pytest.raises(TypeError) as caught:
        function(**(arguments | {name: thing}))
    text = str(caught.value)
    assert text.startswith(f"{name}: got "), text
    assert type(thing).__name__.removesuffix("Type") in text and "expected" in text, text


@pytest.mark.parametrize("scale", ["0.1", None, [0.1]])
def test_a_scale_that_is_no_number_is_named(scale):
    function, arguments = calls()["verify_attn"]
    with pytest.raises(TypeError, match="scale: got .*expected a finite number"):
        function(**(arguments | {"scale": scale}))


def test_a_scale_may_be_any_real_number():
    function, arguments = calls()["verify_attn"]
    for scale in (1, np.float32(0.5), np.float64(0.5), np.int32(2)):
        function(**(arguments | {"scale": scale}))


@pytest.mark.parametrize("op", ["topk", "verify_attn", "merge_states"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_out_of_another_length_is_named(op, count):
    function, arguments = calls()[op]
    whole = function(**arguments)
    with pytest.raises(ValueError, match=f"out: got {count} arrays, expected 2"):
        function(**arguments, out=(whole * 2)[:count])


@pytest.mark.parametrize("op", ["topk", "tree_build", "verify_attn", "merge_states", "tree_accept"])
def test_an_out_of_another_type_is_named(op):
    function, arguments = calls()[op]
    with pytest.raises(TypeError, match="out: got int, expected"):
        function(**arguments, out=5)


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_an_out_that_cannot_be_written_is_named_before_the_launch(backend):
    out = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.int32)
    out[1].flags.writeable = False
    with pytest.raises(ValueError, match="out.token_ids: got a read-only array, expected a writable one"):
        kdtree.topk(np.zeros((1, 3), np.float32), 2, out=out, backend=backend)


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_a_tree_of_out_is_told_its_depth_and_returned(backend):
    log_probs, tokens = np.full((1, 3, 1), -1, np.float32), np.array([[[1], [2], [3]]], np.int32)
    out = DraftTree.empty(1, 4, 0)
    tree = kdtree.tree_build(log_probs, tokens, 3, out=out, backend=backend)
    assert tree is out
    assert out.max_depth == 3
    assert kdtree.tree_accept(out, np.array([[1, 2, 3, 9]], np.int32)).n_accepted.tolist() == [3]


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_predictions_beyond_int32_match_no_token(backend):
    tree = from_parents(np.array([[1, 5]]), np.array([[-1, 0]]), np.array([2]))
    result = kdtree.tree_accept(tree, np.array([[2**32 + 5, 0]], np.int64), backend=backend)
    assert result.n_accepted.tolist() == [0]


def test_auto_is_the_reference_on_the_host(monkeypatch):
    call = Call({"x": np.zeros(3)}, backend="auto", stream=None)
    assert call.backend == "ref"
    assert Call({"x": np.zeros(3)}, backend="numba", stream=None).backend == "numba"


def test_auto_is_the_kernels_on_a_device(monkeypatch):
    monkeypatch.setattr(arrays, "_current_device", lambda: 0)
    assert Call({"x": Interface((3,))}, backend="auto", stream=5).backend == "numba"


def test_a_view_of_an_operand_is_flat_and_shared(monkeypatch):
    from kdtree._cuda import SIMULATED

    if not SIMULATED:
        pytest.skip("host arrays are staged on the GPU")
    array = np.zeros((2, 3), ml_dtypes.bfloat16)
    operand = Call({"x": array}, backend="numba", stream=None).operand(array, writes=True)
    assert (operand.word, operand.handle.dtype, operand.handle.shape) == ("*u16", np.uint16, (6,))
    operand.handle[4] = 0x3F80
    assert array[1, 1] == 1.0


@pytest.mark.gpu
def test_on_a_gpu_results_are_on_the_device_of_the_inputs():
    for op, (function, arguments) in calls().items():
        moved = {
            n: to_gpu(v) if isinstance(v, np.ndarray | DraftTree | kdtree.Accepted) else v for n, v in arguments.items()
        }
        result = function(**moved)
        for array in vars(result).values() if hasattr(result, "__dataclass_fields__") else [result]:
            for one in array if isinstance(array, tuple) else [array]:
                assert not hasattr(one, "is_cuda") or one.is_cuda, op


@pytest.mark.gpu
def test_on_a_gpu_numba_device_arrays_come_back_as_such():
    from kdtree._cuda import cuda

    logits = rng().standard_normal((3, 37)).astype(np.float32)
    log_probs, ids = kdtree.topk(cuda.to_device(logits), 4)
    want = kdtree.topk(logits, 4)
    np.testing.assert_array_equal(ids.copy_to_host(), want[1])
    np.testing.assert_allclose(log_probs.copy_to_host(), want[0], rtol=1e-5)


# ---- what values alone show ----


def test_outputs_that_share_memory_are_refused():
    buffer = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        kdtree.topk(np.ones((4, 5), np.float32), 2, out=(buffer, buffer.view(np.int32)))


def test_masked_arrays_are_refused_since_the_mask_would_be_lost():
    with pytest.raises(TypeError, match="logits: got MaskedArray"):
        kdtree.topk(np.ma.masked_array(np.ones((2, 5), np.float32), mask=True), 2)


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_a_read_only_input_is_read(backend):
    logits = np.linspace(0, 1, 10, dtype=np.float32).reshape(2, 5)
    logits.flags.writeable = False
    assert kdtree.topk(logits, 2, backend=backend)[1].tolist() == [[4, 3], [4, 3]]


@pytest.mark.parametrize("backend", ["ref", "numba"])
@pytest.mark.parametrize("size", [1e10, 1e17, 3e38])
def test_equal_logits_share_the_probability_however_large_they_are(backend, size):
    log_probs, _ = kdtree.topk(np.full((1, 4), size, np.float32), 4, backend=backend)
    np.testing.assert_allclose(log_probs, -np.log(4), rtol=1e-6)


@pytest.mark.parametrize("backend", ["ref", "numba"])
def test_states_of_equal_weight_are_averaged_however_large_their_lse(backend):
    ones, lse = np.ones((3, 8), np.float32), np.full(3, 3e38, np.float32)
    out, _ = kdtree.merge_states(ones, lse, 3 * ones, lse, backend=backend)
    np.testing.assert_allclose(out, 2.0)


def test_token_ids_and_prefix_lengths_out_of_range_are_named():
    log_probs, tokens = np.full((1, 2, 2), -1, np.float32), np.zeros((1, 2, 2), np.int64)
    with pytest.raises(ValueError, match="token_ids: got values 0..2147483648"):
        kdtree.tree_build(log_probs, np.where(np.arange(2), 2**31, tokens), 2)
    with pytest.raises(ValueError, match="prefix_lens: got values"):
        kdtree.tree_build(log_probs, tokens, 2, prefix_lens=np.array([2**62]))


def test_positions_go_on_beyond_int32():
    log_probs, tokens = np.full((1, 2, 2), -1, np.float32), np.zeros((1, 2, 2), np.int32)
    tree = kdtree.tree_build(log_probs, tokens, 1, prefix_lens=np.array([2**31 - 1], np.int32))
    assert tree.positions.tolist() == [[2**31 - 1, 2**31]]


def test_simulated_launches_of_several_threads_wait_for_each_other():
    from concurrent.futures import ThreadPoolExecutor

    logits = np.random.RandomState(0).standard_normal((2, 37)).astype(np.float32)
    want = kdtree.topk(logits, 3)[1].tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kdtree.topk(logits, 3, backend="numba")[1].tolist(), range(4)))
    assert found == [want] * 4
