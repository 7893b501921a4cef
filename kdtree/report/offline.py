"""Keep a page readable without a network: find what a browser would fetch, and take it out."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

_FETCHING = {
    "src",
    "href",
    "srcset",
    "poster",
    "data",
    "action",
    "formaction",
    "background",
    "xlink:href",
    "ping",
}
_EXTERNAL = re.compile(r"^\s*(?:(?:https?|ftp|wss?):)?//", re.IGNORECASE)
_CSS_URL = re.compile(r"url\(\s*['\"]?\s*((?:https?:)?//[^'\")\s]*)", re.IGNORECASE)
_CSS_IMPORT = re.compile(r"@import\s+['\"]?\s*((?:https?:)?//[^'\";\s]*)", re.IGNORECASE)

# Elements that run code or load another document; their content goes too.
_DROPPED = {"script", "iframe", "object", "embed", "applet"}
_DROPPED_VOID = {"link", "base", "meta"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


def _leaves(name: str, value: str) -> bool:
    """True when attribute `name` with `value` fetches from elsewhere or runs code."""
    parts = re.split(r",\s+", value) if name == "srcset" else [value]
    return any(_EXTERNAL.match(part) for part in parts) or value.strip().lower().startswith("javascript:")


def _css_urls(css: str) -> list[str]:
    return _CSS_URL.findall(css) + _CSS_IMPORT.findall(css)


class _Finder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.urls: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        for name, value in attrs:
            if value is None:
                continue
            if name in _FETCHING:
                urls = re.split(r",\s+", value) if name == "srcset" else [value]  # data: URIs hold commas, not ", "
                self.urls += [u.strip() for u in urls if _EXTERNAL.match(u)]
            elif name == "style":
                self.urls += _css_urls(value)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.urls += _css_urls(data)


def find_external_urls(page: str) -> list[str]:
    """Every URL in `page` (HTML) that leaves it: http(s):// or // in src=, href= and such, url(), @import.

    Hyperlinks count too. Text that merely mentions a URL does not.
    """
    finder = _Finder()
    finder.feed(page)
    finder.close()
    return finder.urls


class _Stripper(HTMLParser):
    """Re-emits a fragment without what `find_external_urls` finds and without scripts."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.out: list[str] = []
        self._skipping = 0
        self._style = False
        self._anchors: list[str | None] = []  # per open <a>: the URL to print after it, or None

    def _attrs(self, attrs: list[tuple[str, str | None]]) -> str:
        kept = []
        for name, value in attrs:
            if name.startswith("on"):
                continue
            if value is not None and name in _FETCHING and _leaves(name, value):
                continue
            if name == "style" and value and _css_urls(value):
                continue
            kept.append(f" {name}" if value is None else f' {name}="{html.escape(value)}"')
        return "".join(kept)

    def _start(self, tag: str, attrs: list[tuple[str, str | None]], close: str) -> None:
        if tag in _DROPPED:
            self._skipping += not close and tag not in _VOID
            return
        if self._skipping or tag in _DROPPED_VOID:
            return
        values = dict(attrs)
        target = values.get("src") or values.get("href") or ""
        if tag == "img" and _EXTERNAL.match(target):
            alt = html.escape(values.get("alt") or "no description")
            self.out.append(f'<span class="ext">[image not shown offline: {alt}]</span>')
            return
        if tag == "a" and not close:
            external = _EXTERNAL.match(target)
            self._anchors.append(target.strip() if external else None)
            if external:
                self.out.append('<span class="ext">')
                return
        self._style = tag == "style"
        self.out.append(f"<{tag}{self._attrs(attrs)}{close}>")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._start(tag, attrs, "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._start(tag, attrs, "/")

    def handle_endtag(self, tag: str) -> None:
        if tag in _DROPPED:
            self._skipping = max(0, self._skipping - (tag not in _VOID))
            return
        if self._skipping or tag in _DROPPED_VOID:
            return
        if tag == "style":
            self._style = False
        if tag == "a" and self._anchors and (url := self._anchors.pop()) is not None:
            self.out.append(f'</span> <span class="ext-url">({html.escape(url)})</span>')
            return
        self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if self._skipping:
            return
        if self._style:
            data = _CSS_IMPORT.sub("", _CSS_URL.sub("url(", data))
        self.out.append(data)

    def handle_entityref(self, name: str) -> None:
        if not self._skipping:
            self.out.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        if not self._skipping:
            self.out.append(f"&#{name};")


def strip_external(fragment: str) -> str:
    """The HTML `fragment` without scripts, frames or anything fetched from elsewhere.

    An external hyperlink becomes its text followed by the URL in parentheses, an external image its alt text.
    """
    stripper = _Stripper()
    stripper.feed(fragment)
    stripper.close()
    return "".join(stripper.out)
