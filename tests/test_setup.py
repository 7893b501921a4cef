"""The files that set up a machine agree with each other and with what the code imports."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import lock
import make_env
import pytest
import wheelhouse
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETUP["project"]
EXTRAS = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name != "all"}
DIRECT = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
PINS = {name: version for section in lock.read_constraints().values() for name, version in section.items()}
TARGETS = (
    "help env lock wheelhouse doctor lab test nbtest lint fix cuda sanitize fixtures report compare baseline clean"
).split()
# Imported only where somebody else has installed them.
OPTIONAL_IMPORTS = {"cupy", "flash_mla", "flashinfer", "sgl_kernel"}
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=outer | environment)


# pyproject.toml, constraints.txt, environment.yml


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda r: r.name)
def test_every_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    name = lock.canonical(requirement.name)
    assert name in PINS, f"constraints.txt lacks {name}: make lock"
    assert requirement.specifier.contains(PINS[name], prereleases=True)


def test_every_dependency_line_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    lines = re.search(r"^dependencies = \[.*?^\]", text, re.M | re.S).group().splitlines()
    lines += re.search(r"^\[project.optional-dependencies\].*?(?=^\[)", text, re.M | re.S).group().splitlines()
    named = [line for line in lines if line.lstrip().startswith('"')]
    assert len(named) == len(DIRECT) + len(PROJECT["optional-dependencies"]["all"])
    assert [line for line in named if not re.search(r'",\s+# \S+', line)] == []


def test_constraints_are_exact_pins_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    # A local version (+cpu) would shut out the other builds of torch.
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)] == []
    names = [pin.partition("==")[0] for pin in pins]
    assert len(names) == len(set(names))


def test_the_versions_pinned_by_hand_are_the_ones_in_constraints() -> None:
    for pin in SETUP["tool"]["kdtree"]["lock"]["pins"]:
        name, _, version = pin.partition("==")
        assert Version(PINS[name]) == Version(version)


def test_constraints_admit_cpu_and_cuda_builds_of_torch() -> None:
    pin = SpecifierSet(f"=={PINS['torch']}")
    assert pin.contains("2.13.0+cpu") and pin.contains("2.13.0")
    assert "nvidia-cudnn-cu13" in lock.read_constraints()[lock.TORCH]


def test_environment_yml_names_the_same_packages_at_the_same_versions() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip[:2] == ["--constraint constraints.txt", "--editable ."]
    named = {lock.canonical(Requirement(line).name): Requirement(line) for line in pip[2:]}
    expected = {lock.canonical(r.name): r for r in map(Requirement, lock.direct(PROJECT))}
    assert named.keys() == expected.keys()
    for name, line in named.items():
        assert str(line.specifier) == f"=={PINS[name]}"
        assert line.extras == expected[name].extras
    python = next(d for d in environment["dependencies"] if str(d).startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.partition("=")[2])


def test_no_set_up_file_names_an_index() -> None:
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|index-url", text), name
    for script in (ROOT / "scripts").glob("*.py"):
        assert "index-url" not in script.read_text(), script.name


# the package


def test_what_the_package_imports_is_declared() -> None:
    declared = {lock.canonical(r.name) for r in DIRECT}
    owners = importlib.metadata.packages_distributions()
    undeclared: dict[str, str] = {}
    for path in sorted((ROOT / "kdtree").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top in OPTIONAL_IMPORTS or top == "kdtree":
                    continue
                of = {lock.canonical(d) for d in owners.get(top, [top])}
                # numba brings llvmlite at the one version that it works with.
                if not of & (declared | {"llvmlite"}):
                    undeclared[top] = str(path.relative_to(ROOT))
    assert undeclared == {}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, kdtree; heavy = {'numba', 'torch', 'pandas', 'matplotlib', 'cuda', 'papermill'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_that_are_not_python_are_packaged() -> None:
    packaged = set()
    for package, patterns in SETUP["tool"]["setuptools"]["package-data"].items():
        for pattern in patterns:
            packaged |= set((ROOT / package.replace(".", "/")).glob(pattern))
    there = {
        path
        for path in (ROOT / "kdtree").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and ".ruff_cache" not in path.parts
    }
    assert there - packaged == set()


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "kdtree").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_the_command_is_the_one_of_the_command_line_module() -> None:
    assert PROJECT["scripts"] == {"kdtree": "kdtree.cli:main"}
    from kdtree.cli import main

    assert callable(main)


def test_the_readme_begins_with_what_this_is_and_is_not() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[0]
    assert "spatial k-d trees" in first
    assert "\nmake report " in (ROOT / "README.md").read_text()
    assert "\nmake test " in (ROOT / "README.md").read_text()


# make


@needs_make
def test_make_alone_lists_every_target() -> None:
    done = make()
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^  ([a-z]+)\s+\S", done.stdout, re.M)
    assert set(TARGETS) <= set(listed)
    assert done.stdout == make("help").stdout


@needs_make
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_planned(target: str) -> None:
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr


@needs_make
def test_report_and_test_make_the_environment_first() -> None:
    for target in ("report", "test", "lab"):
        plan = make("--dry-run", "--what-if=constraints.txt", target, "PYTHON=python3").stdout
        assert plan.index("scripts/make_env.py") < plan.index(".venv/bin/"), target


@needs_make
def test_a_wheelhouse_reaches_the_installer() -> None:
    plan = make("--dry-run", "--what-if=constraints.txt", "report", "WHEELHOUSE=some/dir", "PYTHON=3.12").stdout
    assert "python3.12 scripts/make_env.py --wheelhouse 'some/dir'" in plan


@needs_make
def test_nothing_is_built_where_there_is_no_cuda_source() -> None:
    if (ROOT / "cuda" / "build.sh").exists():
        pytest.skip("this version has a CUDA library")
    done = make("cuda")
    assert done.returncode == 0 and "nothing to build" in done.stdout


def test_ci_calls_make_test_and_can_be_executed() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test\b", script.read_text(), re.M)
    assert subprocess.run(["bash", "-n", script]).returncode == 0


# hosts without a network


def test_a_wheelhouse_leaves_out_what_the_host_has_in_the_pinned_version() -> None:
    pins = {name: PINS[name] for name in ("numpy", "pandas", "psutil")}
    have = {"numpy": "2.5.2", "pandas": PINS["pandas"], "unheard-of": "1.0"}
    assert wheelhouse.lacking(pins, have).keys() == {"numpy", "psutil"}
    assert wheelhouse.lacking(pins, {}) == pins


def test_a_wheelhouse_does_not_carry_torch_unless_asked() -> None:
    sections = lock.read_constraints()
    assert "torch" in sections[lock.TORCH] and "torch" not in sections[lock.SUITE]
    assert not any(name.startswith(("nvidia-cudnn", "nvidia-cublas", "triton")) for name in sections[lock.SUITE])
    assert {"numba-cuda", "nvidia-cuda-nvcc", "setuptools"} <= sections[lock.SUITE].keys()


def test_a_freeze_is_read_whatever_else_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "freeze.txt"
    path.write_text("# a comment\n-e git+x\nJinja2==3.1.6\ntorch @ file:///x\nml_dtypes==0.6.0\n\n")
    assert wheelhouse.read_freeze(path) == {"jinja2": "3.1.6", "ml-dtypes": "0.6.0"}


@pytest.mark.parametrize("python", ["3.10", "3", "latest", "2.7", "3.12.1"])
def test_a_wheelhouse_wants_a_python_that_the_suite_runs_on(python: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        wheelhouse.main(["--python", python])
    assert stopped.value.code == 2 and f"got '{python}'" in capsys.readouterr().err


def test_an_empty_wheelhouse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        make_env.wheel_options(tmp_path, Path(sys.executable))
    assert stopped.value.code == 2 and "make wheelhouse" in capsys.readouterr().err


def test_an_environment_is_not_made_by_an_old_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(make_env, "OLDEST", (99, 0))
    with pytest.raises(SystemExit) as stopped:
        make_env.main(["--venv", str(tmp_path / "v")])
    assert stopped.value.code == 2 and "PYTHON=" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_constraints_survive_being_written_and_read(tmp_path: Path) -> None:
    sections = lock.read_constraints()
    lock.write_constraints(sections, tmp_path / "c.txt")
    assert (tmp_path / "c.txt").read_text() == (ROOT / "constraints.txt").read_text()
    lock.write_environment(PROJECT, sections, tmp_path / "e.yml")
    assert (tmp_path / "e.yml").read_text() == (ROOT / "environment.yml").read_text()
