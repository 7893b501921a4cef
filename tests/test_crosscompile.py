"""Every shipped kernel compiles for every target without a spill and within the shared memory it states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtree.kernels import OPS, all_variants, crosscompile
from kdtree.kernels.crosscompile import HARDWARE_SHARED, TARGETS, Resources, parse_ptxas, parse_sass
from kdtree.kernels.launch import Kernel, Variant
from kdtree.kernels.toolchain import COMPILING, tool

# The fixture compiles everything once, on two cores: some minutes.
pytestmark = pytest.mark.timeout(1200)

DTYPES = ("bfloat16", "float16")
PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6kernelE' for 'sm_90a'
ptxas info    : Function properties for _ZN6kernelE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 3120 bytes smem, 4 bytes cmem[2]
ptxas info    : Compile time = 12.3 ms
"""
SPILLING_LOG = """\
    224 bytes stack frame, 220 bytes spill stores, 448 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 224 bytes cumulative stack size
"""
SASS = """\
\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_ACCELERATORS EF_CUDA_SM90"
.text._ZN6kernelE:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/              @!P0 LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0030*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0040*/                   LDG.E R4, desc[UR4][R4.64] ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0080*/                @P2 EXIT ;
        /*0090*/                   NOP;
        /*00a0*/                   NOP;
.L_x_1:
"""


def resources(**changes) -> Resources:
    fields = {
        "op": "topk",
        "kernel": "topk.simt[float32]",
        "target": "sm_90a",
        "threads": 512,
        "registers": 40,
        "shared_bytes": 3120,
        "shared_limit": 16384,
        "stack_bytes": 0,
        "spill_bytes": 0,
        "instructions": 100,
        "tensor_core": 0,
        "global_loads": 4,
        "barriers": 5,
    }
    return Resources(**(fields | changes))


# ---- reading what the tools print ----


def test_numbers_of_ptxas_are_read():
    assert parse_ptxas(PTXAS_LOG) == {"registers": 40, "shared_bytes": 3120, "stack_bytes": 0, "spill_bytes": 0}


def test_stores_and_loads_of_a_spill_add_up():
    assert parse_ptxas(SPILLING_LOG) == {"registers": 255, "shared_bytes": 0, "stack_bytes": 224, "spill_bytes": 668}


def test_instructions_are_counted_by_what_they_tell():
    assert parse_sass(SASS) == {"instructions": 9, "tensor_core": 2, "global_loads": 2, "barriers": 1}


def test_nothing_gives_nothing():
    assert set(parse_ptxas("").values()) == {0}
    assert set(parse_sass("").values()) == {0}


def test_a_kernel_that_spills_is_reported():
    (problem,) = resources(**parse_ptxas(SPILLING_LOG)).problems()
    assert problem == "topk.simt[float32] on sm_90a spills 668 bytes a thread"


REMARKS = """\
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across \
compilation units.
ptxas info    : (C7509) Potential Performance Loss: wgmma.mma_async instructions are serialized due to the presence of \
Extern calls in the function '_ZN6kdtree1fE'
ptxas info    : Used 168 registers, used 5 barriers
"""


def test_performance_that_ptxas_says_is_lost_is_reported():
    said = crosscompile.parse_remarks(REMARKS)
    assert said == (
        "'setmaxnreg' ignored to maintain compatibility across compilation units; "
        "wgmma.mma_async instructions are serialized due to the presence of Extern calls"
    )
    assert resources(remarks=said).problems() == [f"topk.simt[float32] on sm_90a: {said}"]
    assert crosscompile.parse_remarks(PTXAS_LOG) == ""


def test_a_kernel_that_takes_more_shared_memory_than_it_states_is_reported():
    (problem,) = resources(shared_bytes=16385).problems()
    assert "topk.simt[float32] on sm_90a takes 16385 bytes of shared memory, states at most 16384" in problem


def test_both_problems_are_reported_and_neither_without_reason():
    assert len(resources(shared_bytes=16385, spill_bytes=4).problems()) == 2
    assert resources(shared_bytes=16384).problems() == []


@pytest.mark.parametrize(("target", "limit"), [("sm_89", 101376), ("sm_120", 101376), ("sm_80", 166912)])
def test_a_kernel_that_takes_more_shared_memory_than_a_block_can_have_is_reported(target, limit):
    assert resources(target=target, shared_bytes=limit, shared_limit=232448).problems() == []
    (problem,) = resources(target=target, shared_bytes=limit + 1, shared_limit=232448).problems()
    assert f"takes {limit + 1} bytes of shared memory, a block there has at most {limit}" in problem


def test_dynamic_shared_memory_counts(monkeypatch):
    outputs = {"ptxas": SimpleNamespace(returncode=0, stderr=PTXAS_LOG), "nvdisasm": SimpleNamespace(stdout=SASS)}
    monkeypatch.setattr(crosscompile, "tool", lambda name: name)
    monkeypatch.setattr(crosscompile.subprocess, "run", lambda command, **_: outputs[command[0]])
    kernel = Kernel(lambda: None, name="k", threads=384, dynamic_shared=200_000)
    row = crosscompile.resources(Variant("topk", kernel, (), "k", 232448), "sm_90a", Path("k.ptx"))
    assert (row.shared_bytes, row.shared_limit, row.registers) == (203_120, 232448, 40)


def test_a_kernel_is_compiled_for_the_targets_that_it_is_made_for(monkeypatch):
    kernels = {"any": None, "hopper": ("sm_90a",), "newer": ("sm_89",)}
    made = [Variant("topk", Kernel(print, name=n, threads=1, targets=t), (), n) for n, t in kernels.items()]
    monkeypatch.setattr("kdtree.kernels.all_variants", lambda: made)
    monkeypatch.setattr(crosscompile, "compile_ptx", lambda variant, targets, folder: targets)
    monkeypatch.setattr(crosscompile, "resources", lambda variant, target, ptx: (variant.label, target))
    found = list(crosscompile.run(list(TARGETS)))
    assert [t for n, t in found if n == "any"] == list(TARGETS)
    assert [t for n, t in found if n == "hopper"] == ["sm_90a"]
    assert [t for n, t in found if n == "newer"] == ["sm_89", "sm_90a", "sm_100", "sm_120"]
    shares = [list(crosscompile.run(list(TARGETS), share=(i, 2))) for i in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(found) and all(shares)


def test_a_missing_tool_is_named_with_what_to_install():
    with pytest.raises(FileNotFoundError, match="no-such-tool: neither in .* pip install nvidia-cuda-nvcc"):
        tool("no-such-tool")


def test_a_failing_compiler_process_raises_with_its_output():
    with pytest.raises(RuntimeError, match=r"cross-compilation of \[.*\] failed \(2\)(.|\n)*invalid choice: 'sm_1'"):
        crosscompile.collect(["sm_1"])


# ---- the kernels themselves ----


@pytest.fixture(scope="module")
def compiled() -> list[Resources]:
    return crosscompile.collect()


def test_the_targets_are_those_of_the_fleet():
    assert list(TARGETS) == ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]


def test_every_variant_appears_on_every_target_that_it_is_made_for(compiled):
    found: dict[str, list[str]] = {}
    for row in compiled:
        found.setdefault(row.kernel, []).append(row.target)
    assert {f"{v.op}.{v.label}" for v in all_variants()} <= set(found)  # the simulator knows no others than simt
    for kernel, targets in found.items():
        hopper = ".wgmma" in kernel or ".cluster" in kernel
        assert targets == (["sm_90a"] if hopper else list(TARGETS)), kernel


@pytest.mark.parametrize("target", TARGETS)
def test_every_op_compiles_for_the_target(compiled, target):
    assert {row.op for row in compiled if row.target == target} == set(OPS)


def test_no_performance_is_lost_by_what_ptxas_says(compiled):
    assert [(row.kernel, row.target, row.remarks) for row in compiled if row.remarks] == []


def test_nothing_spills(compiled):
    assert [(row.kernel, row.target, row.spill_bytes) for row in compiled if row.spill_bytes] == []


# ptxas 13.0 leaves the output accumulators of this kernel in local memory on Blackwell; 13.5 keeps them in
# registers. Neither spills. The tensor-core kernels will replace it there.
KNOWN_STACKS = {("verify_attn.simt[bfloat16->bfloat16]", "sm_100"), ("verify_attn.simt[bfloat16->bfloat16]", "sm_120")}


def test_nothing_else_needs_a_stack(compiled):
    assert {(row.kernel, row.target) for row in compiled if row.stack_bytes} <= KNOWN_STACKS


def test_shared_memory_stays_within_what_the_kernel_states(compiled):
    assert [(row.kernel, row.target, row.shared_bytes) for row in compiled if row.shared_bytes > row.shared_limit] == []
    assert [problem for row in compiled for problem in row.problems()] == []


def test_a_kernel_states_no_more_shared_memory_than_its_targets_have(compiled):
    assert set(HARDWARE_SHARED) == set(TARGETS)
    for row in compiled:
        assert row.shared_limit <= HARDWARE_SHARED[row.target], row


def test_the_registers_of_a_block_fit_the_register_file(compiled):
    for row in compiled:
        assert 0 < row.registers <= 255, row
        assert row.registers * row.threads <= 65_536, row


def test_every_kernel_reads_memory_and_does_something(compiled):
    for row in compiled:
        assert row.instructions > 20, row
        assert row.global_loads > 0, row


def test_tensor_cores_are_used_by_the_kernels_named_after_them(compiled):
    for row in compiled:
        named = any(f".{impl}" in row.kernel for impl in ("mma", "cluster", "wgmma"))
        assert (row.tensor_core > 0) == named, row


def test_a_float16_form_is_its_bfloat16_form_with_other_types():
    command = [sys.executable, "-m", "kdtree.kernels.crosscompile", "--twins", "combine_mma"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **COMPILING})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_families_follow_the_type_and_only_on_tensor_cores():
    def variant(label, shared):
        return Variant("op", Kernel(lambda: None, name=label, threads=32, dynamic_shared=shared), (), label)

    made = [variant(f"{kind}[{dtype}]", 64 * (kind == "mma")) for kind in ("simt", "mma") for dtype in DTYPES]
    found = [[one.label for one in family] for family in crosscompile.families(made)]
    assert found == [["simt[bfloat16]"], ["simt[float16]"], ["mma[bfloat16]", "mma[float16]"]]
