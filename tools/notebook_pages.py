"""Notebooks as pages of the site: Markdown as it is, each code cell with its outputs.

An extension of Sphinx. The notebooks in ``docs/notebooks`` have outputs, which
`tools.notebook_outputs` has put there: nothing is executed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

from tools.execution import without_codes

__all__ = ["NotebookParser", "as_markdown", "setup"]

_HEADING = re.compile(r"^(#+) ", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
#: A link out of the notebooks' folder, which has the same depth as in the site.
_LINK_UP = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")
#: A link to a folder beside the notebooks, which is no page.
_LINK_BESIDE = re.compile(r"\[`?([\w/.]+)`?\]\((?!https?:|#)([\w/]+)\)")


class NotebookParser(MystParser):
    """Reads a notebook."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Parse the notebook's Markdown, and a block for each cell and output."""
        super().parse(as_markdown(json.loads(inputstring)), document)


def as_markdown(notebook: Mapping[str, Any]) -> str:
    """Return a notebook as Markdown of MyST."""
    parts: list[str] = []
    titles = 0
    for cell in notebook["cells"]:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            prose = _FENCED.sub("", source)
            titles += sum(found[1] == "#" for found in _HEADING.finditer(prose))
            # A page has one title: from the second one on, all are a level lower.
            parts.append(_markdown(source, shift=titles > 1))
        else:
            # By this number errors and verdicts name the cell.
            number = cell.get("execution_count") or " "
            options = {"class": "input", "caption": f"[{number}]"}
            parts.append(_block("code-block", "ipython3", source, **options))
            parts += _outputs(cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"


def _markdown(text: str, *, shift: bool) -> str:
    """Return a text cell; with `shift` its headings are one level lower."""
    kept: list[str] = _FENCED.findall(text)
    parts = _FENCED.split(text)
    changed = []
    for part in parts:
        part = _LINK_UP.sub(_up, part)
        part = _LINK_BESIDE.sub(r"`notebooks/\2`", part)
        changed.append(_HEADING.sub(r"#\1 ", part) if shift else part)
    fenced = [*kept, ""]
    return "".join(
        part + block for part, block in zip(changed, fenced, strict=True)
    ).rstrip()


def _up(link: re.Match[str]) -> str:
    """Return a link to a page of the site, or the name of another file."""
    label, path = link.groups()
    if path.startswith("docs/"):
        return f"[{label}](../{path.removeprefix('docs/')})"
    return f"`{path}`"


def _outputs(outputs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a block for each output; what was printed in a row is one."""
    printed = ""
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream":
            printed += _text(output["text"])
            continue
        if printed.strip():
            yield _output(printed)
        printed = ""
        if kind == "error":
            yield _output("\n".join(output["traceback"]), "output error")
        else:
            yield _shown(output["data"])
    if printed.strip():
        yield _output(printed)


def _output(text: str, classes: str = "output") -> str:
    """Return the block of a text as a terminal shows it: each line as it was last."""
    lines = without_codes(text).rstrip().split("\n")
    screen = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines]
    return _block("code-block", "text", "\n".join(screen), **{"class": classes})


def _shown(data: Mapping[str, Any]) -> str:
    """Return the block of what a cell displays: the richest form there is."""
    if "text/html" in data:
        html = _text(data["text/html"])
    elif "image/png" in data:
        picture = "".join(_text(data["image/png"]).split())
        alt = _text(data.get("text/plain", "the plot"))
        html = f'<img alt="{alt.strip("<>")}" src="data:image/png;base64,{picture}">'
    else:
        return _output(_text(data["text/plain"]))
    return _block("raw", "html", f'<div class="shown">\n{html}\n</div>')


def _block(directive: str, argument: str, content: str, **options: str) -> str:
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    head = [f"{fence}{{{directive}}} {argument}"]
    head += [f":{name}: {value}" for name, value in options.items()]
    return "\n".join([*head, "", content.strip("\n"), fence])


def _text(value: str | Sequence[str]) -> str:
    """Return a text of a notebook's file, which may be a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx what is here."""
    app.setup_extension("myst_parser")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
