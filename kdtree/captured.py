"""Drafts and predictions captured from a real language model by ``scripts/capture_smollm2.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kdtree.ref.tree_build import tree_build

SOURCES = Path(__file__).resolve().parent.parent / "fixtures" / "sources"
CORPORA = ("code", "prose")
BUDGET = 32


def read(corpus: str) -> tuple[dict[str, np.ndarray], dict]:
    """(tensors, what the capture says about itself) of "code" or "prose".

    Tensors: log_probs f32[8,7,32], token_ids i32[8,7,32], root_tokens and prefix_lens i32[8], predictions i32[8,33].
    """
    from safetensors import safe_open

    if corpus not in CORPORA:
        raise ValueError(f"corpus: got {corpus!r}, expected one of {CORPORA}")
    with safe_open(SOURCES / f"smollm2_{corpus}.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return tensors, json.loads(file.metadata()["capture"])


def words(corpus: str) -> dict[int, str]:
    """Token id -> text, for every token that the capture mentions."""
    tensors, _ = read(corpus)
    held = json.loads(tensors["texts_json"].tobytes().decode())
    return {int(token): text for token, text in held.get("tokens", held).items()}


def arguments(op: str, corpus: str) -> tuple[dict, dict]:
    """(arguments, params) of the `tree_build` or `tree_accept` bundle of a corpus, for a budget of 32."""
    tensors, about = read(corpus)
    given = {n: tensors[n] for n in ("log_probs", "token_ids", "root_tokens", "prefix_lens")}
    batch, depth, width = given["log_probs"].shape
    params = {"B": batch, "D": depth, "K": width, "budget": BUDGET, "corpus": corpus, "model": about["model"]}
    if op == "tree_build":
        return given, params
    tree = tree_build(
        given["log_probs"],
        given["token_ids"],
        BUDGET,
        root_tokens=given["root_tokens"],
        prefix_lens=given["prefix_lens"],
    )
    if not (tree.token_ids == tensors["tree_token_ids"]).all():
        raise RuntimeError(f"smollm2_{corpus}: the captured tree is not the one that its draft gives; capture again")
    return {"tree": tree, "predictions": tensors["predictions"]}, params | {
        "N": BUDGET + 1,
        "stop_token": None,
    }
