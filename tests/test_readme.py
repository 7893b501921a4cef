"""What README.md shows runs, and what it points to exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md")


def text_of(page: str) -> str:
    """A page without its comments, which hold what is not there yet."""
    return re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.S)


SNIPPETS = re.findall(r"^```python\n(.*?)^```", text_of("README.md"), re.M | re.S)


def test_there_is_a_snippet() -> None:
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_python_snippet_runs(snippet: str) -> None:
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES)
def test_local_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(page))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_layout_names_what_exists() -> None:
    layout = text_of("README.md").partition("## Layout")[2]
    named = re.findall(r"`([a-z_/]+/)`", layout)
    assert named
    # reports/ is made by the first run, fixtures and the rest are committed.
    assert [name for name in named if name != "reports/" and not (ROOT / name).is_dir()] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_that_a_page_names_exist(page: str) -> None:
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", text_of(page), re.M))
    assert named and named <= made


def test_exit_codes_are_the_ones_of_the_command() -> None:
    from kdtree.report.exit_codes import ExitCode

    listed = re.findall(r"^\| (\d) \|", text_of("README.md"), re.M)
    assert [int(code) for code in listed] == [int(code) for code in ExitCode]
