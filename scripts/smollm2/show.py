"""A capture as text: each place's context, its tree, and the path that the target accepts. Needs no model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from . import tree


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, Any]]:
    """Tensors (texts_json left out), description and texts of a capture."""
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        about = json.loads(file.metadata()["capture"])
    return tensors, about, json.loads(tensors.pop("texts_json").tobytes())


def lines(path: Path) -> Iterator[str]:
    """Lines to print. A star marks an accepted node; behind an arrow stands the target's prediction."""
    tensors, about, texts = read(path)
    yield f"{path.name}: {about['model']}; drafter: {about['drafter']}"
    for b, place in enumerate(about["places"]):
        tokens, parents, predictions = (
            tensors[name][b].tolist() for name in ("tree_token_ids", "tree_parents", "predictions")
        )
        kept = tree.accept(tokens, parents, predictions)
        yield ""
        yield f"{place}: accepted {len(kept) - 1}, prefix {tensors['prefix_lens'][b]} tokens"
        yield f"  context ...{texts['tails'][b]!r}"
        yield f"  drafter   {texts['drafts'][b]!r}"
        yield from _branch(0, 0, tokens, parents, predictions, kept, texts["tokens"])


def _branch(
    node: int,
    depth: int,
    tokens: list[int],
    parents: list[int],
    predictions: list[int],
    kept: list[int],
    text: dict[str, str],
) -> Iterator[str]:
    mark = "*" if node in kept else " "
    indent = "  " * depth
    yield f"  {mark} {node:2d} {indent}{text[str(tokens[node])]!r} -> {text[str(predictions[node])]!r}"
    for child, parent in enumerate(parents):
        if parent == node:
            yield from _branch(child, depth + 1, tokens, parents, predictions, kept, text)
