"""Take this machine's absolute paths out of what a report keeps.

Reports are committed and compared across hosts, so they name `<run>`, `<repo>`, `<home>` and `<python>`
instead of where those happen to be.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Payloads in which a short path could occur by chance.
_OPAQUE_MIME = ("image/png", "image/jpeg", "image/gif", "application/pdf")
# The file name that ipykernel invents for a cell, as seen in warnings and tracebacks.
_KERNEL_FILE = re.compile(r"/[\w./-]*ipykernel_\d+/\d+\.py")
_ANSI = r"\x1b\[[0-9;]*m"


class Scrubber:
    """Replaces absolute paths in strings, and in the strings of nested lists and dicts.

    `paths` maps a label to a path, e.g. ``{"run": run_dir}``; longer paths are replaced first, so a run
    directory inside the repository becomes ``<run>`` and not ``<repo>/...``.
    """

    def __init__(self, paths: Mapping[str, str | Path]) -> None:
        labels: dict[str, str] = {}
        for label, path in paths.items():
            for form in (Path(path).absolute(), Path(path).resolve()):
                if len(form.parts) > 1:  # never "/"
                    labels.setdefault(str(form), f"<{label}>")
        home = str(Path.home())
        for form, label in list(labels.items()):
            if form.startswith(home + "/"):  # IPython writes paths below the home directory as ~/...
                labels.setdefault("~" + form[len(home) :], label)
        self._labels = labels
        ordered = "|".join(re.escape(p) for p in sorted(labels, key=len, reverse=True))
        # A path starts where no other path component precedes it (a colour code may) and ends at a boundary.
        self._pattern = (
            re.compile(rf"(?P<pre>{_ANSI}|(?<![\w.~-]))(?P<path>{ordered})(?![\w-]|\.\w)") if ordered else None
        )

    def text(self, text: str) -> str:
        """`text` with every known path replaced by its label."""
        text = _KERNEL_FILE.sub("<cell>", text)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda m: m["pre"] + self._labels[m["path"]], text)

    def value(self, value: Any) -> Any:
        """A copy of `value` (str, list, dict or scalar) with `text` applied to each string in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list | tuple):
            return [self.value(v) for v in value]
        if isinstance(value, Mapping):
            return {k: v if k in _OPAQUE_MIME else self.value(v) for k, v in value.items()}
        return value

    def clean(self, text: str) -> bool:
        """True when no known path is left in `text`."""
        return self.text(text) == text


def for_run(run_dir: Path, repo: Path) -> Scrubber:
    """The scrubber of one run: its directory, the repository, this Python, and the home directory."""
    return Scrubber(
        {
            "run": run_dir,
            "repo": repo,
            "python": sys.prefix,
            "base-python": sys.base_prefix,
            "home": Path.home(),
        }
    )
