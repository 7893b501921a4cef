"""DraftTree: the arrays of a batch of draft trees, and small pure helpers on them.

Slots are numbered so that ``parent < child``; slot 0 is the root. Everything has a fixed shape, so that a
CUDA graph captured once serves every tree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

UNUSED = -1

# Array name -> dtype name, in the order of the dataclass. `visibility` has the extra axis W.
FIELDS: dict[str, str] = {
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


def visibility_words(n_slots: int) -> int:
    """W: 32-bit words that hold one bit per slot."""
    return (n_slots + 31) // 32


def field_shapes(batch: int, n_slots: int) -> dict[str, tuple[int, ...]]:
    """Shape of each array of a DraftTree of `batch` trees with `n_slots` slots."""
    shapes: dict[str, tuple[int, ...]] = {name: (batch, n_slots) for name in FIELDS}
    shapes["n_nodes"] = (batch,)
    shapes["visibility"] = (batch, n_slots, visibility_words(n_slots))
    return shapes


@dataclass
class DraftTree:
    """A batch of draft trees.

    Attributes (all arrays of one kind: NumPy, torch or CuPy):
        token_ids     i32[B,N]    token of a slot, -1 in unused slots
        parents       i32[B,N]    slot of the parent; -1 for the root and for unused slots
        depths        i32[B,N]    root 0; 0 in unused slots
        scores        f64[B,N]    path log-probability, root 0; -inf in unused slots
        n_nodes       i32[B]      used slots, root included
        visibility    u32[B,N,W]  bit j of row i set when j is i or an ancestor of i; little-endian; 0 in unused rows
        first_child   i32[B,N]    -1 none
        next_sibling  i32[B,N]    -1 none
        positions     i64[B,N]    prefix length + depth (of an unused slot: prefix length, always a valid position)
        max_depth     int         D: the longest path from the root that can occur
    """

    token_ids: Any
    parents: Any
    depths: Any
    scores: Any
    n_nodes: Any
    visibility: Any
    first_child: Any
    next_sibling: Any
    positions: Any
    max_depth: int

    @property
    def batch(self) -> int:
        """B."""
        return int(self.token_ids.shape[0])

    @property
    def n_slots(self) -> int:
        """N = budget + 1."""
        return int(self.token_ids.shape[1])

    def arrays(self) -> dict[str, Any]:
        """The nine arrays by name, in field order."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_depth"}

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], max_depth: int) -> DraftTree:
        """A tree of `arrays` (as `arrays()` gives them)."""
        missing = FIELDS.keys() - arrays.keys()
        if missing:
            raise ValueError(f"arrays: lacks {sorted(missing)}, expected {list(FIELDS)}")
        return cls(**{name: arrays[name] for name in FIELDS}, max_depth=int(max_depth))

    @classmethod
    def empty(cls, batch: int, n_slots: int, max_depth: int) -> DraftTree:
        """NumPy arrays of the right shapes, every slot unused and `n_nodes` 0."""
        arrays = {n: np.zeros(s, dtype=FIELDS[n]) for n, s in field_shapes(batch, n_slots).items()}
        for name in ("token_ids", "parents", "first_child", "next_sibling"):
            arrays[name].fill(UNUSED)
        arrays["scores"].fill(-np.inf)
        return cls.from_arrays(arrays, max_depth)

    def map(self, convert: Any) -> DraftTree:
        """The same tree with `convert` applied to each array (for example ``torch.Tensor.cuda``)."""
        return DraftTree.from_arrays({n: convert(a) for n, a in self.arrays().items()}, self.max_depth)

    def numpy(self) -> DraftTree:
        """A copy on the host."""
        from kdtree.arrays import to_numpy

        return self.map(to_numpy)


def from_parents(
    token_ids: np.ndarray,  # int[B,N], -1 in unused slots
    parents: np.ndarray,  # int[B,N], -1 for roots and unused slots
    n_nodes: np.ndarray,  # int[B]
    *,
    scores: np.ndarray | None = None,  # f64[B,N]
    prefix_lens: np.ndarray | None = None,  # int[B]
    max_depth: int | None = None,
) -> DraftTree:
    """Fill the derived arrays (depths, visibility, links, positions) of trees given by their parents.

    `parents[b, i]` must lie in ``0 .. i-1`` for every used slot i > 0. Raises ValueError where it does not.
    The plain loops are the specification of the derived arrays.
    """
    token_ids = np.asarray(token_ids, dtype=np.int32)
    batch, n_slots = token_ids.shape
    tree = DraftTree.empty(batch, n_slots, 0)
    tree.token_ids[:] = token_ids
    for b in range(batch):
        used = int(n_nodes[b])
        if not 1 <= used <= n_slots:
            raise ValueError(f"n_nodes: request {b} has {used}, expected 1..{n_slots}")
        prefix = 0 if prefix_lens is None else int(prefix_lens[b])
        tree.n_nodes[b] = used
        tree.token_ids[b, used:] = UNUSED
        tree.positions[b, :] = prefix
        for i in range(used):
            parent = int(parents[b][i])
            if i > 0:
                if not 0 <= parent < i:
                    raise ValueError(f"parents: request {b} slot {i} has parent {parent}, expected 0..{i - 1}")
                tree.parents[b, i] = parent
                tree.depths[b, i] = tree.depths[b, parent] + 1
                tree.visibility[b, i] = tree.visibility[b, parent]
                append_child(tree, b, parent, i)
            tree.visibility[b, i, i // 32] |= np.uint32(1 << (i % 32))
            tree.positions[b, i] = prefix + int(tree.depths[b, i])
            tree.scores[b, i] = 0.0 if scores is None else scores[b][i]
    tree.max_depth = int(tree.depths.max()) if max_depth is None else int(max_depth)
    return tree


def append_child(tree: DraftTree, b: int, parent: int, child: int) -> None:
    """Link `child` behind the last child of `parent`: children stand in slot order."""
    last = int(tree.first_child[b, parent])
    if last < 0:
        tree.first_child[b, parent] = child
        return
    while tree.next_sibling[b, last] >= 0:
        last = int(tree.next_sibling[b, last])
    tree.next_sibling[b, last] = child


def dense_visibility(tree: DraftTree) -> np.ndarray:
    """bool[B,N,N] on the host: [b, i, j] is True when slot i sees slot j."""
    words = np.asarray(tree.numpy().visibility)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bits.reshape(*words.shape[:2], -1)[..., : tree.n_slots].astype(bool)


def random_tree(
    rng: np.random.RandomState,
    batch: int,
    n_slots: int,
    *,
    ragged: bool = False,
    prefix_lens: np.ndarray | None = None,
    max_depth: int | None = None,
    vocab: int = 97,
) -> DraftTree:
    """Random well-formed trees: each slot hangs under a random earlier slot of depth below `max_depth`.

    With `ragged` the first tree is full and the others hold between 1 and `n_slots` nodes. Tokens are random, so
    siblings may repeat one.
    """
    tokens = rng.randint(0, vocab, size=(batch, n_slots)).astype(np.int32)
    parents = np.full((batch, n_slots), UNUSED, dtype=np.int32)
    n_nodes = np.full(batch, n_slots, dtype=np.int32)
    for b in range(batch):
        if ragged and b > 0:
            n_nodes[b] = rng.randint(1, n_slots + 1)
        depth = [0]
        for i in range(1, n_nodes[b]):
            choices = [j for j in range(i) if max_depth is None or depth[j] < max_depth]
            parents[b, i] = choices[rng.randint(0, len(choices))]
            depth.append(depth[parents[b, i]] + 1)
    return from_parents(tokens, parents, n_nodes, prefix_lens=prefix_lens, max_depth=max_depth)
