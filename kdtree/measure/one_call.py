"""One call of a kernel of `verify_attn` at a time, for a profiler to look at.

    ncu --profile-from-start off … python -m kdtree.measure.one_call wgmma:B=4,H=64,N=33,L=16384 mma:B=1,H=8,N=9

Each call stands alone between cudaProfilerStart and cudaProfilerStop, compiled and warm, with a fill of one element
in front of it: that kernel marks where the next call begins.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kdtree.measure import impls, sweep


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """(impl, case) of ``impl:B=4,H=64,N=33,L=16384``; what is not said is the reference case's. ValueError else."""
    impl, _, words = text.partition(":")
    if impl not in impls.NAMES:
        raise ValueError(f"call: got {text!r}, expected one of {', '.join(impls.NAMES)}, a colon and a case")
    case = dict(sweep.REFERENCE["verify_attn"])
    for word in filter(None, words.split(",")):
        name, _, value = word.partition("=")
        if name not in case:
            raise ValueError(f"call: got {word!r}, expected {', '.join(f'{n}=…' for n in case)}")
        case[name] = value if name == "dtype" else int(value)
    return impl, case


def written(impl: str, case: dict[str, Any]) -> str:
    """What `parsed` reads."""
    return f"{impl}:" + ",".join(f"{n}={v}" for n, v in case.items())


def main(argv: list[str] | None = None) -> int:
    """Make the calls. A kernel that does not take its case is left out, with its marker in place."""
    parser = argparse.ArgumentParser(prog="python -m kdtree.measure.one_call", description=main.__doc__)
    parser.add_argument("calls", nargs="+", type=parsed, metavar="impl:B=4,H=64,N=33,L=16384")
    options = parser.parse_args(argv)
    import torch

    from kdtree.measure import setups

    marker = torch.zeros(1, device="cuda")
    for impl, case in options.calls:
        setup = setups.make("verify_attn", case).by(impl)
        if reason := impls.refused(setup.run):
            print(f"{written(impl, case)}: {reason}", file=sys.stderr)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        marker.fill_(1.0)
        if not reason:
            setup.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del setup
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
