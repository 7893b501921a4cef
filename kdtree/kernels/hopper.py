"""What Hopper kernels write again and again: waiting at an mbarrier, describing an operand of wgmma.

Layout of a shared-memory operand here: *chunks* of 64 columns of 16-bit elements, so that a row is 128 bytes, in
128-byte swizzle: the 16-byte unit `u` of row `r` lies at ``r * 128 + ((u ^ (r & 7)) << 4)``. A chunk starts at a
multiple of 1024 bytes, the length of the pattern. TMA with CU_TENSOR_MAP_SWIZZLE_128B writes just that.
"""

from __future__ import annotations

import numpy as np

from kdtree._cuda import cuda
from kdtree.kernels import ptx

SWIZZLE_128B = np.int64(1) << 62  # bits 62-63 of a descriptor


@cuda.jit(device=True, inline="always")
def wait(barrier, parity):  # noqa: ANN001, ANN201 (device code)
    """Return once the phase of parity `parity` (0 the first, 1 the second, …) of mbarrier `barrier` has ended.

    barrier: int32 address in shared memory. A fresh barrier counts as one whose phase of parity 1 has ended, so who
    waits for free space starts with parity 1 and passes.
    """
    while ptx.mbarrier_try_wait(barrier, parity) == 0:
        pass


@cuda.jit(device=True, inline="always")
def wgmma_descriptor(address, leading, stride):  # noqa: ANN001, ANN201
    """int64 matrix descriptor of an operand in shared memory, in 128-byte swizzle.

    address: int32, below 2**18, a multiple of 16. leading, stride: byte offsets, multiples of 16.

    K-major (a row of the chunk is one row of A or one column of B, 64 values of k): `stride` = 1024 from 8 rows to
    the next 8, `leading` is not used (16). The next 16 values of k: address + 32.
    MN-major (a row of the chunk is one k, 64 columns of B; ``transposed_b``): `stride` = 1024 from 8 values of k to
    the next 8, `leading` from 64 columns to the next 64: 8192 where a chunk has 64 rows. The next 16 values of k:
    address + 2048.
    Fields are 16-byte units: start in bits 0-13, `leading` in 16-29, `stride` in 32-45. So a descriptor may be moved
    by n bytes by adding n // 16.
    """
    start = np.int64(address & 0x3FFFF) >> 4
    return start | (np.int64(leading >> 4) << 16) | (np.int64(stride >> 4) << 32) | SWIZZLE_128B


@cuda.jit(device=True, inline="always")
def operand(address, leading):  # noqa: ANN001, ANN201
    """uint32, the low word of a descriptor: start and `leading`, as `wgmma_descriptor` takes them.

    `described` makes the descriptor; to move it by n bytes, add n // 16 to the word before. In a loop over k that costs
    one addition a step where `wgmma_descriptor` costs six instructions of the uniform datapath, enough to hold the
    tensor cores up.
    """
    return np.uint32(((address & 0x3FFFF) >> 4) | ((leading >> 4) << 16))


@cuda.jit(device=True, inline="always")
def described(word, stride):  # noqa: ANN001, ANN201
    """int64 matrix descriptor of an `operand` word; `stride` is that of `wgmma_descriptor`, a constant."""
    return np.int64(np.uint32(word)) | ((np.int64(stride >> 4) << 32) | SWIZZLE_128B)
