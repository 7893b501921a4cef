"""verify_attn's portable tensor-core kernel: its plan and shared memory, which need no GPU. More: test_verify_attn."""

from __future__ import annotations

import pytest

from kdtree.kernels import verify_mma as mma
from kdtree.kernels.verify_mma import MAX_WORKSPACE, combine_teams, plan

SMS = 132  # of an H200
SHAPES = [
    (h, b, n, length) for h in (8, 16, 64) for b in (1, 4, 32) for n in (9, 17, 33, 65) for length in (256, 4096, 65536)
]


def test_blocks_fit_the_smallest_target():
    assert mma.SHARED_BYTES <= 99 * 1024
    assert 4 * mma.COMBINE_SHARED_BYTES <= 99 * 1024  # blocks of `combine` a multiprocessor


def test_areas_of_shared_memory_follow_each_other():
    places = [mma.SCORES, mma.FACTORS, mma.TREE_SLOTS, mma.FLAG, mma.PLACE, mma.SPAN, mma.STATE, mma.SHARED_BYTES]
    assert places == sorted(set(places))
    assert all(at % 16 == 0 for at in (mma.SLOT_BYTES, mma.SCORES, mma.PIECE, mma.FACTORS, mma.STATE))


@pytest.mark.parametrize("splits,teams", [(2, 1), (4, 1), (5, 2), (8, 2), (9, 4), (17, 8), (128, 8)])
def test_a_warp_of_combine_takes_four_splits_at_once(splits, teams):
    assert combine_teams(splits) == teams


@pytest.mark.parametrize("heads,batch,n_slots,length", SHAPES)
def test_a_plan_covers_the_rows_and_stays_below_the_workspace_limit(heads, batch, n_slots, length):
    found = plan(batch, n_slots, heads, length + n_slots, SMS)
    assert found.grid[0] * 64 >= n_slots * heads > (found.grid[0] - 1) * 64
    assert 0 <= 16 * found.strips - n_slots * heads < 16
    assert found.grid[2] == batch and 1 <= found.splits <= 128
    assert found.workspace_bytes <= MAX_WORKSPACE < 64e6
    assert (found.workspace_bytes == 0) == (found.splits == 1)


def test_rows_that_fill_the_gpu_are_not_split():
    assert plan(4, 33, 64, 16384 + 33, SMS).splits == 1  # 132 blocks
    assert plan(32, 65, 64, 65536 + 65, SMS).splits == 1


def test_few_rows_are_split_into_one_wave():
    blocks = plan(1, 9, 8, 65536 + 9, SMS).grid
    assert SMS * 0.9 <= blocks[0] * blocks[1] * blocks[2] <= SMS


def test_no_rows_are_no_blocks():
    assert 0 in plan(1, 0, 8, 100, SMS).grid and 0 in plan(0, 3, 8, 100, SMS).grid
