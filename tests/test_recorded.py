"""A call repeated launches what the first one did, on its own pointers, and only when it is an equal call."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_driver import FakeDriver

import kdtree
from kdtree import arrays, attention, recorded
from kdtree.kernels import assemble, driver, launch, verify_simt
from kdtree.kernels import verify_attn as kernels
from kdtree.tree import random_tree

torch = pytest.importorskip("torch")
from kdtree.kernels.replay import Replay, same_as  # noqa: E402

B, N, H, E, C, ROWS = 2, 5, 3, 40, 32, 24
SCALE = 0.25


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    """A process whose torch tensors seem to lie on a GPU with a driver that only remembers launches."""
    found = FakeDriver()
    monkeypatch.setattr(driver, "load", lambda: found)
    monkeypatch.setattr(driver, "capability", lambda device: found.capability)
    monkeypatch.setattr(driver, "sm_count", lambda device: 1)
    monkeypatch.setattr(assemble, "machine_code", lambda kernel, words, target: (b"code", kernel.name))
    for module in (launch, kernels):
        monkeypatch.setattr(module, "SIMULATED", False)
    monkeypatch.setattr("kdtree._cuda.SIMULATED", False)
    monkeypatch.setattr(launch, "_fault", None)
    monkeypatch.setattr(launch, "_workspaces", {})
    monkeypatch.setattr(launch, "on_release", [])
    monkeypatch.setattr(recorded, "known", {})
    monkeypatch.setattr(recorded, "current_stream", recorded._unknown_stream)
    found.stream = 7
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.device - 1, raising=False)  # a CPU tensor's is -1
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: found.stream, raising=False)
    monkeypatch.setattr(arrays, "current_stream", lambda v: found.stream)
    seen = arrays.view

    def view(array, name):
        v = seen(array, name)
        if v.kind == "torch":
            v.device = "cuda:0"
        return v

    monkeypatch.setattr(arrays, "view", view)
    simt = verify_simt.simt

    def fresh(*key):  # a kernel that another test compiled would not be loaded here
        kernel = simt(*key)
        kernel._compiled.clear()
        kernel._launches.clear()
        return kernel

    monkeypatch.setattr(verify_simt, "simt", fresh)
    return found


class Setup:
    """Tensors of one call; `run` makes it."""

    def __init__(self, paged: bool = False, seed: int = 0, dtype=torch.bfloat16, **sizes):
        at = {"B": B, "N": N, "H": H, "rows": ROWS} | sizes
        self.tree = random_tree(np.random.RandomState(seed), at["B"], at["N"]).map(lambda a: torch.from_numpy(a.copy()))
        self.q = torch.zeros(at["B"], at["N"], at["H"], E, dtype=dtype)
        shape = (at["B"] * at["rows"] // 4, 4, E) if paged else (at["B"], at["rows"], E)
        self.kv = torch.zeros(shape, dtype=dtype)
        self.given = {"prefix_lens": torch.zeros(at["B"], dtype=torch.int32), "scale": SCALE, "kv_lora_rank": C}
        if paged:
            self.given["page_table"] = torch.zeros(at["B"], at["rows"] // 4, dtype=torch.int32)
        self.out = (torch.zeros(at["B"], at["N"], at["H"], C, dtype=dtype), torch.zeros(at["B"], at["N"], at["H"]))

    def run(self, **changes):
        given = {"q": self.q, "kv": self.kv, "tree": self.tree, "out": self.out} | self.given | changes
        return kdtree.verify_attn(given.pop("q"), given.pop("kv"), given.pop("tree"), **given)

    def pointers(self):
        """Of q, kv, page_table, prefix_lens, n_nodes, visibility, out and lse, as simt takes them."""
        table = self.given.get("page_table")
        arrays = (self.q, self.kv, table, self.given["prefix_lens"], self.tree.n_nodes, self.tree.visibility, *self.out)
        return [0 if a is None else a.data_ptr() for a in arrays]


def launched(fake: FakeDriver) -> list[int]:
    """Pointers of the last launch of simt."""
    found = fake.launches[-1].parameters
    return [struct.unpack("Q", found[i])[0] for i in (0, 1, 2, 3, 4, 5, 13, 14)]


SIMT = [8] * 6 + [4] * 7 + [8] * 2


@pytest.fixture
def counted(monkeypatch) -> SimpleNamespace:
    """How many calls were checked and planned."""
    found = SimpleNamespace(slow=0)
    real = attention._launch_attention

    def count(*given):
        found.slow += 1
        return real(*given)

    monkeypatch.setattr(attention, "_launch_attention", count)
    return found


@pytest.mark.parametrize("paged", [False, True])
def test_the_second_call_launches_the_same_on_its_own_pointers(paged, fake, counted):
    fake.sizes = SIMT
    first, second = Setup(paged), Setup(paged, seed=1)
    for setup in (first, second, first):
        assert setup.run() == setup.out
        assert launched(fake) == setup.pointers()
    assert counted.slow == 1
    one, two, three = fake.launches
    assert one.parameters[6:13] == two.parameters[6:13]
    assert one.parameters == three.parameters
    assert (one.grid, one.block, one.stream) == (two.grid, two.block, two.stream) == (one.grid, one.block, 7)


def test_a_split_call_repeats_both_kernels_and_its_scratch_memory(fake, counted, monkeypatch):
    monkeypatch.setattr(verify_simt, "plan_splits", lambda *_: 3)
    setup, other = Setup(), Setup(seed=1)
    fake.sizes = [8, 8]
    setup.run()
    other.run()
    assert counted.slow == 1 and len(fake.launches) == 4
    assert fake.launches[1].parameters == fake.launches[3].parameters  # what `combine` reads: the parts
    assert len(launch._workspaces[0, 7]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 0.5},
        {"part": "tree"},
        {"impl": "simt"},
        {"stream": 11},
        {"prefix_lens": torch.zeros(B, dtype=torch.int64)},
        {"kv": torch.zeros(B, ROWS + 1, E, dtype=torch.bfloat16)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_call_that_differs_is_looked_at_and_then_known_too(changes, fake, counted):
    setup = Setup()
    setup.run()
    setup.run(**changes)
    assert counted.slow == 2
    setup.run()
    setup.run(**changes)
    assert counted.slow == 2 and len(fake.launches) == 4


def test_shapes_and_dtypes_live_side_by_side(fake, counted):
    setups = [
        Setup(),
        Setup(dtype=torch.float32),
        Setup(dtype=torch.float16),
        Setup(paged=True),
        Setup(N=9),
        Setup(rows=28),
    ]
    for setup in setups * 3:
        setup.run()
    assert counted.slow == len(setups)


def test_another_stream_takes_scratch_memory_of_its_own(fake, counted, monkeypatch):
    monkeypatch.setattr(verify_simt, "plan_splits", lambda *_: 2)
    setup = Setup()
    for stream in (7, 8, 7, 8):
        fake.stream = stream
        setup.run()
    assert counted.slow == 2
    assert [found.stream for found in fake.launches[::2]] == [7, 8, 7, 8]


BAD = {
    "shape": ({"kv": torch.zeros(B, ROWS, E + 1, dtype=torch.bfloat16)}, ValueError, "kv: got shape"),
    "batch": ({"prefix_lens": torch.zeros(B + 1, dtype=torch.int32)}, ValueError, "prefix_lens: got shape"),
    "dtype": ({"kv": torch.zeros(B, ROWS, E, dtype=torch.float16)}, TypeError, "kv: got dtype float16"),
    "int": ({"prefix_lens": torch.zeros(B)}, TypeError, "prefix_lens: got dtype float32"),
    "strided": ({"kv": torch.zeros(B, E, ROWS, dtype=torch.bfloat16).mT}, ValueError, "kv: got a strided array"),
    "host": ({"prefix_lens": np.zeros(B, np.int32)}, ValueError, "prefix_lens: got an array on cpu"),
    "nothing": ({"prefix_lens": None}, TypeError, "prefix_lens: got NoneType"),
    "scale": ({"scale": float("nan")}, ValueError, "scale: got nan"),
    "bool": ({"scale": True}, TypeError, "scale: got True"),
    "part": ({"part": "some"}, ValueError, "part: got 'some'"),
    "list": ({"part": ["all"]}, ValueError, "part: got"),
    "impl": ({"impl": "best"}, ValueError, "impl: got 'best'"),
    "rank": ({"kv_lora_rank": 32.0}, TypeError, "kv_lora_rank: got 32.0"),
    "out": ({"out": torch.zeros(2, 3)}, TypeError, "out: got Tensor"),
    "outs": ({"out": (torch.zeros(2), torch.zeros(2))}, TypeError, "out.out: got dtype float32"),
    "one": ({"out": (torch.zeros(2),)}, ValueError, "out: got 1 arrays"),
    "tree": ({"tree": None}, TypeError, "tree: got NoneType"),
    "backend": ({"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
    "stream": ({"stream": "main"}, TypeError, "stream: got str"),
    "table": ({"page_table": torch.zeros(B, 0, dtype=torch.int32)}, ValueError, "page_table: got 0 pages"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_argument_is_refused_after_a_good_call_as_before(what, fake):
    changes, kind, message = BAD[what]
    setup = Setup()
    setup.run()
    setup.run()
    with pytest.raises(kind, match=message):
        setup.run(**changes)
    assert len(fake.launches) == 2


def test_a_tree_of_another_kind_is_refused_after_a_good_call(fake):
    setup = Setup()
    setup.run()
    with pytest.raises(TypeError, match="tree: got SimpleNamespace"):
        setup.run(tree=SimpleNamespace(**setup.tree.arrays()))
    with pytest.raises(ValueError, match=r"tree.visibility: got shape \(2, 5, 2\)"):
        setup.run(tree=replace(setup.tree, visibility=torch.zeros(B, N, 2, dtype=torch.int32)))


def test_outputs_that_overlap_are_refused_after_a_good_call(fake):
    setup = Setup(dtype=torch.float32)
    setup.run()
    memory = torch.zeros(B * N * H * (C + 1))
    out = memory[: B * N * H * C].view(B, N, H, C)
    setup.run(out=(out, memory[-B * N * H :].view(B, N, H)))
    for start in (0, 40, B * N * H * C - 1):
        lse = memory[start : start + B * N * H].view(B, N, H)
        with pytest.raises(ValueError, match="out.*: got memory that overlaps"):
            setup.run(out=(out, lse))
    assert len(fake.launches) == 2


def test_a_pointer_that_is_not_aligned_is_looked_at_each_time(fake, counted):
    setup = Setup()
    setup.run()
    odd = torch.zeros(setup.q.numel() + 1, dtype=torch.bfloat16)[1:].view(setup.q.shape)
    assert odd.data_ptr() % 16
    setup.run(q=odd)
    setup.run(q=odd)
    assert counted.slow == 3 and len(fake.launches) == 3


def test_a_call_on_another_current_device_is_looked_at(fake, counted):
    setup = Setup()
    setup.run()
    fake.device = 1
    with pytest.raises(ValueError, match="q: got an array on cuda:0, expected one on the current device cuda:1"):
        setup.run()


def test_without_out_nothing_is_recorded(fake, counted):
    setup = Setup()
    setup.run(out=None)
    assert not recorded.known
    setup.run()
    setup.run(out=None)
    assert counted.slow == 3


def test_another_kernel_in_place_of_the_shipped_one_is_launched(fake, counted, monkeypatch):
    setup = Setup()
    setup.run()
    mine = launch.Kernel(lambda: None, name="mine", threads=32)
    with monkeypatch.context() as patch:
        patch.setattr(verify_simt, "simt", lambda *key: mine)
        setup.run()
        assert fake.loaded[-1] == "mine"
    setup.run()
    assert counted.slow == 2 and fake.launches[-1].block != (32, 1, 1)


def test_a_fault_in_a_repeated_call_is_a_fault_and_ends_everything(fake):
    setup = Setup()
    setup.run()
    fake.statuses = [700]
    with pytest.raises(launch.CudaFault, match="verify_attn.simt.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        setup.run()
    with pytest.raises(launch.CudaFault, match="refused, this process met a CUDA error before"):
        setup.run()
    assert len(fake.launches) == 2 and launch.fault() is not None


def test_a_thread_without_a_context_gets_one(fake):
    setup = Setup()
    setup.run()
    fake.statuses = [201]
    setup.run()
    assert len(fake.launches) == 3 and launch.fault() is None


def test_releasing_scratch_memory_forgets_the_calls(fake, counted, monkeypatch):
    monkeypatch.setattr(launch, "synchronize", lambda what: None)
    setup = Setup()
    setup.run()
    launch.release_workspaces()
    assert not recorded.known
    setup.run()
    assert counted.slow == 2


def test_what_is_known_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(recorded, "KEYS_KEPT", 3)
    setup = Setup()
    for i in range(1, 9):
        setup.run(scale=i / 8)
    assert len(recorded.known) <= 3
    for rows in range(8, 40, 2):
        Setup(rows=rows).run()
    assert max(map(len, recorded.known.values())) == recorded.REPLAYS_A_KEY


def test_two_threads_do_not_mix_their_pointers(fake):
    fake.sizes = SIMT
    setups = [Setup(seed=i) for i in range(2)]
    setups[0].run()
    fake.launches.clear()

    def work(setup):
        for _ in range(200):
            setup.run()

    threads = [threading.Thread(target=work, args=(s,)) for s in setups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [[struct.pack("Q", p) for p in s.pointers()] for s in setups]
    found = [[call.parameters[i] for i in (0, 1, 2, 3, 4, 5, 13, 14)] for call in fake.launches]
    assert len(found) == 400 and all(pointers in wanted for pointers in found)


def test_merging_is_repeated_too_also_in_place(fake, monkeypatch):
    from kdtree.kernels import merge_states

    monkeypatch.setattr(merge_states.simt("float32"), "_compiled", {})
    monkeypatch.setattr(merge_states.simt("float32"), "_launches", {})
    fake.sizes = [8, 8, 8, 8, 4, 8, 8]
    wanted = []
    for _ in range(3):
        a, b, c = ((torch.zeros(2, 3, 8), torch.zeros(2, 3)) for _ in range(3))
        for out in (c, c, a):
            kdtree.merge_states(*a, *b, out=out)
            wanted.append([struct.pack("Q", t.data_ptr()) for t in (*a, *b, *out)])
    found = [[*call.parameters[:4], *call.parameters[5:]] for call in fake.launches]
    assert found == wanted
    with pytest.raises(ValueError, match="lse_b: got shape"):
        kdtree.merge_states(*a, b[0], torch.zeros(2, 4), out=c)
    assert sum(map(len, recorded.known.values())) == 2  # tensors given twice are another call


# ---- the parts


def record(fake, arrays: dict, args, **how):
    made_by = (SimpleNamespace(simt=1), "simt")
    step = launch.Step(launch.Kernel(lambda: None, name="k", threads=32), (1,), args, 0)
    return Replay([step], arrays, **({"aligned": (), "apart": ("x", "y"), "made_by": made_by} | how))


def test_a_tensor_map_follows_its_tensor(fake):
    x, y = torch.zeros(2, 64, 64, dtype=torch.int16), torch.zeros(3)
    seen = launch.TensorMap(launch.Operand(x.data_ptr(), "*u16", "x"), "bfloat16", (2, 64, 64), (1, 64, 64))
    found = record(fake, {"x": x, "y": y}, (seen, ("i32", 3), launch.Operand(y.data_ptr(), "*f32", "y")))
    fake.sizes = [128, 4, 8]
    for _ in range(2):
        other = torch.zeros(2, 64, 64, dtype=torch.int16)
        assert found.repeats((other, y)) and found.repeats((x, y)) and found.repeats((x, y))
        maps = [call.parameters[0].rstrip(b".") for call in fake.launches[-3:]]
        assert maps == [f"map of {p:#x}".encode() for p in (other.data_ptr(), x.data_ptr(), x.data_ptr())]


def test_an_argument_in_an_array_that_it_does_not_name_is_refused(fake):
    x, y = torch.zeros(8), torch.zeros(8)
    with pytest.raises(ValueError, match="k: argument 1 lies in an array that it does not name"):
        record(
            fake,
            {"x": x, "y": y},
            (launch.Operand(x.data_ptr(), "*f32", "x"), launch.Operand(y.data_ptr() + 4, "*f32")),
        )
    record(fake, {"x": x, "y": y}, (launch.Operand(0, "*f32"), launch.Operand(1 << 40, "*f32")))  # null, scratch memory


@pytest.mark.parametrize("guards", [True, False], ids=["torch's guards", "put together"])
def test_tensors_are_compared_one_by_one(guards, monkeypatch):
    if not guards:
        monkeypatch.setattr(torch._C._dynamo, "guards", None)
    x, y = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    same = same_as([x, y])
    assert same(x, y) and same(torch.ones_like(x), torch.ones_like(y))
    assert not same(x.float(), y) and not same(x, y.long())
    assert not same(x[:1], y) and not same(torch.zeros(3, 2, dtype=x.dtype).mT, y)
    assert not same(x, torch.zeros(2, dtype=torch.int32, device="meta"))


def test_one_tensor_given_twice_can_be_compared():
    x = torch.zeros(2)
    assert same_as([x, x])(x, x)


# ---- on a GPU


def random_setup(paged: bool = False, seed: int = 0) -> Setup:
    setup, generator = Setup(paged, seed), torch.Generator().manual_seed(seed)
    setup.tree = setup.tree.map(lambda a: a.cuda())
    setup.q = torch.randn(setup.q.shape, generator=generator).bfloat16().cuda()
    setup.kv = torch.randn(setup.kv.shape, generator=generator).bfloat16().cuda()
    setup.given = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in setup.given.items()}
    setup.given["prefix_lens"] += 1 + seed
    if paged:
        pages = torch.randperm(setup.kv.shape[0], generator=generator).int().cuda()
        setup.given["page_table"] = pages.view_as(setup.given["page_table"])
    setup.out = tuple(torch.full_like(o, float("nan"), device="cuda") for o in setup.out)
    return setup


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_on_a_gpu_a_repeated_call_gives_what_a_checked_one_gives(paged):
    recorded.known.clear()
    setups = [random_setup(paged, seed) for seed in range(4)]
    wanted = [s.run(out=None) for s in setups]
    for _ in range(2):
        for setup, want in zip(setups, wanted, strict=True):
            for array in setup.out:
                array.fill_(float("nan"))
            setup.run()
            assert all(torch.equal(a, b) for a, b in zip(setup.out, want, strict=True))
    assert sum(map(len, recorded.known.values())) == 1


@pytest.mark.gpu
def test_on_a_gpu_a_repeated_call_can_be_captured_and_does_not_allocate():
    setup = random_setup()
    want = [o.clone() for o in setup.run()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        setup.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            setup.run()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            setup.run()
    for array in setup.out:
        array.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(setup.out, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("what", [w for w in BAD if w not in ("host", "nothing", "tree", "one", "out")])
def test_on_a_gpu_a_wrong_argument_is_refused_after_a_good_call(what):
    changes, kind, message = BAD[what]
    setup = random_setup()
    setup.run()
    setup.run()
    on_gpu = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    if what == "outs":
        on_gpu = {"out": tuple(a.cuda() for a in changes["out"])}
    with pytest.raises(kind, match=message):
        setup.run(**on_gpu)


@pytest.mark.gpu
def test_on_a_gpu_a_repeated_call_costs_the_host_little():
    import time

    setup = random_setup()
    setup.run()
    samples = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        setup.run()
        samples.append(time.perf_counter() - start)
    assert np.median(samples) < 60e-6  # 10 or so; the first call takes 200
