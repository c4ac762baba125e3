"""The board's code in the page: the ES modules in page/, put into one.

The front end loads a widget's module from a string, in which no other file can be
imported. The string holds the sources of all modules as they are, makes a URL of each,
and imports entry.js. So every module keeps its own scope, and a stack trace in the
browser names its file and line.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["FOLDER", "link", "module", "styles"]

#: Where the modules are.
FOLDER = Path(__file__).parent / "page"


_IMPORT = re.compile(
    r'^(?:import|export)\s(?:[\w\s{},*]*\sfrom\s)?"([^"]*)"', re.MULTILINE
)

# An import can name a blob alone whose URL is known, so that the order is that of the
# imports. Where a widget is loaded from a string, blobs may be imported.
_LOADER = """\
const urls = new Map();
for (const [name, imports, source] of modules) {
  const linked = imports.reduce(
    (text, other) => text.replaceAll(`"./${other}"`, `"${urls.get(other)}"`),
    source,
  );
  const parts = [linked, `\\n//# sourceURL=rankscope/board/${name}\\n`];
  urls.set(name, URL.createObjectURL(new Blob(parts, { type: "text/javascript" })));
}
const { default: widget } = await import([...urls.values()].at(-1));
for (const url of urls.values()) URL.revokeObjectURL(url);
export default widget;
"""


@functools.cache
def module() -> str:
    """Return the source of the widget's ES module."""
    sources = {
        path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")
    }
    return link(sources, "entry.js")


@functools.cache
def styles() -> str:
    """Return the styles of the board, for its shadow root."""
    return (FOLDER / "board.css").read_text(encoding="utf-8")


def link(sources: Mapping[str, str], entry: str) -> str:
    """Return the source of one ES module with the default export of `entry`.

    `sources` maps names of files in one folder to their sources. Only modules that
    `entry` needs are in the result, each behind those that it imports.
    """
    modules: dict[str, tuple[list[str], str]] = {}

    def add(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"modules import each other: {' → '.join((*path, name))}")
        if name in modules:
            return
        imports = []
        for found in _IMPORT.findall(sources[name]):
            other = found.removeprefix("./")
            if found != f"./{other}" or other not in sources:
                raise ValueError(f'{name} imports "{found}", which is not there')
            add(other, (*path, name))
            imports.append(other)
        modules[name] = imports, sources[name]

    add(entry, ())
    listed = [(name, *module) for name, module in modules.items()]
    return f"const modules = {json.dumps(listed)};\n{_LOADER}"
