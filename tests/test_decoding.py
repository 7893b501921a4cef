"""The whole decoding step: tree decoding says what greedy decoding says, and a CUDA graph holds all of it.

The target is a small attention model over a latent cache, so that a wrong mask, position, path or moved row changes
what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from cases_for_tests import bits, rng, rounded, same_accepted, same_attention, same_tree, to_gpu, wide

import kdtree
from kdtree import inputs
from kdtree.arrays import to_numpy
from kdtree.spec import K26_SCALE
from kdtree.tree import DraftTree

VOCAB, WIDTH, RANK, ROOM, SCALE = 11, 6, 4, 64, 0.9


@dataclass
class Model:
    """One attention layer: a token at a position is a row; what the row attends to names the next token."""

    seed: int = 0
    rows: np.ndarray = field(init=False)
    places: np.ndarray = field(init=False)
    head: np.ndarray = field(init=False)

    def __post_init__(self):
        numbers = rng(self.seed)
        self.rows = numbers.standard_normal((VOCAB, WIDTH))
        self.places = numbers.standard_normal((ROOM, WIDTH))
        self.head = numbers.standard_normal((RANK, VOCAB))

    def row(self, token: int, position: int) -> np.ndarray:
        """The latent row (and query) of a token."""
        return (self.rows[token] + self.places[position]).astype(np.float32)

    def next_token(self, out: np.ndarray) -> int:
        """Greedy choice from an attention output."""
        return int(np.argmax(out.astype(np.float64) @ self.head))

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """`tokens` and `count` more, one at a time, by dense attention over everything before."""
        tokens = list(tokens)
        for _ in range(count):
            rows = np.array([self.row(t, i) for i, t in enumerate(tokens)], dtype=np.float64)
            weights = np.exp(SCALE * rows @ rows[-1])
            tokens.append(self.next_token((weights / weights.sum()) @ rows[:, :RANK]))
        return tokens

    def draft(self, tokens: list[int], depth: int, numbers: np.random.RandomState) -> np.ndarray:
        """Logits f32[D,V] of a drafter that is right about half the time."""
        logits = numbers.standard_normal((depth, VOCAB))
        truth = self.greedy(tokens, depth)[len(tokens) :]
        for d, token in enumerate(truth):
            logits[d, token] += 2.0 * numbers.random_sample() + 0.5
        return logits.astype(np.float32)


def decode(model: Model, prompt: list[int], count: int, *, backend: str, budget: int, paged: bool) -> list[int]:
    """At least `count` more tokens by tree decoding with the public functions."""
    kv = np.full((1, ROOM, WIDTH), np.nan, dtype=np.float32)
    table = None
    if paged:
        table = rng(5).permutation(ROOM // 4)[None].astype(np.int32)
        kv = kv.reshape(ROOM // 4, 4, WIDTH)

    def put(row: int, values: np.ndarray) -> None:
        if table is None:
            kv[0, row] = values
        else:
            kv[table[0, row // 4], row % 4] = values

    tokens, numbers = list(prompt), rng(7)
    for position, token in enumerate(prompt[:-1]):
        put(position, model.row(token, position))
    while len(tokens) < len(prompt) + count:
        prefix = np.array([len(tokens) - 1], dtype=np.int32)  # the last token is the root of the tree
        log_probs, ids = kdtree.topk(model.draft(tokens, 3, numbers)[None], 4, backend=backend)
        root = np.array([tokens[-1]], dtype=np.int32)
        tree = kdtree.tree_build(log_probs, ids, budget, root_tokens=root, prefix_lens=prefix, backend=backend)
        q = np.full((1, budget + 1, 1, WIDTH), np.nan, dtype=np.float32)
        for i in range(int(tree.n_nodes[0])):
            q[0, i, 0] = model.row(int(tree.token_ids[0, i]), int(tree.positions[0, i]))
            put(int(prefix[0]) + i, q[0, i, 0])
        out, _ = kdtree.verify_attn(
            q, kv, tree, prefix_lens=prefix, scale=SCALE, page_table=table, kv_lora_rank=RANK, backend=backend
        )
        predictions = np.array([[model.next_token(row[0]) for row in out[0]]], dtype=np.int32)
        accepted = kdtree.tree_accept(tree, predictions, backend=backend)
        assert accepted.status.tolist() == [0]
        kdtree.kv_compact(kv, tree, accepted, prefix_lens=prefix, page_table=table, backend=backend)
        path = accepted.path[0, 1 : 1 + accepted.n_accepted[0]]
        tokens += [int(tree.token_ids[0, slot]) for slot in path] + [int(accepted.bonus[0])]
    return tokens


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 9, 37])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tree_decoding_is_greedy_decoding(seed, budget, paged):
    model, prompt = Model(seed), [1, 2, 3]
    tokens = decode(model, prompt, 16, backend="ref", budget=budget, paged=paged)
    assert tokens == model.greedy(prompt, len(tokens) - len(prompt))


def test_tree_decoding_accepts_something():
    # Else the test above would show little.
    model, prompt = Model(0), [1, 2, 3]
    numbers, accepted = rng(7), 0
    for _ in range(8):
        log_probs, ids = kdtree.topk(model.draft(prompt, 3, numbers)[None], 4)
        tree = kdtree.tree_build(log_probs, ids, 9)
        truth = model.greedy(prompt, 3)[3:]
        accepted += int(tree.token_ids[0, 1] == truth[0])
    assert accepted >= 3


def test_the_kernels_decode_like_the_references():
    model, prompt = Model(1), [4, 5]
    tokens = decode(model, prompt, 4, backend="numba", budget=5, paged=True)
    assert tokens == model.greedy(prompt, len(tokens) - len(prompt))


# ---- one CUDA graph ----


@dataclass
class Step:
    """Static buffers of one step at K2.6's row width, on the GPU, and a call that runs it all into them."""

    batch: int = 3
    depth: int = 7
    width: int = 8
    budget: int = 32
    heads: int = 8
    page_size: int = 16

    def __post_init__(self):
        import torch

        numbers = rng(0)
        n_slots = self.budget + 1
        self.lengths = np.array([37, 0, 199][: self.batch], dtype=np.int32)
        rows = self.lengths + n_slots
        kv, table = inputs.cache(numbers, rows, 576, "bfloat16", page_size=self.page_size)
        self.kv, self.table = to_gpu(kv), to_gpu(table)
        self.prefix = to_gpu(self.lengths)
        self.root = to_gpu(np.arange(self.batch, dtype=np.int32))
        self.logits = torch.zeros(self.batch, self.depth, 4999, dtype=torch.bfloat16, device="cuda")
        self.predictions = torch.zeros(self.batch, n_slots, dtype=torch.int32, device="cuda")
        self.q = to_gpu(rounded(numbers.standard_normal((self.batch, n_slots, self.heads, 576)), "bfloat16"))
        empty = DraftTree.empty(self.batch, n_slots, self.depth)
        self.tree = to_gpu(empty)
        shape = (self.batch, self.depth, self.width)
        self.candidates = to_gpu((np.zeros(shape, np.float32), np.zeros(shape, np.int32)))
        self.attention = to_gpu(
            (
                rounded(np.zeros((self.batch, n_slots, self.heads, 512)), "bfloat16"),
                np.zeros((self.batch, n_slots, self.heads), np.float32),
            )
        )
        counts = [np.zeros(self.batch, np.int32) for _ in range(3)]
        self.accepted = to_gpu(kdtree.Accepted(np.zeros((self.batch, self.depth + 1), np.int32), *counts))

    def inputs(self, seed: int) -> dict[str, np.ndarray]:
        """New logits, predictions and cache contents of the same shapes, on the host."""
        numbers = rng(seed)
        logits = inputs.logits(numbers, tuple(self.logits.shape), "bfloat16")
        log_probs, ids = kdtree.topk(logits, self.width)
        tree = kdtree.tree_build(log_probs, ids, self.budget)
        kv = rounded(numbers.standard_normal(tuple(self.kv.shape)), "bfloat16")
        return {"logits": logits, "predictions": inputs.predictions_for(numbers, tree, vocab=4999), "kv": kv}

    def load(self, new: dict[str, np.ndarray]) -> None:
        """Copy new inputs into the static buffers and spoil the outputs."""
        import torch

        for name, array in new.items():
            getattr(self, name).copy_(to_gpu(array))
        outputs = (*self.tree.arrays().values(), *vars(self.accepted).values(), *self.candidates, *self.attention)
        for array in outputs:
            array.view(torch.uint8).fill_(0x5A)

    def run(self) -> None:
        """topk, tree_build, verify_attn, tree_accept, kv_compact; no host synchronisation."""
        kdtree.topk(self.logits, self.width, out=self.candidates)
        kdtree.tree_build(*self.candidates, self.budget, root_tokens=self.root, prefix_lens=self.prefix, out=self.tree)
        where = {"prefix_lens": self.prefix, "page_table": self.table}
        kdtree.verify_attn(self.q, self.kv, self.tree, scale=K26_SCALE, out=self.attention, **where)
        kdtree.tree_accept(self.tree, self.predictions, out=self.accepted)
        kdtree.kv_compact(self.kv, self.tree, self.accepted, **where)

    def check(self, new: dict[str, np.ndarray]) -> None:
        """All results against the references on the host."""
        log_probs, ids = kdtree.topk(new["logits"], self.width)
        np.testing.assert_array_equal(to_numpy(self.candidates[1]), ids)
        np.testing.assert_allclose(wide(self.candidates[0]), log_probs, rtol=1e-5, atol=1e-5)
        # From the GPU's own log-probabilities: their last bits may differ, and with them the order of a tie.
        tree = kdtree.tree_build(
            to_numpy(self.candidates[0]),
            ids,
            self.budget,
            root_tokens=to_numpy(self.root),
            prefix_lens=self.lengths,
        )
        same_tree(self.tree, tree)
        kv, where = new["kv"].copy(), {"prefix_lens": self.lengths, "page_table": to_numpy(self.table)}
        attention = kdtree.verify_attn(to_numpy(self.q), kv, tree, scale=K26_SCALE, **where)
        same_attention(self.attention, attention, "bfloat16")
        accepted = kdtree.tree_accept(tree, new["predictions"])
        same_accepted(self.accepted, accepted)
        kdtree.kv_compact(kv, tree, accepted, **where)
        np.testing.assert_array_equal(bits(self.kv), bits(kv))
        assert accepted.n_accepted.max() > 0


@pytest.mark.gpu
def test_on_a_gpu_a_step_agrees_with_the_references():
    step = Step()
    new = step.inputs(1)
    step.load(new)
    step.run()
    step.check(new)


@pytest.mark.gpu
def test_on_a_gpu_a_step_allocates_nothing_and_does_not_wait():
    import torch

    step = Step()
    new = step.inputs(2)
    step.load(new)
    step.run()
    step.load(new)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")  # any synchronisation through torch raises
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocation.all.allocated"]) == before
    step.check(new)


@pytest.mark.gpu
@pytest.mark.parametrize("named_stream", [False, True])
def test_on_a_gpu_one_graph_holds_the_whole_step(named_stream):
    import torch

    step = Step()
    step.load(step.inputs(3))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()  # the one warm-up: compiles, makes the scratch memory and the table of layers
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **({"stream": side} if named_stream else {})):
        step.run()
    for seed in (4, 5):
        new = step.inputs(seed)
        step.load(new)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        step.check(new)


@pytest.mark.gpu
def test_on_a_gpu_the_largest_tree_is_built_verified_and_accepted_in_one_step():
    step = Step(batch=1, depth=7, width=16, budget=1024, heads=2)
    new = step.inputs(6)
    step.load(new)
    step.run()
    step.check(new)


@pytest.mark.gpu
def test_on_a_gpu_steps_on_two_streams_do_not_disturb_each_other():
    import torch

    steps = [Step(), Step()]
    news = [step.inputs(7 + i) for i, step in enumerate(steps)]
    for step, new in zip(steps, news, strict=True):
        step.load(new)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(3):
        for step, new, stream in zip(steps, news, streams, strict=True):
            with torch.cuda.stream(stream):
                step.kv.copy_(to_gpu(new["kv"]))
                step.run()
    torch.cuda.synchronize()
    for step, new in zip(steps, news, strict=True):
        step.check(new)
