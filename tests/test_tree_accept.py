"""tree_accept: the longest predicted path, and a status instead of a fault or a loop."""

from __future__ import annotations

import numpy as np
import pytest
from cases_for_tests import DlpackOnly, rng, same_accepted, to_gpu, to_torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtree
from kdtree import inputs
from kdtree.kernels import tree_accept as kernels
from kdtree.ref import tree_accept as ref
from kdtree.ref.tree_accept import BAD_LINK, BAD_N_NODES, CYCLE, OK, STATUS_NAMES, TOO_DEEP
from kdtree.ref.tree_build import tree_build
from kdtree.tree import DraftTree, from_parents, random_tree

BACKENDS = pytest.mark.parametrize("backend", ["ref", "numba"])


def reference(tree: DraftTree, predictions: np.ndarray, stop_token: int | None = None) -> kdtree.Accepted:
    return kdtree.Accepted(*ref.tree_accept(tree, predictions, stop_token=stop_token))


def by_enumeration(tree: DraftTree, predictions: np.ndarray, stop_token: int | None = None) -> kdtree.Accepted:
    """An independent walk over parents instead of links: of a slot's children in slot order the first that matches."""
    batch, n_slots = tree.batch, tree.n_slots
    result = kdtree.Accepted(
        np.full((batch, tree.max_depth + 1), -1, np.int32), *(np.zeros(batch, np.int32) for _ in range(3))
    )
    for b in range(batch):
        path = [0]
        while stop_token is None or len(path) == 1 or tree.token_ids[b, path[-1]] != stop_token:
            here = path[-1]
            matches = [
                j for j in range(n_slots) if tree.parents[b, j] == here and tree.token_ids[b, j] == predictions[b, here]
            ]
            if not matches:
                break
            path.append(min(matches))
        result.path[b, : len(path)] = path
        result.n_accepted[b] = len(path) - 1
        result.bonus[b] = predictions[b, path[-1]]
    return result


def chain() -> DraftTree:
    """0 -> 1 -> 2 -> 3 -> 4 of tokens 9, 10, 20, 30, 40, and a decoy beside each child."""
    tokens = [[9, 10, 20, 30, 40, 11, 21, 31, 41]]
    return from_parents(np.array(tokens), np.array([[-1, 0, 1, 2, 3, 0, 1, 2, 3]]), np.array([9]), max_depth=4)


AGREE = np.array([[10, 20, 30, 40, 7, 0, 0, 0, 0]], dtype=np.int32)


def one(accepted: kdtree.Accepted) -> tuple[list[int], int, int, int]:
    return accepted.path[0].tolist(), *(int(x[0]) for x in (accepted.n_accepted, accepted.bonus, accepted.status))


# ---- what holds for the reference and the kernel alike ----


@BACKENDS
def test_a_full_path_is_accepted_with_its_bonus(backend):
    assert one(kdtree.tree_accept(chain(), AGREE, backend=backend)) == ([0, 1, 2, 3, 4], 4, 7, OK)


@BACKENDS
def test_no_match_leaves_the_root_and_its_prediction(backend):
    predictions = np.full((1, 9), 1000, dtype=np.int32)
    assert one(kdtree.tree_accept(chain(), predictions, backend=backend)) == ([0, -1, -1, -1, -1], 0, 1000, OK)


@BACKENDS
def test_a_later_sibling_may_match(backend):
    predictions = AGREE.copy()
    predictions[0, 1] = 21
    predictions[0, 6] = 5
    assert one(kdtree.tree_accept(chain(), predictions, backend=backend)) == ([0, 1, 6, -1, -1], 2, 5, OK)


@BACKENDS
def test_of_siblings_with_one_token_the_first_wins(backend):
    tree = from_parents(np.array([[1, 5, 5, 6, 7]]), np.array([[-1, 0, 0, 2, 1]]), np.array([5]), max_depth=2)
    predictions = np.array([[5, 6, 6, 0, 0]], dtype=np.int32)  # only the second 5 has a child 6
    assert one(kdtree.tree_accept(tree, predictions, backend=backend)) == ([0, 1, -1], 1, 6, OK)


@BACKENDS
def test_the_path_ends_behind_a_stop_token(backend):
    result = kdtree.tree_accept(chain(), AGREE, stop_token=20, backend=backend)
    assert one(result) == ([0, 1, 2, -1, -1], 2, 30, OK)


@BACKENDS
def test_a_stop_token_at_the_root_or_off_the_path_stops_nothing(backend):
    for stop in (9, 21, 7, 0):
        assert one(kdtree.tree_accept(chain(), AGREE, stop_token=stop, backend=backend))[1] == 4


@BACKENDS
def test_a_predicted_stop_token_is_the_bonus_when_no_child_has_it(backend):
    predictions = AGREE.copy()
    predictions[0, 1] = 99
    assert one(kdtree.tree_accept(chain(), predictions, stop_token=99, backend=backend)) == (
        [0, 1, -1, -1, -1],
        1,
        99,
        OK,
    )


@BACKENDS
def test_a_root_alone_accepts_nothing(backend):
    tree = from_parents(np.array([[3, -1]]), np.array([[-1, -1]]), np.array([1]), max_depth=0)
    assert one(kdtree.tree_accept(tree, np.array([[8, 8]], np.int32), backend=backend)) == ([0], 0, 8, OK)


@BACKENDS
@pytest.mark.parametrize("n_nodes", [0, -1, -(2**31), 10, 2**31 - 1])
def test_n_nodes_out_of_range_gives_a_status_and_nothing_else(backend, n_nodes):
    tree = chain()
    tree.n_nodes[0] = n_nodes
    assert one(kdtree.tree_accept(tree, AGREE, backend=backend)) == ([-1] * 5, 0, -1, BAD_N_NODES)


@BACKENDS
@pytest.mark.parametrize("link", ["first_child", "next_sibling"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_a_cycle_ends_with_a_status(backend, link, target):
    tree = chain()
    predictions = AGREE.copy()
    predictions[0, 2] = 1000  # so that the walk goes through the sibling links at slot 2
    if link == "first_child":
        tree.first_child[0, 2] = target
    else:
        tree.next_sibling[0, 3] = target
    path, n_accepted, bonus, status = one(kdtree.tree_accept(tree, predictions, backend=backend))
    assert (path, n_accepted, bonus, status) == ([0, 1, 2, -1, -1], 2, 1000, CYCLE)


@BACKENDS
def test_a_slot_that_is_its_own_child_or_sibling_ends_with_a_status(backend):
    for field, slot in (("first_child", 0), ("next_sibling", 1)):
        tree = chain()
        getattr(tree, field)[0, slot] = slot
        predictions = np.full((1, 9), 1000, dtype=np.int32)
        assert one(kdtree.tree_accept(tree, predictions, backend=backend))[3] == CYCLE


@BACKENDS
@pytest.mark.parametrize("link", ["first_child", "next_sibling"])
@pytest.mark.parametrize("target", [9, -2, 2**31 - 1, -(2**31)])
def test_a_link_out_of_range_gives_a_status_and_the_walk_until_there(backend, link, target):
    tree = chain()
    predictions = AGREE.copy()
    if link == "first_child":
        tree.first_child[0, 1] = target
    else:
        predictions[0, 1] = 1000
        tree.next_sibling[0, 2] = target
    path, n_accepted, bonus, status = one(kdtree.tree_accept(tree, predictions, backend=backend))
    assert (path, n_accepted, status) == ([0, 1, -1, -1, -1], 1, BAD_LINK)
    assert bonus == predictions[0, 1]


@BACKENDS
def test_a_link_to_an_unused_slot_gives_a_status(backend):
    tree = chain()
    tree.n_nodes[0] = 4
    assert one(kdtree.tree_accept(tree, AGREE, backend=backend)) == ([0, 1, 2, 3, -1], 3, 40, BAD_LINK)


@BACKENDS
@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_a_path_deeper_than_the_tree_says_is_cut_with_a_status(backend, max_depth):
    tree = chain()
    tree.max_depth = max_depth
    path, n_accepted, bonus, status = one(kdtree.tree_accept(tree, AGREE, backend=backend))
    assert (path, n_accepted, status) == (list(range(max_depth + 1)), max_depth, TOO_DEEP)
    assert bonus == AGREE[0, max_depth]


@BACKENDS
def test_more_slots_than_depth_fit(backend):
    # Buffers are as long as the tree is deep, not as it has slots.
    tree = from_parents(np.arange(37)[None], np.array([[-1] + [0] * 36]), np.array([37]), max_depth=1)
    predictions = np.full((1, 37), 36, dtype=np.int32)
    assert one(kdtree.tree_accept(tree, predictions, backend=backend)) == ([0, 36], 1, 36, OK)


@BACKENDS
def test_predictions_may_be_int64(backend):
    result = kdtree.tree_accept(chain(), AGREE.astype(np.int64), backend=backend)
    same_accepted(result, reference(chain(), AGREE))
    assert result.bonus.dtype == np.int32


@BACKENDS
def test_one_malformed_tree_does_not_touch_its_neighbours(backend):
    trees = [chain() for _ in range(3)]
    batch = DraftTree.from_arrays(
        {n: np.concatenate([t.arrays()[n] for t in trees]) for n in trees[0].arrays()}, trees[0].max_depth
    )
    batch.first_child[1, 0] = 2**31 - 1
    result = kdtree.tree_accept(batch, np.repeat(AGREE, 3, axis=0), backend=backend)
    assert result.status.tolist() == [OK, BAD_LINK, OK]
    assert result.n_accepted.tolist() == [4, 0, 4]


@BACKENDS
def test_no_requests_give_an_empty_batch(backend):
    result = kdtree.tree_accept(DraftTree.empty(0, 3, 2), np.zeros((0, 3), np.int32), backend=backend)
    assert result.path.shape == (0, 3) and result.status.shape == (0,)


def test_every_status_has_a_name():
    assert sorted(STATUS_NAMES) == [OK, BAD_N_NODES, BAD_LINK, CYCLE, TOO_DEEP] == list(range(5))


# ---- agreement ----


@pytest.mark.parametrize("n_slots,max_depth", [(1, 0), (2, 1), (37, 4), (199, 9)])
@pytest.mark.parametrize("stop_token", [None, 3])
def test_the_reference_agrees_with_a_walk_over_parents(n_slots, max_depth, stop_token):
    numbers = rng(n_slots)
    tree = random_tree(numbers, 7, n_slots, ragged=True, max_depth=max_depth, vocab=5)
    predictions = inputs.predictions_for(numbers, tree, vocab=5)
    same_accepted(reference(tree, predictions, stop_token), by_enumeration(tree, predictions, stop_token))


def test_greedy_decoding_with_a_tree_is_greedy_decoding():
    # The target is a function of the tokens so far; whatever was drafted, accepted tokens and bonus are its choice.
    def target(tokens: tuple[int, ...]) -> int:
        return (7 * sum(tokens) + 3 * len(tokens)) % 4

    for seed in range(30):
        numbers = rng(seed)
        rows, tokens = inputs.draft_rows(numbers, 1, 6, 3, vocab=4)
        tree = tree_build(rows, tokens, 30, root_tokens=np.array([seed % 4]))
        history = {0: (int(tree.token_ids[0, 0]),)}
        for i in range(1, 31):
            history[i] = (*history[int(tree.parents[0, i])], int(tree.token_ids[0, i]))
        predictions = np.array([[target(history[i]) for i in range(31)]], dtype=np.int32)
        result = reference(tree, predictions)
        tokens = history[0]
        for slot in result.path[0, 1 : 1 + result.n_accepted[0]]:
            assert tree.token_ids[0, slot] == target(tokens)
            tokens = (*tokens, int(tree.token_ids[0, slot]))
        assert result.bonus[0] == target(tokens)
        children = {history[i] for i in range(1, 31)}
        assert (*tokens, target(tokens)) not in children  # the path could not be longer


@pytest.mark.parametrize("stop_token", [None, 2])
def test_the_kernel_agrees_with_the_reference(stop_token):
    numbers = rng(1)
    tree = random_tree(numbers, 9, 23, ragged=True, max_depth=5, vocab=5)
    predictions = inputs.predictions_for(numbers, tree, vocab=5)
    result = kdtree.tree_accept(tree, predictions, stop_token=stop_token, backend="numba")
    same_accepted(result, reference(tree, predictions, stop_token))
    assert len(set(result.n_accepted.tolist())) > 2, "the case accepts too much alike"


def hostile(numbers: np.random.RandomState, batch: int, n_slots: int, max_depth: int) -> tuple[DraftTree, np.ndarray]:
    """A tree of random links, most of them wrong, and predictions that often match."""
    tree = random_tree(numbers, batch, n_slots, vocab=2)
    for links in (tree.first_child, tree.next_sibling):
        wrong = numbers.random_sample(links.shape) < 0.3
        links[wrong] = numbers.randint(-3, n_slots + 3, size=wrong.sum())
        links[numbers.random_sample(links.shape) < 0.03] = 2**31 - 1
    tree.n_nodes[:] = numbers.randint(-1, n_slots + 2, size=batch)
    tree.max_depth = max_depth
    return tree, numbers.randint(0, 2, size=(batch, n_slots)).astype(np.int64)


@settings(max_examples=20, derandomize=True, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 9), st.integers(0, 4), st.sampled_from([None, 1]))
def test_the_kernel_agrees_on_any_links(seed, n_slots, max_depth, stop_token):
    tree, predictions = hostile(rng(seed), 5, n_slots, max_depth)
    result = kdtree.tree_accept(tree, predictions, stop_token=stop_token, backend="numba")
    same_accepted(result, reference(tree, predictions, stop_token))
    assert ((0 <= result.n_accepted) & (result.n_accepted <= max_depth)).all()


# ---- the public function ----


@pytest.mark.parametrize("backend", ["auto", "numba"])
def test_torch_comes_back_as_torch(backend):
    import torch

    result = kdtree.tree_accept(to_torch(chain()), to_torch(AGREE), backend=backend)
    assert all(x.dtype == torch.int32 and x.device.type == "cpu" for x in vars(result).values())
    same_accepted(result, reference(chain(), AGREE))


@BACKENDS
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_out_is_filled_and_returned(backend, library):
    out = kdtree.Accepted(np.full((1, 5), 77, np.int32), *(np.full(1, 77, np.int32) for _ in range(3)))
    tree, predictions = chain(), AGREE
    if library == "torch":
        out, tree, predictions = to_torch(out), to_torch(tree), to_torch(predictions)
    result = kdtree.tree_accept(tree, predictions, out=out, backend=backend)
    assert all(a is b for a, b in zip(vars(result).values(), vars(out).values(), strict=True))
    same_accepted(out, reference(chain(), AGREE))


@BACKENDS
def test_the_order_of_the_fields_of_out_does_not_matter(backend):
    fields = {"status": 1, "bonus": 1, "n_accepted": 1, "path": (1, 5)}
    out = kdtree.Accepted(**{n: np.full(s, 77, np.int32) for n, s in fields.items()})
    out.__dict__ = {n: out.__dict__[n] for n in fields}
    same_accepted(kdtree.tree_accept(chain(), AGREE, out=out, backend=backend), reference(chain(), AGREE))


def test_an_array_with_dlpack_alone_is_read():
    same_accepted(kdtree.tree_accept(chain(), DlpackOnly(AGREE)), reference(chain(), AGREE))


def changed(**changes) -> DraftTree:
    return DraftTree.from_arrays(chain().arrays() | changes, 4)


def deep(max_depth) -> DraftTree:
    tree = chain()
    tree.max_depth = max_depth
    return tree


def accept(tree=None, predictions=AGREE, **options):
    return lambda: kdtree.tree_accept(chain() if tree is None else tree, predictions, **options)


BAD_CALLS = {
    "no array": (accept(predictions=AGREE.tolist()), TypeError, "predictions", "list"),
    "float": (accept(predictions=AGREE.astype(np.float32)), TypeError, "predictions", "float32"),
    "shape": (accept(predictions=AGREE[:, :8].copy()), ValueError, "predictions", "(1, 8)"),
    "strided": (accept(predictions=np.zeros((1, 18), np.int32)[:, ::2]), ValueError, "predictions", "strided"),
    "link dtype": (
        accept(changed(first_child=chain().first_child.astype(np.int64))),
        TypeError,
        "tree.first_child",
        "int64",
    ),
    "link shape": (
        accept(changed(next_sibling=chain().next_sibling[:, :4].copy())),
        ValueError,
        "tree.next_sibling",
        "(1, 4)",
    ),
    "n_nodes shape": (accept(changed(n_nodes=np.ones((1, 1), np.int32))), ValueError, "tree.n_nodes", "(1, 1)"),
    "depth": (accept(deep(-1)), ValueError, "tree.max_depth", "-1"),
    "depth a float": (accept(deep(4.0)), TypeError, "tree.max_depth", "4.0"),
    "stop negative": (accept(stop_token=-1), ValueError, "stop_token", "-1"),
    "stop too large": (accept(stop_token=2**31), ValueError, "stop_token", str(2**31)),
    "stop a float": (accept(stop_token=2.0), TypeError, "stop_token", "2.0"),
    "out shape": (
        accept(out=kdtree.Accepted(np.zeros((1, 4), np.int32), *(np.zeros(1, np.int32) for _ in range(3)))),
        ValueError,
        "out.path",
        "(1, 4)",
    ),
    "out dtype": (
        accept(out=kdtree.Accepted(np.zeros((1, 5), np.int32), *(np.zeros(1, np.int64) for _ in range(3)))),
        TypeError,
        "out.n_accepted",
        "int64",
    ),
    "backend": (accept(backend=""), ValueError, "backend", "''"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(bad):
    run, error, argument, came = BAD_CALLS[bad]
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(f"{argument}: got "), text
    assert came in text and "expected" in text, text


def test_the_kernel_has_one_form_for_each_prediction_dtype():
    assert [v.label for v in kernels.variants()] == ["simt[i32]", "simt[i64]"]


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("n_slots,max_depth", [(1, 0), (37, 4), (199, 9), (1025, 31)])
@pytest.mark.parametrize("stop_token", [None, 3])
def test_on_a_gpu_the_kernel_agrees_with_the_reference(n_slots, max_depth, stop_token):
    numbers = rng(n_slots)
    tree = random_tree(numbers, 37, n_slots, ragged=True, max_depth=max_depth, vocab=7)
    predictions = inputs.predictions_for(numbers, tree, vocab=7)
    for given_ in (predictions, predictions.astype(np.int64)):
        result = kdtree.tree_accept(to_gpu(tree), to_gpu(given_), stop_token=stop_token)
        assert all(x.is_cuda for x in vars(result).values())
        same_accepted(result, reference(tree, predictions, stop_token))


@pytest.mark.gpu
@pytest.mark.parametrize("n_slots", [1, 5, 65, 1025])
def test_on_a_gpu_hostile_links_end_with_a_status_and_no_fault(n_slots):
    import torch

    tree, predictions = hostile(rng(n_slots), 199, n_slots, 6)
    result = kdtree.tree_accept(to_gpu(tree), to_gpu(predictions))
    torch.cuda.synchronize()
    same_accepted(result, reference(tree, predictions))


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_allocated_when_out_is_given_and_the_current_stream_is_used():
    import torch

    numbers = rng(3)
    tree = random_tree(numbers, 64, 65, max_depth=7, vocab=7)
    predictions = inputs.predictions_for(numbers, tree, vocab=7)
    device, ready = to_gpu(tree), to_gpu(predictions)
    out = kdtree.tree_accept(device, ready)
    for array in vars(out).values():
        array.fill_(77)
    late = torch.full_like(ready, -5)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(ready)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
        kdtree.tree_accept(device, late, out=out)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    side.synchronize()
    same_accepted(out, reference(tree, predictions))


@pytest.mark.gpu
def test_on_a_gpu_arrays_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="predictions: got an array on cpu, expected cuda:0 as tree.token_ids"):
        kdtree.tree_accept(to_gpu(chain()), to_torch(AGREE))
