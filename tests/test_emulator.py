"""The emulator finds what it is for, agrees with the probes, and runs the tensor-core kernels against the reference."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kdtree.emulator.machine import Machine
from kdtree.emulator.memory import BadAccess, Global, Race
from kdtree.emulator.program import Unsupported, parse
from kdtree.emulator.warp import Deadlock
from kdtree.kernels import crosscompile

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry k(
	.param .u64 k_param_0
)
.maxntid 64, 1, 1
{
	.reg .pred %p<4>;
	.reg .f32 %f<70>;
	.reg .b32 %r<12>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [k_param_0];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, memory;
	shl.b32 %r3, %r1, 2;
	add.s32 %r4, %r2, %r3;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
"""


def emulate(body: str, *, size: int = 64, shared: int = 2048, seeds: int = 8, cluster: int = 1) -> np.ndarray:
    """A cluster of blocks of 64 threads on `body`; what is in the buffer of `size` int32 behind the parameter."""
    program = parse(HEAD + body + "\n\tret;\n}\n", "k")
    for seed in range(seeds):
        memory = Global()
        out = np.full(size, -1, np.int32)
        machine = Machine(program, threads=64, dynamic_shared=shared, memory=memory, seed=seed, cluster=cluster)
        machine.launch((cluster,), [memory.add(out)])
    return out


# ---- control and arithmetic


def test_lanes_part_and_meet_again():
    found = emulate("""
	and.b32 %r5, %r1, 1;
	setp.eq.s32 %p1, %r5, 0;
	mov.u32 %r6, 0;
	@%p1 bra $L__even;
	mul.lo.s32 %r6, %r1, 10;
	bra $L__join;
$L__even:
	shl.b32 %r6, %r1, 1;
$L__join:
	shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;
	st.global.u32 [%rd3], %r7;""")
    lane = np.arange(64)
    assert found.tolist() == [2 * (t - 1) if t % 2 else 10 * (t + 1) for t in lane]


def test_integers_wrap_and_shifts_clamp():
    found = emulate("""
	mov.u32 %r5, 2147483647;
	add.s32 %r5, %r5, %r1;
	shr.s32 %r6, %r5, 40;
	shl.b32 %r7, %r1, 32;
	or.b32 %r6, %r6, %r7;
	st.global.u32 [%rd3], %r6;""")
    assert found.tolist() == [0] + [-1] * 63


def test_an_unknown_instruction_is_an_error_with_its_line():
    with pytest.raises(Unsupported, match=r"line 2\d: prmt.b32"):
        emulate("	prmt.b32 %r5, %r1, %r1, 0;")


# ---- faults


def test_an_address_outside_of_a_buffer_is_found():
    with pytest.raises(BadAccess, match="no buffer holds 4 bytes"):
        emulate("	st.global.u32 [%rd3+256], %r1;")
    with pytest.raises(BadAccess, match="outside the block's"):
        emulate("	st.shared.u32 [%r4+2048], %r1;")


STORE = "	st.shared.u32 [%r4], %r1;\n"
LOAD_OTHER = """
	xor.b32 %r5, %r1, 32;
	shl.b32 %r5, %r5, 2;
	add.s32 %r5, %r2, %r5;
	ld.shared.u32 %r6, [%r5];
	st.global.u32 [%rd3], %r6;"""


def test_a_read_of_what_another_warp_writes_needs_a_barrier():
    with pytest.raises(Race, match="reads shared byte .* wrote: nothing orders them|writes shared byte .* reads"):
        emulate(STORE + LOAD_OTHER)
    assert emulate(STORE + "	bar.sync 0;\n" + LOAD_OTHER).tolist() == [t ^ 32 for t in range(64)]


def test_a_write_over_what_another_warp_reads_needs_one_too():
    again = "\n	st.shared.u32 [%r4], %r3;\n"
    with pytest.raises(Race, match="writes shared byte .* reads"):
        emulate(STORE + "	bar.sync 0;\n" + LOAD_OTHER + again)
    emulate(STORE + "	bar.sync 0;\n" + LOAD_OTHER + "\n	bar.sync 0;\n" + again)


def test_a_barrier_that_one_warp_does_not_reach_is_a_deadlock():
    with pytest.raises(Deadlock, match="barrier 0"):
        emulate("""
	setp.ge.s32 %p1, %r1, 32;
	@%p1 bra $L__end;
	bar.sync 0;
$L__end:""")


MBARRIER = """
	add.s32 %r8, %r2, 1024;
	setp.ne.s32 %p1, %r1, 0;
	@%p1 bra $L__ready;
	mbarrier.init.shared::cta.b64 [%r8], 1;
$L__ready:
	bar.sync 0;
	setp.ge.s32 %p2, %r1, 32;
	@%p2 bra $L__wait;
"""
ARRIVE = """
	@%p1 bra $L__wait;
	mbarrier.arrive.shared::cta.b64 _, [%r8];
"""
WAIT = """
$L__wait:
	mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r8], 0;
	@%p3 bra $L__through;
	bra $L__wait;
$L__through:
"""


def test_an_mbarrier_orders_what_was_stored_before_it():
    store = "	st.shared.u32 [%r4], %r1;\n	bar.warp.sync -1;\n"
    load = "\n	ld.shared.u32 %r6, [%r2+4];\n	st.global.u32 [%rd3], %r6;"
    assert emulate(MBARRIER + store + ARRIVE + WAIT + load).tolist() == [1] * 64


def test_an_mbarrier_that_nobody_arrives_at_is_a_deadlock():
    with pytest.raises(Deadlock, match="mbarrier"):
        emulate(MBARRIER + WAIT)


def test_an_arrival_too_many_is_found():
    with pytest.raises(RuntimeError, match="not yet|more arrivals"):
        emulate("	mbarrier.arrive.shared::cta.b64 _, [%r4];")


def test_a_store_over_an_mbarrier_is_found():
    with pytest.raises(BadAccess, match="writes over an mbarrier"):
        emulate("""
	add.s32 %r8, %r2, 0;
	setp.ne.s32 %p1, %r1, 0;
	@%p1 bra $L__end;
	mbarrier.init.shared::cta.b64 [%r8], 1;
	st.shared.u32 [%r8], %r1;
$L__end:""")


MEET = "	barrier.cluster.arrive.release.aligned;\n	barrier.cluster.wait.acquire.aligned;\n"
OTHERS = """
	mov.u32 %r5, %cluster_ctarank;
	xor.b32 %r5, %r5, 1;
	mapa.shared::cluster.u32 %r6, %r4, %r5;
	ld.shared::cluster.u32 %r7, [%r6];
	st.global.u32 [%rd3], %r7;
"""


def test_blocks_of_a_cluster_read_each_other_between_two_barriers():
    assert emulate(STORE + MEET + OTHERS + MEET, cluster=2).tolist() == list(range(64))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (STORE + OTHERS + MEET, "without knowing that it has begun"),
        (STORE + MEET + OTHERS, "which has ended|ends, and nothing orders that"),
        (STORE + MEET + OTHERS.replace("ld.shared::cluster", "ld.shared") + MEET, "an address of the cluster's window"),
        ("	barrier.cluster.wait.acquire.aligned;\n", "at which it has not arrived"),
        ("	barrier.cluster.arrive.release.aligned;\n" * 2, "without a wait in between"),
    ],
)
def test_what_clusters_must_not_do_is_found(body, reason):
    with pytest.raises(RuntimeError, match=reason):
        emulate(body, cluster=2, seeds=1)


SEND = """
	add.s32 %r8, %r2, 1024;
	setp.ne.s32 %p1, %r1, 0;
	@%p1 bra $L__ready;
	mbarrier.init.shared::cta.b64 [%r8], 1;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 256;
$L__ready:
	st.shared.u32 [%r4], %r1;
	fence.proxy.async.shared::cta;
	bar.sync 0;
	barrier.cluster.arrive.relaxed.aligned;
	barrier.cluster.wait.acquire.aligned;
	@%p1 bra $L__wait;
	mov.u32 %r5, %cluster_ctarank;
	xor.b32 %r5, %r5, 1;
	add.s32 %r6, %r2, 512;
	mapa.shared::cluster.u32 %r6, %r6, %r5;
	mapa.shared::cluster.u32 %r9, %r8, %r5;
	cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6], [%r2], 256, [%r9];
"""
RECEIVED = "	ld.shared.u32 %r6, [%r4+512];\n	st.global.u32 [%rd3], %r6;\n"


def test_a_block_sends_shared_memory_to_another():
    assert emulate(SEND + WAIT + RECEIVED + MEET, cluster=2).tolist() == list(range(64))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (SEND.replace("fence.proxy.async.shared::cta;", "") + WAIT + MEET, "no fence between the proxies"),
        (SEND + WAIT, "ended while a copy of its memory is under way"),
        (SEND + "	st.shared.u32 [%r4], %r8;\n" + WAIT + MEET, "written before it has gone"),
        (SEND + "$L__wait:\n" + RECEIVED + MEET, "reads shared byte .* wrote: nothing orders them"),
        (SEND.replace("[%r9];", "[%r8];") + WAIT + MEET, "that ends at an mbarrier of"),
    ],
)
def test_what_must_not_happen_to_what_is_sent_is_found(body, reason):
    with pytest.raises(RuntimeError, match=reason):
        emulate(body, cluster=2)


RELAXED = MEET.replace("release", "relaxed")


def test_a_relaxed_arrival_makes_known_what_came_before_a_fence():
    with pytest.raises(Race, match="nothing orders them"):
        emulate(STORE + RELAXED + OTHERS + MEET, cluster=2)
    emulate(STORE + "	fence.proxy.async.shared::cta;\n" + RELAXED + OTHERS + MEET, cluster=2)


def test_more_than_hopper_has_is_refused():
    with pytest.raises(RuntimeError, match="307200 bytes of shared memory a block"):
        emulate("", shared=300 * 1024)


ONE_WARPGROUP = HEAD.replace(".maxntid 64", ".maxntid 128")
PRODUCT = """
	st.shared.u32 [%r4], %r1;
	FENCE
	bar.sync 0;
	cvt.u64.u32 %rd4, %r2;
	shr.u64 %rd4, %rd4, 4;
	or.b64 %rd5, %rd4, 4611686293305294848;
	setp.ne.s32 %p1, 0, 0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd5, %rd5, %p1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	WAIT
	st.global.f32 [%rd3], %f0;
	wgmma.wait_group.sync.aligned 0;
	ret;
}
"""


def product(fence: str, wait: str) -> np.ndarray:
    text = ONE_WARPGROUP + PRODUCT.replace("FENCE", fence).replace("WAIT", wait)
    memory, out = Global(), np.full(128, -1, np.float32)
    machine = Machine(parse(text, "k"), threads=128, dynamic_shared=8192, memory=memory)
    machine.launch((1,), [memory.add(out)])
    return out


def test_wgmma_needs_a_fence_between_the_proxies():
    fence, wait = "fence.proxy.async.shared::cta;", "wgmma.wait_group.sync.aligned 0;"
    with pytest.raises(Race, match="no fence between the proxies"):
        product("", wait)
    assert np.isfinite(product(fence, wait)[:32]).all()


def test_accumulators_are_not_there_before_they_are_waited_for():
    assert np.isnan(product("fence.proxy.async.shared::cta;", "")).any()


# ---- our kernels


def run(*args: str) -> str:
    """Output of the emulator's command, which compiles and so needs a process without the simulator."""
    done = subprocess.run([sys.executable, "-m", "kdtree.emulator", *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_instruction_does_what_its_probe_says():
    lines = run("--probes").splitlines()
    assert len(lines) > 60 and all(line.startswith("ok ") for line in lines)


@pytest.mark.timeout(1200)  # where the kernels have not been compiled yet
@pytest.mark.parametrize("impl", ["mma", "cluster", "wgmma"])
def test_a_kernel_on_tensor_cores_is_right_and_free_of_races(impl):
    crosscompile.collect()  # leaves the PTX where the emulator finds it
    lines = run("--impl", impl).splitlines()
    assert len(lines) >= 2 and all(line.startswith(f"ok  {impl}") for line in lines)
