"""Reference of `topk`: the K most probable tokens of each row of logits, with their log-probabilities."""

from __future__ import annotations

import numpy as np


def log_softmax(row: np.ndarray) -> np.ndarray | None:
    """row - ln Σ exp(row) in float64, at most 0; None when `row` holds a NaN or +inf or nothing finite.

    The peak is taken off first and apart: added to the logarithm it would swallow it where logits are large.
    """
    peak = row.max()  # NaN if any entry is NaN
    if not np.isfinite(peak):
        return None
    below = row - peak
    return np.minimum(below - np.log(np.sum(np.exp(below))), 0.0)


def topk(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Top-K log-probabilities per row.

    Args:
        logits: float[..., V], any float type.
        k: K, 1 <= K <= V.

    Returns:
        (log_probs f64[..., K], token_ids i32[..., K]) in the order (logit descending, token id ascending).
        ``log_prob = logit - ln Σ exp(logits)``, never above 0. A NaN logit ranks below -inf. A row that has
        no distribution (a NaN, a +inf, or nothing but -inf in it) has NaN for every log-probability, so
        that a tree ends there instead of growing from noise.

    Raises:
        ValueError: `k` outside 1..V.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k: got {k}, expected 1..V with V = {vocab}")
    rows = logits.reshape(-1, vocab)
    log_probs = np.empty((len(rows), k), dtype=np.float64)
    token_ids = np.empty((len(rows), k), dtype=np.int32)
    for r, row in enumerate(rows.astype(np.float64)):
        normal = log_softmax(row)
        descending = np.where(np.isnan(row), np.inf, -row)  # ascending sort key; +inf = last
        order = np.lexsort((np.arange(vocab), np.isnan(row), descending))[:k]
        token_ids[r] = order
        log_probs[r] = np.nan if normal is None else normal[order]
    shape = (*logits.shape[:-1], k)
    return log_probs.reshape(shape), token_ids.reshape(shape)
