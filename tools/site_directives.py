"""What Sphinx needs beyond its own: pages made from the code, links out of the docs.

``magics``, ``command-line`` and ``run`` are directives which write a whole reference:
the options of the magics are declared once, in `magics.language.commands`.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from rankscope import __main__ as command_line
from rankscope import run
from rankscope.magics.language import commands
from rankscope.magics.language.options import Command

__all__ = [
    "Magics",
    "pages_as_links",
    "parameters_as_code",
    "setup",
    "without_outer_links",
]

#: A link to a file of the repository that is no page of the site.
_OUTER_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")
#: A notebook is one: it is there with its outputs.
_NOTEBOOK = re.compile(r"notebooks/\w+\.ipynb")


def without_outer_links(text: str, page: str) -> str:
    """Return the text of `page`, its links out of `docs/` as the paths of the files."""

    def said(link: re.Match[str]) -> str:
        up = link[2].count("../")
        if up <= page.count("/"):
            return link[0]
        path = link[2].replace("../", "")
        if _NOTEBOOK.fullmatch(path):
            return f"[{link[1]}]({'../' * page.count('/')}{path})"
        known = link[1].strip("`") in (path, Path(path).name)
        return f"`{path}`" if known else f"{link[1]} (`{path}`)"

    return _OUTER_LINK.sub(said, text)


class _Reference(SphinxDirective):
    """A section for each of several commands."""

    def _made_from(self, *modules: Any) -> None:
        """Have the page made again when one of `modules`, or this one, changes."""
        for path in (__file__, *(module.__file__ for module in modules)):
            self.env.note_dependency(path)

    def _section(self, title: str, *body: nodes.Node) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(title)], names=[title])
        section += nodes.title(title, "", nodes.literal(title, title))
        section.extend(body)
        self.state.document.note_explicit_target(section)
        return section

    def _code(self, text: str, language: str = "text") -> nodes.literal_block:
        return nodes.literal_block(text, text, language=language)


class Magics(_Reference):
    """The magics: synopsis, options, example, and the same in Python."""

    def run(self) -> list[nodes.Node]:
        self._made_from(commands)
        return [self._of(command) for command in commands.COMMANDS.values()]

    def _of(self, command: Command) -> nodes.section:
        summary = " ".join(command.summary.split())
        return self._section(
            command.title,
            nodes.paragraph(summary, summary),
            self._code(textwrap.fill(command.usage(), 84, subsequent_indent=" " * 4)),
            _table(_rows(command)),
            nodes.rubric("", "Example"),
            self._code(command.example),
            nodes.rubric("", "In Python"),
            self._code(command.python),
        )


class CommandLine(_Reference):
    """The commands of ``rankscope``, as their ``--help`` describes them."""

    def run(self) -> list[nodes.Node]:
        self._made_from(command_line)
        parser = command_line.command_parser()
        (actions,) = (
            action
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        return [
            self._section(f"rankscope {name}", self._code(_help(command)))
            for name, command in actions.choices.items()
        ]


class Run(_Reference):
    """The launcher of scripts, as its ``--help`` describes it."""

    def run(self) -> list[nodes.Node]:
        self._made_from(run)
        return [self._code(_help(run.command_parser()))]


def _help(parser: argparse.ArgumentParser) -> str:
    # As wide as a page of the site, whatever the terminal of the build is.
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, width=80
    )
    return parser.format_help()


def _rows(command: Command) -> Iterator[tuple[str, str]]:
    if command.parameter is not None:
        yield command.parameter.metavar, command.parameter.help
    for option in command.all_options:
        yield ", ".join(option.flags) + option.value_synopsis, option.help


def _table(rows: Iterable[tuple[str, str]]) -> nodes.table:
    """Return a table of two columns: what is typed, and what it does."""
    body = nodes.tbody()
    for typed, does in rows:
        row = nodes.row()
        for cell in (nodes.literal(typed, typed), nodes.inline(does, does)):
            row += nodes.entry("", nodes.paragraph("", "", cell))
        body += row
    group = nodes.tgroup("", cols=2)
    group += [nodes.colspec(colwidth=30), nodes.colspec(colwidth=70), body]
    return nodes.table("", group, classes=["options"])


def parameters_as_code(lines: list[str], documented: object) -> None:
    """Make the names of parameters in a docstring code, in place.

    ``group`` in single backticks is the parameter, and would be a link to
    `rankscope.group`, the class.
    """
    try:
        names = inspect.signature(documented).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return  # no callable, or none with a signature
    for number, line in enumerate(lines):
        lines[number] = re.sub(
            r"(?<![`:])`(\w+)`(?!`)",
            lambda one: f"``{one[1]}``" if one[1] in names else one[0],
            line,
        )


def pages_as_links(lines: list[str]) -> None:
    """Make the pages that a docstring names by their files links, in place."""
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"``docs/(\w+)\.md``", r":doc:`/\1`", line)


def _docstring(
    app: Sphinx, what: str, name: str, documented: object, options: Any, lines: Any
) -> None:
    parameters_as_code(lines, documented)
    pages_as_links(lines)


def _signature(
    app: Sphinx,
    what: str,
    name: str,
    documented: object,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Show a default that is a factory as an empty list, and a lambda as dots."""
    if signature is not None:
        signature = signature.replace("<factory>", "[]").replace("lambda : ...", "...")
    return signature, returned


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = without_outer_links(source[0], page)


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx what is here."""
    app.add_directive("magics", Magics)
    app.add_directive("command-line", CommandLine)
    app.add_directive("run", Run)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
