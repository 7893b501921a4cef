"""The plan of the Hopper kernel: which shares a call is cut into, from its shapes alone."""

from __future__ import annotations

import pytest

from kdtree.kernels.verify_plan import plan

SMS = 132
SHAPES = [(b, n * h, length + n) for h in (8, 16, 64) for b in (1, 4, 32) for n in (9, 65) for length in (256, 65_536)]


@pytest.mark.parametrize(("batch", "n_rows", "capacity"), SHAPES)
def test_every_row_tile_has_a_member_and_every_block_an_sm(batch, n_rows, capacity):
    found = plan(batch, n_rows, capacity, SMS)
    assert found.members * (found.passes - 1) < found.row_tiles <= found.members * found.passes
    assert found.row_tiles == -(-n_rows // 64)
    assert 1 <= found.blocks <= SMS
    assert found.workspace_bytes < 64e6


@pytest.mark.parametrize(
    ("batch", "n_rows", "capacity"), [(32, 1025 * 128, 131_072), (512, 513 * 64, 131_072), (64, 513 * 64, 2**20)]
)
def test_positions_are_cut_within_32_bits(batch, n_rows, capacity):
    found = plan(batch, n_rows, capacity, SMS)
    total = batch * found.passes * -(-capacity // 64)
    assert total < 2**31
    assert total * found.groups < 2**32


def test_more_tiles_than_can_be_numbered_are_refused():
    with pytest.raises(ValueError, match=r"^got B=100000, 65600 rows of N·H and a cache of 4194304 rows"):
        plan(100_000, 1025 * 64, 2**22, SMS)


def test_one_small_request_is_not_cut_finer_than_its_tiles():
    assert plan(1, 72, 265, SMS).groups <= 5
