"""Tensor maps: what the copy engine cannot do is said before the driver is asked."""

from __future__ import annotations

import pytest
from fake_driver import FakeDriver

from kdtree.kernels import driver, tensor_map


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: found)
    monkeypatch.setattr(tensor_map, "_kept", {})
    return found


def encode(**changes):
    given = {"ptr": 4096, "dtype": "bfloat16", "shape": (4, 100, 576), "box": (1, 64, 64)}
    return tensor_map.encode(**(given | changes))


def test_the_driver_gets_everything_innermost_first_and_an_aligned_place(fake):
    assert encode() == b"map of 0x1000".ljust(128, b".")
    (found,) = fake.maps
    assert found.at % 128 == 0 and found.ptr == 4096
    assert (found.dtype, found.rank) == (9, 3)
    assert (found.shape, found.strides, found.box) == ([576, 100, 4], [1152, 115200], [64, 64, 1])
    assert found.steps == [1, 1, 1]
    assert found.rest == [0, 3, 3, 0]  # no interleave, 128-byte swizzle, 256-byte promotion, zeros outside


def test_strides_are_those_given(fake):
    encode(strides=(100 * 640, 640, 1))
    assert fake.maps[0].strides == [1280, 128000]


def test_a_map_is_made_once(fake):
    assert encode() is encode()
    assert encode(ptr=8192) != encode()
    assert len(fake.maps) == 2


def test_maps_kept_are_bounded(fake, monkeypatch):
    monkeypatch.setattr(tensor_map, "KEPT", 3)
    for i in range(1, 9):
        encode(ptr=4096 * i)
    assert len(tensor_map._kept) <= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ptr": 4104}, "ptr: got 0x1008, expected a device address that is a multiple of 16"),
        ({"ptr": 0}, "ptr: got 0x0"),
        ({"dtype": "complex64"}, "dtype: got complex64, expected one of uint8"),
        ({"shape": (4, 0, 576)}, r"shape: got \(4, 0, 576\), expected 1 to 5 extents"),
        ({"shape": (4, 2**32 + 1, 576)}, "shape: got"),
        ({"shape": (1,) * 6, "box": (1,) * 6}, "shape: got"),
        ({"shape": ()}, "shape: got"),
        ({"box": (64, 64)}, r"box: got \(64, 64\), expected 3 extents of 1..256"),
        ({"box": (1, 257, 64)}, "box: got"),
        ({"box": (1, 0, 64)}, "box: got"),
        ({"box": (1, 64, 128)}, "box: got a row of 128 bfloat16, 256 bytes, expected a multiple of 16 up to 128"),
        ({"box": (1, 64, 63)}, "box: got a row of 63 bfloat16, 126 bytes"),
        ({"shape": (4, 100, 575)}, "strides: got 57500 bfloat16 along axis 0|strides: got 575 bfloat16 along axis 1"),
        ({"strides": (100 * 576, 576)}, "strides: got .* expected 3, the last of them 1"),
        ({"strides": (100 * 576, 576, 2)}, "strides: got .* the last of them 1"),
        ({"strides": (0, 576, 1)}, "strides: got 0 bfloat16 along axis 0"),
        ({"shape": (2, 2**31, 2**10), "box": (1, 64, 64)}, "below 2.*40"),
    ],
)
def test_what_the_copy_engine_cannot_do_is_named(changes, message, fake):
    with pytest.raises(ValueError, match=message):
        encode(**changes)
    assert not fake.maps


def test_a_driver_that_refuses_is_a_cuda_error(fake):
    from kdtree.kernels.launch import is_cuda_error

    fake.map_status = 1
    with pytest.raises(driver.DriverError, match=r"cuTensorMapEncodeTiled of bfloat16\[4, 100, 576\]") as caught:
        encode()
    assert is_cuda_error(caught.value)
    assert not tensor_map._kept
