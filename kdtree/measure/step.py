"""One decoding step as a serving engine runs it: five ops over buffers that are allocated once.

    draft logits -> topk -> tree_build -> target pass (verify_attn a layer) -> tree_accept -> kv_compact

Shapes are fixed and nothing is read back in between, so on a GPU the whole step is one CUDA graph. The family
functions at the end (``tiny_correctness`` …) are what `families.run` takes: see `family`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import kdtree
from kdtree import inputs, ref_outputs
from kdtree.arrays import from_numpy_to_torch, numpy_dtype, to_numpy
from kdtree.measure import compare, invoke, memory
from kdtree.measure.compare import Comparison
from kdtree.spec import MODELS, Model
from kdtree.tree import FIELDS, DraftTree, field_shapes

OP = "decode_step"
Target = Callable[["Step"], None]

# The step of a report: K2.6 on one GPU of eight. The tiny one is what the simulator can do.
K26_STEP: dict[str, Any] = {"model": "k2.6-tp8", "B": 1, "H": 8, "D": 7, "K": 64, "budget": 64, "L": 1024}
K26_STEP |= {"n_layers": 61, "dtype": "bfloat16"}
TINY_STEP: dict[str, Any] = {"model": "tiny", "B": 2, "H": 2, "D": 3, "K": 4, "budget": 6, "L": [5, 0]}
TINY_STEP |= {"n_layers": 2, "dtype": "float32"}


class Step:
    """Buffers and launches of one decoding step.

    Args:
        params: model (a name of `spec.MODELS`), B, H, D, K, budget, L (one length or B of them), n_layers,
            dtype; page_size where the cache is paged; V where the vocabulary is not the model's.
        seed: of the draft logits, the cache, the queries and the predictions.
        device: "cpu" for NumPy arrays, "cuda" for torch tensors; by default where kernels run here.
        backend: as the ops take it. "ref" is the step through the references.
        target: the target's pass over the tree: called with the step, it fills `q`, the tree's rows of `kv`
            and `predictions`, and calls `attend` for each layer. By default they stay as drawn: `verify`.
        room: cache rows beyond the first step's, for steps to come.

    Inputs of a step, to be overwritten in place: logits [B,D,V], root_tokens i32[B], prefix_lens i32[B],
    predictions i32[B,N], and for each layer q [B,N,H,E] and kv. Results: log_probs, token_ids, tree, out and
    lse for each layer, accepted, next_prefix_lens.

    Raises ValueError for an unknown model or parameters that the ops refuse.
    """

    def __init__(
        self,
        params: dict[str, Any],
        seed: int = 0,
        *,
        device: str | None = None,
        backend: str = "numba",
        target: Target | None = None,
        room: int = 0,
    ):
        self.params, self.backend = params, backend
        self.device = device or invoke.device()
        self.target = target or Step.verify
        self.graph: Any = None
        model: Model = MODELS[params["model"]]
        self.scale, self.latent = model.softmax_scale, model.kv_lora_rank
        self.n_layers, self.budget = params["n_layers"], params["budget"]
        batch, depth, width, heads = (params[n] for n in ("B", "D", "K", "H"))
        n_slots, dtype = self.budget + 1, params["dtype"]
        lengths = np.array(memory.prefix_lens(params), dtype=np.int32)
        rng = np.random.RandomState(seed)

        vocab = params.get("V", model.vocab_size)
        self.logits = self._put(_draft_logits(rng, (batch, depth, vocab), width, dtype))
        self.root_tokens = self._put(rng.randint(0, 97, size=batch).astype(np.int32))
        self.prefix_lens = self._put(lengths)
        rows = int(lengths.max()) + n_slots + room
        page = params.get("page_size") or 0
        self.page_table, cache = None, (batch, rows, model.head_dim)
        if page:
            pages = -(-rows // page)
            order = rng.permutation(batch * pages).astype(np.int32).reshape(batch, pages)
            self.page_table, cache = self._put(order), (batch * pages, page, model.head_dim)
        self.kv = [self._normal(rng, cache, dtype) for _ in range(self.n_layers)]
        self.q = [self._normal(rng, (batch, n_slots, heads, model.head_dim), dtype) for _ in self.kv]

        self.log_probs = self._empty("float32", (batch, depth, width))
        self.token_ids = self._empty("int32", (batch, depth, width))
        shapes = field_shapes(batch, n_slots)
        self.tree = DraftTree.from_arrays({n: self._empty(FIELDS[n], shapes[n]) for n in FIELDS}, depth)
        self.out = [self._empty(dtype, (batch, n_slots, heads, self.latent)) for _ in self.kv]
        self.lse = [self._empty("float32", (batch, n_slots, heads)) for _ in self.kv]
        numbers = [self._empty("int32", (batch,)) for _ in range(3)]
        self.accepted = kdtree.Accepted(self._empty("int32", (batch, depth + 1)), *numbers)
        self.next_prefix_lens = self._empty("int32", (batch,))
        self.predictions = self._put(self._agreeing_predictions(rng))

    def run(self) -> None:
        """One step, launched op by op on the current stream. On a GPU it waits for nothing."""
        for part in self.parts().values():
            part()
        self.next_prefix_lens[...] = self.prefix_lens + self.accepted.n_accepted + 1

    def parts(self) -> dict[str, Callable[[], None]]:
        """The step's ops in order, by name; the target's pass is "verify_attn"."""
        return {
            "topk": self.topk,
            "tree_build": self.build,
            "verify_attn": lambda: self.target(self),
            "tree_accept": self.accept,
            "kv_compact": self.compact,
        }

    def topk(self) -> None:
        """Logits to candidates."""
        kdtree.topk(self.logits, self.params["K"], out=(self.log_probs, self.token_ids), backend=self.backend)

    def build(self) -> None:
        """Candidates to a tree."""
        kdtree.tree_build(
            self.log_probs,
            self.token_ids,
            self.budget,
            root_tokens=self.root_tokens,
            prefix_lens=self.prefix_lens,
            out=self.tree,
            validate=False,
            backend=self.backend,
        )

    def attend(self, layer: int) -> None:
        """The tree's attention in one layer."""
        kdtree.verify_attn(
            self.q[layer],
            self.kv[layer],
            self.tree,
            prefix_lens=self.prefix_lens,
            scale=self.scale,
            page_table=self.page_table,
            kv_lora_rank=self.latent,
            out=(self.out[layer], self.lse[layer]),
            backend=self.backend,
        )

    def verify(self) -> None:
        """The stand-in for a target's pass: its attention alone, in every layer."""
        for layer in range(self.n_layers):
            self.attend(layer)

    def accept(self) -> None:
        """The longest path that the predictions confirm."""
        kdtree.tree_accept(self.tree, self.predictions, out=self.accepted, backend=self.backend)

    def compact(self) -> None:
        """Its KV rows to the front of the tree part, in all layers."""
        kdtree.kv_compact(
            self.kv,
            self.tree,
            self.accepted,
            prefix_lens=self.prefix_lens,
            page_table=self.page_table,
            backend=self.backend,
        )

    def advance(self) -> None:
        """Make the results the next step's start: its prefix, and the bonus token as its root."""
        self.prefix_lens[...] = self.next_prefix_lens
        self.root_tokens[...] = self.accepted.bonus

    def new_tokens(self, b: int) -> list[int]:
        """What request `b` gained: the accepted tokens and the bonus. Reads device arrays back."""
        path, count = to_numpy(self.accepted.path)[b], int(to_numpy(self.accepted.n_accepted)[b])
        tokens = to_numpy(self.tree.token_ids)[b][path[1 : count + 1]]
        return [*tokens.tolist(), int(to_numpy(self.accepted.bonus)[b])]

    def capture(self) -> None:
        """Capture `run` in one CUDA graph for `replay`. A host synchronisation in it raises CaptureError."""
        from kdtree.measure import graphs

        torch = graphs.torch_cuda()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()  # compiles, and allocates scratch memory on this stream
            torch.cuda.synchronize()
            self.graph = graphs.capture(OP, self.run, stream)

    def replay(self) -> None:
        """Launch the captured step: one call, however many layers."""
        self.graph.replay()

    def check(self, run: Callable[[], None] | None = None) -> Comparison:
        """Run once on poisoned outputs (`run`, or the step op by op) and compare each op with its reference.

        A reference gets what its op got, so an error is named where it arises. For the stand-in target alone:
        another one writes the cache before it is read. On a GPU attention is compared with its float64 twin.
        """
        from kdtree.kernels import launch

        before = [_copy(layer) for layer in self.kv]
        for array in self.outputs():
            array.view(np.uint8 if isinstance(array, np.ndarray) else _torch().uint8)[...] = 0xFF
        (run or self.run)()
        launch.synchronize(OP)
        tree, accepted = self.tree.numpy(), {n: to_numpy(a) for n, a in vars(self.accepted).items()}
        lengths = to_numpy(self.prefix_lens)
        pages = None if self.page_table is None else to_numpy(self.page_table)
        draft = {"log_probs": to_numpy(self.log_probs), "token_ids": to_numpy(self.token_ids)}
        roots = {"root_tokens": to_numpy(self.root_tokens), "prefix_lens": lengths}
        place = {"tree": tree, "prefix_lens": lengths, "page_table": pages}
        walk = {"tree": tree, "predictions": to_numpy(self.predictions)}
        moved = {"path": accepted["path"], "n_accepted": accepted["n_accepted"]} | place

        found = [("topk", self._against("topk", draft, {"logits": to_numpy(self.logits)}))]
        found.append(("tree_build", self._against("tree_build", tree.arrays(), draft | roots)))
        for layer in range(self.n_layers):
            attended = self._check_attention(layer, before[layer], place)
            found.append((f"verify_attn of layer {layer}", attended))
        found.append(("tree_accept", self._against("tree_accept", accepted, walk)))
        for layer in range(self.n_layers):
            kv = {"kv": to_numpy(self.kv[layer])}
            want = moved | {"kv": to_numpy(before[layer])}
            found.append((f"kv_compact of layer {layer}", self._against("kv_compact", kv, want)))
        after = {"next_prefix_lens": to_numpy(self.next_prefix_lens)}
        expected = {"next_prefix_lens": lengths + accepted["n_accepted"] + 1}
        found.append(("the next prefix", compare.compare(after, expected, None)))
        return _worst(found)

    def outputs(self) -> list[Any]:
        """Every buffer that a step writes, the cache apart."""
        made = [self.log_probs, self.token_ids, *self.tree.arrays().values(), *self.out, *self.lse]
        return [*made, *vars(self.accepted).values(), self.next_prefix_lens]

    def _against(self, op: str, got: dict[str, Any], arguments: dict[str, Any]) -> Comparison:
        want = ref_outputs.reference(op, arguments, self._op_params())
        return compare.compare(got, want, self.params["dtype"])

    def _check_attention(self, layer: int, kv: Any, place: dict[str, Any]) -> Comparison:
        got = {"out": self.out[layer], "lse": self.lse[layer]}
        if self.device == "cpu":
            return self._against("verify_attn", got, place | {"q": self.q[layer], "kv": kv})
        from kdtree.measure import twin

        there = {"q": self.q[layer], "kv": kv, "tree": self.tree, "prefix_lens": self.prefix_lens}
        want = twin.verify_attn(there | {"page_table": self.page_table}, self._op_params())
        return compare.compare(got, want, self.params["dtype"])

    def _op_params(self) -> dict[str, Any]:
        return self.params | {"scale": self.scale, "kv_lora_rank": self.latent}

    def _agreeing_predictions(self, rng: np.random.RandomState) -> np.ndarray:
        """i32[B,N]: what a target could say that agrees with the draft more often than not."""
        draft = ref_outputs.reference("topk", {"logits": to_numpy(self.logits)}, self.params)
        log_probs = draft["log_probs"].astype(np.float32)
        tree = ref_outputs.reference("tree_build", draft | {"log_probs": log_probs}, self.params)
        return inputs.predictions_for(rng, DraftTree.from_arrays(tree, self.params["D"]))

    def _put(self, array: np.ndarray) -> Any:
        if self.device == "cpu":
            return array
        return from_numpy_to_torch(np.ascontiguousarray(array)).to(self.device)

    def _normal(self, rng: np.random.RandomState, shape: tuple[int, ...], dtype: str) -> Any:
        if self.device == "cpu":
            return inputs.round_to(rng.standard_normal(shape), dtype)
        torch = _torch()
        generator = torch.Generator(self.device).manual_seed(int(rng.randint(2**31)))
        return torch.randn(shape, device=self.device, generator=generator).to(getattr(torch, dtype))

    def _empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        if self.device == "cpu":
            return np.empty(shape, dtype=numpy_dtype(dtype))
        return _torch().empty(shape, dtype=getattr(_torch(), dtype), device=self.device)


def _draft_logits(rng: np.random.RandomState, shape: tuple[int, int, int], width: int, dtype: str) -> np.ndarray:
    """[B,D,V] of `dtype`: `width` tokens of every row stand out, one of them most."""
    logits = rng.standard_normal(shape).astype(np.float32)
    for row in logits.reshape(-1, shape[-1]):
        chosen = rng.permutation(shape[-1])[:width]
        row[chosen] = 12.0 - 1.2 * np.arange(len(chosen)) ** 0.5 + 0.5 * rng.standard_normal(len(chosen))
    return inputs.round_to(logits, dtype)


def _worst(found: Sequence[tuple[str, Comparison]]) -> Comparison:
    """The first wrong one with its name, else one that holds the largest errors of all."""
    for name, one in found:
        if not one.ok:
            return replace(one, reason=f"{name}: {one.reason}")
    largest = {}
    for field in ("max_abs", "max_rel", "rel_l2"):
        values = [getattr(one, field) for _, one in found if getattr(one, field) is not None]
        largest[field] = max(values, default=None)
    return Comparison(True, None, **largest)


def _copy(array: Any) -> Any:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def _torch() -> Any:
    import torch

    return torch
