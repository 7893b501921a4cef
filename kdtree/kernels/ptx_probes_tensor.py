"""Probes of mbarriers, TMA, setmaxnreg, ldmatrix, mma and wgmma; see `ptx_probes`.

Matrices hold small integers, so that sums of products are exact in any order.
"""

from __future__ import annotations

import numpy as np

from kdtree._cuda import cuda
from kdtree.kernels import ptx
from kdtree.kernels.hopper import described, operand, wait, wgmma_descriptor
from kdtree.kernels.ptx_probes import BITS, Tiled, f32, i32, probe

CHUNK = 8192  # bytes: 64 rows of 64 16-bit elements


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32 integers from -4 to 4."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def words(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` rounded to `dtype`, as int32 words of two elements, flat."""
    return np.ascontiguousarray(values.astype(BITS[dtype])).reshape(-1).view(np.int32)


def swizzled(tile: np.ndarray) -> np.ndarray:
    """Rows of 64 16-bit elements as they lie in shared memory: unit u of 16 bytes of row r at u ^ (r & 7)."""
    units = tile.reshape(-1, 8, 8)
    rows = np.arange(len(units))[:, None]
    out = np.empty_like(units)
    out[rows, np.arange(8) ^ (rows & 7)] = units
    return out.reshape(tile.shape)


# ---- one lane of a warp ----


@probe(want=np.ones(32, np.int32))
def elect_one(out):
    """How many lanes were chosen."""
    out[cuda.threadIdx.x] = cuda.popc(ptx.vote_ballot(ptx.elect_one()))


# ---- mbarriers ----


@probe(want=np.array([1, 0, 0, 1, 0, 1], np.int32), threads=1, shared=8, also=("mbarrier_arrive", "mbarrier_try_wait"))
def mbarrier_init(out):
    """A phase of two arrivals. Before it the phase of parity 1 counts as ended; after it, that of parity 1 runs."""
    barrier = ptx.shared_base()
    ptx.mbarrier_init(barrier, 2)
    out[0] = ptx.mbarrier_try_wait(barrier, 1)
    out[1] = ptx.mbarrier_try_wait(barrier, 0)
    ptx.mbarrier_arrive(barrier)
    out[2] = ptx.mbarrier_try_wait(barrier, 0)
    ptx.mbarrier_arrive(barrier)
    out[3] = ptx.mbarrier_try_wait(barrier, 0)
    out[4] = ptx.mbarrier_try_wait(barrier, 1)
    ptx.mbarrier_arrive(barrier)
    ptx.mbarrier_arrive(barrier)
    out[5] = ptx.mbarrier_try_wait(barrier, 1)


# ---- TMA ----

TENSOR = np.arange(2 * 40 * 128, dtype=np.uint16).reshape(2, 40, 128)
BOX = np.zeros((32, 64), np.uint16)  # rows 16 to 47 of 40, columns 64 to 127, of matrix 1
BOX[:24] = TENSOR[1, 16:, 64:]
box_map = ptx.tensor_map_address(1)


@probe(
    ins=(Tiled(TENSOR, (1, 32, 64)),),
    want=np.append(swizzled(BOX).reshape(-1).view(np.int32), i32(0)),
    shared=4096 + 8,
    also=(
        "tensor_map_address_1",
        "prefetch_tensormap",
        "fence_mbarrier_init",
        "mbarrier_expect_tx",
        "fence_proxy_async",
    ),
)
def cp_async_bulk_tensor_3d(out, tensor):
    """One thread asks for a box of 4096 bytes, all wait for its bytes. Rows outside the tensor come as zeros.

    The last word of `out` is the state of the phase after its only arrival and before the copy: bytes are missing.
    """
    lane = cuda.threadIdx.x
    box = ptx.shared_base()
    barrier = box + 4096
    for i in range(lane, 1024, 32):
        ptx.st_shared_b32(box + 4 * i, -1)
    ptx.fence_proxy_async()  # these stores come before the copy's
    ptx.warp_sync()
    if lane == 0:
        ptx.prefetch_tensormap(box_map())
        ptx.mbarrier_init(barrier, 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_expect_tx(barrier, 4096)
        out[1024] = ptx.mbarrier_try_wait(barrier, 0)
        ptx.cp_async_bulk_tensor_3d(box, box_map(), 64, 16, 1, barrier)
    cuda.syncthreads()
    wait(barrier, 0)
    for i in range(lane, 1024, 32):
        out[i] = ptx.ld_shared_b32(box + 4 * i)


# Chunks of 64 columns as a dimension: [matrix, chunk, row, column].
CHUNKS = {"shape": (2, 2, 40, 64), "strides": (40 * 128, 64, 128, 1)}
TWO_CHUNKS = TENSOR[1, 8:24].reshape(16, 2, 64).transpose(1, 0, 2)


@probe(
    ins=(Tiled(TENSOR, (1, 2, 16, 64), **CHUNKS),),
    want=np.concatenate([swizzled(chunk).reshape(-1).view(np.int32) for chunk in TWO_CHUNKS]),
    shared=4096 + 8,
    also=("cp_async_bulk_prefetch_tensor_4d",),
)
def cp_async_bulk_tensor_4d(out, tensor):
    """All 128 columns of 16 rows as two chunks of 2048 bytes, asked for once as a hint and once in earnest."""
    lane = cuda.threadIdx.x
    box = ptx.shared_base()
    barrier = box + 4096
    if ptx.elect_one():
        ptx.cp_async_bulk_prefetch_tensor_4d(box_map(), 0, 8, 0, 1)
        ptx.mbarrier_init(barrier, 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_expect_tx(barrier, 4096)
        ptx.cp_async_bulk_tensor_4d(box, box_map(), 0, 8, 0, 1, barrier)
    cuda.syncthreads()
    wait(barrier, 0)
    for i in range(lane, 1024, 32):
        out[i] = ptx.ld_shared_b32(box + 4 * i)


# 24 rows of 128 columns, of which the map shows 20: chunk c of row r holds 100 * r + c there.
STORED = np.zeros((24, 128), np.uint16)
STORED[8:20] = 100 * np.arange(8, 20)[:, None] + np.arange(128) // 64


@probe(
    ins=(Tiled(None, (1, 2, 16, 64), shape=(1, 2, 20, 64), strides=(24 * 128, 64, 128, 1)),),
    want=STORED,
    shared=4096,
    also=("cp_async_bulk_commit", "cp_async_bulk_wait_read_0"),
)
def cp_async_bulk_tensor_store_4d(out, tensor):
    """Two chunks of 16 rows go to rows 8 to 23; the last four are outside and keep the zeros stored before.

    What lies in a row is the same everywhere in a chunk, so the swizzle does not show.
    """
    lane = cuda.threadIdx.x
    box = ptx.shared_base()
    for i in range(lane, 24 * 128, 32):
        out[i] = np.uint16(0)
    for i in range(lane, 1024, 32):
        value = 100 * (8 + ((i >> 5) & 15)) + (i >> 9)
        ptx.st_shared_b32(box + 4 * i, value | (value << 16))
    ptx.fence_proxy_async()  # each lane its own stores, then all meet
    ptx.warp_sync()
    if ptx.elect_one():
        ptx.cp_async_bulk_tensor_store_4d(box_map(), 0, 8, 0, 0, box)
        ptx.cp_async_bulk_commit()
        ptx.cp_async_bulk_wait_read_0()  # a block's shared memory is gone when its threads are


# ---- setmaxnreg ----

shrink, grow = ptx.setmaxnreg_op("dec", 24), ptx.setmaxnreg_op("inc", 240)
HELD = 200  # values that a thread needs at once: more than the 168 registers it starts with
HELD_VALUES = integers((HELD, 128), 5)
SQUARES = HELD_VALUES.sum(0) ** 2


@probe(
    name="setmaxnreg_inc_240",
    ins=(HELD_VALUES,),
    want=np.concatenate([np.zeros(128, np.float32), SQUARES, SQUARES]),
    threads=384,
    min_blocks=1,
    also=("setmaxnreg_dec_24",),
)
def setmaxnreg(out, x):
    """Three warpgroups of 168 registers a thread: one gives 144 back, two take 72 more each."""
    thread = cuda.threadIdx.x
    group = ptx.shfl_idx(thread >> 7, 0)  # the same in all lanes, and the compiler knows
    if group == 0:
        shrink()
        out[thread] = f32(0)
    else:
        grow()
        held = cuda.local.array(HELD, np.float32)
        total = f32(0)
        for i in range(HELD):
            held[i] = x[i * 128 + (thread & 127)]
            total += held[i]
        square = f32(0)
        for i in range(HELD):
            square += held[i] * total
        out[thread] = square


# ---- ldmatrix ----

EIGHT_BY_EIGHT = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)


def fragments(matrices: np.ndarray) -> np.ndarray:
    """[lane, matrix] words: lane i holds elements (i / 4, 2 * (i % 4)) and the next of the row."""
    return np.ascontiguousarray(matrices.reshape(4, 64).view(np.int32).T)


@probe(ins=(EIGHT_BY_EIGHT.reshape(-1).view(np.int32),), want=fragments(EIGHT_BY_EIGHT), shared=512)
def ldmatrix_x4(out, x):
    """Lane i has row i % 8 of matrix i / 8 to point at: here they follow each other."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 16 * lane
    ptx.st_shared_v4_b32(at, x[4 * lane], x[4 * lane + 1], x[4 * lane + 2], x[4 * lane + 3])
    ptx.warp_sync()
    out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = ptx.ldmatrix_x4(at)


@probe(
    ins=(EIGHT_BY_EIGHT.reshape(-1).view(np.int32),),
    want=fragments(np.ascontiguousarray(EIGHT_BY_EIGHT.transpose(0, 2, 1))),
    shared=512,
)
def ldmatrix_x4_trans(out, x):
    """A lane gets two elements of a column."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 16 * lane
    ptx.st_shared_v4_b32(at, x[4 * lane], x[4 * lane + 1], x[4 * lane + 2], x[4 * lane + 3])
    ptx.warp_sync()
    out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = ptx.ldmatrix_x4_trans(at)


@probe(ins=(fragments(EIGHT_BY_EIGHT),), want=EIGHT_BY_EIGHT.reshape(-1).view(np.int32), shared=512)
def stmatrix_x4(out, x):
    """The way back from fragments to rows."""
    lane = cuda.threadIdx.x
    at = ptx.shared_base() + 16 * lane
    ptx.stmatrix_x4(at, x[4 * lane], x[4 * lane + 1], x[4 * lane + 2], x[4 * lane + 3])
    ptx.warp_sync()
    out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = ptx.ld_shared_v4_b32(at)


# ---- mma.sync ----


def mma_probe(dtype: str) -> None:
    """``A (16x16) · B (16x16) + 1``: two instructions, one for each 8 columns of B."""
    mma = ptx.mma_m16n8k16(dtype)
    a, b = integers((16, 16), 1), integers((16, 16), 2)

    @probe(
        name=f"mma_m16n8k16_{'bf16' if dtype == 'bfloat16' else 'f16'}",
        ins=(words(a, dtype), words(b, dtype)),
        want=a @ b + 1,
        shared=1024,
    )
    def kernel(out, a, b):
        """One load with ldmatrix for A and one for both halves of B; `at` says which accumulators."""
        lane = cuda.threadIdx.x
        at_a = ptx.shared_base()
        at_b = at_a + 512
        for i in range(4):
            ptx.st_shared_b32(at_a + 4 * (lane + 32 * i), a[lane + 32 * i])
            ptx.st_shared_b32(at_b + 4 * (lane + 32 * i), b[lane + 32 * i])
        ptx.warp_sync()
        # Row i % 16 and half i / 16 of it. For A that gives a0 … a3 in order; B, whose rows are k, is transposed on
        # the way and gives b0, b1 of columns 0-7, then of columns 8-15.
        row = 32 * (lane & 15) + 16 * (lane >> 4)
        a0, a1, a2, a3 = ptx.ldmatrix_x4(at_a + row)
        b0, b1, b2, b3 = ptx.ldmatrix_x4_trans(at_b + row)
        acc = cuda.local.array(8, np.float32)
        for i in range(8):
            acc[i] = f32(1)
        mma(acc, 0, a0, a1, a2, a3, b0, b1)
        mma(acc, 4, a0, a1, a2, a3, b2, b3)
        for i in range(8):
            # Registers 4n … 4n+3: rows lane / 4 and, for the last two, 8 below; columns 8n + 2 * (lane % 4) and next.
            out[16 * ((lane >> 2) + 4 * (i & 2)) + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)] = acc[i]


for dtype in BITS:
    mma_probe(dtype)


# ---- wgmma: A (64 x 64) · B (64 x n), four steps of k ----


@cuda.jit(device=True)
def fill(at, x, rows):
    """128 threads copy `rows` rows of 128 bytes into shared memory with swizzle."""
    for i in range(cuda.threadIdx.x, rows * 8, 128):
        row, unit = i >> 3, i & 7
        ptx.st_shared_v4_b32(
            at + row * 128 + ((unit ^ (row & 7)) << 4), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]
        )


@cuda.jit(device=True)
def place(n):
    """Where the accumulators of this thread begin in a row-major 64 x n result.

    Registers 4j and 4j+1 are columns 8j and 8j+1 from there, 4j+2 and 4j+3 the same columns 8 rows below.
    """
    warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
    return n * (16 * warp + (lane >> 2)) + 2 * (lane & 3)


def operands(n: int, dtype: str, transposed_b: bool) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Words of A and B in rows of 64, and A · B. B is n rows of k, or n / 64 chunks of k rows of 64 columns."""
    a, b = integers((64, 64), 3), integers((64, n), 4)
    rows = b.reshape(64, n // 64, 64).transpose(1, 0, 2) if transposed_b else b.T
    return (words(a, dtype), words(rows, dtype)), a @ b


def name_of(kind: str, n: int, dtype: str, transposed_b: bool) -> str:
    """Name of the intrinsic, as in `ptx.SPECS`."""
    return f"wgmma_m64n{n}k16_{kind}_{'bf16' if dtype == 'bfloat16' else 'f16'}{'_bt' if transposed_b else ''}"


def wgmma_ss_probe(n: int, dtype: str, transposed_b: bool) -> None:
    """A and B in shared memory."""
    wgmma = ptx.wgmma_ss(n, dtype, transposed_b=transposed_b)
    count, tiles, below = n // 2, n // 8, 8 * n  # accumulators a thread, tiles of 8 columns, 8 rows of the result
    step = 2048 if transposed_b else 32  # bytes from 16 values of k to the next
    ins, want = operands(n, dtype, transposed_b)

    @probe(
        name=name_of("ss", n, dtype, transposed_b),
        ins=ins,
        want=want,
        threads=128,
        min_blocks=1,
        shared=CHUNK + 128 * n,
    )
    def kernel(out, a, b):
        """A descriptor for each operand and step; `transposed_b` where the rows of B's chunks are k."""
        at_a = ptx.shared_base()
        at_b = at_a + CHUNK
        fill(at_a, a, 64)
        fill(at_b, b, n)
        ptx.fence_proxy_async()  # each thread its own stores, then all meet
        cuda.syncthreads()
        acc = cuda.local.array(count, np.float32)  # not set: the first step overwrites
        ptx.wgmma_fence()
        for k in range(4):
            of_a, of_b = wgmma_descriptor(at_a + 32 * k, 16, 1024), wgmma_descriptor(at_b + step * k, CHUNK, 1024)
            wgmma(acc, of_a, of_b, k)
        ptx.wgmma_commit()
        ptx.wgmma_wait_0()
        at = place(n)
        for j in range(tiles):
            out[at + 8 * j], out[at + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
            out[at + 8 * j + below], out[at + 8 * j + below + 1] = acc[4 * j + 2], acc[4 * j + 3]


def wgmma_rs_probe(n: int, dtype: str, transposed_b: bool) -> None:
    """A in registers, B in shared memory."""
    wgmma = ptx.wgmma_rs(n, dtype, transposed_b=transposed_b)
    count, tiles, below = n // 2, n // 8, 8 * n
    step = 2048 if transposed_b else 32
    ins, want = operands(n, dtype, transposed_b)

    @probe(
        name=name_of("rs", n, dtype, transposed_b),
        ins=ins,
        want=want,
        threads=128,
        min_blocks=1,
        shared=CHUNK + 128 * n,
    )
    def kernel(out, a, b):
        """A from ldmatrix, a warp its 16 rows."""
        at_a = ptx.shared_base()
        at_b = at_a + CHUNK
        fill(at_a, a, 64)
        fill(at_b, b, n)
        ptx.fence_proxy_async()
        cuda.syncthreads()
        fragment = cuda.local.array(16, np.int32)  # all four steps of k before the first wgmma
        row = 16 * (cuda.threadIdx.x >> 5) + (cuda.threadIdx.x & 15)
        for k in range(4):
            unit = 2 * k + ((cuda.threadIdx.x >> 4) & 1)
            a0, a1, a2, a3 = ptx.ldmatrix_x4(at_a + 128 * row + ((unit ^ (row & 7)) << 4))
            fragment[4 * k], fragment[4 * k + 1], fragment[4 * k + 2], fragment[4 * k + 3] = a0, a1, a2, a3
        acc = cuda.local.array(count, np.float32)
        ptx.wgmma_fence()
        for k in range(4):
            of_b = wgmma_descriptor(at_b + step * k, CHUNK, 1024)
            wgmma(acc, fragment[4 * k], fragment[4 * k + 1], fragment[4 * k + 2], fragment[4 * k + 3], of_b, k)
        ptx.wgmma_commit()
        ptx.wgmma_wait_0()
        at = place(n)
        for j in range(tiles):
            out[at + 8 * j], out[at + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
            out[at + 8 * j + below], out[at + 8 * j + below + 1] = acc[4 * j + 2], acc[4 * j + 3]


for dtype in BITS:
    for n in (64, 256):
        for transposed_b in (False, True):
            wgmma_ss_probe(n, dtype, transposed_b)
            wgmma_rs_probe(n, dtype, transposed_b)

first_ins, first_want = operands(64, "bfloat16", False)
in_flight = ptx.wgmma_ss(64, "bfloat16")


@probe(
    name="wgmma_wait_1",
    ins=first_ins,
    want=np.concatenate([first_want, 2 * first_want]),
    threads=128,
    min_blocks=1,
    shared=2 * CHUNK,
    also=("wgmma_fence", "wgmma_commit", "wgmma_wait_0"),
)
def wgmma_wait_1(out, a, b):
    """Two groups in flight, into accumulators of their own; the first is used while the second still runs.

    Descriptors from `operand` words: steps of k are additions to them.
    """
    at_a = ptx.shared_base()
    at_b = at_a + CHUNK
    fill(at_a, a, 64)
    fill(at_b, b, 64)
    ptx.fence_proxy_async()
    cuda.syncthreads()
    once, twice = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
    word_a, word_b = operand(at_a, 16), operand(at_b, 16)
    ptx.wgmma_fence()
    for k in range(4):
        in_flight(once, described(word_a + np.uint32(2 * k), 1024), described(word_b + np.uint32(2 * k), 1024), k)
    ptx.wgmma_commit()
    for k in range(8):
        step = np.uint32(2 * (k & 3))
        in_flight(twice, described(word_a + step, 1024), described(word_b + step, 1024), k)
    ptx.wgmma_commit()
    ptx.wgmma_wait_1()
    at = place(64)
    for j in range(8):
        out[at + 8 * j], out[at + 8 * j + 1] = once[4 * j], once[4 * j + 1]
        out[at + 8 * j + 512], out[at + 8 * j + 513] = once[4 * j + 2], once[4 * j + 3]
    ptx.wgmma_wait_0()
    at += 64 * 64
    for j in range(8):
        out[at + 8 * j], out[at + 8 * j + 1] = twice[4 * j], twice[4 * j + 1]
        out[at + 8 * j + 512], out[at + 8 * j + 513] = twice[4 * j + 2], twice[4 * j + 3]
