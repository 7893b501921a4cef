"""The model's tokenizer, rebuilt from its GGUF file.

SmolLM2 uses byte-level BPE. Before the merges, text is cut at every digit and then by GPT-2's pattern
(``tokenizer.ggml.pre`` is "smollm").
"""

from __future__ import annotations

from collections.abc import Sequence

from .weights import INSTALL, NotInstalled, Weights

CONTROL = 3  # tokenizer.ggml.token_type of tokens such as <|endoftext|>, never made by merges


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a token's spelling."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Vocabulary:
    """Text to token ids and back."""

    def __init__(self, weights: Weights) -> None:
        try:
            from tokenizers import AddedToken, Tokenizer
            from tokenizers.decoders import ByteLevel as ByteLevelDecoder
            from tokenizers.models import BPE
            from tokenizers.pre_tokenizers import ByteLevel, Digits
            from tokenizers.pre_tokenizers import Sequence as Steps
        except ImportError as error:
            raise NotInstalled(f"cannot import tokenizers ({error}): {INSTALL}") from None
        kind = (weights.field("tokenizer.ggml.model"), weights.field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"{weights.path.name}: tokenizer is {kind}, expected ('gpt2', 'smollm')")
        self._spelling: list[str] = weights.field("tokenizer.ggml.tokens")
        kinds = weights.field("tokenizer.ggml.token_type")
        self._control = {i for i, kind in enumerate(kinds) if kind == CONTROL}
        self._byte_of = _byte_of()
        merges = [tuple(m.split(" ", 1)) for m in weights.field("tokenizer.ggml.merges")]
        ids = {text: i for i, text in enumerate(self._spelling)}
        self._tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
        self._tokenizer.pre_tokenizer = Steps(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        self._tokenizer.decoder = ByteLevelDecoder()
        self._tokenizer.add_special_tokens(
            [AddedToken(self._spelling[i], special=True, normalized=False) for i in sorted(self._control)]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. No special tokens are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``. Bytes that are no whole UTF-8 character (cut off at an end) become ``\\xNN``."""
        pieces = (
            self._spelling[i].encode() if i in self._control else bytes(self._byte_of[c] for c in self._spelling[i])
            for i in ids
        )
        return b"".join(pieces).decode("utf-8", errors="backslashreplace")
