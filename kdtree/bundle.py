"""`.kdtr` bundles: one test case a file, read alike by Python and C++.

A bundle is a safetensors file. Its metadata hold ``kdtr_version``, ``op``, ``name``, ``params`` (JSON), ``seed`` and
``generator``; tensors are named ``in.*`` and ``out.*``. The same case always gives the same bytes: keys are
sorted, nothing in it depends on the clock.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kdtree.arrays import numpy_dtype
from kdtree.tree import FIELDS, DraftTree

KDTR_VERSION = "1"
SUFFIX = ".kdtr"


class BundleError(ValueError):
    """The file is no `.kdtr` bundle of this version; the message names the file and what is wrong."""


@dataclass
class Bundle:
    """One case: `inputs` and expected `outputs` by name (without the ``in.`` / ``out.`` in front)."""

    op: str
    name: str
    params: dict
    seed: int
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    generator: str = "kdtree.fixtures"
    notes: dict[str, str] = field(default_factory=dict)

    def tree(self, prefix: str = "tree.") -> DraftTree:
        """The DraftTree among the inputs (``tree.token_ids`` …). Raises BundleError if it is not whole."""
        missing = [f for f in FIELDS if prefix + f not in self.inputs]
        if missing:
            raise BundleError(f"{self.name}: lacks in.{prefix}{missing[0]}")
        return DraftTree.from_arrays({f: self.inputs[prefix + f] for f in FIELDS}, self.params["D"])


def to_bytes(bundle: Bundle) -> bytes:
    """The file's bytes; equal bundles give equal bytes."""
    import safetensors.numpy

    tensors = {f"in.{n}": a for n, a in bundle.inputs.items()} | {f"out.{n}": a for n, a in bundle.outputs.items()}
    metadata = {
        "kdtr_version": KDTR_VERSION,
        "op": bundle.op,
        "name": bundle.name,
        "params": json.dumps(bundle.params, sort_keys=True, allow_nan=False),
        "seed": str(bundle.seed),
        "generator": bundle.generator,
    } | {f"note.{n}": text for n, text in bundle.notes.items()}
    # safetensors writes metadata in hash order: put the header in order ourselves, the data stay as they are.
    raw = safetensors.numpy.save({n: np.asarray(a, order="C") for n, a in sorted(tensors.items())}, metadata)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items()))} | dict(sorted(header.items()))
    text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def save(bundle: Bundle, path: Path | str) -> str:
    """Write the bundle; returns the SHA-256 of the file."""
    data = to_bytes(bundle)
    Path(path).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


# safetensors' own NumPy reader knows no bfloat16; its parser gives the bytes.
_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U32": "uint32",
}


def _array(entry: dict) -> np.ndarray:
    data = np.frombuffer(bytearray(entry["data"]), dtype=numpy_dtype(_DTYPES[entry["dtype"]]))
    return data.reshape(entry["shape"])


def load(path: Path | str) -> Bundle:
    """Read a bundle. Raises BundleError for a file that is none, FileNotFoundError for one that is not there."""
    import safetensors

    path = Path(path)
    data = path.read_bytes()
    try:
        tensors = {name: _array(entry) for name, entry in safetensors.deserialize(data)}
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        params, seed = json.loads(metadata["params"]), int(metadata["seed"])
        op, case, generator = metadata["op"], metadata["name"], metadata["generator"]
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise BundleError(f"{path.name}: not a .kdtr bundle ({type(error).__name__}: {error})") from error
    if metadata.get("kdtr_version") != KDTR_VERSION:
        raise BundleError(
            f"{path.name}: kdtr_version is {metadata.get('kdtr_version')!r}, this version reads {KDTR_VERSION!r}"
        )
    parts: dict[str, dict[str, np.ndarray]] = {"in": {}, "out": {}}
    for name, array in tensors.items():
        side, _, short = name.partition(".")
        if side not in parts or not short:
            raise BundleError(f"{path.name}: tensor {name!r} is named neither in.* nor out.*")
        parts[side][short] = array
    return Bundle(
        op=op,
        name=case,
        params=params,
        seed=seed,
        inputs=parts["in"],
        outputs=parts["out"],
        generator=generator,
        notes={n.removeprefix("note."): t for n, t in metadata.items() if n.startswith("note.")},
    )
