"""What a page that is not trusted shows of an output: its words, as in JupyterLab.

It drops marks that it does not know, scripts, style sheets, and attributes without a
value; the text of an SVG stays.
"""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["words"]

_WITHOUT_TEXT = {"script", "style", "option"}
#: They have no end.
_VOID = {"br", "img", "input", "hr", "i"}


class _Page(HTMLParser):
    """Collects the words that are not hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, bool]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        hides = tag in _WITHOUT_TEXT or bool(dict(attrs).get("hidden"))
        if tag not in _VOID:
            self.open.append((tag, hides))

    def handle_endtag(self, tag: str) -> None:
        while tag not in _VOID and self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not any(hides for _, hides in self.open):
            self.words += data.split()


def words(html: str) -> str:
    """Return the words of an output where the page is not trusted."""
    page = _Page()
    page.feed(html)
    page.close()
    return " ".join(page.words)
