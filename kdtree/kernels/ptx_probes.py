"""Each PTX intrinsic at work: a tiny kernel, its inputs and what it must write. Usage notes and test in one.

This file holds scalars, memory, barriers and cp.async; `ptx_probes_cluster` clusters; `ptx_probes_tensor` mbarriers,
TMA and the tensor cores. `all_probes()` is all of them. A probe writes every element of `out`; inputs are chosen so
that results are exact.
`ptx_compile` compiles them without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kdtree._cuda import cuda
from kdtree.kernels import ptx
from kdtree.kernels.crosscompile import TARGETS
from kdtree.kernels.launch import Kernel, Operand, TensorMap, Variant, word_of

i32, f32 = np.int32, np.float32
BITS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}  # 16-bit floats travel as their bits


@dataclass(frozen=True)
class Tiled:
    """An argument that the kernel sees as a tensor map: `box` elements of `array` a copy, both outermost first.

    Without an `array` it is `out` once more. `shape` and `strides` (in elements) say how the map sees the memory, if
    other than `array` does.
    """

    array: np.ndarray | None
    box: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Probe:
    """A kernel ``(out, *ins)`` that shows the instructions `names`; `out` must become `want`, within `rtol`."""

    names: tuple[str, ...]
    kernel: Kernel
    blocks: int
    ins: tuple[np.ndarray | Tiled, ...]
    want: np.ndarray
    rtol: float

    @property
    def says(self) -> str:
        """What it shows, in words."""
        return (self.kernel.function.__doc__ or "").strip()

    @property
    def targets(self) -> list[str]:
        """The shipped targets that have all its instructions."""
        return [name for name, target in TARGETS.items() if self.kernel.runs_on(target)]

    @property
    def words(self) -> tuple[str, ...]:
        """Argument words of the kernel."""
        return tuple("tmap" if isinstance(a, Tiled) else word_of(str(a.dtype)) for a in (self.want, *self.ins))

    def arguments(self, out: Operand, place: Callable[[np.ndarray], Operand]) -> tuple[Operand | TensorMap, ...]:
        """The kernel's arguments: `out`, and the inputs where `place` puts them."""
        args: list[Operand | TensorMap] = [out]
        for given in self.ins:
            if not isinstance(given, Tiled):
                args.append(place(given))
                continue
            array = self.want if given.array is None else given.array
            operand = out if given.array is None else place(array)
            args.append(TensorMap(operand, str(array.dtype), given.shape or array.shape, given.box, given.strides))
        return tuple(args)

    @property
    def variant(self) -> Variant:
        """As the cross-compiler takes it."""
        return Variant("ptx", self.kernel, self.words, self.names[0])


PROBES: dict[str, Probe] = {}


def all_probes() -> dict[str, Probe]:
    """Name of an instruction -> the probe that shows it."""
    from kdtree.kernels import ptx_probes_cluster, ptx_probes_tensor  # noqa: F401  (each adds its own)

    return PROBES


def probe(
    *,
    want: np.ndarray,
    ins: tuple[np.ndarray | Tiled, ...] = (),
    also: tuple[str, ...] = (),
    name: str = "",
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    cluster: int = 1,
    min_blocks: int = 0,
    rtol: float = 0.0,
) -> Callable[[Callable], Callable]:
    """Makes the function below it the probe of the instruction it is named after, and of those in `also`.

    shared: bytes of dynamic shared memory. cluster: of so many of the blocks.
    """

    def decorate(function: Callable) -> Callable:
        names = (name or function.__name__, *also)
        kernel = Kernel(
            function,
            name=f"ptx.{names[0]}",
            threads=threads,
            dynamic_shared=shared,
            cluster=cluster,
            min_blocks=min_blocks,
            targets=(_lowest(names),),
        )
        for each in names:
            PROBES[each] = Probe(names, kernel, blocks, ins, want, rtol)
        return function

    return decorate


def _lowest(names: tuple[str, ...]) -> str:
    """The lowest target that has all of the instructions."""
    wanted = [ptx.SPECS[name][0] for name in names if name in ptx.SPECS] or [ptx.ALL]
    return max(wanted, key=lambda target: (target.endswith("a"), target))


LANES = np.arange(32, dtype=np.int32)
ONE_TO_32 = (LANES + 1).astype(np.float32)
ZEROS = np.zeros(32, np.float32)
COUNTER = np.zeros(1, np.int32)
PAIRS = np.stack([LANES, -LANES], 1)
WORDS_128 = np.arange(100, 228, dtype=np.int32)

# ---- addresses ----


@probe(want=np.zeros(1, np.int32), shared=1024)
def shared_base(out):
    """Dynamic shared memory starts at a multiple of 1024 bytes where there is no static memory before it."""
    out[0] = ptx.shared_base() & 1023


# ---- shuffles and votes: a warp, `out` an element a lane ----


@probe(ins=(LANES * 10,), want=np.roll(LANES, -5) * 10)
def shfl_idx(out, x):
    """Read the value of any lane."""
    lane = cuda.threadIdx.x
    out[lane] = ptx.shfl_idx(x[lane], (lane + 5) & 31)


@probe(ins=(LANES * 10,), want=np.where(LANES < 4, LANES, LANES - 4) * i32(10))
def shfl_up(out, x):
    """Four lanes below; lanes 0 to 3 keep their own."""
    lane = cuda.threadIdx.x
    out[lane] = ptx.shfl_up(x[lane], 4)


@probe(ins=(ONE_TO_32,), want=ONE_TO_32.reshape(8, 4).sum(1).repeat(4))
def shfl_bfly_f32(out, x):
    """Sum over groups of four lanes: the columns of a row of an accumulator fragment."""
    value = x[cuda.threadIdx.x]
    value += ptx.shfl_bfly_f32(value, 1)
    value += ptx.shfl_bfly_f32(value, 2)
    out[cuda.threadIdx.x] = value


@probe(ins=(LANES * 3,), want=(LANES ^ 8) * 3)
def shfl_bfly_b32(out, x):
    """Exchange with lane `own ^ 8`."""
    out[cuda.threadIdx.x] = ptx.shfl_bfly_b32(x[cuda.threadIdx.x], 8)


@probe(want=np.full(32, 1, np.int32))
def vote_all(out):
    """Not 0 in every lane, against 0 in one of them."""
    lane = cuda.threadIdx.x
    out[lane] = ptx.vote_all(lane - 32) + 2 * ptx.vote_all(lane - 7)


@probe(want=np.full(32, 0xAAAAAAAA, np.uint32).view(np.int32))
def vote_ballot(out):
    """Lanes with an odd number."""
    lane = cuda.threadIdx.x
    out[lane] = ptx.vote_ballot(lane & 1)


@probe(want=np.concatenate([LANES, LANES]), threads=64, also=("thread_id",))
def lane_id(out):
    """Of 64 threads, each its own in its warp."""
    out[ptx.thread_id()] = ptx.lane_id()


@probe(want=LANES[::-1].copy(), shared=128)
def warp_sync(out):
    """Lanes see what other lanes wrote to shared memory before."""
    lane = cuda.threadIdx.x
    ptx.st_shared_b32(ptx.shared_base() + 4 * lane, lane)
    ptx.warp_sync()
    out[lane] = ptx.ld_shared_b32(ptx.shared_base() + 4 * (31 - lane))


# ---- scalars ----

EXPONENTS = np.array([-np.inf, -200, -126, -1.5, -1, -0.25, 0, 0.5, 1, 10, 127, np.inf], np.float32)
POWERS = np.where(EXPONENTS == -200, f32(0), np.exp2(EXPONENTS.astype(np.float64))).astype(np.float32)


@probe(ins=(EXPONENTS,), want=POWERS, threads=len(EXPONENTS), rtol=2**-21)
def ex2_approx(out, x):
    """2**-inf is 0, which a masked score relies on; results too small for a normal float32 are 0."""
    out[cuda.threadIdx.x] = ptx.ex2_approx(x[cuda.threadIdx.x])


POSITIVE = np.array([0, 2**-126, 0.125, 0.7, 1, 2, 3, 1000, 2**127, np.inf], np.float32)
with np.errstate(divide="ignore"):
    LOGARITHMS = np.log2(POSITIVE)


@probe(ins=(POSITIVE,), want=LOGARITHMS, threads=len(POSITIVE), rtol=2**-20)
def lg2_approx(out, x):
    """Of 0 it is -inf."""
    out[cuda.threadIdx.x] = ptx.lg2_approx(x[cuda.threadIdx.x])


NUMBERS = POSITIVE[POSITIVE != 2**127]  # whose reciprocal is too small for a normal float32
with np.errstate(divide="ignore"):
    RECIPROCALS = 1 / NUMBERS


@probe(ins=(NUMBERS,), want=RECIPROCALS, threads=len(NUMBERS), rtol=2**-22)
def rcp_approx(out, x):
    """Of 0 it is inf, and of inf 0."""
    out[cuda.threadIdx.x] = ptx.rcp_approx(x[cuda.threadIdx.x])


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Pairs of float32, rounded to `dtype` (ties to even), as int32 with the first of a pair in the low half."""
    with np.errstate(over="ignore"):
        return values.astype(BITS[dtype]).view(np.int32)


# Halfway between two neighbours, a little to both sides of it, too large, infinite, small.
TIES = np.array(
    [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 3 * 2**-8, 3.4e38, -np.inf, 1e-30, -0.0], np.float32
)
TIES_F16 = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, -1 - 2**-11, np.inf, 2**-25, 6e-8], np.float32)


@probe(ins=(TIES,), want=rounded(TIES, "bfloat16"), threads=4)
def cvt_bf16x2(out, x):
    """Ties go to the even neighbour, what is too large to infinity."""
    i = cuda.threadIdx.x
    out[i] = ptx.cvt_bf16x2(x[2 * i], x[2 * i + 1])


@probe(ins=(TIES_F16,), want=rounded(TIES_F16, "float16"), threads=4)
def cvt_f16x2(out, x):
    """The same; float16 has subnormal numbers and ends at 65504."""
    i = cuda.threadIdx.x
    out[i] = ptx.cvt_f16x2(x[2 * i], x[2 * i + 1])


NUMERATORS = np.array([0, 7, 100, -1, -1, 2**31 - 1, -(2**31), -7], np.int32)
DENOMINATORS = np.array([3, 2, 7, 2, -1, 10, 64, 1], np.int32)
QUOTIENTS = (NUMERATORS.view(np.uint32) // DENOMINATORS.view(np.uint32)).view(np.int32)


@probe(ins=(NUMERATORS, DENOMINATORS), want=QUOTIENTS, threads=len(QUOTIENTS))
def div_u32(out, x, y):
    """A negative int32 counts as the number from 2**31 on that has the same bits."""
    i = cuda.threadIdx.x
    out[i] = ptx.div_u32(x[i], y[i])


MIXED = np.array([4, 3, 2, np.nan, 5, 0, -np.inf, -1, -4, 4, -2, 3, np.nan, np.inf, 0, -2], np.float32)


@probe(ins=(MIXED,), want=np.array([4, 4, 2, 3, 5, np.inf, 0, -1], np.float32), threads=8)
def max_f32(out, x):
    """The larger of two; a number wins over NaN."""
    i = cuda.threadIdx.x
    out[i] = ptx.max_f32(x[i], x[i ^ 8])


F16_PAIRS = rounded(TIES_F16, "float16")


@probe(ins=(TIES.view(np.int32),), want=TIES, threads=len(TIES))
def b32_f32(out, x):
    """Bits as a float32."""
    out[cuda.threadIdx.x] = ptx.b32_f32(x[cuda.threadIdx.x])


@probe(ins=(F16_PAIRS,), want=F16_PAIRS.view(np.float16).astype(np.float32), threads=4)
def f16x2_f32(out, x):
    """Two results: unpack them."""
    i = cuda.threadIdx.x
    out[2 * i], out[2 * i + 1] = ptx.f16x2_f32(x[i])


# ---- global memory: a lane has its own 4, 8 or 16 bytes ----


@probe(ins=(LANES * 7,), want=LANES * 7, also=("address",))
def ld_global_b32(out, x):
    """Global addresses are 64-bit byte addresses."""
    lane = cuda.threadIdx.x
    out[lane] = ptx.ld_global_b32(ptx.address(x) + 4 * lane)


@probe(ins=(PAIRS,), want=PAIRS[:, ::-1].copy())
def ld_global_v2_b32(out, x):
    """8 bytes a lane, at a multiple of 8."""
    lane = cuda.threadIdx.x
    out[2 * lane + 1], out[2 * lane] = ptx.ld_global_v2_b32(ptx.address(x) + 8 * lane)


@probe(ins=(WORDS_128,), want=WORDS_128)
def ld_global_v4_b32(out, x):
    """16 bytes a lane, at a multiple of 16."""
    lane = cuda.threadIdx.x
    at = 4 * lane
    out[at], out[at + 1], out[at + 2], out[at + 3] = ptx.ld_global_v4_b32(ptx.address(x) + 16 * lane)


@probe(want=LANES * 3)
def st_global_b32(out):
    """4 bytes a lane."""
    lane = cuda.threadIdx.x
    ptx.st_global_b32(ptx.address(out) + 4 * lane, 3 * lane)


@probe(want=PAIRS)
def st_global_v2_b32(out):
    """8 bytes a lane, at a multiple of 8."""
    lane = cuda.threadIdx.x
    ptx.st_global_v2_b32(ptx.address(out) + 8 * lane, lane, -lane)


@probe(want=np.arange(128, dtype=np.int32))
def st_global_v4_b32(out):
    """16 bytes a lane, at a multiple of 16."""
    lane = cuda.threadIdx.x
    ptx.st_global_v4_b32(ptx.address(out) + 16 * lane, 4 * lane, 4 * lane + 1, 4 * lane + 2, 4 * lane + 3)


@probe(want=ONE_TO_32)
def st_global_f32(out):
    """4 bytes a lane."""
    lane = cuda.threadIdx.x
    ptx.st_global_f32(ptx.address(out) + 4 * lane, f32(lane + 1))


@probe(want=np.stack([ONE_TO_32, -ONE_TO_32], 1))
def st_global_v2_f32(out):
    """8 bytes a lane."""
    lane = cuda.threadIdx.x
    ptx.st_global_v2_f32(ptx.address(out) + 8 * lane, f32(lane + 1), f32(-lane - 1))


@probe(want=np.stack([ONE_TO_32, -ONE_TO_32, ONE_TO_32 + 1, ZEROS], 1))
def st_global_v4_f32(out):
    """16 bytes a lane, at a multiple of 16."""
    lane = cuda.threadIdx.x
    ptx.st_global_v4_f32(ptx.address(out) + 16 * lane, f32(lane + 1), f32(-lane - 1), f32(lane + 2), f32(0))


# ---- shared memory ----


@probe(want=LANES * 5, shared=128, also=("ld_shared_b32",))
def st_shared_b32(out):
    """4 bytes a lane."""
    lane = cuda.threadIdx.x
    ptx.st_shared_b32(ptx.shared_base() + 4 * lane, 5 * lane)
    out[lane] = ptx.ld_shared_b32(ptx.shared_base() + 4 * lane)


@probe(want=LANES + LANES, shared=256)
def ld_shared_v2_b32(out):
    """8 bytes that other lanes stored, 4 by 4."""
    lane = cuda.threadIdx.x
    ptx.st_shared_b32(ptx.shared_base() + 4 * lane, lane // 2)
    ptx.st_shared_b32(ptx.shared_base() + 4 * lane + 128, lane // 2 + 16)
    ptx.warp_sync()
    low, high = ptx.ld_shared_v2_b32(ptx.shared_base() + 8 * lane)
    out[lane] = low + high


@probe(want=ONE_TO_32, shared=128, also=("ld_shared_f32",))
def st_shared_f32(out):
    """4 bytes a lane."""
    lane = cuda.threadIdx.x
    ptx.st_shared_f32(ptx.shared_base() + 4 * lane, f32(lane + 1))
    out[lane] = ptx.ld_shared_f32(ptx.shared_base() + 4 * lane)


@probe(want=np.stack([-ONE_TO_32, ONE_TO_32], 1), shared=256, also=("ld_shared_v2_f32",))
def st_shared_v2_f32(out):
    """Two halves of 8 bytes, stored together, checked one by one, loaded together and written in turn."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 8 * lane
    ptx.st_shared_v2_f32(at, f32(lane + 1), f32(-lane - 1))
    low, high = ptx.ld_shared_v2_f32(at)
    same = low == ptx.ld_shared_f32(at) and high == ptx.ld_shared_f32(at + 4)
    out[2 * lane] = high if same else f32(0)
    out[2 * lane + 1] = low


@probe(want=np.stack([ONE_TO_32 + 3, ONE_TO_32 + 2, ONE_TO_32 + 1, ONE_TO_32], 1), shared=512)
def st_shared_v4_f32(out):
    """16 bytes a lane, at a multiple of 16; the order of the four is that of memory."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 16 * lane
    ptx.st_shared_v4_f32(at, f32(lane + 1), f32(lane + 2), f32(lane + 3), f32(lane + 4))
    for i in range(4):
        out[4 * lane + i] = ptx.ld_shared_f32(at + 4 * (3 - i))


@probe(want=np.arange(128, dtype=np.float32), shared=512)
def ld_shared_v4_f32(out):
    """16 bytes that other lanes stored 4 by 4."""
    lane = cuda.threadIdx.x
    for i in range(4):
        ptx.st_shared_f32(ptx.shared_base() + 4 * lane + 128 * i, f32(lane + 32 * i))
    ptx.warp_sync()
    at = 4 * lane
    out[at], out[at + 1], out[at + 2], out[at + 3] = ptx.ld_shared_v4_f32(ptx.shared_base() + 16 * lane)


@probe(want=np.arange(128, dtype=np.int32)[::-1].copy(), shared=512)
def st_shared_v4_b32(out):
    """The same in 32-bit words of any kind."""
    lane = cuda.threadIdx.x
    ptx.st_shared_v4_b32(ptx.shared_base() + 16 * lane, 4 * lane, 4 * lane + 1, 4 * lane + 2, 4 * lane + 3)
    ptx.warp_sync()
    for i in range(4):
        out[lane + 32 * i] = ptx.ld_shared_b32(ptx.shared_base() + 4 * (127 - lane - 32 * i))


@probe(want=np.arange(128, dtype=np.int32), shared=512)
def ld_shared_v4_b32(out):
    """16 bytes that other lanes stored 4 by 4."""
    lane = cuda.threadIdx.x
    for i in range(4):
        ptx.st_shared_b32(ptx.shared_base() + 4 * lane + 128 * i, lane + 32 * i)
    ptx.warp_sync()
    at = 4 * lane
    out[at], out[at + 1], out[at + 2], out[at + 3] = ptx.ld_shared_v4_b32(ptx.shared_base() + 16 * lane)


# ---- barriers between warps ----


@probe(want=LANES + i32(7), threads=96, shared=128)
def bar_sync(out):
    """Two of three warps meet at named barrier 1; the third is not counted and leaves."""
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    if warp == 1:
        ptx.st_shared_b32(ptx.shared_base() + 4 * lane, lane + 7)
    if warp < 2:
        ptx.bar_sync(1, 64)
    if warp == 0:
        out[lane] = ptx.ld_shared_b32(ptx.shared_base() + 4 * lane)


@probe(want=LANES + i32(9), threads=64, shared=128)
def bar_arrive(out):
    """A producer counts and goes on, a consumer waits for it at the same barrier."""
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    if warp == 1:
        ptx.st_shared_b32(ptx.shared_base() + 4 * lane, lane + 9)
        ptx.bar_arrive(1, 64)
    else:
        ptx.bar_sync(1, 64)
        out[lane] = ptx.ld_shared_b32(ptx.shared_base() + 4 * lane)


# ---- between blocks ----


@probe(ins=(ZEROS,), want=ONE_TO_32, blocks=2)
def ld_relaxed_f32(out, mailbox):
    """Block 1 reads until it sees what block 0 writes. A plain load may be done once, before the loop."""
    lane = cuda.threadIdx.x
    at = ptx.address(mailbox) + 4 * lane
    if cuda.blockIdx.x == 0:
        ptx.st_global_f32(at, f32(lane + 1))
    else:
        value = f32(0)
        while value == 0:
            value = ptx.ld_relaxed_f32(at)
        out[lane] = value


@probe(ins=(np.zeros(128, np.float32),), want=np.arange(1, 129, dtype=np.float32), blocks=2)
def ld_relaxed_v4_f32(out, mailbox):
    """The same for 16 bytes; each of the four arrives by itself."""
    lane = cuda.threadIdx.x
    at = ptx.address(mailbox) + 16 * lane
    first = f32(4 * lane + 1)
    if cuda.blockIdx.x == 0:
        ptx.st_global_v2_f32(at, first, first + f32(1))
        ptx.st_global_v2_f32(at + 8, first + f32(2), first + f32(3))
    else:
        x, y, z, w = f32(0), f32(0), f32(0), f32(0)
        while x == 0 or y == 0 or z == 0 or w == 0:
            x, y, z, w = ptx.ld_relaxed_v4_f32(at)
        out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = x, y, z, w


@probe(ins=(ZEROS, COUNTER), want=ONE_TO_32, blocks=2, also=("fence_gpu", "nanosleep"))
def ld_acquire(out, data, ready):
    """Hand-over: every lane writes and fences, one lane counts; who sees the count may read plainly."""
    lane = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        data[lane] = lane + 1
        ptx.fence_gpu()
        ptx.warp_sync()
        if lane == 0:
            ptx.atom_add_acq_rel(ptx.address(ready), 1)
    else:
        while ptx.ld_acquire(ptx.address(ready)) == 0:
            ptx.nanosleep(100)
        out[lane] = data[lane]


@probe(ins=(np.zeros(64 * 32, np.int32), COUNTER), want=np.full(32, 64 * 65 // 2, np.int32) + LANES * 64, blocks=64)
def atom_add_acq_rel(out, parts, finished):
    """The last of 64 blocks adds up what all of them wrote."""
    lane, block, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
    parts[block * 32 + lane] = block + 1 + lane
    ptx.warp_sync()
    before = i32(0)
    if lane == 0:
        before = ptx.atom_add_acq_rel(ptx.address(finished), 1)
    before = ptx.shfl_idx(before, 0)
    ptx.warp_sync()
    if before == blocks - 1:
        total = i32(0)
        for other in range(blocks):
            total += ptx.ld_global_b32(ptx.address(parts) + 4 * (other * 32 + lane))
        out[lane] = total


# ---- cp.async ----


@probe(ins=(WORDS_128,), want=WORDS_128, shared=512)
def cp_async_16(out, x):
    """Each lane copies 16 bytes; it waits for its own copies, the others for it."""
    lane = cuda.threadIdx.x
    ptx.cp_async_16(ptx.shared_base() + 16 * lane, ptx.address(x) + 16 * lane)
    ptx.cp_async_commit()
    ptx.cp_async_wait_0()
    ptx.warp_sync()
    for i in range(4):
        out[lane + 32 * i] = ptx.ld_shared_b32(ptx.shared_base() + 4 * lane + 128 * i)


@probe(ins=(WORDS_128,), want=np.where(np.arange(128) // 4 % 2, 0, WORDS_128).astype(np.int32), shared=512)
def cp_async_16_or_zero(out, x):
    """Odd lanes read nothing, and 16 bytes of zeros replace what was there."""
    lane = cuda.threadIdx.x
    ptx.st_shared_v4_b32(ptx.shared_base() + 16 * lane, -1, -1, -1, -1)
    ptx.cp_async_16_or_zero(ptx.shared_base() + 16 * lane, ptx.address(x) + 16 * lane, 0 if lane & 1 else 16)
    ptx.cp_async_commit()
    ptx.cp_async_wait_0()
    ptx.warp_sync()
    for i in range(4):
        out[lane + 32 * i] = ptx.ld_shared_b32(ptx.shared_base() + 4 * lane + 128 * i)


@probe(
    ins=(np.arange(384, dtype=np.int32),),
    want=np.arange(384, dtype=np.int32).reshape(3, 32, 4).sum(2).astype(np.int32),
    shared=1536,
    also=("cp_async_wait_0", "cp_async_wait_1", "cp_async_wait_2"),
)
def cp_async_commit(out, x):
    """Three groups in flight; each is used as soon as it is there while the later ones still travel."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 16 * lane
    for group in range(3):
        ptx.cp_async_16(at + 512 * group, ptx.address(x) + 16 * lane + 512 * group)
        ptx.cp_async_commit()
    ptx.cp_async_wait_2()
    a, b, c, d = ptx.ld_shared_v4_b32(at)
    out[lane] = a + b + c + d
    ptx.cp_async_wait_1()
    a, b, c, d = ptx.ld_shared_v4_b32(at + 512)
    out[lane + 32] = a + b + c + d
    ptx.cp_async_wait_0()
    a, b, c, d = ptx.ld_shared_v4_b32(at + 1024)
    out[lane + 64] = a + b + c + d
