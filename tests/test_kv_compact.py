"""kv_compact: accepted rows move to the front of the tree part, in place, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest
from cases_for_tests import DlpackOnly, bits, rng, to_gpu, to_torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kdtree
from kdtree import attention, inputs
from kdtree.arrays import to_numpy
from kdtree.ref.kv_compact import kv_compact as reference
from kdtree.ref.kv_compact import moves
from kdtree.tree import DraftTree

BACKENDS = pytest.mark.parametrize("backend", ["ref", "numba"])


def case(
    page_size: int = 0,
    *,
    dtype: str = "bfloat16",
    width: int = 6,
    prefix_lens: tuple[int, ...] = (0, 5, 9),
    paths: tuple[tuple[int, ...], ...] = ((0, 2, 3, 4, 8), (0, 1, 3, 7), (0, 1, 2)),
    n_slots: int = 9,
    seed: int = 0,
) -> dict:
    """Arguments of kv_compact. NaN behind the rows in use, page-table entries out of range where unused."""
    lengths = np.array(prefix_lens, dtype=np.int32)
    batch, depth = len(lengths), max(map(len, paths))
    tree = DraftTree.empty(batch, n_slots, depth - 1)
    tree.n_nodes[:] = n_slots
    path = np.full((batch, depth), -1, dtype=np.int32)
    for b, slots in enumerate(paths):
        path[b, : len(slots)] = slots
    count = np.array([len(p) - 1 for p in paths], dtype=np.int32)
    kv, table = inputs.cache(rng(seed), lengths + tree.n_nodes, width, dtype, page_size=page_size)
    accepted = kdtree.Accepted(path, count, np.zeros(batch, np.int32), np.zeros(batch, np.int32))
    return {"kv": kv, "tree": tree, "accepted": accepted, "prefix_lens": lengths, "page_table": table}


def addresses(a: dict) -> np.ndarray:
    """int[B, capacity]: index into the flattened rows of the cache of each of a request's rows."""
    size = a["kv"].shape[1]
    if a["page_table"] is None:
        return np.arange(len(a["kv"]) * size).reshape(-1, size)
    return (a["page_table"].astype(np.int64)[:, :, None] * size + np.arange(size)).reshape(len(a["page_table"]), -1)


def expected(a: dict) -> np.ndarray:
    """What the cache must hold: one gather from a copy, by an address table, a request at a time."""
    before = a["kv"].reshape(-1, a["kv"].shape[2])
    after = before.copy()
    for b, where in enumerate(addresses(a)):
        tree_rows = where[a["prefix_lens"][b] :]
        slots = a["accepted"].path[b, : a["accepted"].n_accepted[b] + 1]
        after[tree_rows[: len(slots)]] = before[tree_rows[slots]]
    return after.reshape(a["kv"].shape)


def compact(a: dict, backend: str, **options):
    return kdtree.kv_compact(**(a | options), backend=backend)


# ---- what holds for the reference and the kernel alike ----


@BACKENDS
@pytest.mark.parametrize("page_size", [0, 1, 4, 64])
def test_accepted_rows_move_to_the_front_and_nothing_else_moves(backend, page_size):
    a = case(page_size)
    want, before = expected(a), a["kv"].copy()
    assert compact(a, backend) is a["kv"]
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))
    assert (bits(a["kv"]) != bits(before)).any(), "the case moves nothing"


@BACKENDS
@pytest.mark.parametrize(
    "dtype,width", [("float32", 5), ("float16", 5), ("bfloat16", 1), ("bfloat16", 37), ("float32", 1)]
)
def test_rows_of_any_width_move_whole(backend, dtype, width):
    a = case(dtype=dtype, width=width)
    want = expected(a)
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


@BACKENDS
def test_overlapping_moves_read_before_they_write(backend):
    # Every row moves onto a row that is itself the source of the next move.
    a = case(prefix_lens=(2,), paths=((0, 2, 3, 4, 5, 6, 7, 8),))
    old = a["kv"].copy()
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"][0, 3:10]), bits(old[0, 4:11]))


@BACKENDS
@pytest.mark.parametrize("page_size", [0, 4])
def test_a_path_along_the_first_slots_moves_nothing(backend, page_size):
    a = case(page_size, paths=((0, 1, 2, 3), (0,), (0, 1)))
    before = a["kv"].copy()
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(before))


@BACKENDS
@pytest.mark.parametrize("page_size", [0, 1])
def test_the_prefix_of_the_next_step_is_prefix_and_path(backend, page_size):
    a = case(page_size)
    old = a["kv"].reshape(-1, 6).copy()
    compact(a, backend)
    new, where = a["kv"].reshape(-1, 6), addresses(a)
    for b in range(3):
        prefix, count = int(a["prefix_lens"][b]), int(a["accepted"].n_accepted[b]) + 1
        kept = [*range(prefix), *(prefix + a["accepted"].path[b, :count])]
        np.testing.assert_array_equal(bits(new[where[b, : prefix + count]]), bits(old[where[b, kept]]))


BROKEN_PATHS = {
    "falling": ((0, 3, 2, 4), 3, [0, 3]),
    "standing": ((0, 2, 2, 4), 3, [0, 2]),
    "beyond the tree": ((0, 2, 9, 10), 3, [0, 2]),
    "far beyond the tree": ((0, 2, 2**31 - 1, 4), 3, [0, 2]),
    "negative": ((0, 2, -7, 5), 3, [0, 2]),
    "unused entries": ((0, 2, -1, -1), 3, [0, 2]),
    "not at the root": ((1, 2, 3, 4), 3, []),
    "negative root": ((-1, 2, 3, 4), 3, []),
    "count beyond the path": ((0, 2, 3, 4), 2**31 - 1, [0, 2, 3, 4]),
    "count negative": ((0, 2, 3, 4), -1, []),
    "count very negative": ((0, 2, 3, 4), -(2**31), []),
}


@BACKENDS
@pytest.mark.parametrize("what", BROKEN_PATHS)
def test_a_path_that_does_not_rise_is_followed_up_to_there(backend, what):
    path, count, kept = BROKEN_PATHS[what]
    a = case(prefix_lens=(3,), paths=((0, 1, 2, 3),))
    a["accepted"].path[0], a["accepted"].n_accepted[0] = path, count
    want = a["kv"].copy()
    want[0, 3 : 3 + len(kept)] = a["kv"][0, [3 + s for s in kept]]
    assert moves(np.array(path), count, 9, 3, a["kv"].shape[1]) == kept
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


@BACKENDS
def test_all_layers_move_alike(backend):
    layers = [case(seed=s)["kv"] for s in range(3)]
    a = case()
    want = [expected(a | {"kv": layer}) for layer in layers]
    assert compact(a | {"kv": layers}, backend) is layers
    for layer, moved in zip(layers, want, strict=True):
        np.testing.assert_array_equal(bits(layer), bits(moved))


@BACKENDS
def test_lengths_and_pages_may_be_int64(backend):
    a = case(4)
    want = expected(a)
    a["prefix_lens"], a["page_table"] = a["prefix_lens"].astype(np.int64), a["page_table"].astype(np.int64)
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


@BACKENDS
def test_no_requests_are_no_work(backend):
    a = case(4) | {
        "tree": DraftTree.empty(0, 9, 2),
        "accepted": kdtree.Accepted(np.zeros((0, 3), np.int32), *[np.zeros(0, np.int32)] * 3),
        "prefix_lens": np.zeros(0, np.int32),
        "page_table": np.zeros((0, 2), np.int32),
    }
    before = a["kv"].copy()
    compact(a, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(before))


@BACKENDS
def test_an_unaligned_cache_moves_whole(backend):
    # Two-byte elements that begin in the middle of a 32-bit word.
    a = case()
    memory = np.zeros(a["kv"].size + 1, a["kv"].dtype)
    shifted = memory[1:].reshape(a["kv"].shape)
    shifted[...] = a["kv"]
    want = expected(a)
    compact(a | {"kv": shifted}, backend)
    np.testing.assert_array_equal(bits(shifted), bits(want))


@settings(max_examples=15, derandomize=True, deadline=None)
@given(st.integers(0, 2**31 - 1), st.sampled_from([0, 1, 3]))
def test_the_kernel_agrees_with_the_reference_on_any_path(seed, page_size):
    numbers = rng(seed)
    a = case(page_size, width=2, n_slots=6, paths=((0, 1, 2, 3),) * 3, seed=seed, prefix_lens=(0, 1, 4))
    rising = np.sort(np.stack([numbers.permutation(6)[:4] for _ in range(3)]), axis=1)
    rising[:, 0] = 0
    odd = numbers.random_sample(rising.shape) < 0.1
    rising[odd] = numbers.randint(-2, 9, size=odd.sum())
    a["accepted"].path[:] = rising
    a["accepted"].n_accepted[:] = numbers.randint(-1, 6, size=3)
    a["tree"].n_nodes[:] = numbers.randint(0, 7, size=3)
    want = reference(
        a["kv"].copy(),
        a["accepted"].path,
        a["accepted"].n_accepted,
        n_nodes=a["tree"].n_nodes,
        prefix_lens=a["prefix_lens"],
        page_table=a["page_table"],
    )
    compact(a, "numba")
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


HOSTILE = {
    "negative prefix": ("prefix_lens", -1),
    "smallest prefix": ("prefix_lens", -(2**63)),
    "prefix beyond the cache": ("prefix_lens", 1000),
    "largest prefix": ("prefix_lens", 2**63 - 1),
    "no nodes": ("n_nodes", 0),
    "negative n_nodes": ("n_nodes", -(2**31)),
    "n_nodes beyond the cache": ("n_nodes", 100),
    "largest n_nodes": ("n_nodes", 2**31 - 1),
}
HOSTILE_PAGES = {"negative page": ("page_table", -1), "page beyond the cache": ("page_table", 10**6)}
HOSTILE_CASES = [(w, 0) for w in HOSTILE] + [(w, 4) for w in HOSTILE | HOSTILE_PAGES]


def spoil(a: dict, what: str) -> None:
    """Make request 1 wrong in one way."""
    name, value = (HOSTILE | HOSTILE_PAGES)[what]
    a["prefix_lens"] = a["prefix_lens"].astype(np.int64)
    (a["tree"].n_nodes if name == "n_nodes" else a[name])[1] = value


def expected_but_request_1(a: dict) -> np.ndarray:
    """What the rows of the cache must hold when request 1 moves nothing."""
    untouched = addresses(a)[1][: 5 + 9]
    want = expected(a).reshape(-1, 6)
    want[untouched] = a["kv"].reshape(-1, 6)[untouched]
    return want.reshape(a["kv"].shape)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("what,page_size", HOSTILE_CASES)
def test_what_only_the_device_knows_to_be_wrong_moves_nothing(what, page_size, monkeypatch):
    monkeypatch.setattr(attention, "_check_lengths", lambda *_: None)
    a = case(page_size)
    want = expected_but_request_1(a)
    spoil(a, what)
    compact(a, "numba")
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


# ---- the public function ----


@BACKENDS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_is_changed_in_place(backend, dtype):
    a = case(4, dtype=dtype)
    want = expected(a)
    given_ = {n: to_torch(v) for n, v in a.items()}
    pointer = given_["kv"].data_ptr()
    assert compact(given_, backend) is given_["kv"]
    assert given_["kv"].data_ptr() == pointer
    np.testing.assert_array_equal(bits(given_["kv"]), bits(want))


@BACKENDS
def test_an_array_with_dlpack_alone_is_changed_in_place(backend):
    a = case(dtype="float32")
    want = expected(a)
    compact(a | {"kv": DlpackOnly(a["kv"]), "prefix_lens": DlpackOnly(a["prefix_lens"])}, backend)
    np.testing.assert_array_equal(bits(a["kv"]), bits(want))


A, P = case(), case(4)


def call(base=A, **changes):
    accepted = {n: changes.pop(n) for n in ("path", "n_accepted") if n in changes}
    changes["accepted"] = kdtree.Accepted(**(vars(base["accepted"]) | accepted))
    return lambda: kdtree.kv_compact(**(base | changes))


BAD_CALLS = {
    "kv no array": (call(kv="cache"), TypeError, "kv", "str"),
    "no layer": (call(kv=[]), ValueError, "kv", "empty"),
    "a layer no array": (call(kv=[A["kv"], 3]), TypeError, "kv[1]", "int"),
    "a layer of another dtype": (call(kv=[A["kv"], A["kv"].astype(np.float16)]), TypeError, "kv[1]", "float16"),
    "a layer of another shape": (call(kv=[A["kv"], A["kv"][:, :4].copy()]), ValueError, "kv[1]", "(3, 4, 6)"),
    "kv float64": (call(kv=A["kv"].astype(np.float64)), TypeError, "kv", "float64"),
    "kv two axes": (call(kv=A["kv"][0]), ValueError, "kv", "(21, 6)"),
    "kv strided": (call(kv=A["kv"][..., ::2]), ValueError, "kv[0]", "strided"),
    "kv of another batch": (call(kv=A["kv"][:2]), ValueError, "kv", "(2, 21, 6)"),
    "path dtype": (call(path=A["accepted"].path.astype(np.int64)), TypeError, "accepted.path", "int64"),
    "path shape": (call(path=A["accepted"].path[0]), ValueError, "accepted.path", "(5,)"),
    "count dtype": (call(n_accepted=np.zeros(3, np.int64)), TypeError, "accepted.n_accepted", "int64"),
    "count shape": (call(n_accepted=np.zeros(2, np.int32)), ValueError, "accepted.n_accepted", "(2,)"),
    "n_nodes dtype": (
        call(tree=DraftTree.empty(3, 9, 4).map(lambda a: a.astype(np.float32))),
        TypeError,
        "tree.n_nodes",
        "float32",
    ),
    "prefix dtype": (call(prefix_lens=np.zeros(3, np.float32)), TypeError, "prefix_lens", "float32"),
    "prefix shape": (call(prefix_lens=np.zeros(2, np.int32)), ValueError, "prefix_lens", "(2,)"),
    "prefix negative": (call(prefix_lens=np.array([0, -5, 0])), ValueError, "prefix_lens", "request 1 has -5"),
    "prefix too long": (call(prefix_lens=np.array([0, 5, 13])), ValueError, "prefix_lens", "needs 13 + 9"),
    "page dtype": (call(P, page_table=P["page_table"].astype(np.uint32)), TypeError, "page_table", "uint32"),
    "page shape": (call(P, page_table=P["page_table"][:2]), ValueError, "page_table", "(2, 5)"),
    "page out of range": (call(P, page_table=-P["page_table"] - 1), ValueError, "page_table", "request 0 entry 0 is -"),
    "backend": (call(backend="auto "), ValueError, "backend", "'auto '"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(bad):
    run, error, argument, came = BAD_CALLS[bad]
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(argument), text
    assert came in text and "expected" in text, text


# ---- on a GPU ----


def large(page_size: int, dtype: str, width: int, n_slots: int = 65, batch: int = 9, depth: int = 7) -> dict:
    """A ragged batch with random rising paths."""
    numbers = rng(page_size + width)
    paths = []
    for _ in range(batch):
        count = numbers.randint(0, depth + 1)
        paths.append((0, *sorted(1 + numbers.permutation(n_slots - 1)[:count])))
    paths[0] = tuple(range(0, 2 * depth + 1, 2))
    lengths = tuple(int(x) for x in numbers.randint(0, 199, size=batch))
    return case(page_size, dtype=dtype, width=width, paths=tuple(paths), n_slots=n_slots, prefix_lens=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,width", [("bfloat16", 576), ("float16", 577), ("float32", 576), ("bfloat16", 1)])
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
def test_on_a_gpu_rows_move_as_the_reference_moves_them(dtype, width, page_size):
    a = large(page_size, dtype, width)
    want = expected(a)
    device = {n: to_gpu(v) for n, v in a.items()}
    assert kdtree.kv_compact(**device) is device["kv"]
    np.testing.assert_array_equal(bits(device["kv"]), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 64])
def test_on_a_gpu_all_layers_move_in_one_call(page_size):
    a = large(page_size, "bfloat16", 576)
    device = {n: to_gpu(v) for n, v in a.items()}
    layers = [device["kv"] + i for i in range(61)]
    want = [to_numpy(layer) for layer in layers]
    want = [expected(a | {"kv": layer}) for layer in want]
    kdtree.kv_compact(**(device | {"kv": layers}))
    for layer, moved in zip(layers, want, strict=True):
        np.testing.assert_array_equal(bits(layer), bits(moved))


@pytest.mark.gpu
@pytest.mark.parametrize("what,page_size", HOSTILE_CASES)
def test_on_a_gpu_hostile_values_move_nothing_and_do_not_fault(what, page_size):
    import torch

    a = case(page_size)
    want = expected_but_request_1(a)
    spoil(a, what)
    device = {n: to_gpu(v) for n, v in a.items()}
    kdtree.kv_compact(**device)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(bits(device["kv"]), bits(want))


@pytest.mark.gpu
def test_on_a_gpu_hostile_paths_do_not_fault():
    import torch

    for path, count, kept in BROKEN_PATHS.values():
        a = case(prefix_lens=(3,), paths=((0, 1, 2, 3),))
        a["accepted"].path[0], a["accepted"].n_accepted[0] = path, count
        want = a["kv"].copy()
        want[0, 3 : 3 + len(kept)] = a["kv"][0, [3 + s for s in kept]]
        device = {n: to_gpu(v) for n, v in a.items()}
        kdtree.kv_compact(**device)
        torch.cuda.synchronize()
        np.testing.assert_array_equal(bits(device["kv"]), bits(want))


@pytest.mark.gpu
def test_on_a_gpu_an_unaligned_cache_moves_whole():
    import torch

    a = case()
    want = expected(a)
    device = {n: to_gpu(v) for n, v in a.items()}
    memory = torch.zeros(a["kv"].size + 1, dtype=torch.bfloat16, device="cuda")
    device["kv"] = memory[1:].view(a["kv"].shape).copy_(device["kv"])
    assert device["kv"].data_ptr() % 4 == 2
    kdtree.kv_compact(**device)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(bits(device["kv"]), bits(want))


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_allocated_and_the_current_stream_is_used():
    import torch

    a = large(16, "bfloat16", 576)
    want = expected(a)
    device = {n: to_gpu(v) for n, v in a.items()}
    original = device["kv"].clone()
    kdtree.kv_compact(**device)
    device["kv"].zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        device["kv"].copy_(original)
        before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
        kdtree.kv_compact(**device)
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    side.synchronize()
    np.testing.assert_array_equal(bits(device["kv"]), bits(want))


@pytest.mark.gpu
def test_on_a_gpu_arrays_on_two_devices_are_refused():
    a = case()
    with pytest.raises(ValueError, match="accepted.path: got an array on cpu, expected cuda:0 as kv"):
        kdtree.kv_compact(**(a | {"kv": to_gpu(a["kv"])}))
