"""The board's code in the page: one ES module, concatenated from the files in page/.

The module of a widget is loaded from a string and cannot import other files, so all
files share one scope. None of them is compiled or changed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

__all__ = ["FILES", "module"]

#: In this order; the last one has the export.
FILES = (
    "text.js",
    "host.js",
    "connection.js",
    "store.js",
    "table.js",
    "works.js",
    "draw.js",
    "timeline.js",
    "stacks.js",
    "actions.js",
    "board.js",
    "bar.js",
    "entry.js",
)

_FOLDER = Path(__file__).parent / "page"


@functools.cache
def module() -> str:
    """Return the source of the ES module, styles included."""
    styles = (_FOLDER / "board.css").read_text(encoding="utf-8")
    parts = [f"const CSS = {json.dumps(styles)};"]
    parts += [(_FOLDER / name).read_text(encoding="utf-8") for name in FILES]
    return "\n".join(parts)
