from __future__ import annotations

import numpy as np
import pytest

from kdtree.measure import graphs, memory, nvml
from kdtree.spec import MODELS
from kdtree.tree import DraftTree

PARAMS = {
    "topk": {"B": 2, "D": 7, "K": 16, "V": 163_840, "dtype": "bfloat16"},
    "tree_build": {"B": 2, "D": 7, "K": 16, "budget": 32},
    "verify_attn": {"B": 4, "H": 64, "N": 33, "L": 4096, "dtype": "bfloat16", "page_size": 64},
    "merge_states": {"B": 2, "H": 8, "N": 33, "dtype": "bfloat16"},
    "tree_accept": {"B": 2, "N": 33, "D": 7},
    "kv_compact": {"B": 4, "D": 7, "n_layers": 61, "dtype": "bfloat16"},
}


def zeros(shape, dtype):
    return np.zeros(shape, dtype).nbytes


@pytest.mark.parametrize("op", PARAMS)
def test_the_total_is_the_sum_of_the_named_tensors(op):
    parts = memory.predicted_bytes(op, PARAMS[op])
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total") > 0
    assert parts["workspace"] == 0
    assert all(name in ("workspace", "total") or name.startswith(("in.", "out.")) for name in parts)


def test_the_formulas_give_what_numpy_would_allocate():
    tree = DraftTree.empty(2, 33, 7).arrays()
    assert memory.tree_bytes(2, 33) == {name: array.nbytes for name, array in tree.items()}
    build = memory.predicted_bytes("tree_build", PARAMS["tree_build"])
    assert memory.call_bytes(build) == sum(array.nbytes for array in tree.values())
    assert build["in.log_probs"] == zeros((2, 7, 16), np.float32)
    topk = memory.predicted_bytes("topk", PARAMS["topk"])
    assert topk["in.logits"] == zeros((2, 7, 163_840), np.float16)
    assert memory.call_bytes(topk) == zeros((2, 7, 16), np.float32) + zeros((2, 7, 16), np.int32)
    accept = memory.predicted_bytes("tree_accept", PARAMS["tree_accept"])
    assert memory.call_bytes(accept) == zeros((2, 8), np.int32) + 3 * zeros(2, np.int32)
    merge = memory.predicted_bytes("merge_states", PARAMS["merge_states"])
    assert memory.call_bytes(merge) == zeros((2, 33, 8, 512), np.float16) + zeros((2, 33, 8), np.float32)


def test_a_paged_cache_is_whole_pages_per_request():
    parts = memory.predicted_bytes("verify_attn", PARAMS["verify_attn"] | {"L": [0, 31, 32, 4096]})
    pages = [1, 1, 2, 65]
    assert parts["in.kv"] == sum(pages) * 64 * 576 * 2
    assert parts["in.page_table"] == 4 * 65 * 4
    assert parts["in.q"] == 4 * 33 * 64 * 576 * 2
    assert parts["out.out"] == 4 * 33 * 64 * 512 * 2
    assert parts["out.lse"] == 4 * 33 * 64 * 4


def test_a_contiguous_cache_is_as_long_as_its_longest_request():
    params = PARAMS["verify_attn"] | {"L": [0, 5, 9, 100], "page_size": None}
    assert memory.predicted_bytes("verify_attn", params)["in.kv"] == 4 * 133 * 576 * 2
    assert memory.predicted_bytes("verify_attn", params | {"Lmax": 1000})["in.kv"] == 4 * 1000 * 576 * 2
    assert "in.page_table" not in memory.predicted_bytes("verify_attn", params)


def test_other_shapes_and_dtypes_are_followed():
    tiny = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "dtype": "float32", "page_size": 0}
    parts = memory.predicted_bytes("verify_attn", PARAMS["verify_attn"] | tiny)
    assert parts["in.q"] == 4 * 33 * 64 * 40 * 4
    assert parts["out.out"] == 4 * 33 * 64 * 32 * 4


def test_a_workspace_counts_for_its_op_and_implementation_only(monkeypatch):
    monkeypatch.setitem(memory.WORKSPACE, ("verify_attn", "numba:mma"), lambda p: p["B"] * 1000)
    plain = memory.predicted_bytes("verify_attn", PARAMS["verify_attn"])
    split = memory.predicted_bytes("verify_attn", PARAMS["verify_attn"], "numba:mma")
    assert split["workspace"] == 4000 and split["total"] == plain["total"] + 4000
    assert memory.call_bytes(split) == memory.call_bytes(plain) + 4000
    assert memory.predicted_bytes("topk", PARAMS["topk"], "numba:mma")["workspace"] == 0


@pytest.mark.parametrize(
    ("op", "change", "named"),
    [
        ("sort", {}, "op: got 'sort'"),
        ("topk", {"V": None}, "V"),
        ("topk", {"K": -1}, "K"),
        ("topk", {"B": True}, "B"),
        ("topk", {"dtype": "bf16"}, "dtype"),
        ("verify_attn", {"L": [1, 2]}, "L"),
        ("verify_attn", {"L": None}, "L"),
        ("verify_attn", {"L": [1, 2, 3, -4]}, "L"),
        ("merge_states", {"H": None}, "H"),
    ],
)
def test_what_is_missing_or_odd_is_named(op, change, named):
    with pytest.raises(ValueError, match=named):
        memory.predicted_bytes(op, PARAMS.get(op, {}) | change)


def test_a_token_of_k26_takes_1152_bytes_a_layer_in_bf16():
    k26 = MODELS["k2.6-tp1"]
    assert memory.kv_cache_bytes(k26, 1, n_layers=1) == 1152
    assert memory.kv_cache_bytes(k26, 1) == 61 * 1152
    assert memory.kv_cache_bytes(k26, [10, 20]) == 30 * 61 * 1152
    assert memory.kv_cache_bytes(k26, 1, n_layers=1, dtype="float8_e4m3fn") == 576
    assert memory.kv_cache_bytes(MODELS["k2.6-tp8"], 1) == memory.kv_cache_bytes(k26, 1)
    # One layer at 32k tokens: small enough for an H200's L2, hence the rotation.
    assert memory.kv_cache_bytes(k26, 32_768, n_layers=1) == pytest.approx(37.7e6, rel=0.01)


def test_a_dense_mask_is_thousands_of_times_the_packed_one():
    assert memory.dense_mask_bytes(256, 262_144) == pytest.approx(67e6, rel=0.01)
    assert memory.packed_mask_bytes(256) == 8192
    assert memory.packed_mask_bytes(33) == DraftTree.empty(1, 33, 1).visibility.nbytes


def test_what_does_not_fit_says_how_much_is_missing():
    assert memory.fits({"total": 100}, 200, reserve=100) is None
    reason = memory.fits({"total": 2**30}, 2**30)
    assert reason == "needs 1.00 GiB and a reserve of 0.50 GiB, but only 1.00 GiB are free"
    assert memory.fits(101, 200, reserve=100) is not None


def test_without_a_gpu_host_memory_is_free_and_no_peak_is_measured(monkeypatch):
    monkeypatch.setattr(graphs, "gpu_available", lambda: False)
    assert memory.free_bytes() > 2**20
    called = []
    with pytest.raises(graphs.NotMeasurable, match="no GPU"):
        memory.measured_peak(lambda: called.append(1))
    assert called == []


class FakeTorch:
    """As much of torch.cuda as memory.py asks for, with an allocator that counts."""

    def __init__(self):
        self.cuda, self.now, self.peak = self, 1000, 5000

    def synchronize(self):
        pass

    def reset_peak_memory_stats(self):
        self.peak = self.now

    def memory_allocated(self):
        return self.now

    def max_memory_allocated(self):
        return self.peak

    def memory_reserved(self):
        return 4000

    def mem_get_info(self):
        return 10_000, 20_000

    def allocate(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def test_the_peak_is_counted_from_what_was_there_before(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setattr(graphs, "gpu_available", lambda: True)
    monkeypatch.setattr(graphs, "require_gpu", lambda: None)
    monkeypatch.setattr(graphs, "torch_cuda", lambda required=True: fake)

    def work():
        fake.allocate(700)
        fake.allocate(-300)

    assert memory.measured_peak(work) == 700
    assert memory.free_bytes() == 10_000 + 4000 - 1400


def test_without_torch_the_used_memory_of_the_gpu_is_polled(monkeypatch):
    from kdtree.kernels import launch

    used = [100]
    monkeypatch.setattr(launch, "synchronize", lambda what: None)
    monkeypatch.setattr(graphs, "require_gpu", lambda: None)
    monkeypatch.setattr(graphs, "torch_cuda", lambda required=True: None)
    monkeypatch.setattr(graphs, "gpu_available", lambda: True)
    monkeypatch.setattr(nvml, "gpu_memory", lambda: (5000, used[0]))

    def work():
        used[0] = 900

    assert memory.measured_peak(work) == 800
    assert memory.free_bytes() == 5000


@pytest.mark.parametrize("failure", [ImportError("pynvml"), type("NVMLErrorUninitialized", (Exception,), {})()])
def test_memory_that_cannot_be_read_is_said_to_be_so(monkeypatch, failure):
    def fail():
        raise failure

    monkeypatch.setattr(graphs, "torch_cuda", lambda required=True: None)
    monkeypatch.setattr(graphs, "gpu_available", lambda: True)
    monkeypatch.setattr(nvml, "gpu_memory", fail)
    with pytest.raises(graphs.NotMeasurable, match="cannot be read"):
        memory.free_bytes()


def test_a_cuda_error_while_reading_memory_stays_one(monkeypatch):
    def fail():
        raise RuntimeError("the CUDA driver answered CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(graphs, "torch_cuda", lambda required=True: None)
    monkeypatch.setattr(graphs, "gpu_available", lambda: True)
    monkeypatch.setattr(nvml, "gpu_memory", fail)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS") as caught:
        memory.free_bytes()
    assert not isinstance(caught.value, graphs.NotMeasurable)
