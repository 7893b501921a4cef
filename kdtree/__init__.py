"""kdtree: the kernels of a DDTree speculative-decoding step, their references and their measurement.

The name is short for *Kimi draft tree*. It has nothing to do with spatial k-d trees.

Importing this package needs NumPy alone: no GPU, no libcuda, no torch. Numba is imported by the first
call that runs a kernel.
"""

from __future__ import annotations

from kdtree.attention import kv_compact, merge_states, verify_attn
from kdtree.ops import Accepted, topk, tree_accept, tree_build
from kdtree.tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "DraftTree",
    "__version__",
    "kv_compact",
    "merge_states",
    "topk",
    "tree_accept",
    "tree_build",
    "verify_attn",
]
