"""Build the site: ``python -m tools.site``. Every warning of Sphinx is an error.

The pages load nothing from another host: a notebook's machine may have no internet,
and a reader is nobody's business. That is checked in what was built.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path

from sphinx.cmd.build import main as sphinx

__all__ = ["build", "foreign"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "docs" / "html"

#: Elements that load what they name, and the attribute that names it.
_LOADING = {
    **dict.fromkeys(("script", "img", "iframe", "source", "embed"), "src"),
    "link": "href",
    "object": "data",
}
#: A link that a browser follows for nobody.
_INERT = {"search", "index", "next", "prev", "author", "canonical", "license"}


class _Loads(HTMLParser):
    """Collects the addresses of other hosts that a page loads something from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in _INERT:
            return
        address = values.get(_LOADING.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")):
            self.found.append(address)


def foreign(page: str) -> list[str]:
    """Return the addresses of other hosts that the HTML of `page` loads."""
    parser = _Loads()
    parser.feed(page)
    return parser.found


def build() -> int:
    """Build the pages; return 0 if they are in order."""
    status = sphinx(
        [
            *("-b", "html", "-W", "--keep-going", "-q", "-j", "auto"),
            *("-d", str(PAGES.parent / "doctrees")),
            *(str(ROOT / "docs"), str(PAGES)),
        ]
    )
    for page in PAGES.rglob("*.html"):
        for address in foreign(page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(PAGES)} loads {address}: it must not")
            status = 1
    for sheet in PAGES.rglob("*.css"):
        if "url(http" in sheet.read_text(encoding="utf-8").replace('"', ""):
            print(f"{sheet.relative_to(PAGES)} loads from another host: it must not")
            status = 1
    if status == 0:
        print(f"the site: {PAGES / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(build())
