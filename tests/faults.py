"""Families with a fault in them, for `families.run("faults:…")`: what a broken kernel on a user's machine does.

Each family is three cases: one that is right, the faulty one, one that would be right behind it.
"""

from __future__ import annotations

import os
import signal

from kdtree._cuda import cuda
from kdtree.kernels import merge_states, tree_accept
from kdtree.kernels.launch import CudaFault, Kernel
from kdtree.measure import cases, tryit


def _accept_case(name: str, run=None) -> cases.CheckCase:
    """A right `tree_accept` case, or one that runs something else in its place."""
    good = next(c for c in cases.bundle_cases("tree_accept", large=False) if c.name == "tree_accept_full_path")
    params = {"fault": name}
    return cases.CheckCase("tree_accept", name, params, 7, run or good.run)


def _around(name: str, fault) -> list[cases.CheckCase]:
    return [_accept_case("before"), _accept_case(name, fault), _accept_case("behind")]


def _swapped(op: str, kernel_function, threads: int):
    """Run the op's first bundle with another kernel in place of the shipped one."""

    def run():
        case = next(cases.bundle_cases(op, large=False))
        with tryit.swapped(op, lambda *_: Kernel(kernel_function, name="faulty", threads=threads)):
            return case.run()

    return run


def out_of_bounds() -> list[cases.CheckCase]:
    """A kernel that writes behind the end of its output."""

    def faulty(token_ids, n_nodes, first_child, next_sibling, predictions, n, d, has, stop, path, acc, bonus, status):
        path[cuda.blockIdx.x + 100_000_000] = 1

    return _around("out_of_bounds", _swapped("tree_accept", faulty, tree_accept.THREADS))


def just_outside() -> list[cases.CheckCase]:
    """A kernel that is right and also writes in front of its output: no fault, but a stray write."""
    shipped = merge_states.simt

    class Stray(Kernel):
        def launch(self, grid, args, *, stream=0):
            super().launch(grid, args, stream=stream)
            memory = args[-1].handle
            while memory.base is not None:
                memory = memory.base
            memory[5] = 0  # the buffer that the output is cut from begins with its guard band

    def factory(dtype):
        return Stray(shipped(dtype).function, name="stray", threads=merge_states.THREADS)

    def run():
        with tryit.swapped("merge_states", factory):
            return next(cases.bundle_cases("merge_states", large=False)).run()

    return _around("just_outside", run)


def never_returns() -> list[cases.CheckCase]:
    """A kernel that loops for ever."""

    def faulty(token_ids, n_nodes, first_child, next_sibling, predictions, n, d, has, stop, path, acc, bonus, status):
        while n > 0:
            path[0] = 1

    return _around("never_returns", _swapped("tree_accept", faulty, tree_accept.THREADS))


def killed() -> list[cases.CheckCase]:
    """The process is killed from outside, as the kernel's out-of-memory killer does."""
    return _around("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))


def wrong_result() -> list[cases.CheckCase]:
    """A kernel that accepts nothing."""

    def faulty(token_ids, n_nodes, first_child, next_sibling, predictions, n, d, has, stop, path, acc, bonus, status):
        b = cuda.blockIdx.x
        for i in range(d + 1):
            path[b * (d + 1) + i] = -1
        acc[b], bonus[b], status[b] = 0, -1, 0

    return _around("wrong_result", _swapped("tree_accept", faulty, tree_accept.THREADS))


def unwritten() -> list[cases.CheckCase]:
    """A kernel that writes nothing: the poison shows."""

    def faulty(token_ids, n_nodes, first_child, next_sibling, predictions, n, d, has, stop, path, acc, bonus, status):
        pass

    return _around("unwritten", _swapped("tree_accept", faulty, tree_accept.THREADS))


def cuda_error() -> list[cases.CheckCase]:
    """A driver error reported by a later, innocent call."""

    def run():
        from kdtree.kernels import launch

        def illegal():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        launch.guard(illegal, "verify_attn")

    return _around("cuda_error", run)


def always_faulty() -> list[cases.CheckCase]:
    """Six cases that all kill their process."""

    def run():
        raise CudaFault("CUDA error: unspecified launch failure")

    return [_accept_case(f"fault{i}", run) for i in range(6)]
