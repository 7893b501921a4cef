""".kdtr bundles: what goes in comes out, the same case gives the same bytes, other files are refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from cases_for_tests import bits, rng, same_tree

from kdtree.arrays import numpy_dtype
from kdtree.bundle import Bundle, BundleError, load, save, to_bytes
from kdtree.tree import FIELDS, random_tree

DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "uint32")


def bundle(**changes) -> Bundle:
    numbers = rng(0)
    arrays = {f"a_{name}": (numbers.standard_normal((3, 5)) * 9).astype(numpy_dtype(name)) for name in DTYPES[:4]}
    arrays |= {f"a_{name}": numbers.randint(0, 200, size=(2, 3, 1)).astype(name) for name in DTYPES[4:]}
    fields = {
        "op": "topk",
        "name": "mine",
        "params": {"K": 3, "scale": 0.25, "L": [1, 2], "none": None, "text": "é"},
        "seed": 7,
        "inputs": arrays,
        "outputs": {"log_probs": np.array([-np.inf, np.nan, -0.0, 0.0], np.float32)},
        "notes": {"why": "a tie"},
    }
    return Bundle(**(fields | changes))


def with_header(data: bytes, change) -> bytes:
    """The file with `change(header)` applied to its JSON header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_what_goes_in_comes_out(tmp_path):
    path = tmp_path / "mine.kdtr"
    digest = save(bundle(), path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found, put = load(path), bundle()
    for name in ("op", "name", "params", "seed", "generator", "notes"):
        assert getattr(found, name) == getattr(put, name), name
    for side in ("inputs", "outputs"):
        assert getattr(found, side).keys() == getattr(put, side).keys()
        for name, array in getattr(put, side).items():
            back = getattr(found, side)[name]
            assert (back.dtype, back.shape) == (array.dtype, array.shape), name
            np.testing.assert_array_equal(bits(back), bits(array), err_msg=name)


def test_what_is_loaded_may_be_changed(tmp_path):
    save(bundle(), tmp_path / "b.kdtr")
    load(tmp_path / "b.kdtr").inputs["a_float32"][:] = 0.0


def test_equal_bundles_give_equal_bytes_whatever_the_order():
    first = bundle()
    turned = bundle(
        inputs=dict(reversed(first.inputs.items())), params=dict(reversed(first.params.items())), notes={"why": "a tie"}
    )
    assert to_bytes(first) == to_bytes(turned) == to_bytes(bundle())


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"name": "other"}, {"params": {"K": 4}}, {"outputs": {}}, {"notes": {}}, {"op": "topK"}]
)
def test_different_bundles_give_different_bytes(change):
    assert to_bytes(bundle(**change)) != to_bytes(bundle())


def test_the_file_is_plain_safetensors(tmp_path):
    import safetensors

    save(bundle(), tmp_path / "b.kdtr")
    with safetensors.safe_open(tmp_path / "b.kdtr", "np") as file:
        assert set(file.keys()) == {f"in.a_{d}" for d in DTYPES} | {"out.log_probs"}
        assert file.metadata()["kdtr_version"] == "1"
        np.testing.assert_array_equal(file.get_tensor("in.a_int64"), bundle().inputs["a_int64"])


def test_the_header_is_in_order_and_the_data_are_aligned():
    data = to_bytes(bundle())
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    names = list(header)
    assert names[0] == "__metadata__" and names[1:] == sorted(names[1:])
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])


def test_strided_arrays_are_stored_by_value(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    save(bundle(inputs={"x": values.T}), tmp_path / "b.kdtr")
    np.testing.assert_array_equal(load(tmp_path / "b.kdtr").inputs["x"], values.T)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,)])
def test_empty_and_scalar_arrays_keep_their_shape(tmp_path, shape):
    save(bundle(inputs={"x": np.zeros(shape, np.int32)}), tmp_path / "b.kdtr")
    assert load(tmp_path / "b.kdtr").inputs["x"].shape == shape


def test_a_tree_is_put_together_from_its_arrays(tmp_path):
    tree = random_tree(rng(1), 2, 5)
    put = bundle(inputs={f"tree.{n}": a for n, a in tree.arrays().items()}, params={"D": tree.max_depth})
    save(put, tmp_path / "b.kdtr")
    same_tree(load(tmp_path / "b.kdtr").tree(), tree)


@pytest.mark.parametrize("field", FIELDS)
def test_a_tree_that_lacks_an_array_is_refused_by_name(field):
    arrays = {f"tree.{n}": a for n, a in random_tree(rng(), 1, 3).arrays().items() if n != field}
    with pytest.raises(BundleError, match=rf"mine: lacks in\.tree\.{field}"):
        bundle(inputs=arrays, params={"D": 2}).tree()


def test_params_that_are_no_strict_json_are_refused():
    with pytest.raises(ValueError):
        to_bytes(bundle(params={"scale": float("nan")}))


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.kdtr")


WHOLE = to_bytes(bundle())


def without(name: str):
    def change(header: dict) -> None:
        del header["__metadata__"][name]

    return with_header(WHOLE, change)


OTHER_FILES = {
    "empty": b"",
    "short": WHOLE[:5],
    "cut in the header": WHOLE[:100],
    "cut in the data": WHOLE[:-1],
    "text": b"this is no bundle, but it is longer than eight bytes",
    "a huge header": (2**62).to_bytes(8, "little") + WHOLE[8:],
    "no metadata": with_header(WHOLE, lambda h: h.pop("__metadata__")),
    "params no JSON": with_header(WHOLE, lambda h: h["__metadata__"].update(params="{K: 3}")),
    "seed no number": with_header(WHOLE, lambda h: h["__metadata__"].update(seed="seven")),
    "no params": without("params"),
    "no op": without("op"),
    "no name": without("name"),
    "no generator": without("generator"),
    "no version": without("kdtr_version"),
    "another version": with_header(WHOLE, lambda h: h["__metadata__"].update(kdtr_version="2")),
    "a stray tensor": with_header(WHOLE, lambda h: h.update(x=h.pop("in.a_float32"))),
    "a nameless tensor": with_header(WHOLE, lambda h: h.update({"in.": h.pop("in.a_float32")})),
}


@pytest.mark.parametrize("what", OTHER_FILES)
def test_another_file_is_refused_and_named(tmp_path, what):
    path = tmp_path / "odd.kdtr"
    path.write_bytes(OTHER_FILES[what])
    with pytest.raises(BundleError) as caught:
        load(path)
    assert str(caught.value).startswith("odd.kdtr: ")


def test_another_version_is_named_with_the_one_expected(tmp_path):
    path = tmp_path / "odd.kdtr"
    path.write_bytes(OTHER_FILES["another version"])
    with pytest.raises(BundleError, match="kdtr_version is '2', this version reads '1'"):
        load(path)
