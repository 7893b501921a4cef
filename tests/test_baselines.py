"""Every peer against the reference; other projects' kernels by stand-ins with their documented interface."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kdtree import baselines  # noqa: E402
from kdtree.arrays import to_numpy  # noqa: E402
from kdtree.baselines import (  # noqa: E402
    flash_mla,
    flashinfer,
    heapq_build,
    host_accept,
    layout,
    sgl,
    torch_attn,
    torch_merge,
    torch_topk,
)
from kdtree.ref.topk import topk as ref_topk  # noqa: E402
from kdtree.ref.tree_accept import tree_accept as ref_accept  # noqa: E402
from kdtree.ref.tree_build import tree_build as ref_build  # noqa: E402
from kdtree.ref.verify_attn import verify_attn as ref_attn  # noqa: E402
from kdtree.tree import DraftTree, from_parents, random_tree  # noqa: E402

PEERS = {peer.name: peer for op in baselines.OPS for peer in baselines.for_op(op)}
# Of `out`: half a unit in the last place, and softmax weights rounded to q's type.
TOLERANCE = {
    torch.float32: 2e-6,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}


def to_torch(tree: DraftTree) -> DraftTree:
    return tree.map(torch.from_numpy)


def rng(seed: int = 0) -> np.random.RandomState:
    return np.random.RandomState(seed)


# ---- the registry ----


def test_importing_the_registry_loads_no_torch_and_no_peer():
    code = (
        "import sys; from kdtree import baselines; baselines.BASELINES; "
        "print([m for m in ('torch', 'flash_mla', 'flashinfer', 'sgl_kernel', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_are_unique_and_say_peer_and_inexact_peers_say_why():
    peers = [peer for op in baselines.OPS for peer in baselines.for_op(op)]
    assert len({peer.name for peer in peers}) == len(peers)
    for peer in peers:
        assert peer.name.startswith("peer:") and peer.timed
        assert peer.exact or peer.reason


def test_available_gives_a_reason_for_every_absent_peer():
    answers = baselines.available()
    assert answers.keys() == PEERS.keys()
    assert all(ok or why for ok, why in answers.values())
    assert answers["peer:torch-bmm"] == (True, "")


def test_an_unknown_op_is_refused():
    with pytest.raises(ValueError, match="op: got 'attn'"):
        baselines.for_op("attn")


# ---- topk ----


@pytest.mark.parametrize("name", ["peer:torch-topk-float", "peer:torch-topk-native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_topk_gives_the_reference_up_to_ties(name: str, dtype: torch.dtype):
    logits = torch.from_numpy(rng(1).randn(2, 3, 199).astype(np.float32) * 4).to(dtype)  # bf16: many ties
    inputs = {"logits": logits, "k": 37}
    want = ref_topk(logits.float().numpy(), 37)
    log_probs, token_ids = PEERS[name].prepare(inputs)()
    assert (log_probs.dtype, token_ids.dtype) == (torch.float32, torch.int32)
    assert PEERS[name].check(inputs, (log_probs, token_ids), want) == []


def test_the_topk_check_accepts_a_swapped_tie_and_refuses_a_wrong_or_doubled_token():
    logits = torch.tensor([[3.0, 1.0, 3.0, 0.0]])
    log_probs, token_ids = ref_topk(logits.numpy(), 3)
    want = (log_probs, token_ids)
    assert token_ids.tolist() == [[0, 2, 1]]
    inputs = {"logits": logits}
    assert torch_topk.disagreements(inputs, (log_probs, np.array([[2, 0, 1]])), want) == []
    assert "another logit" in torch_topk.disagreements(inputs, (log_probs, np.array([[0, 2, 3]])), want)[0]
    assert "twice" in torch_topk.disagreements(inputs, (log_probs, np.array([[0, 0, 1]])), want)[0]
    assert "off by" in torch_topk.disagreements(inputs, (log_probs + 1e-3, token_ids), want)[0]
    assert "vocabulary" in torch_topk.disagreements(inputs, (log_probs, np.array([[0, 2, 4]])), want)[0]


# ---- tree_build ----


def candidates(seed: int, batch: int, depth: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    draw = rng(seed)
    log_probs = -np.sort(draw.exponential(2.0, size=(batch, depth, k)).astype(np.float32), axis=-1)
    return log_probs, draw.randint(0, 50, size=(batch, depth, k)).astype(np.int32)  # few tokens: equal siblings


def same_tree(got: DraftTree, want: DraftTree) -> None:
    assert got.max_depth == want.max_depth
    for name, array in want.arrays().items():
        other = to_numpy(getattr(got, name))
        assert other.dtype == array.dtype, name
        np.testing.assert_array_equal(other, array, err_msg=name)


BUILDS = {
    "plain": (candidates(0, 2, 5, 6), 33),
    "one depth": (candidates(1, 3, 1, 8), 5),
    "budget 0": (candidates(2, 2, 3, 4), 0),
    "underfull": (candidates(3, 1, 2, 2), 10),
    "all tied": ((np.full((1, 3, 3), -1.0, np.float32), np.tile(np.arange(3), (1, 3, 1))), 20),
    "one distribution": (tuple(np.repeat(a, 7, axis=1) for a in candidates(4, 1, 1, 8)), 64),
    "depth 0": ((np.zeros((2, 0, 4), np.float32), np.zeros((2, 0, 4), np.int32)), 3),
}


@pytest.mark.parametrize("case", BUILDS)
def test_heapq_builds_the_reference_tree_exactly(case: str):
    (log_probs, token_ids), budget = BUILDS[case]
    batch = len(log_probs)
    extra = {"root_tokens": np.arange(batch) + 7, "prefix_lens": np.arange(batch) * 100}
    want = ref_build(log_probs, token_ids, budget, **extra)
    inputs = {"log_probs": log_probs, "token_ids": token_ids, **extra}
    on_torch = {name: torch.from_numpy(a) for name, a in inputs.items()}
    got = heapq_build.prepare({**on_torch, "budget": budget})()
    assert isinstance(got.token_ids, torch.Tensor)
    same_tree(got, want)
    same_tree(heapq_build.prepare({**inputs, "budget": budget})(), want)  # NumPy in, NumPy out


@pytest.mark.parametrize("hole", [-np.inf, np.nan])
def test_heapq_ends_a_row_at_its_first_candidate_that_is_not_finite(hole: float):
    log_probs, token_ids = candidates(5, 2, 4, 4)
    log_probs[0, 1, 2:] = hole
    log_probs[1, 0, 0] = hole
    got = heapq_build.prepare({"log_probs": log_probs, "token_ids": token_ids, "budget": 40})()
    same_tree(got, ref_build(log_probs, token_ids, 40))
    assert got.n_nodes[1] == 1


# ---- tree_accept ----


def walks(seed: int, batch: int = 4, n_slots: int = 40) -> tuple[DraftTree, np.ndarray]:
    draw = rng(seed)
    tree = random_tree(draw, batch, n_slots, ragged=True, max_depth=9, vocab=3)
    predictions = draw.randint(0, 3, size=(batch, n_slots))
    for b, child in np.argwhere(tree.parents >= 0):  # mostly the token of the last child: walks go somewhere
        if draw.rand() < 0.8:
            predictions[b, tree.parents[b, child]] = tree.token_ids[b, child]
    return tree, predictions


def same_accepted(got: object, want: tuple[np.ndarray, ...]) -> None:
    for name, array in zip(("path", "n_accepted", "bonus", "status"), want, strict=True):
        other = to_numpy(getattr(got, name))
        assert other.dtype == array.dtype, name
        np.testing.assert_array_equal(other, array, err_msg=name)


@pytest.mark.parametrize("stop_token", [None, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_host_walk_accepts_as_the_reference_does(seed: int, stop_token: int | None):
    tree, predictions = walks(seed)
    inputs = {"tree": to_torch(tree), "predictions": torch.from_numpy(predictions), "stop_token": stop_token}
    want = ref_accept(tree, predictions, stop_token=stop_token)
    assert stop_token is not None or want[1].max() > 1
    same_accepted(host_accept.prepare(inputs)(), want)


def test_the_host_walk_takes_the_first_of_two_siblings_with_one_token():
    tree = from_parents(np.array([[9, 5, 5]]), np.array([[-1, 0, 0]]), np.array([3]))
    got = host_accept.prepare({"tree": tree, "predictions": np.array([[5, 8, 7]])})()
    assert got.path.tolist() == [[0, 1]] and got.bonus.tolist() == [8]


def test_the_host_walk_refuses_a_malformed_tree():
    tree, predictions = walks(0)
    tree.next_sibling[0, 1] = 1
    with pytest.raises(baselines.Unsupported, match="links slot 1 to 1"):
        host_accept.prepare({"tree": tree, "predictions": predictions})


# ---- verify_attn ----


def attention(
    seed: int = 0,
    *,
    prefix: tuple[int, ...] = (19, 0, 33),
    n_slots: int = 37,
    heads: int = 2,
    latent: int = 32,
    rope: int = 8,
    page_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    poison: bool = True,
    ragged: bool = True,
) -> dict:
    """Inputs of verify_attn; cache rows nobody owns hold NaN, pages lie in random order."""
    draw = rng(seed)
    batch, width = len(prefix), latent + rope
    tree = random_tree(draw, batch, n_slots, ragged=ragged, prefix_lens=np.array(prefix))
    ends = [p + int(n) for p, n in zip(prefix, tree.n_nodes, strict=True)]
    rows = max(prefix) + n_slots + 3
    rows = rows if page_size is None else -(-rows // page_size) * page_size
    cache = draw.randn(batch, rows, width).astype(np.float32)
    for b, end in enumerate(ends):
        cache[b, end:] = np.nan if poison else 0.5
    table = None
    if page_size is not None:
        pages = rows // page_size
        order = draw.permutation(batch * pages + 2)[: batch * pages]
        paged = np.full((batch * pages + 2, page_size, width), np.nan, dtype=np.float32)
        paged[order] = cache.reshape(batch * pages, page_size, width)
        cache, table = paged, torch.from_numpy(order.reshape(batch, pages).astype(np.int32))
    q = draw.randn(batch, n_slots, heads, width).astype(np.float32)
    return {
        "q": torch.from_numpy(q).to(dtype),
        "kv": torch.from_numpy(cache).to(dtype),
        "tree": to_torch(tree),
        "prefix_lens": torch.tensor(prefix, dtype=torch.int32),
        "scale": 0.3,
        "page_table": table,
        "kv_lora_rank": latent,
    }


def reference(inputs: dict) -> tuple[np.ndarray, np.ndarray]:
    hosts = {n: v.float().numpy() if n in ("q", "kv") else v for n, v in inputs.items()}
    hosts["tree"] = inputs["tree"].numpy()
    hosts["page_table"] = None if inputs["page_table"] is None else inputs["page_table"].numpy()
    q, kv, tree = (hosts.pop(n) for n in ("q", "kv", "tree"))
    return ref_attn(q, kv, tree, **{**hosts, "prefix_lens": inputs["prefix_lens"].numpy()})


def same_attention(got: tuple, inputs: dict) -> None:
    out, lse = got
    want_out, want_lse = reference(inputs)
    assert out.dtype == inputs["q"].dtype and tuple(out.shape) == want_out.shape
    np.testing.assert_allclose(out.float().numpy(), want_out, atol=TOLERANCE[out.dtype], rtol=0)
    if lse is not None:
        assert lse.dtype == torch.float32
        np.testing.assert_array_equal(np.isneginf(lse.numpy()), np.isneginf(want_lse))
        np.testing.assert_allclose(lse.numpy(), want_lse, atol=2e-5, rtol=0)


PLAIN = {"bmm": torch_attn.prepare_bmm, "sdpa": torch_attn.prepare_sdpa}


@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("peer", PLAIN)
def test_torch_attention_is_right_with_nan_in_every_row_nobody_owns(peer: str, page_size: int | None):
    inputs = attention(page_size=page_size)
    same_attention(PLAIN[peer](inputs)(), inputs)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("peer", PLAIN)
def test_torch_attention_of_the_tree_alone(peer: str, page_size: int | None):
    inputs = {**attention(1, page_size=page_size), "part": "tree"}
    same_attention(PLAIN[peer](inputs)(), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peer", PLAIN)
def test_torch_attention_in_half_precision(peer: str, dtype: torch.dtype):
    inputs = attention(2, dtype=dtype)
    same_attention(PLAIN[peer](inputs)(), inputs)


@pytest.mark.parametrize("peer", PLAIN)
def test_rows_with_nothing_visible_are_zero_and_minus_infinity(peer: str):
    inputs = {**attention(3, prefix=(0, 0)), "part": "tree"}
    inputs["tree"].visibility[0, 0] = 0  # a used slot that sees nothing, not even itself
    same_attention(PLAIN[peer](inputs)(), inputs)


@pytest.mark.parametrize("part", ["all", "tree"])
@pytest.mark.parametrize("peer", PLAIN)
def test_bits_of_unused_slots_mean_nothing(peer: str, part: str):
    inputs = {**attention(7), "part": part}
    assert int(inputs["tree"].n_nodes.min()) < 37
    words = inputs["tree"].visibility.view(torch.int32)
    for b, used in enumerate(inputs["tree"].n_nodes.tolist()):
        words[b, used:] = -1  # rows of unused slots
        for j in range(used, 37):
            words[b, :, j // 32] |= -(2**31) if j % 32 == 31 else 1 << (j % 32)  # and their columns
    same_attention(PLAIN[peer](inputs)(), inputs)


@pytest.mark.parametrize("n_slots", [1, 32, 65])
def test_torch_attention_at_the_edges_of_a_visibility_word(n_slots: int):
    inputs = attention(4, n_slots=n_slots, prefix=(5, 2))
    same_attention(torch_attn.prepare_bmm(inputs)(), inputs)


def test_a_clean_contiguous_cache_is_read_in_place():
    inputs = attention(5, poison=False)
    rows, _ = layout.visible_rows(layout.read(inputs))
    assert rows().data_ptr() == inputs["kv"].data_ptr()


def test_a_prefix_part_merged_with_the_tree_is_exact_also_where_the_prefix_is_empty():
    inputs = attention(6, page_size=16)  # request 1 has an empty prefix
    case = layout.read(inputs)
    nothing = inputs["tree"].map(lambda a: a.clone())
    nothing.visibility.view(torch.int32).zero_()
    out, lse = torch_attn.prepare_bmm({**inputs, "tree": nothing})()
    lse = torch.where(torch.isinf(lse), float("inf"), lse)  # FlashMLA's way of saying empty
    out[1] = float("nan")  # and what its rows may hold
    same_attention(torch_merge.prepare(case, lambda: (out, lse))(), inputs)


# ---- peers of other projects, on stand-ins ----


def mla_over(q, cache, table, lengths, scale, causal=False):
    """(out f32[B,N,H,512], lse f32[B,N,H]) over the first lengths[b] rows of pages [P,S,E]; -inf if none."""
    batch, n_slots, heads, _ = q.shape
    out = torch.zeros(batch, n_slots, heads, 512)
    lse = torch.full((batch, n_slots, heads), float("-inf"))
    for b, n in enumerate(lengths.tolist()):
        rows = cache[table[b].long()].reshape(-1, cache.shape[-1])[:n].float()
        if n == 0:
            continue
        scores = q[b].float() @ rows.T * scale
        if causal:
            ahead = torch.arange(n) > torch.arange(n_slots)[:, None] + (n - n_slots)
            scores = scores.masked_fill(ahead[:, None, :], float("-inf"))
        lse[b] = scores.logsumexp(-1)
        out[b] = scores.softmax(-1) @ rows[:, :512]
    return out, lse


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = types.ModuleType(name)
    for key, value in members.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def fake_flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, meta, splits, softmax_scale, causal):
        assert k_cache.shape[1:3] == (64, 1) and block_table.dtype == cache_seqlens.dtype == torch.int32
        assert head_dim_v == 512 and (meta, splits) == ("plan", None)
        out, lse = mla_over(q, k_cache.squeeze(2), block_table, cache_seqlens, softmax_scale, causal)
        lse = torch.where(torch.isinf(lse), float("inf"), lse)
        return out.to(q.dtype), lse.transpose(1, 2).contiguous()

    stand_in(
        monkeypatch,
        "flash_mla",
        get_mla_metadata=lambda *a: ("plan", None),
        flash_mla_with_kvcache=with_kvcache,
    )


class FakeFlashInferWrapper:
    """FlashInfer's BatchMLAPagedAttentionWrapper as documented: flat queries, CSR pages, LSE in base 2."""

    def __init__(self, workspace, backend):
        assert workspace.numel() >= 1 << 20 and backend in ("fa2", "fa3")

    def plan(self, **plan):
        self.p = types.SimpleNamespace(**plan)
        assert not self.p.causal and self.p.head_dim_ckv == 512 and self.p.head_dim_kpe == 64

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse):
        assert return_lse
        starts, pages = self.p.kv_indptr.tolist(), self.p.kv_indices
        assert len(pages) == starts[-1]
        n_slots = int(self.p.qo_indptr[1])
        q = torch.cat([q_nope, q_pe], -1).unflatten(0, (-1, n_slots))
        cache = torch.cat([ckv_cache, kpe_cache], -1)
        table = [pages[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        out, lse = mla_over(q, cache, table, self.p.kv_len_arr, self.p.sm_scale)
        return out.to(q.dtype).flatten(0, 1), lse.flatten(0, 1) / np.log(2.0)


@pytest.fixture
def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "flashinfer")
    stand_in(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=FakeFlashInferWrapper)


def k26(seed: int, **changes: object) -> dict:
    shape = {"prefix": (70, 0, 5), "n_slots": 9, "latent": 512, "rope": 64, "dtype": torch.bfloat16}
    inputs = attention(seed, **{**shape, **changes})
    return {**inputs, "scale": 0.05}


@pytest.mark.parametrize("page_size", [None, 1, 64])
def test_flash_mla_with_a_torch_tail_is_exact_from_any_cache_layout(fake_flash_mla: None, page_size: int | None):
    inputs = k26(0, page_size=page_size)
    same_attention(flash_mla.prepare_merge(inputs)(), inputs)


@pytest.mark.parametrize("name", ["peer:flashmla-full", "peer:flashmla-causal"])
def test_flash_mla_alone_answers_the_question_it_says_it_answers(fake_flash_mla: None, name: str):
    peer = PEERS[name]
    inputs = k26(1, page_size=64, ragged=False)
    assert not peer.exact
    same_attention(peer.prepare(inputs)(), peer.asked(inputs))


def test_flash_mla_full_takes_underfull_trees_and_causal_does_not(fake_flash_mla: None):
    inputs = k26(2)
    same_attention(PEERS["peer:flashmla-full"].prepare(inputs)(), PEERS["peer:flashmla-full"].asked(inputs))
    with pytest.raises(baselines.Unsupported, match="underfull"):
        PEERS["peer:flashmla-causal"].prepare(inputs)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtype": torch.float32}, "q: got torch.float32"),
        ({"latent": 32, "rope": 8}, "expected 576 with 512"),
    ],
)
def test_flash_mla_says_what_it_does_not_take(fake_flash_mla: None, change: dict, word: str):
    with pytest.raises(baselines.Unsupported, match=word):
        flash_mla.prepare_full(k26(3, **change), causal=False)


@pytest.mark.parametrize("page_size", [None, 1, 64])
def test_flashinfer_alone_and_merged_convert_its_base_2_lse(fake_flashinfer: None, page_size: int | None):
    inputs = k26(4, prefix=(70, 3, 5), page_size=page_size)
    same_attention(flashinfer.prepare_merge(inputs, backend="fa2")(), inputs)
    full = PEERS["peer:flashinfer-fa3-full"]
    same_attention(full.prepare(inputs)(), full.asked(inputs))


def test_flashinfer_is_not_asked_for_an_empty_prefix(fake_flashinfer: None):
    with pytest.raises(baselines.Unsupported, match="empty prefix"):
        flashinfer.prepare_merge(k26(5), backend="fa2")


def fake_verify(predicts, accept_index, accept_count, tokens, index, first_child, next_sibling, target):
    """sgl-kernel's greedy verification as documented: global slot numbers, results written in place."""
    assert {t.dtype for t in (predicts, accept_index, accept_count)} == {torch.int32}
    assert {t.dtype for t in (tokens, index, first_child, next_sibling, target)} == {torch.int64}
    for b in range(len(tokens)):
        here, count = 0, 0
        accept_index[b, 0] = index[b, 0]
        while count + 1 < accept_index.shape[1]:
            child = int(first_child[b, here])
            while child != -1 and tokens[b, child] != target[b, here]:
                child = int(next_sibling[b, child])
            if child == -1:
                break
            predicts[index[b, here]] = target[b, here].int()
            here, count = child, count + 1
            accept_index[b, count] = index[b, here]
        predicts[index[b, here]] = target[b, here].int()
        accept_count[b] = count


def fake_build(parents, selected, prefix, mask, positions, index, next_token, next_sibling, topk, depth, n, mode):
    """sgl-kernel's tree builder as documented, mask mode QLEN_ONLY; a slot without parent fails here."""
    assert mode == 1 and parents.shape[1] == topk * (depth - 1) + 1
    dense = mask.view(-1, n, n).zero_()
    for b in range(len(parents)):
        numbers = selected[b].tolist()
        assert len(set(numbers)) == len(numbers)
        entry = [0] + [number // topk for number in numbers]
        above = [0] + [1 + numbers.index(int(parents[b, e])) if e else 0 for e in entry[1:]]
        for slot in range(n - 1, 0, -1):
            if next_token[b, above[slot]] != -1:
                next_sibling[b, slot] = next_token[b, above[slot]]
            next_token[b, above[slot]] = slot
        for slot in range(n):
            here, steps = slot, 0
            dense[b, slot, 0] = True
            while here:
                dense[b, slot, here] = True
                here, steps = above[here], steps + 1
            positions[b * n + slot] = prefix[b] + steps
            index[b, slot] = b * n + slot


@pytest.fixture
def fake_sgl(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "sgl_kernel", verify_tree_greedy=fake_verify, build_tree_kernel_efficient=fake_build)


@pytest.mark.parametrize("seed", range(3))
def test_sgl_verify_accepts_as_the_reference_does_with_nothing_left_from_the_step_before(fake_sgl, seed: int):
    tree, predictions = walks(seed)
    peer = sgl.prepare_accept({"tree": to_torch(tree), "predictions": torch.from_numpy(predictions)})
    same_accepted(peer(), ref_accept(tree, predictions))
    predictions[...] = walks(seed + 1)[1]  # the tensor shares its memory: the next step's predictions
    same_accepted(peer(), ref_accept(tree, predictions))


def test_sgl_verify_has_no_stop_token(fake_sgl: None):
    tree, predictions = walks(0)
    with pytest.raises(baselines.Unsupported, match="stop_token"):
        sgl.prepare_accept({"tree": tree, "predictions": torch.from_numpy(predictions), "stop_token": 1})


@pytest.mark.parametrize("budget", [1, 33])
def test_sgl_build_gives_the_links_mask_and_positions_of_the_reference(fake_sgl: None, budget: int):
    log_probs, token_ids = candidates(6, 2, 5, 6)
    prefix = np.array([3, 1000])
    inputs = {"log_probs": log_probs, "token_ids": token_ids, "prefix_lens": prefix}
    peer = sgl.prepare_build({**{n: torch.from_numpy(a) for n, a in inputs.items()}, "budget": budget})
    for _ in range(2):
        same_tree(peer(), ref_build(log_probs, token_ids, budget, prefix_lens=prefix))


def test_sgl_build_refuses_an_underfull_tree(fake_sgl: None):
    log_probs, token_ids = (torch.from_numpy(a) for a in candidates(7, 1, 2, 2))
    with pytest.raises(baselines.Unsupported, match="underfull"):
        sgl.prepare_build({"log_probs": log_probs, "token_ids": token_ids, "budget": 10})


def test_the_libraries_that_are_not_installed_say_so():
    for module in (flash_mla.available, sgl.available, lambda: flashinfer.available("fa2")):
        ok, why = module()
        assert ok or "torch sees no GPU" in why or "does not import" in why or "compute capability" in why


# ---- on a GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("peer", [p for p in baselines.for_op("verify_attn") if p.exact], ids=lambda p: p.name)
def test_the_exact_attention_peers_that_run_here_are_exact_on_the_gpu(peer: baselines.Baseline):
    ok, why = peer.available()
    if not ok:
        pytest.skip(why)
    inputs = k26(8, prefix=(700, 1, 65), n_slots=33, heads=8, page_size=64)
    on_gpu = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    on_gpu["tree"] = inputs["tree"].map(torch.Tensor.cuda)
    out, lse = peer.prepare(on_gpu)()
    same_attention((out.cpu(), None if lse is None else lse.cpu()), inputs)
