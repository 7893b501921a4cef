"""An executed notebook as one offline HTML page.

nbconvert's own HTML templates load scripts from public CDNs, so a page is blank behind a proxy. The template
in nbtemplate/ has none, shows formulas as their source, and turns outside links into text.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from kdtree.report.html import MAX_PAGE, TEMPLATES
from kdtree.report.offline import strip_external

NBTEMPLATES = Path(__file__).parent / "nbtemplate"
_KEPT_TEXT = 4000  # characters of an output that is cut to make a page fit


def _exporter() -> Any:
    import nbconvert
    from nbconvert import HTMLExporter

    # nbconvert looks for its own templates below sys.prefix, which is not where `pip install --target` puts them.
    beside = Path(nbconvert.__file__).parent.parent / "share" / "jupyter" / "nbconvert" / "templates"
    more = [str(beside)] if beside.is_dir() else []
    exporter = HTMLExporter(
        template_name="kdtree",
        extra_template_basedirs=[str(NBTEMPLATES), *more],
        extra_template_paths=more,
    )
    exporter.register_filter("offline", strip_external)
    return exporter


def _style() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    own = (NBTEMPLATES / "kdtree" / "notebook.css").read_text(encoding="utf-8")
    return f"{css}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"


def convert(notebook: Path, target: Path, *, title: str, status: str, reason: str | None) -> None:
    """Write the page of the executed `notebook` to `target`, below 4 MiB.

    Outputs too large for that are cut, and the page says so. A notebook that cannot be read gets a page that
    says that. `status` and `reason` stand at the top.
    """
    import nbformat

    try:
        nb = nbformat.read(notebook, as_version=4)
    except Exception as exc:
        nb = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_markdown_cell(f"The notebook cannot be read: {type(exc).__name__}.")]
        )
    exporter = _exporter()
    extra = {"title": title, "status": status, "reason": reason, "style": _style(), "file": notebook.name}
    html = ""
    for limit in (None, 512 * 1024, 64 * 1024, 4 * 1024):
        html, _ = exporter.from_notebook_node(_within(nb, limit), resources={"kdtree": extra})
        if len(html.encode()) < MAX_PAGE:
            break
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")


def _within(nb: Any, limit: int | None) -> Any:
    """A copy of `nb` in which no output is larger than `limit` characters."""
    nb = copy.deepcopy(nb)
    if limit is None:
        return nb
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if "text" in output and len(output.text) > limit:
                output.text = output.text[: min(limit, _KEPT_TEXT)] + "\n… the rest is in the notebook"
            for mime, data in list(output.get("data", {}).items()):
                if len(str(data)) > limit:
                    del output.data[mime]
                    output.data["text/plain"] = (
                        f"[{mime} of {len(str(data)) // 1024} KiB left out; it is in the notebook]"
                    )
    return nb
