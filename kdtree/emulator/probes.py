"""The probes of `ptx_probes`, emulated: is each instruction here what it is on a GPU?"""

from __future__ import annotations

import numpy as np

from kdtree.emulator.device import Device
from kdtree.kernels.ptx_probes import Probe, all_probes


def probes() -> dict[str, Probe]:
    """A name for each kernel."""
    return {probe.names[0]: probe for probe in all_probes().values()}


def run(probe: Probe, seed: int = 0) -> str:
    """What is wrong with what the probe's kernel writes, or nothing. Raises what the emulator finds."""
    device = Device(132, seed=seed)
    out = np.frombuffer(bytearray(b"\xa5" * probe.want.nbytes), probe.want.dtype).reshape(probe.want.shape)
    args = probe.arguments(device.pointer(out), lambda array: device.pointer(np.ascontiguousarray(array)))
    with device.installed():
        probe.kernel.launch((probe.blocks,), args)
    if np.allclose(out, probe.want, rtol=max(probe.rtol, 1e-6), atol=0):
        return ""
    return f"{(out != probe.want).sum()} of {out.size} elements differ"
