"""The site: every public name on one page, code blocks that run, nothing from afar."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope import engines, magics
from rankscope.backends.conformance.ranks import run_ranks
from rankscope.backends.groups.world import world
from rankscope.backends.interface.registry import builtin_devices
from rankscope.magics.language.commands import COMMANDS
from tests.page_programs import PROGRAMS, left_in_x
from tests.public_names import exported
from tools.site import foreign
from tools.site_directives import (
    pages_as_links,
    parameters_as_code,
    without_outer_links,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    """Return the code of a page in one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_every_public_name_stands_on_one_page() -> None:
    named: Counter[str] = Counter()
    for page in REFERENCE:
        text = page.read_text(encoding="utf-8")
        # What is there a second time has no entry in the index.
        again = re.findall(r"autoclass:: (\w+)\n   :noindex:", text)
        named.update(re.findall(r"auto(?:function|class):: (\w+)", text))
        named.subtract(again)
    assert named == Counter(list(exported()))


@pytest.mark.parametrize("page", ["cluster", "work"])
def test_the_trees_of_the_errors_are_those_of_the_classes(page: str) -> None:
    (tree,) = blocks(DOCS / "reference" / f"{page}.md", "text")
    places = (dist, engines, magics, builtins)
    above: list[type[BaseException]] = []
    for indent, name in re.findall(r"^([│├└─ ]*)(\w+)", tree, re.MULTILINE):
        error = next(getattr(one, name) for one in places if hasattr(one, name))
        depth = len(indent) // 4
        assert len(above) >= depth
        assert depth == 0 or issubclass(error, above[depth - 1])
        above[depth:] = [error]


def test_every_page_is_in_a_list_of_contents() -> None:
    listed = set[str]()
    for contents in blocks(DOCS / "index.md", "{toctree}"):
        listed |= set(re.findall(r"^[a-z][\w/-]*$", contents, re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert listed == pages - {"index"}


def test_links_out_of_the_docs_become_paths() -> None:
    text = "[07_ddp.ipynb](../notebooks/07_ddp.ipynb), [it](../x.md), [on](b.md#c)"
    assert without_outer_links(text, "torch") == (
        "[07_ddp.ipynb](notebooks/07_ddp.ipynb), it (`x.md`), [on](b.md#c)"
    )
    deeper = "[it](../../notebooks/07_ddp.ipynb)"
    assert without_outer_links(deeper, "reference/ops") == (
        "[it](../notebooks/07_ddp.ipynb)"
    )
    inside = "[all](../backends.md), [it](../../README.md)"
    assert without_outer_links(inside, "reference/ops") == (
        "[all](../backends.md), it (`README.md`)"
    )


def test_a_parameter_is_no_link_to_what_has_its_name() -> None:
    lines = ["The ranks of `group` meet; see `Work`, ``group``, :obj:`group`."]
    expected = ["The ranks of ``group`` meet; see `Work`, ``group``, :obj:`group`."]
    parameters_as_code(lines, dist.barrier)
    assert lines == expected
    # These have no signature.
    parameters_as_code(lines, 1)
    assert lines == expected


def test_a_page_that_a_docstring_names_is_a_link() -> None:
    lines = ["The tables of ``docs/backends.md``; ``docs/a.png``, ``README.md``."]
    pages_as_links(lines)
    expected = ["The tables of :doc:`/backends`; ``docs/a.png``, ``README.md``."]
    assert lines == expected


@pytest.mark.processes
@pytest.mark.parametrize(("expected", "torch", "ours"), PROGRAMS)
def test_the_programs_beside_those_of_torch_run(
    expected: list[list[float]], torch: str, ours: str
) -> None:
    assert "import torch\n" in torch
    assert run_ranks(2, left_in_x, ours) == expected


def test_the_architecture_names_what_is_there() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    pictures = "".join(
        (DOCS / "_static" / name).read_text(encoding="utf-8")
        for name in re.findall(r":file: _static/(\S+)", text)
    )
    rooms = ("backends", "engines", "magics", "widgets")
    code = "".join(
        path.read_text(encoding="utf-8")
        for room in rooms
        for path in (DOCS.parent / room).rglob("*.py")
    )
    threads = set(re.findall(r"\brankscope-[a-z-]+", text + pictures))
    assert len(threads) > 5
    # Most are started by `start_thread`, which adds the first word.
    given = {name: f'start_thread("{name[len("rankscope-") :]}"' for name in threads}
    assert not [
        name for name in threads if f'"{name}"' not in code and given[name] not in code
    ]
    for path in re.findall(r"`([a-z_]+(?:/[a-z_.]*)+)`", text):
        places = (DOCS.parent / path, DOCS.parent / "backends" / path)
        assert any(place.exists() for place in places), path


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://cdn.test/x.js"></script>', ["https://cdn.test/x.js"]),
        ('<link rel="stylesheet" href="//cdn.test/x.css">', ["//cdn.test/x.css"]),
        ('<img src="_images/board.png"><a href="https://other.test">there</a>', []),
        ('<link rel="search" href="https://other.test">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page: str, found: list[str]) -> None:
    assert foreign(page) == found


def test_the_backend_of_the_page_is_one() -> None:
    (code,) = blocks(DOCS / "reference" / "writing_a_backend.md", "python")
    try:
        exec(code, {"__name__": "the_page"})
        dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
        work = dist.barrier(async_op=True)
        assert work is not None
        assert work.wait(10)
        with pytest.raises(NotImplementedError, match="does not implement all_reduce"):
            dist.all_reduce(np.ones(2))
    finally:
        if world.default is not None:
            world.destroy()
        for name in {*dist.Backend.registry} - {*builtin_devices()}:
            del dist.Backend.registry[name]


def test_the_overview_has_each_magic() -> None:
    text = (DOCS / "in_a_notebook.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if not re.search(rf"`%+{name}\b", text)]


def test_the_magics_and_options_that_pages_name_are_there() -> None:
    named = [
        (page, *line)
        for page in sorted(DOCS.rglob("*.md"))
        for line in re.findall(
            r"^(?:.*`)?%{1,2}(dist_\w+)([^`\n#]*)(?:`|$|\s#)",
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ]
    assert len(named) > 30
    for page, magic, arguments in named:
        assert magic in COMMANDS, f"{page.name}: %{magic}"
        # What stands in quotes is for another program.
        own = re.sub(r'"[^"]*"', "", arguments)
        for flag in re.findall(r"(?<!\S)--?[a-z][a-z-]*", own):
            assert COMMANDS[magic].option(flag), f"{page.name}: %{magic} {flag}"
