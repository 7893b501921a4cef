"""The suite's test cases as `.kdtr` bundles: `kdtree fixtures` makes them again, byte for byte.

Small bundles are committed; large ones are made on demand into ``fixtures/large/`` and only pinned.
MANIFEST.json holds the SHA-256 of both kinds.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtree import inputs, ref_outputs
from kdtree.bundle import SUFFIX, Bundle, load, save, to_bytes
from kdtree.spec import K26_SCALE, MODELS
from kdtree.tree import from_parents, random_tree

ROOT = Path(__file__).resolve().parent.parent / "fixtures"
MANIFEST = "MANIFEST.json"
TINY = {"kv_lora_rank": MODELS["tiny"].kv_lora_rank, "rope": MODELS["tiny"].qk_rope_head_dim}


@dataclass(frozen=True)
class Fixture:
    """One named case: `make` returns (inputs, params) from a seeded generator; `large` ones are not committed."""

    op: str
    name: str
    make: Callable[[np.random.RandomState], tuple[dict, dict]]
    large: bool = False

    @property
    def seed(self) -> int:
        """From the name, so that adding a case moves no other."""
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    def bundle(self) -> Bundle:
        """The case with its reference outputs."""
        arguments, params = self.make(np.random.RandomState(self.seed))
        given, expected = ref_outputs.solve(self.op, arguments, params)
        return Bundle(self.op, self.name, params, self.seed, given, expected)


def _draft(batch: int, depth: int, width: int, budget: int, kind: str = "smooth", duplicates: bool = False):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        rows, tokens = inputs.draft_rows(rng, batch, depth, width, kind)
        if duplicates:
            tokens = inputs.duplicate_siblings(tokens)
        arguments = {
            "log_probs": rows,
            "token_ids": tokens,
            "root_tokens": rng.randint(0, 97, size=batch).astype(np.int32),
            "prefix_lens": rng.randint(0, 4096, size=batch).astype(np.int32),
        }
        return arguments, {"B": batch, "D": depth, "K": width, "budget": budget}

    return make


def _attention(
    heads: int, n_slots: int, prefix_lens: list[int], *, part: str = "all", scale: float = K26_SCALE, **more
):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        batch = len(prefix_lens)
        arguments = inputs.attention(rng, batch=batch, heads=heads, n_slots=n_slots, prefix_lens=prefix_lens, **more)
        params = {
            "B": batch,
            "H": heads,
            "N": n_slots,
            "L": prefix_lens if len(set(prefix_lens)) > 1 else prefix_lens[0],
            "dtype": more.get("dtype", "bfloat16"),
            "page_size": more.get("page_size", 0),
            "kv_lora_rank": more.get("kv_lora_rank", 512),
            "qk_rope_head_dim": more.get("rope", 64),
            "scale": scale,
            "part": part,
            "D": arguments["tree"].max_depth,
        }
        return arguments, params

    return make


def _accept(kind: str):
    """A batch of three random trees; `kind` says what is special about them."""

    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        tree = random_tree(rng, 3, 13, max_depth=4, ragged=kind == "random")
        wanted = inputs.predictions_for(rng, tree)
        stop = None
        if kind == "no_match":
            wanted[:] = 96 - tree.token_ids.clip(0)  # random, then made sure of below
            wanted[:] = 1000
        elif kind in ("full_path", "stop_token"):
            tree = chain_with_branches()
            wanted = np.where(tree.first_child >= 0, np.take_along_axis(tree.token_ids, tree.first_child.clip(0), 1), 7)
            wanted = wanted.astype(np.int32)
            stop = int(tree.token_ids[0, 2]) if kind == "stop_token" else None
        elif kind == "duplicate_siblings":
            tree = from_parents(
                np.array([[1, 5, 5, 6, 7, 8]]), np.array([[-1, 0, 0, 1, 2, 1]]), np.array([6]), max_depth=3
            )
            wanted = np.array([[5, 7, 6, 0, 0, 9]], dtype=np.int32)
        elif kind == "cycle":
            # A grandchild link back to the root, a sibling that is its own sibling, a root that is its own child.
            child, other = tree.first_child[0, 0], tree.first_child[1, 0]
            wanted[0, 0], tree.first_child[0, child] = tree.token_ids[0, child], 0
            wanted[1, 0], tree.next_sibling[1, other] = 1000, other
            tree.first_child[2, 0] = 0
        elif kind == "bad_link":
            tree.first_child[0, 0] = 13
            tree.next_sibling[1, :] = 2**31 - 1
            tree.first_child[2, 0] = -2
            wanted[1] = 1000
        elif kind == "n_nodes":
            tree.n_nodes[:] = [0, 14, -3]
        params = {"B": tree.batch, "N": tree.n_slots, "D": tree.max_depth, "stop_token": stop}
        return {"tree": tree, "predictions": wanted}, params

    return make


def chain_with_branches():
    """Two trees whose first children make a chain of four, each slot with a decoy beside it."""
    tokens = np.array([[3, 10, 20, 30, 40, 11, 21, 31, 41]] * 2) + np.array([[0], [100]])
    parents = np.array([[-1, 0, 1, 2, 3, 0, 1, 2, 3]] * 2)
    return from_parents(tokens, parents, np.array([9, 9]), max_depth=4)


def _compact(page_size: int, dtype: str = "bfloat16"):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        lengths = np.array([0, 5, 9], dtype=np.int32)
        tree = random_tree(rng, 3, 9, prefix_lens=lengths)
        # Neighbouring rows move by one and by several: sources and destinations overlap; the last path is a no-op.
        path = np.array([[0, 2, 3, 4, 8], [0, 1, 3, 7, -1], [0, 1, 2, -1, -1]], dtype=np.int32)
        accepted = np.array([4, 3, 2], dtype=np.int32)
        kv, table = inputs.cache(rng, lengths + tree.n_nodes, 40, dtype, page_size=page_size)
        params = {"B": 3, "N": 9, "D": 4, "E": 40, "dtype": dtype, "page_size": page_size}
        tree.max_depth = 4
        arguments = {"kv": kv, "tree": tree, "path": path, "n_accepted": accepted}
        return arguments | {"prefix_lens": lengths, "page_table": table}, params

    return make


def _topk(kind: str, dtype: str, rows: int = 4, vocab: int = 97, k: int = 9):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        values = inputs.logits(rng, (rows, vocab), dtype, kind)
        return {"logits": values}, {"B": rows, "V": vocab, "K": k, "dtype": dtype}

    return make


def _merge(dtype: str):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        shape = (2, 3, 2)
        arguments = {}
        for side in "ab":
            arguments[f"out_{side}"] = inputs.round_to(rng.standard_normal((*shape, 32)), dtype)
            arguments[f"lse_{side}"] = (rng.standard_normal(shape) * 4).astype(np.float32)
        arguments["lse_a"][0, 0], arguments["lse_b"][0, 0] = -np.inf, -np.inf  # both empty
        arguments["lse_a"][0, 1] = -np.inf
        arguments["out_a"][0, 1] = np.nan  # an empty part may hold anything
        return arguments, {"rows": 12, "C": 32, "dtype": dtype}

    return make


def _captured(op: str, corpus: str):
    def make(rng: np.random.RandomState) -> tuple[dict, dict]:
        from kdtree.captured import arguments

        return arguments(op, corpus)

    return make


def all_fixtures() -> list[Fixture]:
    """Every case, small ones first within an op."""
    tiny = dict(TINY, scale=MODELS["tiny"].softmax_scale)
    found = [
        Fixture("topk", "topk_tiny", _topk("smooth", "float32")),
        Fixture("topk", "topk_bf16_ties", _topk("ties", "bfloat16")),
        Fixture("topk", "topk_fp16", _topk("smooth", "float16", vocab=41, k=41)),
        Fixture("topk", "topk_hostile", _topk("hostile", "float32")),
        Fixture("tree_build", "tree_build_singlereq", _draft(1, 7, 4, 12)),
        Fixture("tree_build", "tree_build_small_budget", _draft(5, 7, 4, 4)),
        Fixture("tree_build", "tree_build_tiny", _draft(8, 3, 3, 5)),
        Fixture("tree_build", "tree_build_underfull", _draft(5, 2, 2, 8)),
        Fixture("tree_build", "tree_build_wide", _draft(4, 7, 8, 32)),
        Fixture("tree_build", "tree_build_peaked", _draft(3, 7, 4, 16, "peaked")),
        Fixture("tree_build", "tree_build_ties", _draft(3, 4, 4, 20, "ties")),
        Fixture("tree_build", "tree_build_ties_bf16", _draft(3, 7, 8, 24, "bf16")),
        Fixture("tree_build", "tree_build_identical_rows", _draft(2, 7, 6, 30, "identical")),
        Fixture("tree_build", "tree_build_inf", _draft(4, 3, 5, 12, "inf")),
        Fixture("tree_build", "tree_build_nan", _draft(4, 3, 5, 12, "nan")),
        Fixture("tree_build", "tree_build_duplicates", _draft(2, 3, 4, 12, "smooth", True)),
        Fixture("tree_build", "tree_build_certain", _draft(2, 5, 3, 9, "certain")),
        Fixture("tree_build", "tree_build_no_budget", _draft(2, 3, 3, 0)),
        Fixture("tree_build", "tree_build_no_depth", _draft(2, 0, 3, 4)),
        Fixture("tree_build", "tree_build_smollm2_code", _captured("tree_build", "code")),
        Fixture("tree_build", "tree_build_smollm2_prose", _captured("tree_build", "prose")),
        Fixture("verify_attn", "verify_attn_tiny", _attention(2, 5, [11], **tiny)),
        Fixture("verify_attn", "verify_attn_tiny_fp16", _attention(1, 4, [6], dtype="float16", **tiny)),
        Fixture("verify_attn", "verify_attn_tiny_fp32", _attention(3, 3, [7], dtype="float32", **tiny)),
        Fixture("verify_attn", "verify_attn_tiny_ragged", _attention(2, 4, [0, 9, 3], ragged=True, **tiny)),
        Fixture(
            "verify_attn",
            "verify_attn_tiny_page1",
            _attention(1, 4, [5, 0], page_size=1, ragged=True, **tiny),
        ),
        Fixture("verify_attn", "verify_attn_tiny_page4", _attention(2, 3, [6, 9], page_size=4, **tiny)),
        Fixture("verify_attn", "verify_attn_tiny_treepart", _attention(2, 5, [4, 0], part="tree", **tiny)),
        Fixture("verify_attn", "verify_attn_h64_p128_b32", _attention(64, 33, [128]), True),
        Fixture("verify_attn", "verify_attn_h16_p2048_b16", _attention(16, 17, [2048, 2048]), True),
        Fixture(
            "verify_attn",
            "verify_attn_h8_ragged_page64",
            _attention(8, 9, [0, 1, 63, 64, 500], page_size=64, ragged=True),
            True,
        ),
        Fixture("merge_states", "merge_states_bf16", _merge("bfloat16")),
        Fixture("merge_states", "merge_states_fp32", _merge("float32")),
        *[
            Fixture("tree_accept", f"tree_accept_{kind}", _accept(kind))
            for kind in (
                "full_path",
                "no_match",
                "duplicate_siblings",
                "stop_token",
                "cycle",
                "bad_link",
                "n_nodes",
                "random",
            )
        ],
        Fixture("tree_accept", "tree_accept_smollm2_code", _captured("tree_accept", "code")),
        Fixture("tree_accept", "tree_accept_smollm2_prose", _captured("tree_accept", "prose")),
        Fixture("kv_compact", "kv_compact_overlap", _compact(0)),
        Fixture("kv_compact", "kv_compact_overlap_page1", _compact(1)),
        Fixture("kv_compact", "kv_compact_overlap_page4", _compact(4)),
        Fixture("kv_compact", "kv_compact_fp32", _compact(0, "float32")),
    ]
    return found


def by_name(name: str) -> Fixture:
    """The fixture called `name`. Raises KeyError naming it."""
    for fixture in all_fixtures():
        if fixture.name == name:
            return fixture
    raise KeyError(f"no fixture is called {name!r}")


def path_of(fixture: Fixture, root: Path = ROOT) -> Path:
    """Where the bundle lies; large ones in a folder that git ignores."""
    return (root / "large" if fixture.large else root) / f"{fixture.name}{SUFFIX}"


def read_manifest(root: Path = ROOT) -> dict[str, dict]:
    """name -> {op, params, sha256, bytes, large}."""
    return json.loads((root / MANIFEST).read_text())["bundles"]


def get(name: str, root: Path = ROOT) -> Bundle:
    """The bundle called `name`, made first if it is a large one that is not there yet.

    Raises RuntimeError if its bytes are not those that MANIFEST.json pins.
    """
    fixture = by_name(name)
    path = path_of(fixture, root)
    if fixture.large and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save(fixture.bundle(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    pinned = read_manifest(root)[name]["sha256"]
    if digest != pinned:
        raise RuntimeError(f"{path.name}: SHA-256 is {digest}, MANIFEST.json pins {pinned}; run `kdtree fixtures`")
    return load(path)


def regenerate(
    root: Path = ROOT, *, large: bool = True, check: bool = False, progress: Callable | None = None
) -> list[str]:
    """Make every bundle; write those that are committed, and MANIFEST.json.

    With `check` nothing is written. Returns the names of bundles whose bytes differ from what MANIFEST.json pins.
    """
    root.mkdir(parents=True, exist_ok=True)
    old = read_manifest(root) if (root / MANIFEST).exists() else {}
    entries, changed = {}, []
    for fixture in all_fixtures():
        if fixture.large and not large:
            entries[fixture.name] = old[fixture.name]
            continue
        bundle = fixture.bundle()
        data = to_bytes(bundle)
        digest = hashlib.sha256(data).hexdigest()
        entries[fixture.name] = {
            "op": fixture.op,
            "params": bundle.params,
            "sha256": digest,
            "bytes": len(data),
            "large": fixture.large,
        }
        if old.get(fixture.name, {}).get("sha256") != digest:
            changed.append(fixture.name)
        if not check:
            path_of(fixture, root).parent.mkdir(exist_ok=True)
            path_of(fixture, root).write_bytes(data)
        if progress:
            progress(fixture.name)
    if not check:
        text = json.dumps({"kdtr_version": "1", "bundles": entries}, indent=1, sort_keys=True)
        (root / MANIFEST).write_text(text + "\n")
    return changed


def main(argv: list[str] | None = None) -> int:
    """``kdtree fixtures``: make all bundles again. ``--check`` compares instead and exits 1 on a difference."""
    import argparse

    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="kdtree fixtures", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with MANIFEST.json")
    parser.add_argument("--small", action="store_true", help="leave the large ones out")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the bundles")
    options = parser.parse_args(argv)
    with tqdm(total=len(all_fixtures()), unit="bundle") as bar:

        def step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        changed = regenerate(options.root, large=not options.small, check=options.check, progress=step)
    for name in changed:
        print(f"{'differs' if options.check else 'changed'}: {name}")
    return int(options.check and bool(changed))
