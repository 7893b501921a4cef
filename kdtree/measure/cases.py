"""What is checked: the correctness cases of each op family, by profile.

Profiles: "tiny" for the simulator, "quick" for a first look on a GPU, "full" for a host's report.
A case is cheap to list; its inputs are made when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from kdtree import fixtures, inputs, ref_outputs
from kdtree.kernels import OPS
from kdtree.measure import attention_cases, impls, invoke
from kdtree.measure.compare import Comparison, compare
from kdtree.spec import K26_SCALE
from kdtree.tree import FIELDS, DraftTree, random_tree

PROFILES = ("tiny", "quick", "full")
FAMILIES = OPS


@dataclass(frozen=True)
class CheckCase:
    """One correctness case. `run` gives its Comparison; CUDA errors are raised as `CudaFault`."""

    op: str
    name: str
    params: dict
    seed: int
    run: Callable[[], Comparison] = field(compare=False, repr=False)
    impl: str = "numba:simt"


def _attention_kernels(profile: str) -> Iterator[CheckCase]:
    """Cases of each tensor-core kernel of verify_attn; skipped with the reason where it cannot run."""
    for impl, name, params, run in attention_cases.kernels(profile):
        seed = seed_of("verify_attn", name)
        yield CheckCase("verify_attn", name, params, seed, partial(run, seed), impls.label(impl))


def family(op: str, profile: str) -> list[CheckCase]:
    """The cases of one family. Raises ValueError for an unknown op or profile."""
    if op not in FAMILIES or profile not in PROFILES:
        raise ValueError(f"family: got op {op!r}, profile {profile!r}; expected one of {FAMILIES} and {PROFILES}")
    found = list(bundle_cases(op, large=profile != "tiny"))
    if profile != "tiny":
        found += {
            "topk": random_topk,
            "tree_build": random_trees,
            "verify_attn": random_attention,
            "tree_accept": random_walks,
            "kv_compact": random_moves,
            "merge_states": random_merges,
        }[op](profile)
    if op == "verify_attn":
        found = [replace(case, impl=impls.label(None)) for case in found]  # they ask for no kernel by name
        found += _attention_kernels(profile)
    return found


def dtype_of(arguments: dict[str, Any]) -> str | None:
    """The dtype that decides the tolerance: that of q, logits or out_a."""
    for name in ("q", "out_a"):
        if name in arguments:
            return invoke.dtype_name(arguments[name])
    return "float32" if "logits" in arguments else None


def check(op: str, make: Callable[[], tuple[dict, dict]], want: dict[str, Any] | None = None) -> Comparison:
    """Run `op` on what `make` gives, (arguments, params), and compare with `want` or else with the reference."""
    arguments, params = make()
    if want is None:
        want = ref_outputs.reference(op, arguments, params)
    got, stray = invoke.run_guarded(op, arguments, params)
    outcome = compare(got, want, dtype_of(arguments))
    return replace(outcome, ok=False, reason=stray) if stray else outcome


# --- bundles ----------------------------------------------------------------------------------------------------


def bundle_cases(op: str, *, large: bool) -> Iterator[CheckCase]:
    """Every bundle of `op`; the large ones only where `large`."""
    manifest = fixtures.read_manifest()
    for fixture in fixtures.all_fixtures():
        if fixture.op == op and (large or not fixture.large):
            params = {"bundle": fixture.name} | manifest[fixture.name]["params"]
            yield CheckCase(op, fixture.name, params, fixture.seed, partial(check_bundle, fixture.name))


def arguments_of(bundle: Any) -> dict[str, Any]:
    """A bundle's inputs as arguments of the op: ``tree.*`` become a DraftTree."""
    given = {n: a for n, a in bundle.inputs.items() if not n.startswith("tree.")}
    if any(n.startswith("tree.") for n in bundle.inputs):
        given["tree"] = DraftTree.from_arrays({f: bundle.inputs[f"tree.{f}"] for f in FIELDS}, bundle.params["D"])
    return given


def check_bundle(name: str, **change: Any) -> Comparison:
    """Run the bundle called `name`, its parameters changed by `change`, and compare with the outputs stored in it."""
    bundle = fixtures.get(name)
    return check(bundle.op, lambda: (arguments_of(bundle), bundle.params | change), bundle.outputs)


# --- random cases for a GPU ---------------------------------------------------------------------------------------


def seeded(op: str, name: str, params: dict, make: Callable[..., tuple[dict, dict]], **options: Any) -> CheckCase:
    """A case whose inputs come from a seed made of its name."""
    seed = seed_of(op, name)
    run = partial(check_seeded, op, seed, partial(make, params), **options)
    return CheckCase(op, name, params, seed, run)


def seed_of(op: str, name: str) -> int:
    """The seed of a case: it stays when cases are added around it."""
    import zlib

    return zlib.crc32(f"{op}/{name}".encode()) & 0x7FFFFFFF


def check_seeded(op: str, seed: int, make: Callable[..., tuple[dict, dict]]) -> Comparison:
    """`check` on inputs drawn from `seed`."""
    return check(op, lambda: make(np.random.RandomState(seed)))


def random_topk(profile: str) -> Iterator[CheckCase]:
    """All dtypes; K2.6's vocabulary and odd ones; ties and broken rows."""
    shapes = [(1, 1, 1), (3, 37, 37), (7, 1009, 199), (7, 32_768, 64)]
    if profile == "full":
        shapes += [(7, 163_840, k) for k in (8, 64, 512)] + [(56, 163_840, 64)]

    def make(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
        return {"logits": inputs.logits(rng, (p["B"], p["V"]), p["dtype"], p["kind"])}, p

    for rows, vocab, k in shapes:
        for dtype in ("bfloat16", "float16", "float32"):
            for kind in ("smooth", "ties", "hostile"):
                params = {"B": rows, "V": vocab, "K": k, "dtype": dtype, "kind": kind}
                yield seeded("topk", f"random_{kind}_{dtype}_V{vocab}_K{k}_B{rows}", params, make)


def random_trees(profile: str) -> Iterator[CheckCase]:
    """1000 random trees a size in the full profile, 50 in the quick one, over all kinds of rows."""
    count = 1000 if profile == "full" else 50

    def make(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
        share = -(-p["trees"] // len(inputs.DRAFT_KINDS))
        drafts = [inputs.draft_rows(rng, share, p["D"], p["K"], kind) for kind in inputs.DRAFT_KINDS]
        arguments = {
            "log_probs": np.concatenate([d[0] for d in drafts])[: p["trees"]],
            "token_ids": np.concatenate([d[1] for d in drafts])[: p["trees"]],
            "root_tokens": rng.randint(0, 1000, size=p["trees"]).astype(np.int32),
            "prefix_lens": rng.randint(0, 100_000, size=p["trees"]).astype(np.int32),
        }
        return arguments, p

    for depth, width, budget in [
        (7, 4, 8),
        (7, 8, 16),
        (7, 16, 32),
        (7, 32, 64),
        (15, 16, 64),
        (7, 64, 128),
        (7, 64, 256),
        (1, 199, 37),
        (7, 128, 512),
        (15, 64, 1024),
    ]:
        params = {"trees": count, "D": depth, "K": width, "budget": budget}
        yield seeded("tree_build", f"random_D{depth}_K{width}_n{budget}", params, make)


def attention_arguments(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
    """Arguments of a K2.6-shaped `verify_attn` case with random ragged trees."""
    lengths = p["L"] if isinstance(p["L"], list) else [p["L"]] * p["B"]
    arguments = inputs.attention(
        rng,
        batch=p["B"],
        heads=p["H"],
        n_slots=p["N"],
        prefix_lens=lengths,
        dtype=p["dtype"],
        page_size=p["page_size"],
        ragged=p.get("ragged", False),
    )
    return arguments, p


def check_attention(op: str, seed: int, make: Callable[..., tuple[dict, dict]]) -> Comparison:
    """Against the float64 twin on the GPU: the loops of the reference would take minutes."""
    from kdtree.measure import twin

    arguments, params = make(np.random.RandomState(seed))
    moved = invoke.to_device(arguments)
    want = twin.verify_attn(moved, params)
    got, stray = invoke.run_guarded(op, arguments, params, moved=moved)
    again, _ = invoke.run_guarded(op, arguments, params, moved=moved)
    outcome = compare(got, want, params["dtype"])
    if outcome.ok and any(bool((got[n] != again[n]).any()) for n in got):
        outcome = replace(outcome, ok=False, reason="two runs on the same inputs gave different bits")
    return replace(outcome, ok=False, reason=stray) if stray else outcome


def random_attention(profile: str) -> Iterator[CheckCase]:
    """K2.6 shapes: heads, slots, prefixes, dtypes, pages, ragged lengths, large trees, the tree part alone."""
    base = {"B": 2, "H": 8, "N": 9, "L": 256, "dtype": "bfloat16", "page_size": 0}
    changes: list[dict] = [{"dtype": d} for d in ("bfloat16", "float16", "float32")]
    changes += [{"page_size": s} for s in (1, 16, 64)]
    changes += [{"H": 64, "N": 33}, {"H": 16, "N": 17, "L": 1024}, {"H": 64, "N": 65, "L": 37, "B": 1}]
    changes += [{"B": 4, "L": [0, 1, 63, 1000], "ragged": True, "page_size": s} for s in (0, 16, 64)]
    changes += [{"part": "tree", "L": [5, 0]}, {"N": 1}, {"N": 129, "H": 2}]
    if profile == "full":
        changes += [{"N": 1025, "H": 8, "B": 1, "L": 300}, {"H": 128, "N": 9}]
        changes += [
            {"H": h, "N": n, "L": length, "B": b}
            for h, b, n, length in [
                (8, 1, 9, 256),
                (8, 1, 65, 65_536),
                (8, 4, 17, 4096),
                (8, 32, 33, 1024),
                (16, 1, 33, 16_384),
                (16, 4, 65, 4096),
                (16, 32, 9, 256),
                (64, 1, 17, 4096),
                (64, 4, 33, 16_384),
                (64, 4, 9, 1024),
                (64, 32, 17, 1024),
            ]
        ]
    for change in changes:
        params = base | change | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": K26_SCALE}
        name = "random_" + "_".join(f"{k}{v}" for k, v in (base | change).items()).replace(" ", "")
        case = seeded("verify_attn", name, params, attention_arguments)
        run = partial(check_attention, "verify_attn", case.seed, partial(attention_arguments, params))
        yield replace(case, run=run)


def random_walks(profile: str) -> Iterator[CheckCase]:
    """Random trees and predictions; the same trees with a share of their links overwritten by noise."""

    def make(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
        tree = random_tree(rng, p["B"], p["N"], ragged=True, max_depth=p["D"])
        wanted = inputs.predictions_for(rng, tree)
        if p["noise"]:
            for links in (tree.first_child, tree.next_sibling):
                hit = rng.random_sample(links.shape) < 0.2
                links[hit] = rng.randint(-3, p["N"] + 3, size=int(hit.sum()))
            tree.n_nodes[rng.random_sample(p["B"]) < 0.1] = rng.randint(-1, p["N"] + 2)
        return {"tree": tree, "predictions": wanted.astype(p["dtype"])}, p

    count = 256 if profile == "full" else 32
    for n_slots, depth in [(1, 0), (9, 3), (33, 7), (65, 7), (257, 15)]:
        for noise in (False, True):
            for dtype in ("int32", "int64"):
                params = {"B": count, "N": n_slots, "D": depth, "noise": noise, "dtype": dtype}
                yield seeded("tree_accept", f"random_N{n_slots}_noise{int(noise)}_{dtype}", params, make)


def random_moves(profile: str) -> Iterator[CheckCase]:
    """Random rising paths at K2.6's row width, contiguous and paged, and paths that stop being valid."""

    def make(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
        lengths = rng.randint(0, 300, size=p["B"]).astype(np.int32)
        tree = random_tree(rng, p["B"], p["N"], ragged=True, prefix_lens=lengths)
        path = np.full((p["B"], p["D"] + 1), -1, dtype=np.int32)
        accepted = np.zeros(p["B"], dtype=np.int32)
        for b in range(p["B"]):
            others = 1 + rng.permutation(int(tree.n_nodes[b]) - 1)[: p["D"]]
            chosen = np.concatenate([[0], np.sort(others)])
            if p["hostile"] and len(chosen) > 2:
                chosen[rng.randint(1, len(chosen))] = rng.choice([0, -5, p["N"] + 9])
            path[b, : len(chosen)] = chosen
            accepted[b] = len(chosen) - 1
        kv, table = inputs.cache(rng, lengths + tree.n_nodes, 576, p["dtype"], page_size=p["page_size"])
        arguments = {"kv": kv, "tree": tree, "path": path, "n_accepted": accepted}
        return arguments | {"prefix_lens": lengths, "page_table": table}, p

    for batch in (1, 5) if profile == "quick" else (1, 5, 32):
        for page_size in (0, 1, 64):
            for dtype, hostile in [("bfloat16", False), ("bfloat16", True), ("float32", False)]:
                params = {
                    "B": batch,
                    "N": 33,
                    "D": 7,
                    "page_size": page_size,
                    "dtype": dtype,
                    "hostile": hostile,
                }
                name = f"random_B{batch}_page{page_size}_{dtype}_hostile{int(hostile)}"
                yield seeded("kv_compact", name, params, make)


def random_merges(profile: str) -> Iterator[CheckCase]:
    """Random states, a quarter of each side empty."""

    def make(p: dict, rng: np.random.RandomState) -> tuple[dict, dict]:
        shape = (p["rows"], p["C"])
        a = {f"out_{s}": inputs.round_to(rng.standard_normal(shape), p["dtype"]) for s in "ab"}
        for side in "ab":
            lse = (rng.standard_normal(p["rows"]) * 6).astype(np.float32)
            lse[rng.random_sample(p["rows"]) < 0.25] = -np.inf
            a[f"lse_{side}"] = lse
        return a, p

    for rows in (1, 199, 4096) if profile == "full" else (1, 199):
        for dtype in ("bfloat16", "float16", "float32"):
            yield seeded("merge_states", f"random_{rows}_{dtype}", {"rows": rows, "C": 512, "dtype": dtype}, make)
