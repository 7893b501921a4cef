"""One corpus in, one capture out: draft distributions, their trees, and the target's predictions.

The target is the whole model on the whole context. The drafter is the same model that sees only the last
``DRAFTER_CONTEXT`` tokens: right often enough to be useful, wrong often enough to be interesting. It
decodes greedily, and the distribution at depth d is its own after its first d - 1 greedy tokens. A block
drafter, which predicts all depths at once, would not know those tokens; that is as near as an ordinary
language model comes to one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import tree
from .model import Cache, Model, Segment
from .vocabulary import Vocabulary

CORPORA = {"prose": "prose.txt", "code": "code.py.txt"}
CONTEXTS = ((64, 112), (80, 128), (96, 144), (72, 160))  # tokens of context, two places per passage
DEPTHS = 7  # D: the drafter of Kimi K2.6 predicts blocks of 8, of which one is known
CANDIDATES = 32  # K
BUDGET = 32  # tree nodes without the root, so N = 33
DRAFTER_CONTEXT = 32  # tokens; given 16 it is accepted less, given all it would draft the target's own words
TAIL = 24  # tokens of each context that are kept as text

DRAFTER = (
    f"the same model given only the last {DRAFTER_CONTEXT} tokens of the context, decoding greedily; "
    "depth d is its distribution after its first d - 1 greedy tokens"
)
TARGET = "the whole model given the whole context; predictions are the first maximum after each node's path"


def passages(text: str) -> dict[str, str]:
    """Passages of a corpus by name; a line ``# %% name`` opens one, what stands before the first is a note.

    Raises ValueError for two passages of one name.
    """
    parts = re.split(r"^# %% (\w+)\n", text, flags=re.MULTILINE)
    if len(set(parts[1::2])) < len(parts[1::2]):
        raise ValueError(f"corpus: passage names {parts[1::2]} are not distinct")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def contexts(text: str, vocabulary: Vocabulary) -> dict[str, list[int]]:
    """Token ids of the context of each place, by the place's name. Raises ValueError for a short passage."""
    found = passages(text)
    if len(found) != len(CONTEXTS):
        raise ValueError(f"corpus: got {len(found)} passages, expected {len(CONTEXTS)}")
    places = {}
    for (name, body), lengths in zip(found.items(), CONTEXTS, strict=True):
        ids = vocabulary.encode(body)
        for n in lengths:
            if n > len(ids):
                raise ValueError(f"passage {name}: {len(ids)} tokens, expected at least {n}")
            places[f"{name}@{n}"] = ids[:n]
    return places


def top(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Top-k log-probabilities f32[k] and token ids i32[k] of logits f64[V].

    The log-softmax is float64, rounded once. Order: value as rounded, descending, then token id.
    """
    shifted = logits - logits.max()
    log_probs = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    order = np.lexsort((np.arange(len(log_probs)), -log_probs))[:k]
    return log_probs[order], order.astype(np.int32)


def draft(model: Model, places: list[list[int]], tick: Callable[[], object]) -> tuple[np.ndarray, np.ndarray]:
    """The drafter's log-probabilities f32[B, D, K] and token ids i32[B, D, K]."""
    shape = (len(places), DEPTHS, CANDIDATES)
    log_probs, token_ids = np.empty(shape, np.float32), np.empty(shape, np.int32)
    segments = [Segment.causal(ids[-DRAFTER_CONTEXT:]) for ids in places]
    for depth in range(DEPTHS):
        states = model.hidden(segments, model.config.n_layers, tick)
        logits = model.logits(np.stack([rows[-1] for rows in states]))
        for b, segment in enumerate(segments):
            log_probs[b, depth], token_ids[b, depth] = top(logits[b], CANDIDATES)
            following = int(segment.positions[-1]) + 1
            segments[b] = Segment.causal([int(token_ids[b, depth, 0])], following, segment.cache)
    return log_probs, token_ids


def predict(
    model: Model,
    places: list[list[int]],
    tokens: np.ndarray,
    parents: np.ndarray,
    tick: Callable[[], object],
) -> np.ndarray:
    """The target's predictions i32[B, N] after each node of trees tokens, parents i32[B, N]; -1 if unused.

    One pass for the prefixes, one for all nodes of all trees, each node seeing its ancestors.
    """
    caches = [Cache() for _ in places]
    prefixes = [Segment.causal(ids[:-1], 0, cache) for ids, cache in zip(places, caches, strict=True)]
    model.hidden(prefixes, model.config.n_layers, tick)
    used = [int((row >= 0).sum()) for row in tokens]
    segments = []
    for b, n in enumerate(used):
        above = parents[b, :n].tolist()
        positions = len(places[b]) - 1 + np.array(tree.depths(above), np.int64)
        segments.append(Segment(tokens[b, :n].astype(np.int64), positions, tree.visibility(above), caches[b]))
    states = model.hidden(segments, model.config.n_layers, tick)
    predictions = np.full(tokens.shape, -1, np.int32)
    for b, n in enumerate(used):
        predictions[b, :n] = model.logits(states[b]).argmax(axis=-1)  # NumPy's argmax is the first maximum
    return predictions


def n_ticks(model: Model) -> int:
    """How often ``capture`` calls ``tick``."""
    return (DEPTHS + 2) * model.config.n_layers


def capture(
    model: Model, vocabulary: Vocabulary, corpus: Path, tick: Callable[[], object] = lambda: None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and description of one corpus.

    Tensors: log_probs f32[B, D, K] and token_ids i32[B, D, K] of the drafter; root_tokens i32[B], each the
    last token of its context; prefix_lens i32[B], the tokens before the root; tree_token_ids,
    tree_parents and predictions i32[B, N]; texts_json u8[...], UTF-8 JSON of the text of every token id
    that occurs ("tokens"), and per place the end of the context ("tails") and the drafter's greedy
    continuation ("drafts").
    """
    text = corpus.read_text(encoding="utf-8")
    names, places = zip(*contexts(text, vocabulary).items(), strict=True)
    log_probs, token_ids = draft(model, list(places), tick)
    roots = np.array([ids[-1] for ids in places], np.int32)
    trees = [
        tree.best_first(row, ids, BUDGET, int(root)) for row, ids, root in zip(log_probs, token_ids, roots, strict=True)
    ]
    tokens, parents = np.stack([t for t, _ in trees]), np.stack([p for _, p in trees])
    predictions = predict(model, list(places), tokens, parents, tick)
    accepted = [len(tree.accept(*row)) - 1 for row in zip(tokens, parents, predictions, strict=True)]
    ids = np.unique(np.concatenate([a.ravel() for a in (token_ids, roots, tokens, predictions)]))
    texts = {
        "tokens": {str(i): vocabulary.decode([i]) for i in ids.tolist() if i >= 0},
        "tails": [vocabulary.decode(ids[-TAIL:]) for ids in places],
        "drafts": [vocabulary.decode(row) for row in token_ids[:, :, 0].tolist()],
    }
    tensors = {
        "log_probs": log_probs,
        "token_ids": token_ids,
        "root_tokens": roots,
        "prefix_lens": np.array([len(ids) - 1 for ids in places], np.int32),
        "tree_token_ids": tokens,
        "tree_parents": parents,
        "predictions": predictions,
        "texts_json": np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8),
    }
    about = {
        "drafter": DRAFTER,
        "target": TARGET,
        "budget": BUDGET,
        "places": names,
        "accepted": accepted,
        "text": corpus.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return tensors, about
