"""Command lines of the magics: one declaration gives parser, usage, help, completion.

`argparse` is not used: its messages differ between Python versions, it prints
and exits on its own, and it offers no completions.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from IPython.core.error import UsageError

from rankscope.backends.did_you_mean import did_you_mean

__all__ = ["Command", "Option", "Parameter", "Values"]

Values = dict[str, Any]

#: The longest synopsis that an error shows, in characters.
SYNOPSIS = 110

#: What is quoted or escaped, a stretch of blanks, or a character.
_PART = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.)|\s+|.""", re.DOTALL)


def _without_comment(line: str) -> str:
    """Return `line` up to a ``#`` that begins a word, as a shell reads it."""
    before = " "
    for part in _PART.finditer(line):
        if part[0] == "#" and before.isspace():
            return line[: part.start()]
        before = part[0]
    return line


@dataclass(frozen=True)
class Option:
    """An option of a command; without a `metavar` it is a switch.

    `parse` turns its text into a value and raises `ValueError` with the
    reason. `kind` names what completion offers for the value.
    """

    name: str
    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] = str
    kind: str | None = None
    #: The value where the command line has the flag alone; ``None``: it needs a text.
    implied: Any = None
    #: What other launchers call it: such a flag is refused with this one's name.
    elsewhere: tuple[str, ...] = ()

    @property
    def synopsis(self) -> str:
        return f"{self.flags[0]}{self.value_synopsis}"

    @property
    def value_synopsis(self) -> str:
        """The value, with a blank before it; empty for a switch."""
        if self.metavar is None:
            return ""
        return f" {self.metavar}" if self.implied is None else f" [{self.metavar}]"


@dataclass(frozen=True)
class Parameter:
    """A positional argument; `arity` is ``"1"``, ``"?"``, ``"*"`` or ``"+"``."""

    name: str
    metavar: str
    arity: str
    help: str
    kind: str | None = None

    @property
    def synopsis(self) -> str:
        if self.arity == "1":
            return self.metavar
        if self.arity == "+":
            return f"{self.metavar} [{self.metavar} …]"
        return f"[{self.metavar}]" if self.arity == "?" else f"[{self.metavar} …]"


_HELP = Option("help", ("-h", "--help"), "show this text")


@dataclass(frozen=True)
class Command:
    """The options and the parameter of one magic, and its help text."""

    name: str
    summary: str
    example: str
    #: The same in Python.
    python: str
    options: tuple[Option, ...] = ()
    parameter: Parameter | None = None
    cell: bool = False
    #: The option that a text without a flag is taken for, in the refusal of it.
    meant: str = ""

    @property
    def title(self) -> str:
        return f"%%{self.name}" if self.cell else f"%{self.name}"

    @property
    def all_options(self) -> tuple[Option, ...]:
        return (*self.options, _HELP)

    def option(self, flag: str) -> Option | None:
        return next((o for o in self.all_options if flag in o.flags), None)

    # -- text ---------------------------------------------------------------

    def usage(self) -> str:
        parts = [self.title, *(f"[{option.synopsis}]" for option in self.options)]
        if self.parameter is not None:
            parts.insert(1, self.parameter.synopsis)
        return " ".join(parts)

    def help(self) -> str:
        """Return the help text: synopsis, options, example, the same in Python."""
        rows = (
            []
            if self.parameter is None
            else [(self.parameter.metavar, self.parameter.help)]
        )
        for option in self.all_options:
            flags = ", ".join(option.flags) + option.value_synopsis
            rows.append((flags, option.help))
        width = max(len(left) for left, _ in rows)
        table = "\n".join(f"  {left:<{width}}  {right}" for left, right in rows)
        example = "\n".join(f"  {line}" for line in self.example.splitlines())
        return (
            f"{self.summary}\n\nusage: {self.usage()}\n\n{table}\n\n"
            f"example:\n{example}\n\nin Python: {self.python}"
        )

    def fail(self, message: str) -> NoReturn:
        """Raise the `UsageError` that IPython prints without a traceback."""
        usage = f"usage: {self.usage()}"
        if len(usage) > SYNOPSIS:
            usage = f"{self.title} --help shows its options"
        raise UsageError(f"{self.title}: {message}\n{usage}")

    # -- parsing ------------------------------------------------------------

    def parse(self, line: str) -> Values | None:
        """Return the values of `line`, by default none; ``None``: it asks for help."""
        try:
            words = shlex.split(_without_comment(line))
        except ValueError as error:
            self.fail(f"cannot read {line.strip()!r}: {str(error).lower()}")
        values: Values = {
            option.name: False if option.metavar is None else None
            for option in self.options
        }
        operands: list[str] = []
        given: set[str] = set()
        position, only_operands = 0, False
        while position < len(words):
            word = words[position]
            position += 1
            if only_operands or not word.startswith("-") or word == "-":
                operands.append(word)
                continue
            if word == "--":
                only_operands = True
                continue
            option, flag, attached = self._match(word, words[position:])
            if option is _HELP:
                return None
            if option.name in given:
                self.fail(f"{flag} is given twice")
            given.add(option.name)
            if option.metavar is None:
                if attached is not None:
                    self.fail(f"{flag} takes no value, {attached!r} was given")
                values[option.name] = True
                continue
            if attached is None:
                if position == len(words) or self._is_flag(words[position]):
                    if option.implied is not None:
                        values[option.name] = option.implied
                        continue
                    self.fail(f"{flag} needs a value: {option.metavar}, {option.help}")
                attached = words[position]
                position += 1
            try:
                values[option.name] = option.parse(attached)
            except ValueError as error:
                self.fail(f"{flag} {attached}: {error}")
        self._place(operands, values)
        return values

    def written(self, values: Values) -> str:
        """Return a command line that `parse` makes these `values` of options from."""
        words = []
        for option in self.options:
            value = values.get(option.name)
            if value not in (None, False):
                words.append(option.flags[0])
                words += [] if option.metavar is None else [shlex.quote(f"{value}")]
        return " ".join(words)

    def _match(
        self, word: str, following: Sequence[str]
    ) -> tuple[Option, str, str | None]:
        """Split `word` into its option, the flag as typed and an attached value."""
        flag, equals, value = word.partition("=")
        option = self.option(flag)
        if option is not None:
            return option, flag, value if equals else None
        if not word.startswith("--") and len(word) > 2:
            option = self.option(word[:2])
            if option is not None and option.metavar is not None:
                return option, word[:2], word[2:]
        for one in self.options:
            if flag in one.elsewhere:
                meant = f"{one.flags[0]} {value or next(iter(following), one.metavar)}"
                self.fail(f"unknown option {flag}; did you mean {meant}?")
        known = [f for o in self.all_options for f in o.flags]
        self.fail(f"unknown option {flag}{did_you_mean(flag, known)}")

    def _meant(self, operands: Sequence[str]) -> str:
        """Return ``"; did you mean -n 4?"`` if the first of `operands` could be it."""
        for option in self.options:
            if option.name == self.meant:
                try:
                    option.parse(operands[0])
                except ValueError:
                    return ""
                return f"; did you mean {option.flags[0]} {operands[0]}?"
        return ""

    def _is_flag(self, word: str) -> bool:
        return self.option(word.partition("=")[0]) is not None

    def _place(self, operands: list[str], values: Values) -> None:
        if self.parameter is None:
            if operands:
                self.fail(f"unexpected argument {operands[0]!r}{self._meant(operands)}")
            return
        if self.parameter.arity in "1+" and not operands:
            self.fail(f"{self.parameter.metavar} is missing: {self.parameter.help}")
        if self.parameter.arity in "1?":
            if len(operands) > 1:
                self.fail(f"unexpected argument {operands[1]!r}")
            values[self.parameter.name] = operands[0] if operands else None
            return
        values[self.parameter.name] = operands
