"""A papermill engine that starts the kernel with this interpreter, keeps deadlines and reports progress.

Papermill on its own looks up a registered kernel (perhaps another Python), knows only a timeout per cell,
and leaves the processes that a killed kernel had started running on the GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
from jupyter_client.kernelspec import KernelSpecManager
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines

ENGINE = "kdtree"
KERNEL = "python3"  # what jupyter_client calls the interpreter it runs in when no kernel dirs are searched
_TOKEN = "KDTREE_KERNEL_TOKEN"  # marks the processes of one kernel, so that only those are ended with it


class _Client(PapermillNotebookClient):
    """Runs the cells of one notebook in a kernel of `sys.executable`, registered nowhere."""

    def create_kernel_manager(self) -> Any:
        manager = super().create_kernel_manager()
        manager.kernel_spec_manager = KernelSpecManager(kernel_dirs=[])
        return manager


class Engine(NBClientEngine):
    """Papermill engine ``kdtree``; its extra arguments come through ``execute_notebook(**engine_kwargs)``."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        on_cell: Callable[[int, int], None] | None = None,
        cell_timeout: float = 600.0,
        deadline: float = 1800.0,
        start_timeout: float = 60.0,
        env: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        """Execute all cells. `on_cell(done, total)` counts code cells; times are seconds.

        Raises nbclient's DeadKernelError and CellTimeoutError, which papermill lets through.
        """
        cells = [c for c in nb_man.nb.cells if c.cell_type == "code" and c.source.strip()]
        ends = time.monotonic() + deadline
        done = 0

        def started(**_: Any) -> None:
            if on_cell is not None:
                on_cell(done, len(cells))

        def finished(cell: Any, **_: Any) -> None:
            nonlocal done
            done += bool(cell.source.strip())
            if on_cell is not None:
                on_cell(done, len(cells))

        token = f"{os.getpid()}-{time.monotonic_ns()}"
        client = _Client(
            nb_man,
            kernel_name=kernel_name,
            startup_timeout=int(start_timeout),
            # nbclient wants whole seconds and takes 0 for "no limit".
            timeout_func=lambda cell: max(1, int(min(cell_timeout, ends - time.monotonic()))),
            on_cell_start=started,
            on_cell_complete=finished,
            shutdown_kernel="immediate",
            extra_arguments=["--log-level=ERROR"],  # its advice on transports would tear the progress bar
        )
        try:
            client.execute(env={**os.environ, **(env or {}), _TOKEN: token})
        finally:
            end_processes(token)


def end_processes(token: str) -> int:
    """Kill every process of the kernel with `token` that outlived it; returns how many there were.

    A worker that a killed kernel leaves behind would hold GPU memory and disturb the next measurement.
    """
    ended = 0
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_TOKEN) == token:
                process.kill()
                ended += 1
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
    return ended


papermill_engines.register(ENGINE, Engine)
