"""DraftTree and its helpers: shapes, derived arrays, conversions."""

from __future__ import annotations

import numpy as np
import pytest
from cases_for_tests import rng, same_tree, to_torch

import kdtree
from kdtree.tree import (
    FIELDS,
    DraftTree,
    dense_visibility,
    field_shapes,
    from_parents,
    random_tree,
    visibility_words,
)


@pytest.mark.parametrize("n_slots,words", [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3), (1025, 33)])
def test_a_visibility_row_has_a_bit_for_each_slot(n_slots, words):
    assert visibility_words(n_slots) == words


def test_the_fields_are_those_of_the_contract():
    assert FIELDS == {
        "token_ids": "int32",
        "parents": "int32",
        "depths": "int32",
        "scores": "float64",
        "n_nodes": "int32",
        "visibility": "uint32",
        "first_child": "int32",
        "next_sibling": "int32",
        "positions": "int64",
    }
    assert list(DraftTree.empty(1, 2, 3).arrays()) == list(FIELDS)


@pytest.mark.parametrize("batch,n_slots", [(0, 1), (1, 1), (3, 37), (2, 199)])
def test_an_empty_tree_has_the_right_shapes_and_no_node(batch, n_slots):
    tree = DraftTree.empty(batch, n_slots, 7)
    assert {n: a.shape for n, a in tree.arrays().items()} == field_shapes(batch, n_slots)
    assert {n: a.dtype.name for n, a in tree.arrays().items()} == FIELDS
    assert (tree.batch, tree.n_slots, tree.max_depth) == (batch, n_slots, 7)
    assert (tree.n_nodes == 0).all() and (tree.visibility == 0).all() and (tree.scores == -np.inf).all()
    for links in (tree.token_ids, tree.parents, tree.first_child, tree.next_sibling):
        assert (links == -1).all()


def test_a_tree_lacking_an_array_is_refused_by_name():
    arrays = DraftTree.empty(1, 2, 1).arrays()
    del arrays["first_child"], arrays["depths"]
    with pytest.raises(ValueError, match=r"lacks \['depths', 'first_child'\]"):
        DraftTree.from_arrays(arrays, 1)


@pytest.fixture
def forked() -> DraftTree:
    """0 -> (1 -> (3, 5), 2 -> 4) and one unused slot."""
    return from_parents(
        np.array([[7, 1, 2, 3, 4, 3, 99]]),
        np.array([[-1, 0, 0, 1, 2, 1, 0]]),
        np.array([6]),
        scores=np.array([[0.0, -1.0, -1.5, -2.0, -2.5, -3.0, 5.0]]),
        prefix_lens=np.array([100]),
    )


def test_links_follow_slot_order(forked):
    assert forked.first_child[0].tolist() == [1, 3, 4, -1, -1, -1, -1]
    assert forked.next_sibling[0].tolist() == [-1, 2, -1, 5, -1, -1, -1]


def test_depths_and_positions_follow_parents(forked):
    assert forked.depths[0].tolist() == [0, 1, 1, 2, 2, 2, 0]
    assert forked.positions[0].tolist() == [100, 101, 101, 102, 102, 102, 100]
    assert forked.max_depth == 2


def test_visibility_is_self_and_ancestors(forked):
    rows = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 1, 5}, set()]
    dense = dense_visibility(forked)
    assert dense.shape == (1, 7, 7) and dense.dtype == bool
    assert [set(np.nonzero(row)[0]) for row in dense[0]] == rows
    assert forked.visibility[0, :, 0].tolist() == [sum(1 << j for j in row) for row in rows]


def test_unused_slots_hold_nothing_whatever_was_given(forked):
    assert (forked.token_ids[0, 6], forked.parents[0, 6], forked.scores[0, 6]) == (-1, -1, -np.inf)


def test_bit_31_and_the_second_word_are_set():
    chain = from_parents(np.zeros((1, 34)), np.arange(-1, 33)[None], np.array([34]))
    assert chain.visibility[0, 31].tolist() == [2**32 - 1, 0]
    assert chain.visibility[0, 33].tolist() == [2**32 - 1, 3]
    np.testing.assert_array_equal(dense_visibility(chain)[0], np.tril(np.ones((34, 34), dtype=bool)))


def test_mask_words_as_int32_mean_the_same():
    chain = from_parents(np.zeros((1, 34)), np.arange(-1, 33)[None], np.array([34]))
    signed = DraftTree.from_arrays(chain.arrays() | {"visibility": chain.visibility.view(np.int32)}, 33)
    np.testing.assert_array_equal(dense_visibility(signed), dense_visibility(chain))


@pytest.mark.parametrize("parent", [-1, 2, 3, 7])
def test_a_parent_that_is_no_earlier_slot_is_refused(parent):
    with pytest.raises(ValueError, match=rf"parents: request 0 slot 2 has parent {parent}, expected 0\.\.1"):
        from_parents(np.zeros((1, 4)), np.array([[-1, 0, parent, 0]]), np.array([4]))


@pytest.mark.parametrize("n_nodes", [0, -1, 5])
def test_a_count_out_of_range_is_refused(n_nodes):
    with pytest.raises(ValueError, match=rf"n_nodes: request 0 has {n_nodes}, expected 1\.\.4"):
        from_parents(np.zeros((1, 4)), np.array([[-1, 0, 0, 0]]), np.array([n_nodes]))


@pytest.mark.parametrize("n_slots", [1, 2, 37, 199])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("max_depth", [None, 3])
def test_random_trees_are_well_formed(n_slots, ragged, max_depth):
    tree = random_tree(rng(n_slots), 5, n_slots, ragged=ragged, max_depth=max_depth)
    dense = dense_visibility(tree)
    for b in range(5):
        used = int(tree.n_nodes[b])
        assert 1 <= used <= n_slots and (ragged or used == n_slots)
        for i in range(1, used):
            parent = tree.parents[b, i]
            assert 0 <= parent < i
            assert tree.depths[b, i] == tree.depths[b, parent] + 1
            np.testing.assert_array_equal(np.delete(dense[b, i], i), np.delete(dense[b, parent], i))
            assert dense[b, i, i]
        assert dense[b].sum() == (tree.depths[b, :used] + 1).sum()
        reached = [0]
        for i in reached:  # every used slot is found once by following the links
            child = tree.first_child[b, i]
            while child >= 0:
                reached.append(int(child))
                child = tree.next_sibling[b, child]
        assert sorted(reached) == list(range(used))
    assert max_depth is None or tree.max_depth == max_depth >= tree.depths.max()


def test_a_seed_gives_one_tree():
    same_tree(random_tree(rng(3), 2, 37, ragged=True), random_tree(rng(3), 2, 37, ragged=True))


def test_a_tree_goes_to_torch_and_back():
    import torch

    tree = random_tree(rng(), 2, 37)
    there = to_torch(tree)
    assert there.visibility.dtype == torch.uint32
    assert (there.batch, there.n_slots, there.max_depth) == (2, 37, tree.max_depth)
    same_tree(there.numpy(), tree)
    np.testing.assert_array_equal(dense_visibility(there), dense_visibility(tree))


def test_a_built_tree_is_what_its_parents_say():
    log_probs = np.log(np.array([[[0.6, 0.3, 0.1]] * 3], dtype=np.float32))
    tree = kdtree.tree_build(log_probs, np.arange(9).reshape(1, 3, 3), 17, prefix_lens=np.array([4]))
    again = from_parents(
        tree.token_ids, tree.parents, tree.n_nodes, scores=tree.scores, prefix_lens=np.array([4]), max_depth=3
    )
    same_tree(again, tree)
