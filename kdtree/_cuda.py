"""The only import of `numba.cuda` in the package: picks the GPU or Numba's simulator, once a process.

One import site, because numba-cuda is in maintenance and its successor has no simulator: whatever follows
is swapped in here.
"""

from __future__ import annotations

import os
import sys
import warnings

from kdtree.device import NO_GPU, gpu_available, why_no_gpu

# A process that only compiles (kernels/crosscompile.py) needs the real module although there is no GPU.
_COMPILING = os.environ.get("KDTREE_CROSS_COMPILE") == "1"

SIMULATED: bool = not (gpu_available() or _COMPILING)
BACKEND: str = "simulator" if SIMULATED else "compiler" if not gpu_available() else "gpu"

if SIMULATED:
    # numba.cuda reads this on import, so it must be set before; a numba already imported is told as well.
    os.environ[NO_GPU] = why_no_gpu()
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    if "numba" in sys.modules:
        sys.modules["numba"].config.ENABLE_CUDASIM = 1
        if "numba.cuda" in sys.modules and not hasattr(sys.modules["numba.cuda"], "simulator"):
            warnings.warn("numba.cuda was imported before kdtree without a GPU: kernels will not run", stacklevel=2)

# The silent half of small grids: Numba warns that a grid of 8 blocks underuses a GPU. Tests use such grids.
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")

from numba import cuda  # noqa: E402  (after the choice above)

__all__ = ["BACKEND", "SIMULATED", "cuda"]
