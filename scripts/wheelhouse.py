#!/usr/bin/env python3
"""Collect the wheels that a GPU host without a network lacks; run on a connected machine.

    python3 scripts/wheelhouse.py --python 3.12                        # `make wheelhouse PYTHON=3.12`
    python3 scripts/wheelhouse.py --python 3.12 --have host-freeze.txt # less what `pip freeze` printed there
    python3 scripts/wheelhouse.py --python 3.12 --torch                # with torch and the CUDA libraries under it

Versions are those of constraints.txt. The host's own torch is kept unless --torch is given, because it fits the
host's driver and takes gigabytes. Beside the wheels lie

    constraints.txt    their versions, for make_env.py
    requirements.txt   their names, for `pip install --no-index --find-links DIR -r DIR/requirements.txt`
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lock import MODEL, ROOT, SUITE, TORCH, name_of, read_constraints

# pip matches the platform tag of a wheel exactly, so every glibc that a host of today has is named.
NEWEST_GLIBC = 39
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC + 1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def read_freeze(path: Path) -> dict[str, str]:
    """{name: version} of what ``pip freeze`` or ``pip list --format=freeze`` printed; other lines are passed over."""
    found = {}
    for line in path.read_text().splitlines():
        name, equals, version = line.partition("==")
        if equals and not line.startswith(("#", "-")):
            found[name_of(name)] = version.strip()
    return found


def lacking(pins: dict[str, str], have: dict[str, str]) -> dict[str, str]:
    """The pins that a host with the packages `have` lacks: whatever it has in another version does not count.

    A version that is merely in range would not do. The packages under it are pinned too, and fit only the pinned one.
    """
    return {name: version for name, version in pins.items() if have.get(name) != version}


def download(pins: dict[str, str], python: str, folder: Path) -> int:
    """pip download of exactly `pins`, for Linux on x86-64 under `python` ("3.12"); returns pip's exit code."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["--dest", str(folder), *(f"{name}=={version}" for name, version in pins.items())]
    if not sys.stdout.isatty():
        command.append("--quiet")
    return subprocess.run(command).returncode


def main(argv: list[str] | None = None) -> int:
    """See the module. Exits with pip's code when a wheel cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, metavar="3.X", help="the host's Python")
    parser.add_argument("--dir", type=Path, default=ROOT / "wheelhouse", help="default: wheelhouse")
    parser.add_argument("--have", type=Path, metavar="FILE", help="the host's `pip freeze`: leave out what it has")
    parser.add_argument("--torch", action="store_true", help="with torch and the CUDA libraries under it")
    parser.add_argument("--model", action="store_true", help="with the extra `model`")
    options = parser.parse_args(argv)
    parts = options.python.split(".")
    if len(parts) != 2 or not all(p.isdigit() for p in parts) or (int(parts[0]), int(parts[1])) < (3, 11):
        parser.error(f"--python: got {options.python!r}, expected a version such as 3.12, 3.11 at least")
    sections = read_constraints()
    pins = dict(sections[SUITE])
    pins |= sections[TORCH] if options.torch else {}
    pins |= sections[MODEL] if options.model else {}
    have = read_freeze(options.have) if options.have else {}
    wanted = lacking(pins, have)
    options.dir.mkdir(parents=True, exist_ok=True)
    print(f"{len(wanted)} wheels for Python {options.python} into {options.dir}", flush=True)
    code = download(wanted, options.python, options.dir)
    if code:
        return code
    lines = [f"{name}=={version}\n" for name, version in sorted(wanted.items())]
    (options.dir / "constraints.txt").write_text("".join(lines))
    (options.dir / "requirements.txt").write_text("".join(lines))
    size = sum(wheel.stat().st_size for wheel in options.dir.glob("*.whl"))
    print(f"{size / 2**20:.0f} MiB. Copy the checkout and {options.dir} to the host, then there:")
    print(f"  make report WHEELHOUSE={options.dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
