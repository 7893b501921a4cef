"""The probes of clusters: blocks that read and write each other's shared memory."""

from __future__ import annotations

import numpy as np

from kdtree._cuda import cuda
from kdtree.kernels import ptx
from kdtree.kernels.hopper import wait
from kdtree.kernels.ptx_probes import LANES, ONE_TO_32, probe

f32, i32 = np.float32, np.int32
BLOCKS = 4

# Block r: the lanes' numbers as block r + 1 keeps them, then the pairs that block r - 1 stored here.
KEPT = np.stack([LANES[:, None] * 4 + np.arange(4) + 1000 * ((r + 1) % BLOCKS) for r in range(BLOCKS)])
SENT = np.stack([np.stack([ONE_TO_32, 0 * ONE_TO_32 + (r - 1) % BLOCKS], 1) for r in range(BLOCKS)])


@probe(
    want=np.concatenate([KEPT.reshape(BLOCKS, 128), SENT.reshape(BLOCKS, 64)], axis=1).astype(np.float32),
    blocks=BLOCKS,
    cluster=BLOCKS,
    shared=1024,
    also=("map_shared", "ld_cluster_v4_b32", "st_cluster_v2_f32", "cluster_arrive", "cluster_wait"),
)
def cluster_rank(out):
    """Each block keeps 512 bytes that the block before it reads, and stores 256 bytes into the block behind it.

    The barrier first because nothing may be stored into a block that has not begun, in the middle because what is read
    must be there, and at the end because a block that others still read must not end.
    """
    lane = cuda.threadIdx.x
    rank = ptx.cluster_rank()
    base = ptx.shared_base()
    value = i32(rank * 1000 + lane * 4)
    ptx.st_shared_v4_b32(base + 16 * lane, value, value + 1, value + 2, value + 3)
    ptx.cluster_arrive()
    ptx.cluster_wait()
    behind = i32((rank + 1) & (BLOCKS - 1))
    ptx.st_cluster_v2_f32(ptx.map_shared(base + 512 + 8 * lane, behind), f32(lane + 1), f32(rank))
    a, b, c, d = ptx.ld_cluster_v4_b32(ptx.map_shared(base + 16 * lane, behind))
    ptx.cluster_arrive()
    ptx.cluster_wait()
    at = cuda.blockIdx.x * 192
    out[at + lane * 4] = f32(a)
    out[at + lane * 4 + 1] = f32(b)
    out[at + lane * 4 + 2] = f32(c)
    out[at + lane * 4 + 3] = f32(d)
    x, y = ptx.ld_shared_v2_f32(base + 512 + 8 * lane)
    out[at + 128 + lane * 2] = x
    out[at + 128 + lane * 2 + 1] = y


@probe(
    want=np.stack([1000 * ((r - 1) % BLOCKS) + LANES for r in range(BLOCKS)]).astype(np.int32),
    blocks=BLOCKS,
    cluster=BLOCKS,
    shared=256 + 8,
    also=("cluster_arrive_relaxed",),
)
def cp_async_bulk_cluster(out):
    """Each block sends 128 bytes into the block behind it, whose mbarrier waits for them.

    The mbarrier is told how many bytes come before the cluster meets for the first time, so none come before that. The
    cluster meets again at the end: a block that has got its bytes says so, and the one that sent them may end.
    """
    lane = cuda.threadIdx.x
    rank = ptx.cluster_rank()
    base = ptx.shared_base()
    barrier = i32(base + 256)
    if ptx.elect_one():
        ptx.mbarrier_init(barrier, 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_expect_tx(barrier, 128)
    ptx.warp_sync()
    ptx.st_shared_b32(base + 4 * lane, 1000 * rank + lane)
    ptx.fence_proxy_async()
    ptx.cluster_arrive()
    ptx.cluster_wait()
    behind = i32((rank + 1) & (BLOCKS - 1))
    if ptx.elect_one():
        to = ptx.map_shared(base + 128, behind)
        ptx.cp_async_bulk_cluster(to, base, 128, ptx.map_shared(barrier, behind))
    ptx.warp_sync()
    wait(barrier, 0)
    out[cuda.blockIdx.x * 32 + lane] = ptx.ld_shared_b32(base + 128 + 4 * lane)
    ptx.cluster_arrive_relaxed()
    ptx.cluster_wait()
