"""Runs the PTX of our kernels on a CPU, tensor cores and copy engine included, and watches it.

Numba's simulator has no PTX, so kernels that live on `wgmma`, TMA and mbarriers would run on a GPU alone. Here their
PTX runs warp by warp in random order, with every asynchronous operation ending at a random time. Beside wrong results
this finds what a GPU may hide for years: accesses outside of buffers, races in shared memory, a missing fence between
the generic and the asynchronous proxy, deadlocks. It says nothing of time.

    python -m kdtree.emulator --impl wgmma

`program` parses PTX, `arithmetic` and `compile` turn basic blocks into NumPy, `warp`, `machine`, `tensor` and `memory`
are the hardware, `device` runs a `launch.Kernel`, `attention` has the cases.

What it does not see: races between the lanes of a warp, and in global memory; a missing `wgmma.fence`, or registers
that are written while a wgmma reads them (ptxas sees those); a proxy fence that only some lanes execute; a store of
what was there already; what a tensor map may not be (the driver checks that). An instruction that our kernels do not
use is an error.
"""
