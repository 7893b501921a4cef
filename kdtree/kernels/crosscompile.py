"""Compile every kernel for every target without a GPU: registers, shared memory, spills, instructions.

``python -m kdtree.kernels.crosscompile`` prints one JSON line per kernel and target. It runs in a process of its
own because a process that chose the simulator cannot compile. Numba makes the PTX; ptxas and nvdisasm come from
the `nvidia-cuda-nvcc` and `nvidia-cuda-nvdisasm` wheels or the PATH.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

from kdtree.kernels.toolchain import COMPILING, tool

TARGETS: dict[str, tuple] = {
    "sm_80": (8, 0),  # A100
    "sm_89": (8, 9),  # L40S, RTX 4090
    "sm_90a": (9, 0, "a"),  # H100, H200
    "sm_100": (10, 0),  # B200
    "sm_120": (12, 0),  # RTX 5070 Ti, RTX PRO 6000
}

EMULATED = "sm_90a"  # whose PTX is kept for `emulator`
SHARES = 2  # processes that `collect` starts

# Shared memory that a block can have, static and dynamic: bytes.
HARDWARE_SHARED = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one target. Bytes are per thread (stack, spills) or per block (shared).

    `shared_bytes` is static and dynamic shared memory together, `shared_limit` what the kernel states of itself.
    `remarks` are what ptxas says of lost performance: a wgmma that waits for the one before, a setmaxnreg ignored.
    """

    op: str
    kernel: str
    target: str
    threads: int
    registers: int
    shared_bytes: int
    shared_limit: int
    stack_bytes: int
    spill_bytes: int
    instructions: int
    tensor_core: int
    global_loads: int
    barriers: int
    remarks: str = ""

    def problems(self) -> list[str]:
        """Why this is not acceptable: spills, lost performance, more shared memory than the kernel states."""
        found = [f"{self.kernel} on {self.target}: {self.remarks}"] if self.remarks else []
        if self.spill_bytes:
            found.append(f"{self.kernel} on {self.target} spills {self.spill_bytes} bytes a thread")
        if self.shared_bytes > self.shared_limit:
            found.append(
                f"{self.kernel} on {self.target} takes {self.shared_bytes} bytes of shared memory, "
                f"states at most {self.shared_limit}"
            )
        elif self.shared_bytes > HARDWARE_SHARED[self.target]:
            found.append(
                f"{self.kernel} on {self.target} takes {self.shared_bytes} bytes of shared memory, "
                f"a block there has at most {HARDWARE_SHARED[self.target]}"
            )
        return found


def parse_ptxas(log: str) -> dict[str, int]:
    """Numbers of ``ptxas -v`` for the one kernel in `log`."""

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found.group(1)) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "shared_bytes": number(r"(\d+) bytes smem"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    }


def parse_remarks(log: str) -> str:
    """What ptxas says of performance that is lost, without the mangled name of the kernel."""
    found = re.findall(r"\(C\d+\) Potential Performance Loss: ([^\n]*)", log)
    return "; ".join(re.sub(r"(?: in the function)? '_Z\w+'", "", text).strip(" .") for text in found)


def parse_sass(text: str) -> dict[str, int]:
    """Instruction counts of an ``nvdisasm -c`` listing, by what they tell."""
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", text, re.MULTILINE)
    count = Counter(names)
    tensor = ("HMMA", "HGMMA", "IMMA", "QGMMA", "OMMA", "UTCHMMA")
    return {
        "instructions": sum(count.values()) - count["NOP"],
        "tensor_core": sum(count[n] for n in tensor),
        "global_loads": count["LDG"] + count["LD"],
        "barriers": count["BAR"],
    }


def stand_in(target: tuple) -> None:
    """Answer for a device that is not there.

    Numba asks the current one for its capability when a kernel calls a device function, although it was told.
    """
    from numba.cuda import dispatcher

    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=target)


def compile_ptx(variant, targets: list[str], folder: Path) -> list[Path]:  # noqa: ANN001 (Variant needs Numba)
    """PTX files of one variant, one a target. Typing and lowering, most of the time, are done once for all."""
    from kdtree.kernels import assemble

    first = TARGETS[targets[0]]
    stand_in(first)
    code = assemble.library(variant.kernel, variant.words, first)
    paths = []
    for target in targets:
        paths.append(folder / f"{variant.op}-{len(list(folder.iterdir()))}.ptx")
        text = assemble.ptx(code, variant.kernel, variant.words, TARGETS[target])
        paths[-1].write_text(text)
        if target == EMULATED and variant.kernel.dynamic_shared:  # a kernel on tensor cores
            assemble.keep_ptx(variant.kernel, variant.words, TARGETS[target], text, code._entry_name)
    return paths


def families(variants: Iterable) -> list[list]:
    """Variants, each followed by that whose PTX is the same but for the name of the type.

    A tensor-core kernel converts float32 to 16 bits by an instruction, so its float16 form is its bfloat16 form with
    other names of types, and need not be lowered again, which takes longest. `--twins` lowers both and compares.
    """
    found: dict[tuple[str, str], list] = {}
    for variant in variants:
        label = variant.label
        if variant.kernel.dynamic_shared and "bfloat16" not in label:
            twin = found.get((variant.op, label.replace("float16", "bfloat16")))
            if twin:
                twin.append(variant)
                continue
        found[variant.op, label] = [variant]
    return list(found.values())


def as_float16(text: str) -> str:
    """PTX of a tensor-core kernel for bfloat16, for float16."""
    return text.replace("bf16", "f16")


def different_twins(prefix: str) -> list[str]:
    """Labels beginning with `prefix` of variants that `families` takes for twins and that are not. Lowers both."""
    from kdtree.kernels import all_variants, assemble

    wrong = []
    for variant, *twins in families(v for v in all_variants() if v.label.startswith(prefix)):
        for twin in twins:
            target = next(t for t in TARGETS.values() if variant.kernel.runs_on(t))
            stand_in(target)
            texts = []
            for one in (variant, twin):
                code = assemble.library(one.kernel, one.words, target)
                text = assemble.ptx(code, one.kernel, one.words, target).replace(code._entry_name, "entry")
                # Numba's unused marks and comments hold numbers of its own.
                texts.append(as_float16(re.sub(r"//.*|^\.common .*NumbaEnv.*$", "", text, flags=re.MULTILINE)))
            wrong += [twin.label] * (texts[0] != texts[1])
    return wrong


def resources(variant, target: str, ptx: Path) -> Resources:  # noqa: ANN001
    """Run ptxas and nvdisasm on a PTX file."""
    cubin = ptx.with_suffix(".cubin")
    command = [tool("ptxas"), "-v", f"-arch={target}", str(ptx), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refused {variant.kernel.name} for {target}:\n{done.stderr}")
    listing = subprocess.run([tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True)
    taken = parse_ptxas(done.stderr)
    taken["shared_bytes"] += variant.kernel.dynamic_shared
    return Resources(
        op=variant.op,
        kernel=f"{variant.op}.{variant.label}",
        target=target,
        threads=variant.kernel.threads,
        shared_limit=variant.shared_limit,
        **taken,
        **parse_sass(listing.stdout),
        remarks=parse_remarks(done.stderr),
    )


def run(targets: list[str], ops: list[str] | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Resources]:
    """Resources of every variant on every target that it is made for, as they come.

    `share` = (i, n) does every n-th variant from the i-th on. Needs a process without the simulator.
    """
    from kdtree.kernels import all_variants

    wanted = families(v for v in all_variants() if ops is None or v.op in ops)[share[0] :: share[1]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for variant, *twins in wanted:
            chosen = [t for t in targets if variant.kernel.runs_on(TARGETS[t])]
            for target, ptx in zip(chosen, chosen and compile_ptx(variant, chosen, Path(folder)), strict=True):
                jobs.append(pool.submit(resources, variant, target, ptx))
                for number, twin in enumerate(twins):
                    renamed = ptx.with_name(f"{ptx.stem}-twin{number}.ptx")
                    renamed.write_text(as_float16(ptx.read_text()))
                    jobs.append(pool.submit(resources, twin, target, renamed))
        for job in jobs:
            yield job.result()


def collect(targets: list[str] | None = None, ops: list[str] | None = None) -> list[Resources]:
    """The same from any process: starts two that compile, with half of the work each, and keeps what they found.

    What was found is kept in the user's cache folder under the fingerprint of the kernels' sources, since it takes
    minutes. Raises RuntimeError with the output of a process that fails.
    """
    from kdtree.kernels import OPS

    wanted, chosen = targets or list(TARGETS), ops or list(OPS)
    with ThreadPoolExecutor(SHARES) as pool:
        found = [row for rows in pool.map(lambda i: _collect(wanted, chosen, i), range(SHARES)) for row in rows]
    return sorted(found, key=lambda row: (chosen.index(row.op), row.kernel, wanted.index(row.target)))


def _collect(targets: list[str], ops: list[str], share: int) -> list[Resources]:
    kept = _cache_file(targets, ops, share)
    with one_at_a_time(kept):
        if kept.exists():
            return _parse(kept.read_text())
        command = [sys.executable, "-m", "kdtree.kernels.crosscompile", "--report-only", f"--share={share}"]
        command += [f"--target={t}" for t in targets] + [f"--op={o}" for o in ops]
        environment = {**os.environ, **COMPILING}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"cross-compilation of {ops} failed ({done.returncode}):\n{done.stderr[-4000:]}")
        _keep(kept, done.stdout)
        return _parse(done.stdout)


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Processes that want the same file: the first makes it, the others wait and read. Nothing, where that fails."""
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _parse(lines: str) -> list[Resources]:
    return [Resources(**json.loads(line)) for line in lines.splitlines()]


def _keep(path: Path, text: str) -> None:
    """Write the cache; where that cannot be done, the next call compiles again."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        pass


def _cache_file(targets: list[str], ops: list[str], share: int) -> Path:
    from importlib.metadata import version

    digest = hashlib.sha256(f"{targets} {ops} {share}/{SHARES} {version('numba-cuda')} {tool('ptxas')}".encode())
    package = Path(__file__).resolve().parent
    for path in sorted([*package.glob("*.py"), package.parent / "spec.py", package.parent / "_cuda.py"]):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kdtree" / f"resources-{digest.hexdigest()[:16]}.jsonl"


def main(argv: list[str] | None = None) -> int:
    """Print a JSON line per kernel and target; exit 1 where one spills or takes too much shared memory."""
    from kdtree.kernels import OPS

    parser = argparse.ArgumentParser(prog="python -m kdtree.kernels.crosscompile", description=main.__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--op", action="append", choices=OPS, help="default: all")
    parser.add_argument("--share", type=int, choices=range(SHARES), help=f"only this one of {SHARES} shares")
    parser.add_argument("--report-only", action="store_true", help="exit 0 whatever the kernels take")
    parser.add_argument("--twins", metavar="PREFIX", help="only compare float16 forms with bfloat16 ones, by label")
    options = parser.parse_args(argv)
    if options.twins is not None:
        wrong = different_twins(options.twins)
        print("\n".join(f"{label}: not its bfloat16 form with other types" for label in wrong), end="\n" * bool(wrong))
        return int(bool(wrong))
    problems: list[str] = []
    share = (0, 1) if options.share is None else (options.share, SHARES)
    for row in run(options.target or list(TARGETS), options.op, share):
        print(json.dumps(asdict(row)), flush=True)
        problems += row.problems()
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems) and not options.report_only)


if __name__ == "__main__":
    os.environ |= COMPILING
    sys.exit(main())
