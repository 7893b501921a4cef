"""``python -m kdtree.emulator``: the tensor-core kernels of verify_attn on this CPU, with a look for races."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial

from kdtree.kernels.toolchain import COMPILING


def main(argv: list[str] | None = None) -> int:
    """Run each case of each kernel, or each probe; exit 1 where a result is wrong or the emulator finds a fault."""
    from kdtree.emulator import probes
    from kdtree.emulator.attention import CASES, run

    parser = argparse.ArgumentParser(prog="python -m kdtree.emulator", description=main.__doc__)
    parser.add_argument("--impl", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the order in which things happen")
    parser.add_argument("--probes", action="store_true", help="the probes of single instructions instead")
    options = parser.parse_args(argv)
    todo: list[tuple[str, Callable[[], str]]] = []
    if options.probes:
        todo = [(name, partial(probes.run, probe, options.seed)) for name, probe in probes.probes().items()]
    else:
        for impl in options.impl or CASES:
            for case in CASES[impl]:
                text = " ".join([impl, *(f"{k}={v}" for k, v in case.items())])
                todo.append((text, lambda case=case, impl=impl: run(case, impl, options.seed).reason or ""))
    wrong = 0
    for name, check in todo:
        began = time.monotonic()
        try:
            reason = check()
        except Exception as found:  # what is found is printed, and the next one runs
            reason = f"{type(found).__name__}: {found}"
        wrong += bool(reason)
        print(f"{'FAIL' if reason else 'ok'}  {name}  {time.monotonic() - began:.1f} s  {reason}".rstrip(), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    if not os.environ.items() >= COMPILING.items():
        os.environ |= COMPILING
        os.execv(sys.executable, [sys.executable, "-m", "kdtree.emulator", *sys.argv[1:]])
    sys.exit(main())
