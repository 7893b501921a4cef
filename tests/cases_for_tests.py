"""Small things that the op tests share: tolerances, comparisons, conversions, an independent tree enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import kdtree
from kdtree.arrays import from_numpy_to_torch, numpy_dtype, to_numpy
from kdtree.tree import FIELDS, DraftTree

# Relative L2 error by dtype of the output: half a unit in the last place, and little more. Never loosened.
TOLERANCE = {"bfloat16": 2e-3, "float16": 5e-4, "float32": 1e-5}
FLOAT_DTYPES = tuple(TOLERANCE)


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


def rounded(values: Any, dtype: str) -> np.ndarray:
    """`values` in `dtype`, bfloat16 included."""
    return np.asarray(values).astype(numpy_dtype(dtype))


def wide(array: Any) -> np.ndarray:
    """float64 on the host of NumPy or torch arrays."""
    return to_numpy(array).astype(np.float64)


def bits(array: Any) -> np.ndarray:
    """The bytes of an array: for comparisons where NaN equals itself and -0 does not equal 0."""
    return np.ascontiguousarray(to_numpy(array)).view(np.uint8)


def rel_l2(got: Any, want: Any) -> float:
    """|got - want| / |want| over the finite entries; NaN and infinities must stand in the same places."""
    got, want = wide(got), wide(want)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg="places of NaN")
    infinite = np.isinf(want)
    np.testing.assert_array_equal(np.isinf(got), infinite, err_msg="places of infinities")
    np.testing.assert_array_equal(got[infinite], want[infinite])
    finite = np.isfinite(want)
    error, size = np.linalg.norm(got[finite] - want[finite]), np.linalg.norm(want[finite])
    return float(error / size) if size > 0 else float(error)


def same_attention(got: tuple[Any, Any], want: tuple[Any, Any], dtype: str) -> None:
    """(out, lse) pairs agree within the tolerance of `dtype` and of float32."""
    assert rel_l2(got[0], want[0]) < TOLERANCE[dtype]
    assert rel_l2(got[1], want[1]) < TOLERANCE["float32"]


def same_candidates(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """(log_probs, token_ids) pairs: ids alike, log-probabilities to float32."""
    np.testing.assert_array_equal(to_numpy(got[1]), to_numpy(want[1]))
    got_lp, want_lp = wide(got[0]), wide(want[0])
    np.testing.assert_allclose(got_lp, want_lp, rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])
    assert rel_l2(got_lp, want_lp) < TOLERANCE["float32"]


def same_tree(got: DraftTree, want: DraftTree) -> None:
    """Every array alike, bit for bit."""
    for name, dtype in FIELDS.items():
        a, b = to_numpy(getattr(got, name)), to_numpy(getattr(want, name))
        assert a.dtype == b.dtype == dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert got.max_depth == want.max_depth


def same_accepted(got: kdtree.Accepted, want: kdtree.Accepted) -> None:
    for name in vars(want):
        np.testing.assert_array_equal(to_numpy(getattr(got, name)), to_numpy(getattr(want, name)), err_msg=name)


def to_torch(value: Any) -> Any:
    """Torch CPU tensors on copies of NumPy arrays; trees and lists as a whole, None stays None."""
    if isinstance(value, DraftTree):
        return value.map(to_torch)
    if isinstance(value, kdtree.Accepted):
        return kdtree.Accepted(**{n: to_torch(a) for n, a in vars(value).items()})
    if isinstance(value, list | tuple):
        return type(value)(to_torch(v) for v in value)
    return None if value is None else from_numpy_to_torch(np.array(value, order="C"))


def to_gpu(value: Any) -> Any:
    """The same on the GPU."""
    if isinstance(value, DraftTree):
        return value.map(to_gpu)
    if isinstance(value, kdtree.Accepted):
        return kdtree.Accepted(**{n: to_gpu(a) for n, a in vars(value).items()})
    if isinstance(value, list | tuple):
        return type(value)(to_gpu(v) for v in value)
    return None if value is None else to_torch(value).cuda()


class DlpackOnly:
    """An array whose only interface is DLPack."""

    def __init__(self, array: Any):
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def finite_width(row: np.ndarray) -> int:
    """Candidates in front of the first one that is not finite."""
    return next((r for r, value in enumerate(row) if not math.isfinite(value)), len(row))


def all_rank_paths(log_probs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
    """Every rank path of one request [D,K] with its score, best first: by enumeration and one sort."""
    widths = [finite_width(row) for row in log_probs]
    found = []
    for level in range(1, len(log_probs) + 1):
        for path in itertools.product(*[range(w) for w in widths[:level]]):
            score = math.fsum(float(log_probs[d][r]) for d, r in enumerate(path))
            found.append((score, path))
    return sorted(found, key=lambda entry: (-entry[0], entry[1]))


def tree_of_paths(
    paths: list[tuple[float, tuple[int, ...]]], tokens: np.ndarray, n_slots: int, *, root: int, prefix: int
) -> dict[str, np.ndarray]:
    """The arrays of one request's tree, each from its definition: no links are followed, no parents walked."""
    slots = [(0.0, ()), *paths][:n_slots]
    where = {path: i for i, (_, path) in enumerate(slots)}
    tree = {n: a[0] for n, a in DraftTree.empty(1, n_slots, 0).arrays().items()}
    tree["n_nodes"] = np.int32(len(slots))
    tree["positions"][:] = prefix
    for i, (score, path) in enumerate(slots):
        tree["token_ids"][i] = tokens[len(path) - 1][path[-1]] if path else root
        tree["parents"][i] = where[path[:-1]] if path else -1
        tree["depths"][i] = len(path)
        tree["scores"][i] = score
        tree["positions"][i] = prefix + len(path)
        children = [j for p, j in where.items() if p and p[:-1] == path]
        tree["first_child"][i] = min(children, default=-1)
        later = [j for p, j in where.items() if p and path and p[:-1] == path[:-1] and j > i]
        tree["next_sibling"][i] = min(later, default=-1)
        for j in (where[path[:d]] for d in range(len(path) + 1)):
            tree["visibility"][i, j // 32] |= np.uint32(1 << (j % 32))
    return tree
