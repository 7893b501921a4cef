"""Numba-CUDA kernels, one module an op. Each module lists what it ships in `variants()`."""

from __future__ import annotations

OPS = ("topk", "tree_build", "verify_attn", "merge_states", "tree_accept", "kv_compact")


def all_variants() -> list:
    """Every compiled form that the suite cross-compiles: `kdtree.kernels.launch.Variant` objects."""
    import importlib

    found = []
    for op in OPS:
        found += importlib.import_module(f"kdtree.kernels.{op}").variants()
    return found
