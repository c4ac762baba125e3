"""The code blocks of the README and of the pages in ``docs/``, and what each is for.

A comment right above a block says what a reader knows and a test does not::

    <!-- not run here: needs a GPU -->   one of `REASONS`
    <!-- needs PyTorch -->               run by make test-torch alone
    <!-- hangs -->                       a cell that ends by what the page does next
    <!-- the cell ends -->               what that cell prints in the end
    <!-- continues hello.py -->          lines for the end of a program of the page
    <!-- from backends/work/work.py -->  lines of that file; ``...`` leaves some out
    <!-- in any order -->                the lines of an output may come in any order

A block of text right below one that is run is its output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "NEEDS_TORCH",
    "REASONS",
    "ROOT",
    "Block",
    "all_pages",
    "blocks_in",
    "blocks_of",
    "matches",
]

ROOT = Path(__file__).resolve().parents[2]

#: Why a block is not run.
REASONS = frozenset(
    {
        "needs a GPU",
        "needs a package index",
        "needs a backend of yours",
        "needs the files of a dead job",
        "needs Colab",
        "needs a script under torchrun",
        "needs several hosts",
        "needs Slurm",
    }
)

#: The note above a block that only an environment with PyTorch runs.
NEEDS_TORCH = "needs PyTorch"

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n\s*?)?"
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=fence)[^\S\n]*$",
    re.DOTALL | re.MULTILINE,
)
_NOTE = re.compile(
    r"<!-- (not run here|needs PyTorch|hangs|the cell ends|continues|from|in any order)"
)
_MAGIC = re.compile(r"^(?:\w+ = )?%{1,2}\w", re.MULTILINE)
_FILE = re.compile(r"(?:#|//) ((?:[\w-]+/)*[\w-]+\.\w+)\n")

_COMMANDS = frozenset({"bash", "console", "sh", "shell"})
_PROGRAMS = frozenset({"python", "py", "ipython", "ipython3"})


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: str
    line: int
    language: str
    code: str
    note: str = ""
    below: bool = False
    """Only empty lines are between it and a block above that is run."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        """``cell``, ``file``, ``program``, ``commands``, ``output`` or nothing.

        One that is ``quoted`` is compared with its file.
        """
        if self.note.startswith("from "):
            return "quoted"
        if self.language in {"", "text", *_PROGRAMS} and _MAGIC.match(self.code):
            return "cell"
        if self.language != "text" and _FILE.match(self.code):
            return "file"
        if self.language in _COMMANDS:
            return "commands"
        if self.language in _PROGRAMS:
            return "program"
        shown = self.below or self.note == "the cell ends"
        return "output" if shown and self.language == "text" else ""

    @property
    def file(self) -> str:
        """The path of a block of kind ``file``."""
        found = _FILE.match(self.code)
        assert found, self
        return found[1]

    @property
    def not_run(self) -> str:
        """Why it is not run, or nothing."""
        return self.note.partition("not run here: ")[2]


def all_pages() -> list[str]:
    """Return the pages with code: all but those that are made of notebooks."""
    found = ["README.md"]
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = str(path.relative_to(ROOT))
        if not page.startswith("docs/notebooks/"):
            found.append(page)
    return [page for page in found if any(block.kind for block in blocks_of(page))]


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    return blocks_in((ROOT / page).read_text(encoding="utf-8"), page)


def blocks_in(text: str, page: str = "a page") -> list[Block]:
    """Return the blocks of the text of a page, in order."""
    blocks = list(_parse(page, text))
    noted = sum(bool(_NOTE.match(f"<!-- {block.note}")) for block in blocks)
    assert noted == len(_NOTE.findall(text)), f"{page}: a note that is above no block"
    for block in blocks:
        assert not block.not_run or block.not_run in REASONS, f"{block}: {block.note}"
    return blocks


def _parse(page: str, text: str) -> Iterator[Block]:
    end, running = 0, False
    for found in _BLOCK.finditer(text):
        block = Block(
            page,
            text.count("\n", 0, found.start("fence")) + 1,
            found["language"].strip(),
            found["code"],
            found["note"] or "",
            below=running and not text[end : found.start()].strip(),
        )
        end = found.end()
        running = block.kind in ("cell", "program", "commands")
        yield block


#: What differs from run to run: a time, a size, an address, a process, a cell.
_VARIES = [
    r"\d+(?:\.\d+)? ?(?:ns|µs|ms|s|min|h)\b",
    r"\d+(?:\.\d+)? ?[kMG]i?B(?:/s)?",
    r"\d\d:\d\d:\d\d",
    r"0x[0-9a-f]+",
    r"127\.0\.0\.1:\d+",
    r"pid \d+",
    r"cell \d+",
    r"cluster rankscope-[0-9a-f]+",
    r"(?:\.\.\.|…)",
]
_SPACE = re.compile(r"[^\S\n]+")


def matches(expected: str, output: str, *, in_any_order: bool = False) -> bool:
    """Whether `output` has the lines of `expected`, one below the other.

    Times, sizes, addresses and the numbers of processes and cells may differ;
    ``…`` is any text, on a line of its own any lines; a space may be the end of a line.
    """
    if not expected:
        return True
    if in_any_order:
        return all(matches(line, output) for line in expected.splitlines())
    pattern = "".join(_pattern_of(_SPACE.sub(" ", expected.rstrip())))
    lines = [_SPACE.sub(" ", line.rstrip()) for line in output.splitlines()]
    return re.search(f"^{pattern}$", "\n".join(lines), re.MULTILINE) is not None


def _pattern_of(expected: str) -> Iterator[str]:
    end = 0
    for found in re.finditer("|".join(f"(?:{one})" for one in _VARIES), expected):
        yield _wrapped(expected[end : found.start()])
        yield next(_masked(one) for one in _VARIES if re.fullmatch(one, found[0]))
        end = found.end()
    yield _wrapped(expected[end:])


def _wrapped(literal: str) -> str:
    """Return the pattern of a text in which any space may be the end of a line."""
    return re.escape(literal).replace(r"\ ", "[ \\n]")


def _masked(one: str) -> str:
    return r"[\s\S]*?" if "…" in one else f"(?:{one})"
