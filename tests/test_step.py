"""The decoding step: right op by op, right as a whole, and greedy decoding token for token."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from kdtree.device import gpu_available
from kdtree.measure import families, session, step_tasks
from kdtree.measure.step import TINY_STEP, Step

SMALL = TINY_STEP | {"H": 1, "budget": 4, "n_layers": 1, "L": [3, 0]}
VOCAB = 97


def test_only_names_of_existing_profiles_make_a_family():
    with pytest.raises(ValueError, match="profile|expected tiny, quick or full"):
        step_tasks.family("huge")
    with pytest.raises(ValueError, match="correctness or latency"):
        step_tasks.family("tiny", "memory")


@pytest.mark.parametrize("profile", ["tiny", "quick", "full"])
@pytest.mark.parametrize("metric", ["correctness", "latency"])
def test_a_family_name_leads_to_its_tasks(profile, metric):
    module, _, function = step_tasks.family(profile, metric).partition(":")
    tasks = getattr(importlib.import_module(module), function)()
    assert [t.metric for t in tasks] == [metric] * len(tasks)
    assert len({t.name for t in tasks}) == len(tasks)
    assert (step_tasks.K26_STEP in [t.first["case"] for t in tasks]) == (profile != "tiny")


@pytest.mark.parametrize("page_size", [0, 4])
def test_a_step_through_the_kernels_is_right(page_size):
    outcome = Step(SMALL | {"page_size": page_size}, device="cpu").check()
    assert outcome.ok, outcome.reason
    assert 0 < outcome.rel_l2 < 1e-5


def test_kernels_and_references_agree_on_the_whole_step():
    ours, theirs = Step(SMALL, device="cpu"), Step(SMALL, device="cpu", backend="ref")
    ours.run()
    theirs.run()
    for name, got in vars(ours.accepted).items():
        np.testing.assert_array_equal(got, getattr(theirs.accepted, name), err_msg=name)
    np.testing.assert_array_equal(ours.kv[0], theirs.kv[0])
    np.testing.assert_array_equal(ours.next_prefix_lens, theirs.next_prefix_lens)
    assert ours.accepted.n_accepted.any(), "a step that accepts nothing tests little"


def nothing(self, *_):
    """An op that does not run: its outputs stay poisoned, or the cache as it was."""


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("topk", "topk"),
        ("attend", "verify_attn of layer 0"),
        ("accept", "tree_accept"),
        ("compact", "kv_compact of layer 0"),
    ],
)
def test_the_check_names_the_op_that_did_not_run(monkeypatch, method, named):
    one = Step(TINY_STEP, device="cpu", backend="ref")
    assert one.check().ok
    assert (one.accepted.path > np.arange(4)).any(), "rows have to move, or a missing kv_compact shows in nothing"
    monkeypatch.setattr(Step, method, nothing)
    outcome = Step(TINY_STEP, device="cpu", backend="ref").check()
    assert not outcome.ok
    assert outcome.reason.startswith(named)


def test_a_tree_that_was_not_built_is_refused_by_the_next_op(monkeypatch):
    monkeypatch.setattr(Step, "build", nothing)
    with pytest.raises(ValueError, match="n_nodes"):
        Step(TINY_STEP, device="cpu", backend="ref").check()


def test_the_check_sees_a_wrong_next_prefix():
    class Wrong(Step):
        def run(self):
            super().run()
            self.next_prefix_lens += 1

    outcome = Wrong(SMALL, device="cpu", backend="ref").check()
    assert not outcome.ok
    assert "next prefix" in outcome.reason


def next_token(text: list[int]) -> int:
    """A target that is a hash of everything before: deterministic, and different for every text."""
    state = 17
    for token in text:
        state = (state * 1_000_003 ^ (token + 1)) % 2_147_483_647
    return state % VOCAB


def path_text(tree, b: int, slot: int) -> list[int]:
    """Tokens from the root's child to `slot`."""
    tokens = []
    while slot > 0:
        tokens.insert(0, int(tree.token_ids[b, slot]))
        slot = int(tree.parents[b, slot])
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 5, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_decoding_with_the_tree_is_greedy_decoding(budget, seed):
    """The drafter is right with its first, second or no candidate at random; the text must not depend on it."""
    rng = np.random.RandomState(seed)
    texts = [list(rng.randint(0, VOCAB, size=n)) for n in (4, 1, 9)]
    starts = [len(t) for t in texts]

    def target(one: Step) -> None:
        for b, text in enumerate(texts):
            for slot in range(int(one.tree.n_nodes[b])):
                one.predictions[b, slot] = next_token(text + path_text(one.tree, b, slot))

    params = SMALL | {"B": 3, "L": [n - 1 for n in starts], "budget": budget, "V": VOCAB}
    one = Step(params, device="cpu", backend="ref", target=target, room=10 * 4)
    one.root_tokens[:] = [t[-1] for t in texts]
    gains = []
    for _ in range(10):
        for b, text in enumerate(texts):
            ahead = list(text)
            for d in range(params["D"]):
                ahead.append(next_token(ahead))
                one.logits[b, d] = rng.standard_normal(VOCAB)
                one.logits[b, d, ahead[-1]] += rng.choice([0.0, 2.0, 6.0])
        before = one.prefix_lens.copy()
        one.run()
        new = [one.new_tokens(b) for b in range(3)]
        for text, gained in zip(texts, new, strict=True):
            text += gained
        gains += [len(gained) for gained in new]
        one.advance()
        np.testing.assert_array_equal(one.prefix_lens, before + [len(g) for g in new])
        np.testing.assert_array_equal(one.root_tokens, [t[-1] for t in texts])
    for text, start in zip(texts, starts, strict=True):
        plain = text[:start]
        while len(plain) < len(text):
            plain.append(next_token(plain))
        assert text == plain
    assert max(gains) in {0: (1,), 1: (2,), 5: (3, 4), 12: (4,)}[budget]


def test_steps_reuse_their_buffers():
    one = Step(SMALL, device="cpu", backend="ref", room=8)
    places = [a.ctypes.data for a in (*one.outputs(), *one.kv)]
    for _ in range(2):
        one.run()
        one.advance()
    assert [a.ctypes.data for a in (*one.outputs(), *one.kv)] == places


def test_attention_counts_once_a_layer():
    one, two = (step_tasks.flop_bytes(step_tasks.K26_STEP | {"n_layers": n}) for n in (1, 2))
    three = step_tasks.flop_bytes(step_tasks.K26_STEP | {"n_layers": 3})
    assert two[0] - one[0] == three[0] - two[0] == 2 * 8 * 65 * (1024 + 65) * (576 + 512)
    assert step_tasks.step_bytes(step_tasks.K26_STEP) > step_tasks.flop_bytes(step_tasks.K26_STEP)[1]


@pytest.mark.skipif(gpu_available(), reason="speaks of the simulator")
def test_without_a_gpu_the_latency_row_has_no_time(tmp_path):
    s = session.open_session(tmp_path, "tiny")
    (task,) = step_tasks.tiny_latency()
    (row,) = task.run()
    signed = s.append(row)
    assert signed["status"] == "skipped"
    assert "GPU" in signed["reason"]
    assert signed["flop"] > 0 and signed["bytes"] > 0
    assert signed["device_us"] is signed["latency_us"] is signed["floor_us"] is None
    assert "parts" not in signed


def test_the_family_runs_in_a_process_of_its_own(tmp_path):
    s = session.open_session(tmp_path, "tiny")
    result = families.run(step_tasks.family("tiny"), s)
    assert result.exit_code == 0
    assert [(r["op"], r["impl"], r["status"]) for r in result.rows] == [("decode_step", "numba:simt", "passed")]


@pytest.mark.gpu
@pytest.mark.skipif(not gpu_available(), reason="needs a GPU")
@pytest.mark.parametrize("page_size", [0, 64])
def test_one_graph_replays_the_whole_step(page_size):
    params = step_tasks.K26_STEP | {"n_layers": 3, "L": 300, "budget": 32, "K": 16, "page_size": page_size}
    one = Step(params)
    assert one.check().ok
    one.capture()
    outcome = one.check(one.replay)
    assert outcome.ok, outcome.reason
