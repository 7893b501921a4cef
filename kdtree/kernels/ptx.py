"""PTX as typed Numba intrinsics: one function per instruction, named after it.

Each is LLVM inline assembly behind `numba.cuda.extending.intrinsic`. The semantics are those of the PTX ISA manual
(docs.nvidia.com/cuda/parallel-thread-execution); a docstring says what the instruction does, what its operands are
and which targets have it, and counts operands as the PTX does: ``$0`` is the result if there is one, arguments follow.
Operands: ``r`` an int32, ``l`` an int64, ``f`` a float32; Numba casts other numbers. Shared-memory addresses are
32-bit (``shared_base() + offset``), global ones 64-bit. Accumulators are ``cuda.local.array``s that are only ever
indexed by constants, so they live in registers. `ptx_probes` shows each instruction at work and tests it.

The simulator has no PTX: this module can be imported there, a kernel that uses it cannot run. `SPECS` lists what
there is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

import kdtree._cuda  # noqa: F401  (chooses GPU or simulator)

# isort: split
from numba.cuda.extending import intrinsic  # after the choice above

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_LLVM = {"r": I32, "l": I64, "f": F32}
_NUMBA = {"r": types.int32, "l": types.int64, "f": types.float32}

ALL = "sm_80"  # lowest target of an instruction that every shipped target has
HOPPER = "sm_90"  # and its successors
HOPPER_ONLY = "sm_90a"

SPECS: dict[str, tuple[str, str]] = {}  # name -> (lowest target, PTX)
INTRINSICS: dict[str, Any] = {}  # name -> what a kernel calls

_ARITY: list[Callable] = [  # `intrinsic` reads the number of operands off a function's signature
    lambda make: lambda ctx: make(),
    lambda make: lambda ctx, a: make(a),
    lambda make: lambda ctx, a, b: make(a, b),
    lambda make: lambda ctx, a, b, c: make(a, b, c),
    lambda make: lambda ctx, a, b, c, d: make(a, b, c, d),
    lambda make: lambda ctx, a, b, c, d, e: make(a, b, c, d, e),
    lambda make: lambda ctx, a, b, c, d, e, f: make(a, b, c, d, e, f),
    lambda make: lambda ctx, a, b, c, d, e, f, g: make(a, b, c, d, e, f, g),
    lambda make: lambda ctx, a, b, c, d, e, f, g, h: make(a, b, c, d, e, f, g, h),
]


def _call(builder: Any, function: Any, ptx: str, constraints: str, args: list, *, pure: bool) -> Any:
    """The instruction as LLVM inline assembly.

    What a warp or warpgroup executes together is marked convergent: LLVM may otherwise copy it into both branches of
    a neighbouring `if`, where only some of the threads arrive.
    """
    together = ".sync" in ptx or ptx.startswith(("bar.", "barrier."))
    asm = ir.InlineAsm(function, ptx, constraints, side_effect=not pure)
    return builder.call(asm, args, attrs=("convergent",) if together else ())


def _register(name: str, target: str, ptx: str, doc: str, typing: Callable, arity: int) -> Any:
    """`typing(*numba types)` -> (signature, codegen) as the intrinsic `name`."""
    function = _ARITY[arity](typing)
    function.__name__ = function.__qualname__ = name
    which = f"{target} only" if target.endswith("a") else f"{target} and later"
    function.__doc__ = f"{doc.rstrip()}\n\nPTX: ``{ptx}`` ({which})."
    SPECS[name] = (target, ptx)
    made = INTRINSICS[name] = intrinsic(function)
    made.__doc__ = function.__doc__
    return made


def _op(name: str, ptx: str, ins: str, out: str = "", *, doc: str, target: str = ALL, pure: bool = False) -> Any:
    """A scalar instruction. `ins` has a letter per operand, `out` one per result; a `pure` one touches no memory."""
    result = _LLVM[out] if len(out) == 1 else ir.LiteralStructType([_LLVM[c] for c in out]) if out else ir.VoidType()
    returns = _NUMBA[out] if len(out) == 1 else types.UniTuple(_NUMBA[out[0]], len(out)) if out else types.void
    constraints = ",".join(["=" + c for c in out] + list(ins) + ([] if pure else ["~{memory}"]))
    function = ir.FunctionType(result, [_LLVM[c] for c in ins])

    def typing(*given: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = _call(builder, function, ptx, constraints, args, pure=pure)
            if not out:
                return context.get_dummy_value()
            if len(out) == 1:
                return value
            parts = [builder.extract_value(value, i) for i in range(len(out))]
            return context.make_tuple(builder, sig.return_type, parts)

        return returns(*[_NUMBA[c] for c in ins]), codegen

    return _register(name, target, ptx, doc, typing, len(ins))


# ---- addresses ----


@intrinsic
def shared_base(typingctx):
    """Address of the block's dynamic shared memory, int32.

    A multiple of 1024 bytes, the length of a swizzle pattern, in a kernel without static shared memory; behind static
    memory it is where that ends, whatever alignment is asked for.
    """

    def codegen(context, builder, sig, args):
        name = "kdtree_dynamic_shared"
        found = builder.module.globals.get(name)
        if found is None:
            found = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
            found.linkage = "external"
            found.align = 1024
        return builder.ptrtoint(found, I32)

    return types.int32(), codegen


@intrinsic
def address(typingctx, pointer):
    """The address a pointer argument holds, int64."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(pointer), codegen


# ---- shuffles, votes, scalars ----

shfl_idx = _op("shfl_idx", "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "rr", "r", doc="Lane `$2`'s value of `$1`.")
shfl_up = _op(
    "shfl_up",
    "shfl.sync.up.b32 $0, $1, $2, 0, -1;",
    "rr",
    "r",
    doc="The value of the lane `$2` below; a lane without one keeps its own.",
)
shfl_bfly_f32 = _op(
    "shfl_bfly_f32", "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "fr", "f", doc="float32 of lane `own ^ $2`."
)
shfl_bfly_b32 = _op(
    "shfl_bfly_b32", "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "rr", "r", doc="32 bits of lane `own ^ $2`."
)
vote_all = _op(
    "vote_all",
    "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.all.pred q, p, -1; selp.b32 $0, 1, 0, q; }",
    "r",
    "r",
    doc="1 if `$1` is not 0 in every lane of the warp.",
)
vote_ballot = _op(
    "vote_ballot",
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }",
    "r",
    "r",
    doc="Bit i is set where lane i's `$1` is not 0.",
)
lane_id = _op(
    "lane_id",
    "mov.u32 $0, %laneid;",
    "",
    "r",
    doc="This lane's number, read where it stands: what is computed from it is not moved out of a loop, where it would "
    "hold a register that the loop needs.",
)
thread_id = _op(
    "thread_id", "mov.u32 $0, %tid.x;", "", "r", doc="This thread's number in its block, read as `lane_id` is."
)
elect_one = _op(
    "elect_one",
    "{ .reg .pred p; elect.sync _|p, -1; selp.b32 $0, 1, 0, p; }",
    "",
    "r",
    target=HOPPER,
    doc="1 in one lane of the warp. Behind this ptxas knows that one lane is active, and takes the operands of bulk "
    "copies from uniform registers without a loop over lanes.",
)
warp_sync = _op("warp_sync", "bar.warp.sync -1;", "", doc="Wait for the warp; orders its memory accesses.")
ex2_approx = _op(
    "ex2_approx", "ex2.approx.ftz.f32 $0, $1;", "f", "f", pure=True, doc="2 to the power `$1`; 2**-inf is 0."
)
lg2_approx = _op("lg2_approx", "lg2.approx.ftz.f32 $0, $1;", "f", "f", pure=True, doc="Base-2 logarithm of `$1`.")
rcp_approx = _op("rcp_approx", "rcp.approx.ftz.f32 $0, $1;", "f", "f", pure=True, doc="1 / `$1`, within 1 ulp.")
max_f32 = _op("max_f32", "max.f32 $0, $1, $2;", "ff", "f", pure=True, doc="The larger; of NaN and a number the number.")
cvt_bf16x2 = _op(
    "cvt_bf16x2", "cvt.rn.bf16x2.f32 $0, $2, $1;", "ff", "r", pure=True, doc="Two bfloat16, `$1` in the low half."
)
cvt_f16x2 = _op(
    "cvt_f16x2", "cvt.rn.f16x2.f32 $0, $2, $1;", "ff", "r", pure=True, doc="Two float16, `$1` in the low half."
)
div_u32 = _op(
    "div_u32",
    "div.u32 $0, $1, $2;",
    "rr",
    "r",
    pure=True,
    doc="`$1` / `$2` rounded down, both as unsigned. Python's ``//`` on int32 is a signed 64-bit division in Numba.",
)
b32_f32 = _op("b32_f32", "mov.b32 $0, $1;", "r", "f", pure=True, doc="The float32 whose bits `$1` holds.")
f16x2_f32 = _op(
    "f16x2_f32",
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
    "r",
    "ff",
    pure=True,
    doc="The two float16 in `$2` as float32, the low half first.",
)

# ---- global and shared memory ----

ld_global_b32 = _op("ld_global_b32", "ld.global.b32 $0, [$1];", "l", "r", doc="Load 4 bytes.")
ld_global_v2_b32 = _op("ld_global_v2_b32", "ld.global.v2.b32 {$0, $1}, [$2];", "l", "rr", doc="Load 8 bytes.")
ld_global_v4_b32 = _op(
    "ld_global_v4_b32", "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "l", "rrrr", doc="Load 16 bytes."
)
ld_relaxed_f32 = _op(
    "ld_relaxed_f32", "ld.relaxed.gpu.global.f32 $0, [$1];", "l", "f", doc="Load what another block may have written."
)
ld_relaxed_v4_f32 = _op(
    "ld_relaxed_v4_f32",
    "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];",
    "l",
    "ffff",
    doc="Load 16 bytes that another block may have written: past the L1 cache, which is not coherent.",
)
st_global_b32 = _op("st_global_b32", "st.global.b32 [$0], $1;", "lr", doc="Store 4 bytes.")
st_global_v2_b32 = _op("st_global_v2_b32", "st.global.v2.b32 [$0], {$1, $2};", "lrr", doc="Store 8 bytes.")
st_global_v4_b32 = _op("st_global_v4_b32", "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "lrrrr", doc="Store 16 bytes.")
st_global_v2_f32 = _op("st_global_v2_f32", "st.global.v2.f32 [$0], {$1, $2};", "lff", doc="Store 8 bytes.")
st_global_v4_f32 = _op("st_global_v4_f32", "st.global.v4.f32 [$0], {$1, $2, $3, $4};", "lffff", doc="Store 16 bytes.")
st_global_f32 = _op("st_global_f32", "st.global.f32 [$0], $1;", "lf", doc="Store 4 bytes.")
ld_shared_b32 = _op("ld_shared_b32", "ld.shared.b32 $0, [$1];", "r", "r", doc="Load 4 bytes.")
ld_shared_v2_b32 = _op("ld_shared_v2_b32", "ld.shared.v2.b32 {$0, $1}, [$2];", "r", "rr", doc="Load 8 bytes.")
ld_shared_f32 = _op("ld_shared_f32", "ld.shared.f32 $0, [$1];", "r", "f", doc="Load 4 bytes.")
ld_shared_v2_f32 = _op("ld_shared_v2_f32", "ld.shared.v2.f32 {$0, $1}, [$2];", "r", "ff", doc="Load 8 bytes.")
ld_shared_v4_f32 = _op(
    "ld_shared_v4_f32", "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "r", "ffff", doc="Load 16 bytes."
)
ld_shared_v4_b32 = _op(
    "ld_shared_v4_b32", "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "r", "rrrr", doc="Load 16 bytes."
)
st_shared_b32 = _op("st_shared_b32", "st.shared.b32 [$0], $1;", "rr", doc="Store 4 bytes.")
st_shared_f32 = _op("st_shared_f32", "st.shared.f32 [$0], $1;", "rf", doc="Store 4 bytes.")
st_shared_v2_f32 = _op("st_shared_v2_f32", "st.shared.v2.f32 [$0], {$1, $2};", "rff", doc="Store 8 bytes.")
st_shared_v4_f32 = _op("st_shared_v4_f32", "st.shared.v4.f32 [$0], {$1, $2, $3, $4};", "rffff", doc="Store 16 bytes.")
st_shared_v4_b32 = _op("st_shared_v4_b32", "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "rrrrr", doc="Store 16 bytes.")

# ---- clusters: the shared memory of neighbouring blocks (sm_90) ----

cluster_rank = _op(
    "cluster_rank", "mov.u32 $0, %cluster_ctarank;", "", "r", target=HOPPER, doc="This block's number in its cluster."
)
map_shared = _op(
    "map_shared",
    "mapa.shared::cluster.u32 $0, $1, $2;",
    "rr",
    "r",
    target=HOPPER,
    pure=True,
    doc="Shared-memory address `$1` in block `$2` of the cluster, for `ld_cluster_…` and `st_cluster_…`. That block "
    "must have begun, and must not end before the access is over.",
)
ld_cluster_v4_b32 = _op(
    "ld_cluster_v4_b32",
    "ld.shared::cluster.v4.b32 {$0, $1, $2, $3}, [$4];",
    "r",
    "rrrr",
    target=HOPPER,
    doc="Load 16 bytes from a block of the cluster.",
)
st_cluster_v2_f32 = _op(
    "st_cluster_v2_f32",
    "st.shared::cluster.v2.f32 [$0], {$1, $2};",
    "rff",
    target=HOPPER,
    doc="Store 8 bytes to a block of the cluster.",
)
cp_async_bulk_cluster = _op(
    "cp_async_bulk_cluster",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    "rrrr",
    target=HOPPER,
    doc="Copy `$2` bytes (a multiple of 16, as both addresses are) from this block's shared `$1` to `$0` in a block of "
    "the cluster; mbarrier `$3` of that block counts them. `map_shared` gives `$0` and `$3`. This block must not end "
    "before they are there.",
)
cluster_arrive = _op(
    "cluster_arrive",
    "barrier.cluster.arrive.release.aligned;",
    "",
    target=HOPPER,
    doc="Arrive at the cluster's barrier: what this thread wrote is seen by who waits. All threads of all blocks do.",
)
cluster_arrive_relaxed = _op(
    "cluster_arrive_relaxed",
    "barrier.cluster.arrive.relaxed.aligned;",
    "",
    target=HOPPER,
    doc="Arrive as `cluster_arrive` does, which takes as long as a fence for the whole GPU, but only with what came "
    "before this thread's last fence: to say how far it is, not to hand data on.",
)
cluster_wait = _op(
    "cluster_wait",
    "barrier.cluster.wait.acquire.aligned;",
    "",
    target=HOPPER,
    doc="Wait until all threads of all blocks of the cluster have arrived. Each arrival has its wait.",
)

# ---- barriers between warps and blocks ----

bar_sync = _op("bar_sync", "bar.sync $0, $1;", "rr", doc="Wait at named barrier `$0` until `$1` threads are there.")
bar_arrive = _op("bar_arrive", "bar.arrive $0, $1;", "rr", doc="Count for named barrier `$0` of `$1` threads; no wait.")
fence_gpu = _op("fence_gpu", "fence.acq_rel.gpu;", "", doc="Order this thread's memory accesses for the whole GPU.")
atom_add_acq_rel = _op(
    "atom_add_acq_rel",
    "atom.add.acq_rel.gpu.global.s32 $0, [$1], $2;",
    "lr",
    "r",
    doc="Add `$2` to a counter in global memory and return what it held. Who sees the sum sees this thread's earlier "
    "writes, and this thread sees those of everyone counted before.",
)
ld_acquire = _op(
    "ld_acquire",
    "ld.acquire.gpu.global.s32 $0, [$1];",
    "l",
    "r",
    doc="Read a counter; later reads see what was written before it was counted up.",
)
nanosleep = _op("nanosleep", "nanosleep.u32 $0;", "r", doc="Pause for about `$0` nanoseconds, at most twice that.")


@cache
def setmaxnreg_op(direction: str, registers: int) -> Any:
    """``setmaxnreg.inc`` or ``.dec`` to `registers` (24 to 256 in steps of 8) a thread of this warpgroup.

    All warps of a warpgroup execute it, right at the start of the warpgroup's branch. A block starts with what its
    launch bounds allow (384 threads, one block a multiprocessor: 168 a thread) and ``inc`` waits until other warpgroups
    gave enough back. ptxas ignores it (C7508) in a kernel without launch bounds.
    """
    return _op(
        f"setmaxnreg_{direction}_{registers}",
        f"setmaxnreg.{direction}.sync.aligned.u32 {registers};",
        "",
        target=HOPPER_ONLY,
        doc=f"{direction} to {registers} registers a thread, for all four warps of a warpgroup.",
    )


# ---- cp.async: copies by threads (sm_80) ----

cp_async_16 = _op(
    "cp_async_16",
    "cp.async.cg.shared.global [$0], [$1], 16;",
    "rl",
    doc="Copy 16 bytes global -> shared past L1, asynchronously.",
)
cp_async_16_or_zero = _op(
    "cp_async_16_or_zero",
    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
    "rlr",
    doc="The same; only the first `$2` bytes (16 or 0) are read, the rest become 0.",
)
cp_async_commit = _op("cp_async_commit", "cp.async.commit_group;", "", doc="Close a group of this thread's copies.")
cp_async_wait_0 = _op("cp_async_wait_0", "cp.async.wait_group 0;", "", doc="Wait for all of this thread's groups.")
cp_async_wait_1 = _op("cp_async_wait_1", "cp.async.wait_group 1;", "", doc="Wait for all but the last group.")
cp_async_wait_2 = _op("cp_async_wait_2", "cp.async.wait_group 2;", "", doc="Wait for all but the last two groups.")

# ---- mbarriers (shared memory, 8 bytes each) ----

mbarrier_init = _op(
    "mbarrier_init",
    "mbarrier.init.shared::cta.b64 [$0], $1;",
    "rr",
    target=HOPPER,  # sm_80 has it, but not the ways to wait that follow
    doc="A phase of mbarrier `$0` ends after `$1` arrivals.",
)
mbarrier_arrive = _op(
    "mbarrier_arrive", "mbarrier.arrive.shared::cta.b64 _, [$0];", "r", target=HOPPER, doc="Arrive; release this CTA."
)
mbarrier_expect_tx = _op(
    "mbarrier_expect_tx",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    "rr",
    target=HOPPER,
    doc="Arrive, and let the phase also wait for `$1` bytes of asynchronous copies.",
)
mbarrier_try_wait = _op(
    "mbarrier_try_wait",
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }",
    "rr",
    "r",
    target=HOPPER,
    doc="1 if the phase of parity `$2` has ended, 0 after a while if not.",
)
fence_mbarrier_init = _op(
    "fence_mbarrier_init",
    "fence.mbarrier_init.release.cluster;",
    "",
    target=HOPPER,
    doc="Make initialised mbarriers visible to the copy engine.",
)
fence_proxy_async = _op(
    "fence_proxy_async",
    "fence.proxy.async.shared::cta;",
    "",
    target=HOPPER,
    doc="Order ordinary accesses to shared memory before those of the copy engine and of wgmma.",
)

# ---- TMA: bulk tensor copies (sm_90) ----

cp_async_bulk_tensor_3d = _op(
    "cp_async_bulk_tensor_3d",
    "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4}], [$5];",
    "rlrrrr",
    target=HOPPER,
    doc="Copy the box at coordinates `$2, $3, $4` (innermost first) of tensor map `$1` to shared `$0`; mbarrier `$5` "
    "counts its bytes. Coordinates outside the tensor give zeros.",
)
cp_async_bulk_tensor_4d = _op(
    "cp_async_bulk_tensor_4d",
    "cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5}], [$6];",
    "rlrrrrr",
    target=HOPPER,
    doc="The same for a tensor of four dimensions. Columns 64·c … as a dimension of their own (stride 128 bytes) let "
    "one copy bring several chunks of 64 columns, one after the other in shared memory.",
)
cp_async_bulk_tensor_store_4d = _op(
    "cp_async_bulk_tensor_store_4d",
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [$0, {$1, $2, $3, $4}], [$5];",
    "lrrrrr",
    target=HOPPER,
    doc="Copy shared `$5` to the box at coordinates `$1, $2, $3, $4` of tensor map `$0`; nothing is written outside.",
)
cp_async_bulk_commit = _op(
    "cp_async_bulk_commit", "cp.async.bulk.commit_group;", "", target=HOPPER, doc="Close a group of bulk stores."
)
cp_async_bulk_wait_read_0 = _op(
    "cp_async_bulk_wait_read_0",
    "cp.async.bulk.wait_group.read 0;",
    "",
    target=HOPPER,
    doc="Wait until all of this thread's bulk stores have read their shared memory.",
)
cp_async_bulk_prefetch_tensor_4d = _op(
    "cp_async_bulk_prefetch_tensor_4d",
    "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$0, {$1, $2, $3, $4}];",
    "lrrrr",
    target=HOPPER,
    doc="Bring the box at coordinates `$1, $2, $3, $4` of tensor map `$0` into the L2 cache.",
)
prefetch_tensormap = _op(
    "prefetch_tensormap", "prefetch.tensormap [$0];", "l", target=HOPPER, doc="Fetch tensor map `$0` ahead of its use."
)


@cache
def tensor_map_address(index: int) -> Any:
    """Intrinsic: generic address of kernel parameter `index`, a 128-byte CUtensorMap passed by value.

    Numba has no such parameter type. The kernel declares an int64 that it never reads, and `launch.assemble` turns
    its declaration in the PTX into 128 bytes aligned to 64; the name in this assembly is replaced there too.
    """
    return _op(
        f"tensor_map_address_{index}",
        "{ .reg .b64 a; mov.b64 a, kdtree_parameter_" + str(index) + "; cvta.param.u64 $0, a; }",
        "",
        "l",
        target=HOPPER,
        pure=True,
        doc=f"Address of parameter {index}.",
    )


# ---- mma.sync with ldmatrix (sm_80) ----

ldmatrix_x4 = _op(
    "ldmatrix_x4",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
    "r",
    "rrrr",
    doc="Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.",
)
ldmatrix_x4_trans = _op(
    "ldmatrix_x4_trans",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
    "r",
    "rrrr",
    doc="The same, each matrix transposed.",
)
stmatrix_x4 = _op(
    "stmatrix_x4",
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "rrrrr",
    target=HOPPER,
    doc="Store four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.",
)


@cache
def mma_m16n8k16(dtype: str) -> Any:
    """``mma.sync.m16n8k16``: ``acc[at:at+4] += A (16x16, row major) · B (16x8, column major)``, f32 accumulators.

    The intrinsic takes (acc float32 local array, at, a0, a1, a2, a3, b0, b1) with `at` an integer constant, fragments
    as `ldmatrix` gives them. dtype: "bfloat16" or "float16".
    """
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    name = f"mma_m16n8k16_{short}"
    ptx = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    result = ir.LiteralStructType([F32] * 4)
    function = ir.FunctionType(result, [I32] * 6 + [F32] * 4)
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"

    def typing(acc: Any, at: Any, *fragments: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
            places = [builder.gep(data, [builder.add(args[1], ir.Constant(I32, i))]) for i in range(4)]
            values = list(args[2:]) + [builder.load(p) for p in places]
            done = _call(builder, function, ptx, constraints, values, pure=True)
            for i, place in enumerate(places):
                builder.store(builder.extract_value(done, i), place)
            return context.get_dummy_value()

        return types.void(acc, types.int32, *[types.int32] * 6), codegen

    return _register(name, ALL, ptx, mma_m16n8k16.__doc__, typing, 8)


# ---- wgmma (sm_90a) ----

wgmma_fence = _op(
    "wgmma_fence",
    "wgmma.fence.sync.aligned;",
    "",
    target=HOPPER_ONLY,
    doc="Order the warpgroup's registers and shared memory before its next wgmma.",
)
wgmma_commit = _op(
    "wgmma_commit", "wgmma.commit_group.sync.aligned;", "", target=HOPPER_ONLY, doc="Close a group of wgmma."
)
wgmma_wait_0 = _op(
    "wgmma_wait_0", "wgmma.wait_group.sync.aligned 0;", "", target=HOPPER_ONLY, doc="Wait for all groups."
)
wgmma_wait_1 = _op(
    "wgmma_wait_1", "wgmma.wait_group.sync.aligned 1;", "", target=HOPPER_ONLY, doc="Wait for all but the last group."
)


def _wgmma(name: str, ptx: str, n: int, a_registers: bool, doc: str | None) -> Any:
    """An accumulator array of n / 2 float32, then (a0…a3 or descriptor A), descriptor B, scale-d."""
    count = n // 2
    ins = [I32] * 4 + [I64, I32] if a_registers else [I64, I64, I32]
    takes = [types.int32] * 4 + [types.int64, types.int32] if a_registers else [types.int64, types.int64, types.int32]
    letters = ["r"] * 4 + ["l", "r"] if a_registers else ["l", "l", "r"]
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)] + letters)
    function = ir.FunctionType(ir.LiteralStructType([F32] * count), [F32] * count + ins)

    def typing(acc: Any, *given: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            data = context.make_array(sig.args[0])(context, builder, value=args[0]).data
            places = [builder.gep(data, [ir.Constant(I32, i)]) for i in range(count)]
            values = [builder.load(p) for p in places] + list(args[1:])
            done = _call(builder, function, ptx, constraints, values, pure=False)
            for i, place in enumerate(places):
                builder.store(builder.extract_value(done, i), place)
            return context.get_dummy_value()

        return types.void(acc, *takes), codegen

    instruction = ptx[ptx.index("wgmma.") : ptx.index(" {$0")]  # without its accumulators, of which there are many
    return _register(name, HOPPER_ONLY, instruction, doc or "", typing, len(takes) + 1)


@cache
def wgmma_ss(n: int, dtype: str, *, transposed_b: bool = False) -> Any:
    """``wgmma.mma_async.m64n<n>k16`` with A and B in shared memory: intrinsic (acc f32[n/2], A, B, scale_d).

    A and B are matrix descriptors (`wgmma_descriptor`); `scale_d` 0 overwrites the accumulators, 1 adds. B is K-major,
    or MN-major with `transposed_b`. dtype: "bfloat16" or "float16".
    """
    short, at = {"bfloat16": "bf16", "float16": "f16"}[dtype], n // 2
    registers = ", ".join(f"${i}" for i in range(at))
    base = 2 * at
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${base + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{short}.{short} "
        f"{{{registers}}}, ${base}, ${base + 1}, p, 1, 1, 0, {int(transposed_b)}; }}"
    )
    name = f"wgmma_m64n{n}k16_ss_{short}" + ("_bt" if transposed_b else "")
    return _wgmma(name, ptx, n, False, wgmma_ss.__doc__)


@cache
def wgmma_rs(n: int, dtype: str, *, transposed_b: bool = False) -> Any:
    """``wgmma.mma_async.m64n<n>k16`` with A in registers: intrinsic (acc f32[n/2], a0, a1, a2, a3, B, scale_d).

    A's fragment is that of `ldmatrix_x4` on the warp's own 16 rows. It must not change while the wgmma is in flight.
    """
    short, at = {"bfloat16": "bf16", "float16": "f16"}[dtype], n // 2
    registers = ", ".join(f"${i}" for i in range(at))
    base = 2 * at
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${base + 5}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{short}.{short} "
        f"{{{registers}}}, {{${base}, ${base + 1}, ${base + 2}, ${base + 3}}}, ${base + 4}, p, 1, 1, "
        f"{int(transposed_b)}; }}"
    )
    name = f"wgmma_m64n{n}k16_rs_{short}" + ("_bt" if transposed_b else "")
    return _wgmma(name, ptx, n, True, wgmma_rs.__doc__)
