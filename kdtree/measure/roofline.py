"""The floor under every time: the least an op must move and compute, over what this GPU was measured to do.

    floor = max(bytes / copy bandwidth, FLOP / bf16 matrix rate, time of an empty kernel)

Bytes count each input read once and each output written once. FLOP count what runs on matrix units for
`verify_attn`, and scalar additions, multiplications and exponentials elsewhere: a bound that is too low,
never one that is too high.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kdtree.measure import timing
from kdtree.measure.memory import (
    accepted_bytes,
    free_bytes,
    itemsize,
    latent_widths,
    merged_rows,
    need,
    prefix_lens,
    tree_bytes,
)

COPY_BYTES = 2 * 2**30  # of one buffer: far beyond any L2, and long enough that the launch does not show
MATMUL = 8192  # side of the matrix product: large enough to fill any GPU, 1.1 TFLOP


@dataclass(frozen=True)
class Roofs:
    """What a GPU can do.

    copy_gbs     GB/s (1e9), bytes read plus bytes written
    bf16_tflops  TFLOP/s (1e12) of a dense bf16 product with float32 accumulation
    empty_us     µs of an empty kernel inside a CUDA graph; 0 where unknown
    l2_bytes, sm_count
    source       "measured" or "datasheet"
    """

    copy_gbs: float
    bf16_tflops: float
    empty_us: float
    l2_bytes: int
    sm_count: int
    source: str = "measured"

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)


def _sheet(copy_gbs: float, bf16_tflops: float, l2_mib: int, sm_count: int) -> Roofs:
    return Roofs(copy_gbs, bf16_tflops, 0.0, l2_mib * 2**20, sm_count, source="datasheet")


# By the piece of the driver's name for the GPU that tells it from others; the first that fits is taken.
DATASHEET: dict[str, Roofs] = {
    # NVIDIA H200 datasheet: NVL 836 and SXM 989 TFLOP/s dense bf16, 4.8 TB/s; L2 as the driver reports it.
    "H200 NVL": _sheet(4800, 836, 60, 132),
    "H200": _sheet(4800, 989, 60, 132),
    # NVIDIA H100 datasheet, SXM5: 989 TFLOP/s dense bf16, 3.35 TB/s. Its driver name is the second.
    "H100 SXM": _sheet(3350, 989, 50, 132),
    "H100 80GB HBM3": _sheet(3350, 989, 50, 132),
    # NVIDIA A100 datasheet, SXM4: 312 TFLOP/s dense bf16; 2039 GB/s with 80 GB, 1555 GB/s with 40 GB.
    "A100-SXM4-80GB": _sheet(2039, 312, 40, 108),
    "A100-SXM4-40GB": _sheet(1555, 312, 40, 108),
    # HGX B200 datasheet: 36 PFLOP/s of sparse bf16 over 8 GPUs, half of it dense; 8 TB/s each.
    "B200": _sheet(8000, 2250, 126, 148),
    # RTX PRO Blackwell whitepaper: 512 bits of 28 Gb/s GDDR7; 188 SMs of 1024 dense bf16 FLOP a clock
    # (float32 accumulation) at a boost clock of 2.617 GHz, 2.28 GHz for Max-Q.
    "RTX PRO 6000 Blackwell Max-Q": _sheet(1792, 439, 128, 188),
    "RTX PRO 6000 Blackwell Workstation": _sheet(1792, 503.8, 128, 188),
    # RTX Blackwell whitepaper: 256 bits of 28 Gb/s GDDR7; 70 SMs at a boost clock of 2.452 GHz, each 512
    # dense bf16 FLOP a clock, since GeForce accumulates in float32 at half rate.
    "RTX 5070 Ti": _sheet(896, 87.9, 48, 70),
}


def datasheet(name: str | None) -> Roofs | None:
    """Datasheet roofs of the GPU with this driver name, or None where it is not in DATASHEET.

    Whole words only: a GH200 is no H200, and a laptop part never takes the numbers of a desktop part.
    """
    if not name or "laptop" in name.lower():
        return None
    for piece, roofs in DATASHEET.items():
        if re.search(rf"(?<!\w){re.escape(piece)}(?!\w)", name, re.IGNORECASE):
            return roofs
    return None


def floor_us(flop: float, bytes: float, roofs: Roofs) -> float:
    """Shortest possible time in µs of `flop` operations and `bytes` moved: the longest of the three terms."""
    return max(bytes / (roofs.copy_gbs * 1e3), flop / (roofs.bf16_tflops * 1e6), roofs.empty_us)


def bound(flop: float, bytes: float, roofs: Roofs) -> str:
    """Which term of the floor is the largest: "bytes", "flop" or "launch"."""
    terms = {
        "bytes": bytes / (roofs.copy_gbs * 1e3),
        "flop": flop / (roofs.bf16_tflops * 1e6),
        "launch": roofs.empty_us,
    }
    return max(terms, key=lambda name: terms[name])


def flop_bytes(op: str, params: Mapping[str, Any]) -> tuple[float, float]:
    """(FLOP, bytes) that one call of `op` cannot avoid. Raises ValueError for what it does not know.

    Parameters, all counts unless said otherwise (``dtype`` is a name, bfloat16 by default):
        verify_attn   B, H, N, L (one or a list of B), dtype, page_size, kv_lora_rank, qk_rope_head_dim, part
        merge_states  rows and H, or B, N and H; dtype, kv_lora_rank
        topk          B, D, K, V, dtype
        tree_build    B, D, K, budget
        tree_accept   B, N, D
        kv_compact    B, D, n_layers, dtype, E or kv_lora_rank and qk_rope_head_dim
    """
    if op not in COUNTS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(COUNTS)}")
    flop, moved = COUNTS[op](params)
    return float(flop), float(moved)


def _verify_attn(p: Mapping[str, Any]) -> tuple[int, int]:
    b, h, n = need(p, "B", "H", "N")
    size, (c, e) = itemsize(p.get("dtype", "bfloat16")), latent_widths(p)
    lens = [0] * b if p.get("part") == "tree" else prefix_lens(p)
    rows = sum(lens) + b * n  # KV rows of all requests: each is read once, whatever the number of heads
    flop = 2 * h * n * rows * (e + c)  # scores over E, values over C; masked tree slots count as computed
    page = p.get("page_size") or 0
    table = 4 * sum(-(-(length + n) // page) for length in lens) if page else 0
    query = b * n * h * ((e + c) * size + 4)  # q in, out and lse out
    return flop, query + rows * e * size + tree_bytes(b, n)["visibility"] + table


def _merge_states(p: Mapping[str, Any]) -> tuple[int, int]:
    rows, (c, _) = merged_rows(p), latent_widths(p)
    return rows * (3 * c + 8), 3 * rows * (c * itemsize(p.get("dtype", "bfloat16")) + 4)


def _topk(p: Mapping[str, Any]) -> tuple[int, int]:
    b, d, k, v = need(p, "B", "D", "K", "V")
    size = itemsize(p.get("dtype", "bfloat16"))
    return 2 * b * d * v, b * d * (v * size + k * 8)  # an exp and an addition per logit


def _tree_build(p: Mapping[str, Any]) -> tuple[int, int]:
    b, d, k, budget = need(p, "B", "D", "K", "budget")
    # A node taken puts forward two more at the most (its next rank, its first child), at one addition each.
    return 2 * b * budget, b * d * k * 8 + sum(tree_bytes(b, budget + 1).values())


def _tree_accept(p: Mapping[str, Any]) -> tuple[int, int]:
    b, n, d = need(p, "B", "N", "D")
    tree = tree_bytes(b, n)
    read = sum(tree[name] for name in ("token_ids", "first_child", "next_sibling", "n_nodes"))
    return 0, read + b * n * 4 + sum(accepted_bytes(b, d).values())


def _kv_compact(p: Mapping[str, Any]) -> tuple[int, int]:
    b, d, layers = need(p, "B", "D", "n_layers")
    row = p.get("E", latent_widths(p)[1]) * itemsize(p.get("dtype", "bfloat16"))
    return 0, b * (d + 1) * (2 * layers * row + 4)


COUNTS: dict[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    "topk": _topk,
    "tree_build": _tree_build,
    "verify_attn": _verify_attn,
    "merge_states": _merge_states,
    "tree_accept": _tree_accept,
    "kv_compact": _kv_compact,
}


def measure_roofs(*, copy_bytes: int = COPY_BYTES, side: int = MATMUL, repeats: int = 20) -> Roofs:
    """Measure the current GPU: a device copy, a bf16 matrix product, an empty kernel. Takes seconds.

    On a card that others use, the copy shrinks to a third of what is free. Raises NotMeasurable without a
    GPU, without torch, or when too little memory is free for a copy that its L2 cannot hold.
    """
    torch = timing.torch_cuda()
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    l2 = timing.l2_bytes()
    copy_bytes = min(copy_bytes, free_bytes() // 3) // 4096 * 4096
    least = max(4 * l2, 2**27)
    if copy_bytes < least:
        raise timing.NotMeasurable(f"a copy wants two buffers of {least} bytes, {copy_bytes} each are free")
    roofs = Roofs(
        copy_gbs=2 * copy_bytes / _copy_us(copy_bytes, repeats) / 1e3,
        bf16_tflops=2 * side**3 / _matmul_us(side, repeats) / 1e6,
        empty_us=_median_us(_empty_kernel(), "warm", repeats),
        l2_bytes=l2,
        sm_count=int(device.multi_processor_count),
    )
    torch.cuda.empty_cache()  # a serving process may want the rest of the card back
    return roofs


def _median_us(thunk: Callable[[], object], cache: timing.Cache, repeats: int, touched: int | None = None) -> float:
    samples = timing.time_graphs({"roof": [thunk]}, cache=cache, bytes_per_set=touched, repeats=repeats)
    return samples["roof"].median


def _copy_us(size: int, repeats: int) -> float:
    import torch

    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # A kernel that reads and writes, not copy_(): in a graph that is a memcpy node, which on an H200 moves a third
    # less than a kernel does.
    return _median_us(lambda: torch.neg(source, out=target), "cold", repeats, 2 * size)


def _matmul_us(side: int, repeats: int) -> float:
    import torch

    # Random data: on zeros the same product runs some 13 % faster, for want of power.
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    return _median_us(lambda: torch.matmul(a, b, out=c), "warm", repeats)  # compute-bound, L2 does not matter


def _empty_kernel() -> Callable[[], None]:
    """A thunk that launches a kernel of one warp with nothing in it, on the current torch stream."""
    import torch

    from kdtree._cuda import cuda

    @cuda.jit
    def nothing() -> None:
        pass

    def launch() -> None:
        nothing[1, 32, cuda.external_stream(torch.cuda.current_stream().cuda_stream)]()

    return launch
