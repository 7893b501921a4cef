from __future__ import annotations

import pytest

from kdtree.measure import graphs, roofline
from kdtree.measure.roofline import DATASHEET, Roofs, bound, datasheet, floor_us, flop_bytes

H200 = Roofs(copy_gbs=4300, bf16_tflops=787, empty_us=1.0, l2_bytes=60 * 2**20, sm_count=132)
VERIFY = {"B": 4, "H": 64, "N": 33, "L": 4096, "dtype": "bfloat16", "page_size": 64}


def test_the_floor_is_the_longest_of_its_three_terms():
    assert floor_us(787e6, 0, H200) == pytest.approx(1.0)
    assert floor_us(787e9, 1e6, H200) == pytest.approx(1000)
    assert floor_us(0, 4.3e9, H200) == pytest.approx(1000)
    assert floor_us(0, 0, H200) == 1.0
    assert [bound(787e9, 0, H200), bound(0, 4.3e9, H200), bound(1, 1, H200)] == ["flop", "bytes", "launch"]


def test_verification_counts_two_products_over_prefix_and_tree():
    flop, moved = flop_bytes("verify_attn", VERIFY)
    assert flop == 2 * 4 * 64 * 33 * (4096 + 33) * 1088
    rows = 4 * (4096 + 33)
    by_hand = 4 * 33 * 64 * (576 * 2 + 512 * 2 + 4) + rows * 1152 + 4 * 33 * 2 * 4 + 4 * 65 * 4
    assert moved == by_hand


def test_the_floor_of_a_reference_case_is_set_by_its_matrix_products():
    # 2·B·H·N·(L+N)·1088 / 787 TFLOP/s; the bytes would take 12 µs.
    assert floor_us(*flop_bytes("verify_attn", VERIFY), H200) == pytest.approx(96.4, rel=0.001)


def test_a_ragged_batch_is_the_sum_of_its_requests():
    ragged = VERIFY | {"B": 3, "L": [0, 100, 5000], "page_size": None}
    parts = [flop_bytes("verify_attn", VERIFY | {"B": 1, "L": n, "page_size": None}) for n in (0, 100, 5000)]
    assert flop_bytes("verify_attn", ragged) == tuple(map(sum, zip(*parts, strict=True)))


def test_tree_part_does_not_read_the_prefix():
    alone = flop_bytes("verify_attn", VERIFY | {"part": "tree"})
    assert alone == flop_bytes("verify_attn", VERIFY | {"L": 0})


def test_kv_rows_are_counted_once_whatever_the_heads():
    few, many = (flop_bytes("verify_attn", VERIFY | {"H": h})[1] for h in (8, 64))
    per_head = 4 * 33 * (576 * 2 + 512 * 2 + 4)
    assert many - few == 56 * per_head


def test_small_ops_by_hand():
    topk = flop_bytes("topk", {"B": 2, "D": 7, "K": 8, "V": 163_840, "dtype": "bfloat16"})
    assert topk == (2 * 14 * 163_840, 14 * (163_840 * 2 + 64))
    n, w = 33, 2
    build = flop_bytes("tree_build", {"B": 1, "D": 7, "K": 8, "budget": 32})
    assert build == (64, 7 * 8 * 8 + n * (5 * 4 + 8 + 8 + 4 * w) + 4)
    accept = flop_bytes("tree_accept", {"B": 2, "N": 33, "D": 7})
    assert accept == (0, 2 * (33 * 16 + 4) + 2 * (8 * 4 + 12))
    compact = flop_bytes("kv_compact", {"B": 4, "D": 7, "n_layers": 61, "dtype": "bfloat16"})
    assert compact == (0, 4 * 8 * (2 * 61 * 1152 + 4))
    assert flop_bytes("kv_compact", {"B": 4, "D": 7, "n_layers": 61, "E": 40, "dtype": "float32"})[1] == (
        4 * 8 * (2 * 61 * 160 + 4)
    )
    merge = flop_bytes("merge_states", {"rows": 66, "H": 8, "dtype": "bfloat16"})
    assert merge == flop_bytes("merge_states", {"B": 2, "N": 33, "H": 8, "dtype": "bfloat16"})
    assert merge[1] == 66 * 8 * 3 * (1024 + 4)


def test_decoding_of_one_query_is_bound_by_bytes_and_a_tree_by_flop():
    one = VERIFY | {"N": 1, "H": 8, "L": 32_768}
    assert bound(*flop_bytes("verify_attn", one), H200) == "bytes"
    assert bound(*flop_bytes("verify_attn", one | {"N": 33, "H": 64}), H200) == "flop"


@pytest.mark.parametrize(("op", "params", "named"), [("sort", {}, "op"), ("topk", {"B": 1, "D": 2, "K": 3}, "V")])
def test_what_is_not_known_is_named(op, params, named):
    with pytest.raises(ValueError, match=named):
        flop_bytes(op, params)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 PCIe", None),
        ("", None),
        (None, None),
    ],
)
def test_a_datasheet_is_taken_for_its_own_gpu_only(name, piece):
    assert datasheet(name) == (DATASHEET[piece] if piece else None)


def test_datasheets_are_dense_bf16_and_bytes_per_second():
    assert (DATASHEET["H200"].bf16_tflops, DATASHEET["H200"].copy_gbs) == (989, 4800)
    assert all(r.source == "datasheet" and r.empty_us == 0 for r in DATASHEET.values())
    # A card's rate is SMs times FLOP a clock times boost clock.
    assert 70 * 512 * 2.452e9 / 1e12 == pytest.approx(DATASHEET["RTX 5070 Ti"].bf16_tflops, rel=0.005)
    assert 188 * 1024 * 2.617e9 / 1e12 == pytest.approx(
        DATASHEET["RTX PRO 6000 Blackwell Workstation"].bf16_tflops, rel=0.005
    )


def test_roofs_are_not_measured_without_a_gpu(monkeypatch):
    monkeypatch.setattr(graphs, "gpu_available", lambda: False)
    with pytest.raises(graphs.NotMeasurable, match="no GPU"):
        roofline.measure_roofs()


def test_roofs_come_from_the_times_and_what_was_done(monkeypatch):
    class Torch:
        class cuda:
            get_device_properties = staticmethod(lambda _: type("P", (), {"multi_processor_count": 132}))
            current_device = staticmethod(lambda: 0)
            empty_cache = staticmethod(lambda: None)

    monkeypatch.setattr(roofline.timing, "torch_cuda", lambda: Torch)
    monkeypatch.setattr(roofline.timing, "l2_bytes", lambda: 60 * 2**20)
    monkeypatch.setattr(roofline, "free_bytes", lambda: 100 * 2**30)
    monkeypatch.setattr(roofline, "_copy_us", lambda size, repeats: 2 * size / 4.3e6)
    monkeypatch.setattr(roofline, "_matmul_us", lambda side, repeats: 2 * side**3 / 787e6)
    monkeypatch.setattr(roofline, "_empty_kernel", lambda: None)
    monkeypatch.setattr(roofline, "_median_us", lambda *a, **k: 1.0)
    roofs = roofline.measure_roofs()
    assert roofs.copy_gbs == pytest.approx(4300) and roofs.bf16_tflops == pytest.approx(787)
    assert (roofs.empty_us, roofs.l2_bytes, roofs.sm_count, roofs.source) == (
        1.0,
        60 * 2**20,
        132,
        "measured",
    )
    monkeypatch.setattr(roofline, "free_bytes", lambda: 2**20)
    with pytest.raises(graphs.NotMeasurable, match="copy wants"):
        roofline.measure_roofs()
