"""Compile the probe of every PTX intrinsic for every target that has it, without a GPU.

``python -m kdtree.kernels.ptx_compile`` prints a JSON line for each. A process that chose the simulator cannot
compile, so `collect` starts one that does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kdtree.kernels import crosscompile
from kdtree.kernels.crosscompile import parse_ptxas
from kdtree.kernels.toolchain import COMPILING, tool

MODULE = "kdtree.kernels.ptx_compile"  # what `collect` runs
SOURCES = ("ptx*.py", "hopper.py", "assemble.py", "crosscompile.py", "launch.py")  # that decide what comes out


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of the probe `name` for `target`; stack and spills in bytes a thread.

    `local` tells whether the PTX declares local memory, `remarks` holds what ptxas says about lost performance.
    """

    name: str
    shows: list[str]
    target: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    local: bool
    remarks: str


def run() -> Iterator[Compiled]:
    """Every probe for every shipped target that has its instructions. Needs a process without the simulator.

    Raises RuntimeError for an instruction without a probe, and with what ptxas says where it refuses one.
    """
    from kdtree.kernels import ptx
    from kdtree.kernels.ptx_probes import all_probes

    by_instruction = all_probes()
    missing = [name for name in ptx.SPECS if name not in by_instruction]
    if missing:
        raise RuntimeError(f"no probe shows {', '.join(missing)}")
    probes = {one.names[0]: one for one in by_instruction.values()}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for one in probes.values():
            place = Path(folder) / one.names[0]
            place.mkdir()
            paths = crosscompile.compile_ptx(one.variant, one.targets, place)
            jobs += [pool.submit(_assemble, one, t, p) for t, p in zip(one.targets, paths, strict=True)]
        for job in jobs:
            yield job.result()


def _assemble(probe, target: str, ptx: Path) -> Compiled:  # noqa: ANN001 (importing Probe would import Numba)
    command = [tool("ptxas"), "-v", f"-arch={target}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refused {probe.kernel.name} for {target}:\n{done.stderr}")
    numbers = parse_ptxas(done.stderr)
    return Compiled(
        name=probe.names[0],
        shows=list(probe.names),
        target=target,
        registers=numbers["registers"],
        stack_bytes=numbers["stack_bytes"],
        spill_bytes=numbers["spill_bytes"],
        local=".local" in ptx.read_text(),
        remarks="\n".join(re.findall(r".*(?:Potential Performance Loss|warning).*", done.stderr)),
    )


def collect() -> list[Compiled]:
    """`run` from any process, kept in the user's cache folder under the fingerprint of the sources.

    Raises RuntimeError with the output of a compiling process that fails.
    """
    kept = _cache_file()
    with crosscompile.one_at_a_time(kept):
        if kept.exists():
            text = kept.read_text()
        else:
            environment = {**os.environ, **COMPILING}
            command = [sys.executable, "-m", MODULE]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise RuntimeError(f"compiling the probes failed ({done.returncode}):\n{done.stderr[-4000:]}")
            text = done.stdout
            crosscompile._keep(kept, text)
    return [Compiled(**json.loads(line)) for line in text.splitlines()]


def _cache_file() -> Path:
    from importlib.metadata import version

    digest = hashlib.sha256(f"{version('numba-cuda')} {tool('ptxas')}".encode())
    for pattern in SOURCES:
        for path in sorted(Path(__file__).resolve().parent.glob(pattern)):
            digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kdtree" / f"ptx-{digest.hexdigest()[:16]}.jsonl"


def main() -> None:
    """What `collect` reads: a JSON line for each probe and target."""
    os.environ |= COMPILING
    for row in run():
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
