#!/usr/bin/env python3
"""The rules for committed notebooks, and the one way to write them down.

    python scripts/check_notebooks.py                   # notebooks/*.ipynb; prints what is wrong, exit 1
    python scripts/check_notebooks.py --fix             # writes them canonically; says what only a person can mend
    python scripts/check_notebooks.py --fix a.ipynb

Canonical: sorted keys, one space of indent, an id in every cell, no traces of how long or by what a cell was run.
Outputs and execution counts stay: a reader sees them, and nbval compares some.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = "parameters"
KERNEL_TO_EDIT = "kernel"  # tags a cell that holds a whole kernel for the reader to change
MAX_LINES = 20  # of code in a cell: a cell is a paragraph. A kernel to edit may be longer
FIRST_CELLS = 3  # the parameters are among the first code cells: behind imports at most
CELL_KEYS = ("tags", "jupyter", "alt")  # of a cell's metadata, what a person wrote; alt describes its figure
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

# Not within a word, a relative path or an address; images are base64, in which anything may occur by chance.
ABSOLUTE = re.compile(r"(?<![\w.~/:-])/(?:root|home|work|tmp|mnt|opt|usr|var|Users)/[\w./-]+")
DATA_URI = re.compile(r"data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s\\]+")


def absolute_path(text: str) -> str | None:
    """The first absolute path of some machine in `text`, or None."""
    found = ABSOLUTE.search(DATA_URI.sub("", text))
    return found.group() if found else None


def joined(value: str | list[str]) -> str:
    """Text that nbformat may hold as a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def output_texts(cell: dict[str, Any]) -> Iterator[str]:
    """Every textual part of a cell's outputs."""
    for output in cell.get("outputs", ()):
        yield joined(output.get("text", ""))
        yield "\n".join(output.get("traceback", ()))
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/") or kind == "image/svg+xml":
                yield json.dumps(value) if isinstance(value, dict) else joined(value)


def is_literal(source: str) -> bool:
    """True when every statement assigns a literal to a name: what papermill can replace."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        value = getattr(statement, "value", None)
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if value is None or not targets or not all(isinstance(t, ast.Name) for t in targets):
            return False
        try:
            ast.literal_eval(value)
        except ValueError:
            return False
    return True


def problems(notebook: dict[str, Any]) -> list[str]:
    """What a person has to mend, a sentence each."""
    found = []
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tagged = [i for i, cell in enumerate(code) if PARAMETERS in cell["metadata"].get("tags", ())]
    if len(tagged) != 1:
        found.append(f"{len(tagged)} cells are tagged {PARAMETERS}, expected one")
    elif tagged[0] >= FIRST_CELLS:
        found.append(f"the cell tagged {PARAMETERS} is code cell {tagged[0]}, expected one of the first {FIRST_CELLS}")
    elif not is_literal(joined(code[tagged[0]]["source"])):
        found.append(f"the cell tagged {PARAMETERS} does more than assign literals")
    for number, cell in enumerate(code):
        where, source = f"code cell {number}", joined(cell["source"])
        lines = len(source.rstrip().splitlines())
        if lines > MAX_LINES and KERNEL_TO_EDIT not in cell["metadata"].get("tags", ()):
            found.append(f"{where} has {lines} lines, expected at most {MAX_LINES}")
        if source.strip() and cell.get("execution_count") is None:
            found.append(f"{where} was never run: commit it with its output")
        if any(output["output_type"] == "error" for output in cell.get("outputs", ())):
            found.append(f"{where} is committed with an error")
        for text in output_texts(cell):
            path = absolute_path(text)
            if path:
                found.append(f"{where} prints an absolute path: {path}")
                break
    return found


def canonical(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy as it should be stored. `name` seeds the ids of cells that have none."""
    result = copy.deepcopy(notebook)
    result["metadata"] = {"kernelspec": dict(KERNEL), "language_info": dict(LANGUAGE)}
    result["nbformat"], result["nbformat_minor"] = 4, 5
    taken: set[str] = set()
    for number, cell in enumerate(result["cells"]):
        kept = {key: cell["metadata"][key] for key in CELL_KEYS if cell["metadata"].get(key)}
        if "tags" in kept:
            kept["tags"] = sorted(set(kept["tags"]))
        cell["metadata"] = kept
        given = str(cell.get("id", ""))
        if not CELL_ID.fullmatch(given) or given in taken:
            given = hashlib.sha256(f"{name}:{number}:{joined(cell['source'])}".encode()).hexdigest()[:8]
        cell["id"] = given
        taken.add(given)
        cell["source"] = joined(cell["source"]).splitlines(keepends=True)
        if cell["cell_type"] == "code":
            cell.setdefault("execution_count", None)
            cell.setdefault("outputs", [])
        for output in cell.get("outputs", ()):
            if "execution_count" in output:
                output["execution_count"] = cell["execution_count"]
    return result


def as_text(notebook: dict[str, Any]) -> str:
    """JSON in the form that Jupyter itself writes, with sorted keys."""
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def check(path: Path, *, fix: bool = False) -> list[str]:
    """Problems of the notebook at `path`; with `fix` it is first written canonically."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    wanted = as_text(canonical(notebook, path.name))
    found = problems(notebook)
    if wanted != text:
        if fix:
            path.write_text(wanted, encoding="utf-8")
        else:
            found.append("is not in canonical form: make fix")
    return found


def committed(root: Path = ROOT) -> list[Path]:
    """The notebooks of the repository, in order."""
    return sorted((root / "notebooks").glob("*.ipynb"))


def main(argv: list[str] | None = None) -> int:
    """Check, or fix, the notebooks named; exit 1 if something is left to mend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="write canonically")
    parser.add_argument("notebook", nargs="*", type=Path, help="default: notebooks/*.ipynb")
    options = parser.parse_args(argv)
    bad = 0
    for path in options.notebook or committed():
        for problem in check(path, fix=options.fix):
            print(f"{path.name}: {problem}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
