"""The rules of the repository's layout and of its notebooks."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import check_notebooks
import pytest

ROOT = Path(__file__).resolve().parent.parent
OPS = ("topk", "tree_build", "verify_attn", "tree_accept", "kv_compact")
NOTEBOOKS = check_notebooks.committed()
NAMES = (
    "00_host",
    "10_tree_build",
    "20_verify_attn",
    "30_tree_accept",
    "40_decode_step",
    "50_memory",
    "60_latency",
    "90_compare_hosts",
)
# Whom a module may import, by the folder or file under kdtree/ that it lies in: dependencies point one way.
FOUNDATION = {"spec", "tree", "arrays", "device"}
ALLOWED = {
    "spec": set(),
    "device": set(),
    "ref": {"tree", "spec", "ref"},
    "tree": {"spec", "arrays"},
    "kernels": FOUNDATION | {"kernels", "_cuda", "ref"},
}


def imported(path: Path) -> set[str]:
    """First name below `kdtree` of each import in a file, deferred ones included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kdtree":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("kdtree.")}
    return found


def tracked() -> list[Path]:
    """Files that git tracks or would add. Without git nobody knows which are made on demand: the test is skipped."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, or git is not installed")
    return [p for name in done.stdout.decode().split("\0") if name and (p := ROOT / name).is_file()]


# ops


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_same_named_files(op: str) -> None:
    wanted = [f"kdtree/ref/{op}.py", f"kdtree/kernels/{op}.py", f"tests/test_{op}.py"]
    assert [name for name in wanted if not (ROOT / name).exists()] == []


def test_every_op_is_public() -> None:
    import kdtree

    assert set(OPS) <= set(kdtree.__all__)


def test_the_cuda_folder_does_not_shadow_nvidias_package() -> None:
    assert not (ROOT / "cuda" / "__init__.py").exists()


def test_numba_cuda_has_one_import_site() -> None:
    sites = []
    for path in (ROOT / "kdtree").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "numba":
                sites += [path.name for alias in node.names if alias.name == "cuda"]
    assert sites == ["_cuda.py"]


@pytest.mark.parametrize("layer", ALLOWED)
def test_dependencies_point_one_way(layer: str) -> None:
    root = ROOT / "kdtree" / layer
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
    wrong = {f.name: sorted(imported(f) - ALLOWED[layer]) for f in files if imported(f) - ALLOWED[layer]}
    assert wrong == {}


def test_nothing_in_the_package_but_measurement_imports_the_baselines() -> None:
    users = {
        path.relative_to(ROOT / "kdtree").parts[0]
        for path in (ROOT / "kdtree").rglob("*.py")
        if "baselines" in imported(path)
    }
    assert users <= {"baselines", "measure"}


def test_library_code_does_not_print() -> None:
    loud = []
    for path in sorted((ROOT / "kdtree").rglob("*.py")):
        tree = ast.parse(path.read_text())
        # A function called main, and what the command line calls, talk to a person.
        spared = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "main"
            for inner in ast.walk(node)
        }
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
        if path.name not in ("cli.py", "worker.py", "sanitize.py", "progress.py"):
            loud += [f"{path.name}:{call.lineno}" for call in calls if id(call) not in spared]
    assert loud == []


# notebooks


def test_the_notebooks_of_the_design_are_there() -> None:
    assert {path.stem for path in NOTEBOOKS} >= set(NAMES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    assert check_notebooks.check(path) == []


def test_no_committed_output_holds_an_absolute_path() -> None:
    """Of this or any machine: in notebooks and in published reports."""
    found = {}
    for path in tracked():
        inside = path.relative_to(ROOT).parts[0]
        if inside not in ("reports", "notebooks") or path.suffix not in (".html", ".json", ".jsonl", ".ipynb"):
            continue
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            texts = [text for cell in cells for text in check_notebooks.output_texts(cell)]
        else:
            texts = [path.read_text()]
        paths = [p for p in map(check_notebooks.absolute_path, texts) if p]
        if paths:
            found[str(path.relative_to(ROOT))] = paths[0]
    assert found == {}


def test_no_committed_file_is_huge() -> None:
    """A page or a bundle above 4 MiB belongs into what is made on demand."""
    assert [str(p.relative_to(ROOT)) for p in tracked() if p.stat().st_size > 4 << 20] == []


# the checker itself


def cell(source: str, tags: tuple[str, ...] = (), outputs: tuple[dict, ...] = (), count: int | None = 1) -> dict:
    metadata: dict[str, Any] = {"tags": list(tags)} if tags else {}
    return {
        "cell_type": "code",
        "execution_count": count,
        "id": "a" + str(abs(hash(source)) % 10**6),
        "metadata": metadata,
        "outputs": list(outputs),
        "source": source,
    }


def notebook(*cells: dict) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


GOOD = cell("profile = 'tiny'\nrun_dir = None\nsizes: list = [1, 2]", ("parameters",))


def printed(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text}


@pytest.mark.parametrize(
    ("cells", "complaint"),
    [
        ([cell("1")], "0 cells are tagged"),
        ([GOOD, GOOD], "2 cells are tagged"),
        ([cell("1"), cell("2"), cell("3"), GOOD], "code cell 3"),
        ([cell("n = len('abc')", ("parameters",))], "more than assign literals"),
        ([cell("import os", ("parameters",))], "more than assign literals"),
        ([GOOD, cell("\n".join("x" * 21))], "21 lines"),
        ([GOOD, cell("1", count=None)], "never run"),
        ([GOOD, cell("1", outputs=({"output_type": "error", "traceback": []},))], "with an error"),
        ([GOOD, cell("1", outputs=(printed("saved in /home/me/x.png"),))], "/home/me/x.png"),
        ([GOOD, cell("1", outputs=(printed('File "/tmp/a.py"'),))], "/tmp/a.py"),
    ],
)
def test_the_checker_sees(cells: list[dict], complaint: str) -> None:
    found = check_notebooks.problems(notebook(*cells))
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize(
    "text", ["a/tmp/b", "reports/home/x", "https://x.org/home/a", "1/work/2", "see ~/tmp/x", "n/a", "/ root /"]
)
def test_the_checker_passes_over_what_is_no_path_of_a_machine(text: str) -> None:
    assert check_notebooks.absolute_path(text) is None


def test_base64_is_not_read_as_a_path() -> None:
    image = {"output_type": "display_data", "data": {"image/png": "iVBO\n/tmp/abc"}, "metadata": {}}
    page = {"output_type": "display_data", "data": {"text/html": "<img src='data:image/png;base64,aa+/tmp/b0='>"}}
    assert check_notebooks.problems(notebook(GOOD, cell("1", outputs=(image, page)))) == []


def test_a_kernel_to_edit_may_be_long() -> None:
    assert check_notebooks.problems(notebook(GOOD, cell("\n".join("x" * 99), ("kernel",)))) == []


def test_fixing_makes_one_form_and_keeps_what_a_reader_sees(tmp_path: Path) -> None:
    shown = printed("42\n")
    raw = notebook(copy.deepcopy(GOOD), cell("print(42)", outputs=(shown,), count=7))
    raw["metadata"] = {"papermill": {"duration": 3.5}, "kernelspec": {"name": "venv-of-somebody"}}
    raw["cells"][1]["metadata"] = {"execution": {"iopub.busy": "2026"}, "papermill": {}, "tags": ["b", "a"], "alt": "x"}
    del raw["cells"][1]["id"]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps(raw))
    assert check_notebooks.check(path) == ["is not in canonical form: make fix"]
    assert check_notebooks.check(path, fix=True) == []
    assert check_notebooks.check(path) == []
    fixed = json.loads(path.read_text())
    second = fixed["cells"][1]
    assert second["metadata"] == {"alt": "x", "tags": ["a", "b"]} and second["execution_count"] == 7
    assert second["outputs"] == [shown] and second["source"] == ["print(42)"] and second["id"]
    assert "papermill" not in fixed["metadata"] and fixed["metadata"]["kernelspec"]["name"] == "python3"


def test_cells_with_the_same_id_get_different_ones() -> None:
    first, second = cell("1"), cell("2")
    second["id"] = first["id"]
    fixed = check_notebooks.canonical(notebook(first, second), "n.ipynb")
    assert fixed["cells"][0]["id"] == first["id"] != fixed["cells"][1]["id"]
