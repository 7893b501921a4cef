"""The forward pass: Llama's architecture in NumPy.

Weights are float32, arithmetic is float64: results then hardly depend on the BLAS library, its number of
threads or the CPU's vector width, so that a capture can be repeated bit for bit on other machines too.

Several sequences go through a layer at once, their tokens side by side, so that each weight is touched
once per layer; only attention looks at one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .weights import Weights


@dataclass
class Cache:
    """Rotated keys and values of the tokens seen so far, one [S, n_kv_heads, head_dim] pair per layer."""

    layers: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def extend(self, layer: int, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append rows to a layer and return all of its keys and values."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = (np.concatenate([old_keys, keys]), np.concatenate([old_values, values]))
        return self.layers[layer]


@dataclass
class Segment:
    """New tokens of one sequence.

    Every token sees all that is in the cache, and of the new tokens those that ``visible`` names.
    """

    token_ids: np.ndarray  # [T] int
    positions: np.ndarray  # [T] int
    visible: np.ndarray  # [T, T] bool: row i sees column j
    cache: Cache = field(default_factory=Cache)

    @classmethod
    def causal(cls, token_ids: Sequence[int], start: int = 0, cache: Cache | None = None) -> Segment:
        """Tokens that follow one another, the first at position ``start``."""
        n = len(token_ids)
        return cls(
            np.asarray(token_ids, np.int64),
            np.arange(start, start + n),
            np.tri(n, dtype=bool),
            Cache() if cache is None else cache,
        )


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of x [T, heads, head_dim].

    GGUF stores the rows of Q and K so that a rotated pair is two neighbours (2i, 2i+1), unlike the
    original checkpoint, where it is (i, i + head_dim/2).
    """
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-np.arange(half) / half)  # [T, 1, half]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return turned


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Attention of q [T, H, d] over k, v [S, G, d]; visible [T, T] speaks of the last T of the S rows."""
    n_new, n_heads, dim = q.shape
    group = n_heads // k.shape[1]  # query heads that share a key head
    hidden_from = np.zeros((n_new, k.shape[0]))
    hidden_from[:, k.shape[0] - n_new :][~visible] = -np.inf
    out = np.empty_like(q)
    for head in range(n_heads):
        scores = q[:, head] @ k[:, head // group].T * dim**-0.5 + hidden_from
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out


class Model:
    """SmolLM2, or any Llama with tied embeddings and few enough parameters to wait for."""

    def __init__(self, weights: Weights) -> None:
        if weights.has("output.weight"):
            raise ValueError("the model has an output matrix of its own; only tied embeddings are supported")
        self.config = weights.config
        self._weights = weights

    def _apply(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights.get(name).T.astype(np.float64)

    def hidden(
        self, segments: Sequence[Segment], n_layers: int, tick: Callable[[], object] = lambda: None
    ) -> list[np.ndarray]:
        """States [T, hidden] float64 after ``n_layers`` layers and the final norm, one array per segment.

        The segments' caches grow by their tokens. ``tick`` is called after each layer. With fewer layers
        than the model has, this is an early exit.
        """
        c, weights = self.config, self._weights
        if not 1 <= n_layers <= c.n_layers:
            raise ValueError(f"n_layers: got {n_layers}, expected 1 to {c.n_layers}")
        cuts = np.cumsum([len(s.token_ids) for s in segments])[:-1]
        positions = np.concatenate([s.positions for s in segments])
        ids = np.concatenate([s.token_ids for s in segments])
        x = weights.get("token_embd.weight")[ids].astype(np.float64)
        for layer in range(n_layers):
            at = f"blk.{layer}"
            y = _rms_norm(x, weights.get(f"{at}.attn_norm.weight"), c.rms_eps)
            q = self._apply(y, f"{at}.attn_q.weight").reshape(-1, c.n_heads, c.head_dim)
            k = self._apply(y, f"{at}.attn_k.weight").reshape(-1, c.n_kv_heads, c.head_dim)
            v = self._apply(y, f"{at}.attn_v.weight").reshape(-1, c.n_kv_heads, c.head_dim)
            q, k = _rotate(q, positions, c.rope_theta), _rotate(k, positions, c.rope_theta)
            parts = zip(segments, np.split(q, cuts), np.split(k, cuts), np.split(v, cuts), strict=True)
            mixed = [_attend(sq, *s.cache.extend(layer, sk, sv), s.visible) for s, sq, sk, sv in parts]
            x = x + self._apply(np.concatenate(mixed).reshape(len(x), -1), f"{at}.attn_output.weight")
            y = _rms_norm(x, weights.get(f"{at}.ffn_norm.weight"), c.rms_eps)
            gate = self._apply(y, f"{at}.ffn_gate.weight")
            up = self._apply(y, f"{at}.ffn_up.weight")
            x = x + self._apply(gate / (1 + np.exp(-gate)) * up, f"{at}.ffn_down.weight")
            tick()
        return np.split(_rms_norm(x, weights.get("output_norm.weight"), c.rms_eps), cuts)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits [..., vocab] float64 of states [..., hidden]."""
        return self._apply(hidden, "token_embd.weight")

    def greedy(self, token_ids: Sequence[int], n_new: int) -> list[int]:
        """The ``n_new`` tokens that follow, each the first maximum."""
        segment, made = Segment.causal(token_ids), []
        for _ in range(n_new):
            (states,) = self.hidden([segment], self.config.n_layers)
            made.append(int(np.argmax(self.logits(states[-1]))))
            start = int(segment.positions[-1]) + 1
            segment = Segment.causal(made[-1:], start, segment.cache)
        return made
