"""The board's page side: one ES module, put together from the files in page/.

A widget's module is loaded from a string and cannot import its neighbours, so
the files share one scope; none of them is compiled or changed.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

__all__ = ["FILES", "module"]

#: In this order; the last one has the export.
FILES = (
    "text.js",
    "store.js",
    "table.js",
    "draw.js",
    "timeline.js",
    "actions.js",
    "board.js",
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
