"""Every PTX intrinsic is documented, compiles for each target that has it and does what its probe says."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from kdtree.kernels import assemble, hopper, launch, ptx, ptx_compile
from kdtree.kernels.crosscompile import TARGETS
from kdtree.kernels.ptx_probes import Probe, all_probes
from kdtree.kernels.ptx_probes_tensor import swizzled

PROBES = all_probes()

# The fixture compiles all probes once: about 20 s of one core.
pytestmark = pytest.mark.timeout(600)


# ---- without a GPU ----


@pytest.fixture(scope="module")
def compiled() -> list[ptx_compile.Compiled]:
    return ptx_compile.collect()


def test_every_instruction_has_a_probe():
    """The compiling process checks also those that other kernels ask a factory for."""
    assert [name for name in ptx.SPECS if hasattr(ptx, name) and name not in PROBES] == []
    assert [name for name in PROBES if name not in ptx.SPECS] == ["shared_base", "address"]


@pytest.mark.parametrize("name", [name for name in PROBES if name in ptx.SPECS])
def test_an_instruction_says_what_it_does_and_what_ptx_it_is(name):
    target, text = ptx.SPECS[name]
    meaning, _, rest = ptx.INTRINSICS[name].__doc__.partition("\n\nPTX: ")
    assert len(meaning) > 10
    assert text in rest and target in rest


def test_a_probe_says_what_it_shows():
    assert [name for name, probe in PROBES.items() if not probe.says] == []


def test_probes_take_an_argument_for_each_parameter():
    for name, probe in PROBES.items():
        assert len(inspect.signature(probe.kernel.function).parameters) == len(probe.words), name


def test_factories_give_the_same_intrinsic_again():
    assert ptx.wgmma_ss(64, "float16") is ptx.wgmma_ss(64, "float16")
    assert ptx.setmaxnreg_op("dec", 24) is ptx.setmaxnreg_op("dec", 24)
    assert ptx.mma_m16n8k16("bfloat16") is not ptx.mma_m16n8k16("float16")


def test_every_probe_compiles_for_every_target_that_has_it(compiled):
    having = {ptx.ALL: list(TARGETS), ptx.HOPPER: ["sm_90a", "sm_100", "sm_120"], ptx.HOPPER_ONLY: ["sm_90a"]}
    shown: dict[str, list[str]] = {}
    for row in compiled:
        for name in row.shows:
            shown.setdefault(name, []).append(row.target)
    assert shown == {name: having[ptx.SPECS[name][0] if name in ptx.SPECS else ptx.ALL] for name in PROBES}


def test_nothing_touches_local_memory_or_spills(compiled):
    assert [row for row in compiled if row.local or row.stack_bytes or row.spill_bytes] == []


def test_ptxas_takes_every_instruction_as_it_is_meant(compiled):
    """No wgmma serialised, no setmaxnreg ignored."""
    assert [row.remarks for row in compiled if row.remarks] == []


def test_accumulators_live_in_registers(compiled):
    taken = {(row.name, row.target): row.registers for row in compiled}
    assert taken["wgmma_m64n256k16_ss_bf16", "sm_90a"] >= 128
    assert taken["setmaxnreg_inc_240", "sm_90a"] == 168  # what 384 threads start with


def test_a_failing_compiler_process_raises_with_its_output(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ptx_compile, "MODULE", "kdtree.kernels.no_such_module")
    with pytest.raises(RuntimeError, match=r"compiling the probes failed \(1\)(.|\n)*no_such_module"):
        ptx_compile.collect()


def test_the_fields_of_a_matrix_descriptor_are_where_the_manual_puts_them():
    describe = getattr(hopper.wgmma_descriptor, "py_func", None) or hopper.wgmma_descriptor.fn
    made = int(describe(0x12340, 8192, 1024))
    assert made & 0x3FFF == 0x1234
    assert made >> 16 & 0x3FFF == 8192 >> 4
    assert made >> 32 & 0x3FFF == 1024 >> 4
    assert made >> 62 == 1  # 128-byte swizzle
    assert describe(0x12340 + 32, 8192, 1024) == made + 2


@pytest.mark.parametrize(("address", "leading"), [(0, 16), (0x12340, 8192), (0x3FFF0, 16)])
def test_a_descriptor_made_of_an_operand_word_is_the_same(address, leading):
    describe, operand, described = [
        getattr(f, "py_func", None) or f.fn for f in (hopper.wgmma_descriptor, hopper.operand, hopper.described)
    ]
    word = operand(address, leading)
    assert word.dtype == np.uint32
    assert described(word, 1024) == describe(address, leading, 1024)
    if address + 32 < 2**18:
        assert described(word + np.uint32(2), 1024) == describe(address + 32, leading, 1024)


def test_the_swizzle_moves_units_within_their_row():
    tile = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    moved = swizzled(tile)
    assert (np.sort(moved, axis=1) == tile).all()
    assert (moved[[0, 8]] == tile[[0, 8]]).all()
    assert moved[3].reshape(8, 8)[5 ^ 3, 0] == tile[3, 40]
    assert (swizzled(moved) == tile).all()


# ---- on a GPU ----


def launched(probe: Probe) -> np.ndarray:
    """What the probe's kernel writes. `out` is poisoned before."""
    from kdtree._cuda import cuda

    kept = []

    def operand(memory) -> launch.Operand:
        kept.append(memory)  # as long as the kernel runs
        return launch.Operand(memory.__cuda_array_interface__["data"][0], launch.word_of(str(memory.dtype)))

    out = cuda.to_device(np.frombuffer(b"\xa5" * probe.want.nbytes, probe.want.dtype))
    args = probe.arguments(operand(out), lambda array: operand(cuda.to_device(array)))
    assert launch.words_of(args) == probe.words
    probe.kernel.launch((probe.blocks,), args)
    launch.synchronize(probe.kernel.name)
    return out.copy_to_host().reshape(probe.want.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROBES)
def test_on_a_gpu_an_instruction_does_what_its_probe_says(name, monkeypatch):
    monkeypatch.setenv("KDTREE_CUBIN_CACHE", "0")  # so many small files would push the large ones out
    probe, target = PROBES[name], assemble.target_of(launch.capability())
    if not probe.kernel.runs_on(target):
        pytest.skip(f"{assemble.target_name(target)} has no {name}: it needs {', '.join(probe.kernel.targets)}")
    np.testing.assert_allclose(launched(probe), probe.want, rtol=probe.rtol, atol=0)


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_for_another_target_is_refused_before_it_is_launched():
    probe = PROBES["wgmma_fence"]
    other = launch.Kernel(probe.kernel.function, name="ptx.other", threads=128, targets=("sm_70a",))
    with pytest.raises(ValueError, match=r"ptx.other: got a device of target sm_.*, expected one of sm_70a"):
        other.launch((1,), tuple(launch.Operand(0, word) for word in probe.words))
