"""Execute notebooks and find out whether they really ran.

Papermill's own word is not enough: it exits 0 after ``sys.exit()`` in a cell, marks cells that never ran as
completed when the kernel dies, and only warns of unknown parameters.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kdtree
from kdtree.report.scrub import Scrubber

COMPLETED, FAILED, INTERRUPTED = "completed", "failed", "interrupted"
PARAMETERS = ("run_dir", "profile")
# Which ops a notebook has to leave passed rows for.
OPS_OF = {
    "10_tree_build": ("topk", "tree_build"),
    "20_verify_attn": ("verify_attn", "merge_states"),
    "30_tree_accept": ("tree_accept", "kv_compact"),
    "40_decode_step": ("decode_step",),
}
CELL_TIMEOUT = {"tiny": 1200.0, "quick": 1200.0, "full": 7200.0}  # seconds for one cell
DEADLINE = {"tiny": 2400.0, "quick": 2400.0, "full": 4 * 3600.0}  # seconds for one notebook
START_TIMEOUT = 120.0  # a cold file system can take a minute to import a kernel


class Incomplete(Exception):
    """A notebook did not run to its end; the message says where it stopped."""


@dataclass(frozen=True)
class Outcome:
    """What became of one notebook. `sha` is that of its source, `seconds` the time it took."""

    status: str
    reason: str | None
    seconds: float
    sha: str
    source: str
    profile: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def repo_root() -> Path:
    """Directory that holds `notebooks/`: where the package was checked out, else the working directory."""
    package = Path(kdtree.__file__).resolve().parent.parent
    for root in (package, *Path.cwd().parents, Path.cwd()):
        if root == package or (root / "kdtree" / "__init__.py").is_file():
            if (root / "notebooks").is_dir():
                return root
    return Path.cwd() if (Path.cwd() / "notebooks").is_dir() else package


def discover(directory: Path | None = None) -> list[Path]:
    """The notebooks of a report in order; numbers from 90 up look at several hosts and are left out.

    Raises FileNotFoundError when there is none.
    """
    directory = Path(directory) if directory is not None else repo_root() / "notebooks"
    found = [p for p in sorted(directory.glob("*.ipynb")) if not re.match(r"9\d_", p.name)]
    if not found:
        raise FileNotFoundError(f"notebooks: no *.ipynb in {directory}, expected 00_host.ipynb and so on")
    return found


def digest(path: Path) -> str:
    """First 12 hex digits of the SHA-256 of a notebook's cells: outputs and counts do not matter."""
    import nbformat

    nb = nbformat.read(path, as_version=4)
    text = "\x00".join(f"{c.cell_type}\x01{sorted(c.metadata.get('tags', []))}\x01{c.source}" for c in nb.cells)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_parameters(path: Path, parameters: Mapping[str, Any]) -> None:
    """Raise ValueError when the notebook at `path` does not declare one of `parameters`."""
    import papermill

    known = papermill.inspect_notebook(str(path))
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        declared = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"{path.name}: no such parameter: {', '.join(unknown)}; its parameters cell declares: {declared}"
        )


def assert_complete(path: Path) -> None:
    """Raise Incomplete unless every code cell of the executed notebook at `path` ran without an error.

    An output cut short, an error output, a cell without an execution count or with counts out of order,
    and a cell whose papermill status is not "completed" all count.
    """
    import nbformat

    try:
        nb = nbformat.read(path, as_version=4)
    except Exception as exc:  # truncated JSON, no notebook at all, unreadable
        raise Incomplete(f"the output notebook cannot be read: {type(exc).__name__}") from exc
    cells = [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]
    if not cells:
        raise Incomplete("the output notebook has no code cell")
    last = 0
    for number, cell in enumerate(cells, 1):
        where = f"code cell {number} of {len(cells)}"
        for output in cell.outputs:
            if output.output_type == "error":
                raise Incomplete(f"{where} raised {output.ename}: {_first_line(output.evalue)}")
        if cell.execution_count is None:
            raise Incomplete(f"{where} never ran")
        if cell.execution_count <= last:
            raise Incomplete(f"{where} has count {cell.execution_count} after {last}: not one run from top to bottom")
        last = cell.execution_count
        status = cell.metadata.get("papermill", {}).get("status", COMPLETED)
        if status != COMPLETED:
            raise Incomplete(f"{where} is marked {status}")


def _first_line(text: str, limit: int = 300) -> str:
    line = next((part for part in str(text).splitlines() if part.strip()), "")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _why(exc: BaseException) -> str:
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    if isinstance(exc, DeadKernelError):
        return "its kernel died"
    if isinstance(exc, CellTimeoutError):
        return "timeout: " + _first_line(str(exc))
    if isinstance(exc, PapermillExecutionError):
        return f"cell [{exc.exec_count}] raised {exc.ename}: {_first_line(exc.evalue)}"
    return f"{type(exc).__name__}: {_first_line(str(exc))}"


def execute(
    source: Path,
    target: Path,
    *,
    run_dir: Path,
    profile: str,
    scrubber: Scrubber,
    on_cell: Callable[[int, int], None] | None = None,
    cell_timeout: float | None = None,
    deadline: float | None = None,
    start_timeout: float = START_TIMEOUT,
) -> tuple[str, str | None, float]:
    """Run notebook `source` into `target`; returns (status, reason, seconds), whatever the notebook did.

    KeyboardInterrupt passes through, after the kernel and its children have been ended. Whatever happened, no
    absolute path of this machine is left in `target`.
    """
    import papermill

    from kdtree.report.engine import ENGINE, KERNEL

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it would log is in the outcome
    source, target = source.resolve(), target.resolve()
    parameters = {"run_dir": str(run_dir.resolve()), "profile": profile}
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # an earlier output must never be taken for this run's
    reason: str | None = None
    try:
        check_parameters(source, parameters)
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters,
            engine_name=ENGINE,
            kernel_name=KERNEL,
            progress_bar=False,
            cwd=str(repo_root()),
            start_timeout=start_timeout,
            on_cell=on_cell,
            cell_timeout=cell_timeout or CELL_TIMEOUT[profile],
            deadline=deadline or DEADLINE[profile],
            env=_kernel_env(),
        )
        assert_complete(target)
    except Exception as exc:
        reason = scrubber.text(_why(exc))
    finally:
        clean_notebook(target, scrubber)
    return (COMPLETED if reason is None else FAILED), reason, time.monotonic() - began


def _kernel_env() -> dict[str, str]:
    """Environment of a kernel: it imports the same kdtree as this process, installed or not."""
    package = str(Path(kdtree.__file__).resolve().parent.parent)
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        "PYTHONPATH": os.pathsep.join(p for p in dict.fromkeys(paths) if p),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }


def clean_notebook(path: Path, scrubber: Scrubber) -> None:
    """Take absolute paths out of the executed notebook at `path`, in place."""
    import nbformat

    if not path.is_file():
        return
    try:
        nb = nbformat.read(path, as_version=4)
    except Exception:  # torn; assert_complete has already said so
        path.write_text(scrubber.text(path.read_text(errors="replace")))
        return
    papermill_meta = nb.metadata.get("papermill", {})
    for name, folder in (("input_path", "notebooks"), ("output_path", "<run>/notebooks")):
        if papermill_meta.get(name):
            papermill_meta[name] = f"{folder}/{Path(papermill_meta[name]).name}"
    # Papermill marks an error with cells of its own; the page has a banner, and the cell its traceback.
    nb.cells = [c for c in nb.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    clean = nbformat.from_dict(scrubber.value(nb))
    temporary = path.with_suffix(".tmp")
    nbformat.write(clean, temporary)
    os.replace(temporary, path)
