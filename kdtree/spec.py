"""Axis letters, model shapes and test cases: every shape in the suite comes from here.

Axes used in all docstrings and shape comments
    B  requests in the batch
    D  draft depths (block size of the drafter minus one)
    K  candidates kept per depth
    V  vocabulary size
    N  slots of a tree = budget + 1; slot 0 is the root, the last verified token
    W  32-bit words of a visibility row = ceil(N / 32)
    H  query heads on this GPU
    L  prefix length in tokens
    E  width of a latent KV row = kv_lora_rank + qk_rope_head_dim
    C  kv_lora_rank, the width of a value (and of an output) row
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

MAX_BUDGET = 1024  # largest tree any kernel builds, root excluded
MAX_DEPTH = 31  # draft depths; paths are short lists
MAX_TOPK = 512
VERIFY_ATTN_IMPLS = ("simt", "mma", "cluster", "wgmma")  # its kernels, in rising order of cleverness


@dataclass(frozen=True)
class Model:
    """The numbers of an MLA model that the kernels depend on, for one tensor-parallel rank.

    `softmax_scale` multiplies q·k; `n_heads` counts the query heads of this rank.
    """

    name: str
    n_layers: int
    n_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    vocab_size: int = 163_840
    softmax_scale: float = 1.0
    draft_depth: int = 7

    @property
    def head_dim(self) -> int:
        """Width E of a latent KV row."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def yarn_scale(qk_head_dim: int, factor: float, mscale: float = 1.0) -> float:
    """Softmax scale of DeepSeek-style MLA under yarn: qk_head_dim^-0.5 · (0.1 · mscale · ln factor + 1)²."""
    return qk_head_dim**-0.5 * (0.1 * mscale * math.log(factor) + 1.0) ** 2


K26_SCALE = yarn_scale(192, 64.0)  # 0.1446796; 576**-0.5 is the usual mistake

MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model("k2.6-tp1", 61, 64, softmax_scale=K26_SCALE),
        Model("k2.6-tp4", 61, 16, softmax_scale=K26_SCALE),
        Model("k2.6-tp8", 61, 8, softmax_scale=K26_SCALE),
        Model("deepseek-v3", 61, 128, vocab_size=129_280, softmax_scale=yarn_scale(192, 40.0)),
        # Small enough for the simulator, odd enough to catch a hard-coded 576.
        Model(
            "tiny",
            2,
            2,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            vocab_size=97,
            softmax_scale=0.16,
            draft_depth=3,
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """One test case: what op, at what shape, from what seed. `params` is JSON-able."""

    op: str
    name: str
    params: dict = field(default_factory=dict, hash=False)
    seed: int = 0

    @property
    def key(self) -> str:
        """Stable text form of the parameters, as printed in tables: ``B=4 H=64 N=33``."""
        return case_key(self.params)


def case_key(params: dict) -> str:
    """`params` as ``name=value`` words in their own order; lists as compact JSON."""

    def text(value: object) -> str:
        return json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)

    return " ".join(f"{name}={text(value)}" for name, value in params.items() if value is not None)
