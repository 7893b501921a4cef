"""PTX as Numba writes it becomes PTX with tensor maps and a register limit, and code is kept between processes."""

from __future__ import annotations

import numpy as np
import pytest

from kdtree.kernels import assemble, cubin_cache
from kdtree.kernels.launch import Kernel

ENTRY = "_ZN4kern$B2v1"
PTX = f"""\
.version 9.0
.target sm_90a
.visible .entry {ENTRY}(
\t.param .u64 {ENTRY}_param_0,
\t.param .u32 {ENTRY}_param_1,
{"".join(f"	.param .u64 {ENTRY}_param_{i},{chr(10)}" for i in range(2, 10))}\t.param .u64 {ENTRY}_param_10
)
.maxntid 128, 1, 1
{{
\tld.param.u64 \t%rd1, [{ENTRY}_param_1];
\t{{ .reg .b64 a; mov.b64 a, kdtree_parameter_0; cvta.param.u64 %rd2, a; }}
\t{{ .reg .b64 a; mov.b64 a, kdtree_parameter_10; cvta.param.u64 %rd3, a; }}
}}
"""
WORDS = ("tmap", "i32", *["*f32"] * 8, "tmap")


def test_a_tensor_map_is_declared_as_128_bytes_and_named():
    text = assemble.finished(PTX, ENTRY, WORDS, None, "k")
    assert f"\t.param .align 64 .b8 {ENTRY}_param_0[128],\n" in text
    assert f"\t.param .align 64 .b8 {ENTRY}_param_10[128]\n)" in text
    assert f"mov.b64 a, {ENTRY}_param_0; " in text and f"mov.b64 a, {ENTRY}_param_10; " in text
    assert "kdtree_parameter" not in text and "maxnreg" not in text


def test_the_other_parameters_stay_as_they_are():
    text = assemble.finished(PTX, ENTRY, WORDS, None, "k")
    for i in range(2, 10):
        assert f"\t.param .u64 {ENTRY}_param_{i}," in text
    assert f"[{ENTRY}_param_1]" in text


def test_a_register_limit_stands_in_front_of_the_body():
    text = assemble.finished(PTX, ENTRY, WORDS, 168, "k")
    assert ")\n.maxntid 128, 1, 1\n.maxnreg 168\n{\n" in text


def test_the_address_of_an_ordinary_parameter_is_refused():
    with pytest.raises(ValueError, match=r"k: takes the address of parameter 10, which is \*f32, expected tmap"):
        assemble.finished(PTX, ENTRY, (*WORDS[:-1], "*f32"), None, "k")


def test_a_parameter_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="k: found 0 declarations of parameter 11 in its PTX, expected 1"):
        assemble.finished(PTX, ENTRY, (*WORDS, "tmap"), None, "k")
    with pytest.raises(ValueError, match="parameter 10, which is missing"):
        assemble.finished(PTX, ENTRY, WORDS[:-1], None, "k")


def test_hopper_gets_its_own_target_and_nobody_else():
    assert [assemble.target_name(assemble.target_of(c)) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100",
        "sm_120",
    ]


# ---- fingerprints


def kernel_of(step: float, helper=None):
    def kernel(x, n):
        for i in range(n):
            x[i] = (helper(x[i]) if helper else x[i]) * step + SCALE

    return kernel


SCALE = 3


def same(a, b) -> bool:
    return cubin_cache.fingerprint(a) == cubin_cache.fingerprint(b)


def test_equal_kernels_have_one_fingerprint():
    assert same(kernel_of(2.0), kernel_of(2.0))
    assert same(kernel_of(2.0, lambda v: v + 1), kernel_of(2.0, lambda v: v + 1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (kernel_of(2.0), kernel_of(3.0)),
        (kernel_of(2), kernel_of(2.0)),
        (kernel_of(np.float32(2)), kernel_of(np.float64(2))),
        (kernel_of(2.0, lambda v: v + 1), kernel_of(2.0, lambda v: v + 2)),
        (kernel_of(2.0, lambda v: v + 1), kernel_of(2.0, lambda v: v - 1)),
        (kernel_of((1, 2)), kernel_of((2, 1))),
        (kernel_of(np.zeros(2)), kernel_of(np.ones(2))),
        (kernel_of({"a": 1}), kernel_of({"a": 2})),
        (kernel_of(frozenset({1})), kernel_of(frozenset({2}))),
        (kernel_of(np.float32), kernel_of(np.uint16)),
    ],
)
def test_what_a_kernel_closes_over_is_part_of_it(one, other):
    assert not same(one, other)


def test_a_constant_of_the_module_is_part_of_it(monkeypatch):
    before = cubin_cache.fingerprint(kernel_of(2.0))
    monkeypatch.setitem(globals(), "SCALE", 4)
    assert cubin_cache.fingerprint(kernel_of(2.0)) != before


def test_what_cannot_be_told_has_no_fingerprint(tmp_path):
    with open(tmp_path / "f", "w") as file, pytest.raises(cubin_cache.NoFingerprintError):
        cubin_cache.fingerprint(kernel_of(file))


# ---- files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KDTREE_CUBIN_CACHE", raising=False)
    return cubin_cache.folder()


class Compiler:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return b"code\nof a kernel\x00", "entry$1"


def get(compiler, words=("i32",), target=(9, 0, "a"), step=2.0, **options):
    kernel = Kernel(kernel_of(step), name="k", threads=32, **options)
    return cubin_cache.machine_code(kernel, words, target, compiler)


def test_code_is_compiled_once_and_then_read(folder):
    compiler, before = Compiler(), dict(cubin_cache.count)
    assert get(compiler) == get(compiler) == (b"code\nof a kernel\x00", "entry$1")
    assert compiler.calls == 1
    assert cubin_cache.count == {name: before[name] + 1 for name in ("read", "compiled")}
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"words": ("i64",)},
        {"target": (8, 0)},
        {"step": 3.0},
        {"fastmath": True},
        {"min_blocks": 1},
        {"max_registers": 40},
    ],
)
def test_another_kernel_target_or_option_is_compiled_anew(other, folder):
    compiler = Compiler()
    get(compiler)
    get(compiler, **other)
    assert compiler.calls == 2


def test_a_damaged_file_is_compiled_anew(folder):
    compiler = Compiler()
    get(compiler)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert get(compiler)[0] == b"code\nof a kernel\x00"
    assert compiler.calls == 2


def test_the_cache_can_be_turned_off(folder, monkeypatch):
    monkeypatch.setenv("KDTREE_CUBIN_CACHE", "0")
    compiler = Compiler()
    get(compiler)
    get(compiler)
    assert compiler.calls == 2 and not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.mkdir()
    folder.write_text("a file in its place")
    assert get(Compiler())[1] == "entry$1"


def test_the_oldest_files_go(folder, monkeypatch):
    monkeypatch.setattr(cubin_cache, "FILES_KEPT", 2)
    for step in range(5):
        get(Compiler(), step=step)
    assert len(list(folder.iterdir())) == 2


# ---- ptxas ----

SMALL = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry small()
{
    ret;
}
"""


def test_machine_code_is_that_of_a_whole_program():
    assert assemble.cubin(SMALL, (8, 0), "small")[:4] == b"\x7fELF"


def test_ptx_that_ptxas_refuses_is_an_error_with_its_words():
    with pytest.raises(ValueError, match=r"^small: cannot be assembled for sm_80: ptxas kernel\.ptx, line 6"):
        assemble.cubin(SMALL.replace("ret", "return"), (8, 0), "small")


def test_without_ptxas_the_driver_gets_the_text(monkeypatch):
    def missing(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(assemble, "tool", missing)
    assert assemble.cubin(SMALL, (8, 0), "small") == SMALL.encode() + b"\0"
