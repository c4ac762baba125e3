"""LineBuffer: complete lines of a stream that arrives in pieces."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Line", "LineBuffer"]

_CONTROL = re.compile(r"[\r\b\x1b]")
_TOKEN = re.compile(r"\x1b\[[0-9;?]*[@-~]|[^\x1b\r\b]+|.", re.DOTALL)
_CUT_OFF = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Line(NamedTuple):
    """A complete line, without its newline."""

    text: str
    #: Whether text of it was written over, as a progress bar does.
    rewritten: bool = False


class LineBuffer:
    """Collects one stream of one rank; returns lines when they are complete."""

    __slots__ = ("_line", "_split")

    def __init__(self) -> None:
        self._line = _TerminalLine()
        # The start of an escape sequence whose end has not arrived yet.
        self._split = ""

    @property
    def partial(self) -> str:
        """The unfinished line as a terminal would show it now."""
        return self._line.text

    def feed(self, text: str) -> list[Line]:
        text = self._split + text
        cut = _CUT_OFF.search(text)
        self._split = cut[0] if cut else ""
        *complete, last = text[: len(text) - len(self._split)].split("\n")
        lines = []
        for piece in complete:
            if not self._line and _CONTROL.search(piece) is None:
                lines.append(Line(piece))
                continue
            self._line.write(piece)
            lines.append(self._line.as_line)
            self._line = _TerminalLine()
        self._line.write(last)
        return lines

    def flush(self) -> list[Line]:
        """Return the unfinished line, if there is one, as a complete one."""
        rest = self._line.as_line
        self._line, self._split = _TerminalLine(), ""
        return [rest] if rest.text else []


class _TerminalLine:
    """One line of a terminal: cells, a column, and the colour codes in between."""

    __slots__ = ("_cells", "_codes", "_column", "_rewritten")

    def __init__(self) -> None:
        self._cells: list[str] = []
        self._column = 0
        self._codes = ""  # colour codes that the next character will carry
        self._rewritten = False

    def __bool__(self) -> bool:
        return bool(self._cells or self._codes)

    @property
    def text(self) -> str:
        shown = "".join(self._cells)
        # Colour codes without text are dropped; after text they end its colour.
        return shown + self._codes if shown else ""

    @property
    def as_line(self) -> Line:
        return Line(self.text, self._rewritten)

    def write(self, text: str) -> None:
        for token in _TOKEN.findall(text):
            if token == "\r":
                self._column = 0
            elif token == "\b":
                self._column = max(0, self._column - 1)
            elif token[0] != "\x1b":
                self._put(token)
            elif token.endswith("m"):
                self._codes += token
            elif token.endswith("K"):
                self._erase(token[2:-1])
            # Other sequences (moves to other lines, the bell) are dropped.

    def _put(self, text: str) -> None:
        if self._column > len(self._cells):
            self._cells += " " * (self._column - len(self._cells))
        self._rewritten |= self._column < len(self._cells)
        self._cells[self._column : self._column + len(text)] = text
        if self._codes:
            self._cells[self._column] = self._codes + self._cells[self._column]
            self._codes = ""
        self._column += len(text)

    def _erase(self, mode: str) -> None:
        self._rewritten |= bool(self._cells)
        if mode == "2":
            self._cells.clear()
        elif mode == "1":
            self._cells[: self._column] = " " * min(self._column, len(self._cells))
        else:
            del self._cells[self._column :]
