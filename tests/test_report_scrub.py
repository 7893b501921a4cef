"""No absolute path of the machine is left in what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdtree.report.scrub import Scrubber


@pytest.fixture
def scrubber(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "someone"))
    repo = tmp_path / "home" / "someone" / "code"
    return Scrubber({"repo": repo, "run": repo / "reports" / "host" / "run", "home": Path.home()})


def test_the_longest_path_wins(scrubber, tmp_path):
    base = tmp_path / "home" / "someone"
    text = f"{base}/code/reports/host/run/a.json {base}/code/x.py {base}/notes"
    assert scrubber.text(text) == "<run>/a.json <repo>/x.py <home>/notes"


def test_colour_codes_and_urls_do_not_hide_a_path(scrubber, tmp_path):
    base = f"{tmp_path}/home/someone"
    assert scrubber.text(f"\x1b[32m{base}/code/x.py") == "\x1b[32m<repo>/x.py"
    assert scrubber.text(f"file://{base}/code") == "file://<repo>"


def test_a_longer_name_is_another_path(scrubber, tmp_path):
    other = f"{tmp_path}/home/someone/codex/y"
    assert scrubber.text(other) == "<home>/codex/y"
    assert scrubber.text(f"/mnt{tmp_path}/home/someone") == f"/mnt{tmp_path}/home/someone"


def test_ipython_tilde_paths_and_cell_files(scrubber):
    assert scrubber.text("File ~/code/kdtree/x.py:3") == "File <repo>/kdtree/x.py:3"
    assert scrubber.text("/tmp/ipykernel_123/456.py:1: UserWarning") == "<cell>:1: UserWarning"


def test_values_are_scrubbed_deeply_but_pictures_are_not(scrubber, tmp_path):
    home = f"{tmp_path}/home/someone"
    value = {"a": [home, {"b": home}], "n": 1, "image/png": home}
    assert scrubber.value(value) == {"a": ["<home>", {"b": "<home>"}], "n": 1, "image/png": home}


def test_the_root_is_never_replaced():
    assert Scrubber({"repo": "/"}).text("/usr/lib") == "/usr/lib"
