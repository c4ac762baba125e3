"""Failures of ranks: which are the same, and how they are shown.

An error that several ranks share is shown as one traceback. Ranks may differ
in the numbers of the message (their own rank, a pid, an address): such errors
count as the same, and each message is then listed.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Hashable, Iterable, Sequence

import rankscope
from rankscope import backends, engines
from rankscope.backends.rank_sets import format_ranks, group_by, name_ranks
from rankscope.engines import Output, RankError
from rankscope.engines.errors import impersonal, plain

from .wrapped import lines_of, wrapped

__all__ = [
    "CellError",
    "CellTimeout",
    "CommandError",
    "Interrupted",
    "brief_lines",
    "failure_key",
    "failure_of",
    "in_lines",
    "place_of",
    "report",
    "summary_of",
    "tell",
]

_PACKAGES = (rankscope, backends, engines)

_CELL_LINE = re.compile(r"Cell In\[(\d+)\], line (\d+)")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")

_SYNTAX_PLACE = re.compile(r" \([^()]*, line \d+\)$")
_FILE = re.compile(r"File (.+?):(\d+)")
#: The line of a frame that IPython marks, also with a caret below it.
_MARKED = re.compile(r"^-+> \d+ +(.*)|^ +(.*)\n +\^+$", re.M)
#: Folders of files that are no user's.
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3")
# For ranks that run from the same checkout as the notebook.
_ROOMS = tuple(f"{os.path.abspath(m.__path__[0])}/" for m in _PACKAGES)
#: What the message of a timeout has before the cause, and that of an abort.
_TIMED_OUT = re.compile(r"(?<= timeout\)): ")
_ABORTED = ": the group was aborted: "
_AUTHOR = re.compile(r" (?:\(at [\d:]+, by [^()]*\)|at [\d:]+)$")
_WORD, _TIME = re.compile(r"\w+"), re.compile(r"\bat [\d:]+")
#: What the message of another error has before the cause.
_DIAGNOSED = re.compile(r"; diagnosis(?: at [\d:]+)?: ")
#: The errors whose message is an op and why it ended.
_ENDED = ("DistAbortedError", "DistTimeoutError")
#: What the messages of a timeout and of an abort have before the remedy.
_REMEDY = re.compile(
    r"\. The group was aborted; |; (?=make it usable again with |start it again with )"
)
#: Errors that Rankscope raises besides its own classes, for bad arguments.
_OURS = (
    "ValueError",
    "TypeError",
    "NotImplementedError",
    "RuntimeError",
    "StdinNotImplementedError",
)

#: Messages of one shared error that are listed; the rest is counted.
VARIANTS = 8

#: The longest message in a one-line summary, in characters.
LONGEST = 500
#: Lines of a cell's error, and those of its first part: what failed where, why, what is
#: next. Above it is the line that opens the tracebacks.
MOST, FIRST = 5, 2
#: Ops, or errors, of which such an error has the ranks.
OPS = 3
#: Characters of a line of code, and of a message that is shown in full elsewhere.
SHORT = 80

# What `_folded` makes.
_FOLDED = re.compile(r"… \d+ frames? inside rankscope")

# Of a clause that is cut off so early the beginning says nothing.
_BEGUN = re.compile(r"; [^;]{0,18} …$")

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


class _ReportedError(BaseException):
    """An error whose causes were shown before: IPython shows it in one line."""

    def _render_traceback_(self) -> list[str]:
        name = type(self).__name__
        first, *others = f"{name}: {self}".splitlines()[:MOST]
        # Why comes before who: the line above has the ranks, too.
        needed = sum(len(lines_of(part)) for part in others)
        count = max(1, min(FIRST, MOST - needed)) if others else MOST
        # Front ends split a line within a word. `str` has all of it.
        parts = [lines_of(first, max_lines=count, placeholder=" …")]
        parts[0][-1] = _BEGUN.sub("; …", parts[0][-1])
        for place, part in enumerate(others, 1):
            # A line is left for each of the others.
            room = MOST - sum(map(len, parts)) - (len(others) - place)
            parts.append(lines_of(part, max_lines=room, placeholder=" …"))
        # As much in more lines, where a page is narrow.
        lines = wrapped("\n".join(map(" ".join, parts))).splitlines()
        return [lines[0].replace(name, f"\x1b[31m{name}\x1b[0m", 1), *lines[1:]]


class CommandError(_ReportedError, RuntimeError):
    """A magic failed, for another cause than that of a cell.

    Parameters
    ----------
    title : str
        The magic, such as ``"%dist_abort"``; an attribute, too.
    message : str
        What happened, and what to do next.
    """

    def __init__(self, title: str, message: str) -> None:
        super().__init__(message)
        self.title = title

    def _render_traceback_(self) -> list[str]:
        return [f"\x1b[31m{self.title}\x1b[0m: {self}"]


class CellError(_ReportedError, Exception):
    """A cell of a magic failed on some ranks.

    ``%%distributed``, ``%%rank`` and ``%dist_mode on`` raise it, and ``result()`` of
    the handle of ``%%distributed --async``.

    Parameters
    ----------
    message : str
        The failures, in at most three lines.
    errors : dict of int to RankError
        The error of each rank that failed; an attribute, too.
    """

    def __init__(self, message: str, errors: dict[int, RankError]) -> None:
        super().__init__(message)
        self.errors = errors
        self._shown = False

    def _render_traceback_(self) -> list[str]:
        if not self._shown:
            self._shown = True
            return super()._render_traceback_()
        # %tb: what was left out.
        groups = [*group_by(self.errors.values(), failure_key).values()]
        return [line for one in groups for line in report(one).splitlines()]


class CellTimeout(_ReportedError, TimeoutError):
    """A ``%%distributed`` cell did not end within the seconds of its ``-t``."""


class Interrupted(_ReportedError, KeyboardInterrupt):
    """A cell or a magic was interrupted; ends "Run All" as an error does."""


def failure_of(rank: int, output: Output, cell: int | None) -> RankError:
    """Return the failure in an ``error`` output; its line is in the traceback alone."""
    error = RankError(
        rank, output["ename"], output["evalue"], tuple(output["traceback"]), cell
    )
    # Not a line of an earlier cell, whose function this one called.
    found = [
        line
        for number, line in _CELL_LINE.findall(error.plain_traceback)
        if cell in (None, int(number))
    ]
    return error.replaced(line=int(found[-1])) if found else error


def failure_key(error: RankError) -> Hashable:
    """Return a key that is equal for errors that are the same.

    Of the traceback what is shown counts: ranks may meet one error at different places
    inside Rankscope.
    """
    said = _gist(error)
    trace = _FOLDED.sub("…", plain("\n".join(_without_our_frames(error))))
    if said != error.evalue:
        trace = trace.partition(said)[0]
    # Of a death the exit code counts, and not the process.
    dead = error.ename == "EngineDied"
    end = said.partition(" (engine ")[0] if dead else ""
    said = end + _NUMBER.sub("#", said.removeprefix(end))
    return (error.ename, error.line, said, _NUMBER.sub("#", trace))


def _gist(error: RankError) -> str:
    """Return the message, of a timeout without what each rank knows of the cause.

    The first rank whose op timed out reports the cause as it found it, the others as
    they were told of it.
    """
    if error.ename == "DistTimeoutError":
        return _TIMED_OUT.split(error.evalue, maxsplit=1)[0]
    return error.evalue


def place_of(error: RankError) -> str:
    """Return ``" at cell 7 line 3"``, or the part of it that is known."""
    if error.cell is None or error.line is None:
        return ""
    return f" at cell {error.cell} line {error.line}"


def _at(error: RankError) -> str:
    """Return `place_of`, where in the user's code it raised, and the code.

    As " at cell 7 line 3, model.py:88 `x = 1 / 0`": the innermost frame that is in no
    library.
    """
    place, inner, code = place_of(error), "", ""
    for frame in map(plain, error.traceback):
        file, cell = _FILE.match(frame.lstrip()), _CELL_LINE.match(frame.lstrip())
        marked = _MARKED.search(frame)
        if marked is None or (file and (_is_ours(frame) or _LIBRARIES.search(file[1]))):
            continue
        code = marked[1] or marked[2]
        if file:
            inner = f"{os.path.basename(file[1])}:{file[2]}"
        elif cell:
            inner = f"cell {cell[1]} line {cell[2]}"
    if inner and inner != place.removeprefix(" at "):
        place = f"{place}, {inner}" if place else f" at {inner}"
    return f"{place} `{_shorten(code)}`" if code else place


def _shorten(text: str) -> str:
    return textwrap.shorten(text, SHORT, placeholder=" …")


def report(errors: Sequence[RankError], label: bool = True) -> str:
    """Return one traceback for `errors`, which share a `failure_key`."""
    first = errors[0]
    lines = []
    if label:
        ranks = name_ranks(error.rank for error in errors)
        lines.append(f"{BOLD}{ranks}{PLAIN}")
    lines += _without_our_frames(first) or [f"{first.ename}: {first.evalue}"]
    variants = group_by(errors, lambda error: impersonal(error.rank, _gist(error)))
    if len(variants) > 1:
        lines.append(f"{BOLD}The message on each rank{PLAIN}")
        for members in list(variants.values())[:VARIANTS]:
            ranks = format_ranks(error.rank for error in members)
            lines.append(f"[{ranks}] {first.ename}: {members[0].evalue}")
        if len(variants) > VARIANTS:
            lines.append(f"… and {len(variants) - VARIANTS} more")
    return "\n".join(lines)


def _without_our_frames(error: RankError) -> list[str]:
    """Return the traceback up to the user's line that called Rankscope.

    Likewise the tracebacks of its causes. The messages describe the error;
    `CellError.errors` has all frames.
    """
    lines = list(error.traceback)
    if not (error.ename.startswith("Dist") or error.ename in _OURS):
        return lines
    kept: list[str] = []
    ours: list[str] = []
    for line in lines:
        if _is_ours(line):
            ours.append(line)
            continue
        # Frames between two frames of the user are kept.
        kept += ours if _is_frame(line) else _folded(ours)
        kept.append(line)
        ours = []
    return kept + ours


def _folded(frames: Sequence[str]) -> list[str]:
    count = len(frames)
    return [f"… {count} frame{'s'[: count > 1]} inside rankscope\n"] if count else []


def _is_frame(line: str) -> bool:
    text = plain(line).lstrip()
    return _FILE.match(text) is not None or _CELL_LINE.match(text) is not None


def _is_ours(frame: str) -> bool:
    found = _FILE.match(plain(frame).lstrip())
    if found is None:
        return False
    path = os.path.expanduser(found[1])
    return "/site-packages/rankscope/" in path or path.startswith(_ROOMS)


def brief_lines(errors: Iterable[Sequence[RankError]]) -> list[str]:
    """Return a line on ranks that failed alike; the error of the cell says all."""
    told: dict[str, list[int]] = {}
    for alike in errors:
        first = alike[0]
        what = "op aborted" if first.is_abort_echo else first.ename
        if not first.ename.startswith("Dist"):
            message = _DIAGNOSED.split(first.evalue, maxsplit=1)[0]
            said = impersonal(first.rank, _one_line(message))
            what = ": ".join(filter(None, [what, _shorten(said)]))
        ranks = told.setdefault(f"{what}{place_of(first)}", [])
        ranks += [error.rank for error in alike]
    lines = [f"{name_ranks(sorted(ranks))}: {what}" for what, ranks in told.items()]
    return _shortened(lines, "errors")


def _shortened(parts: list[str], what: str) -> list[str]:
    left = len(parts) - OPS + 1
    return [*parts[: OPS - 1], f"and {left} more {what}"] if left > 1 else parts


def tell(errors: Iterable[RankError], after: str, found: str = "") -> str:
    """Return a cell's error: who failed in what, why, and, `after`, what is next."""
    failures = list(errors)
    told: dict[tuple[str, str], list[int]] = {}
    whys: dict[Hashable, str] = {}
    if not all(one.ename in _ENDED for one in failures):
        for place, one in enumerate(failures):
            message, *cause = _DIAGNOSED.split(one.evalue, maxsplit=1)
            if cause and not one.is_abort_echo:
                failures[place] = one.replaced(evalue=message)
                whys[cause[0]] = cause[0]
        what = summary_of(failures, remedy=not after)
        return in_lines(what, "; ".join(whys.values()) or found, after)
    for one in failures:
        op, why = _op_and_cause(one)
        told.setdefault((one.ename, op), []).append(one.rank)
        if why and _both_sides(why) not in map(_both_sides, whys.values()):
            # Each rank may have found it by itself.
            whys.setdefault(_AUTHOR.sub("", why), why)
    parts, before = [], ""
    for (ename, op), ranks in told.items():
        # Ops that end together end with one error.
        named = "" if ename == before else f"{ename}: "
        parts.append(f"{name_ranks(ranks)}: {named}{op}")
        before = ename
    what = "; ".join(_shortened(parts, "ops"))
    causes = [*whys.values()]
    # The others are told what the rank found whose op timed out first, and that it did.
    first = (
        one for one in causes if not one.startswith(tuple(f"{c}; " for c in causes))
    )
    why = "; ".join(first)
    if why and all(one.sequence_number is None for one in failures):
        # The ops were refused, and have no number: another cell's error is the cause.
        why = f"the group was aborted earlier: {why}"
    return in_lines(what, why or found, after)


def _both_sides(why: str) -> list[str]:
    """Return the words of a cause with who found it, for any of the two ranks.

    "rank 1 sent 40 bytes where 32 were expected", by rank 0, is told by rank 1 as well.
    """
    return sorted(_WORD.findall(_TIME.sub("", why))) if ", by rank " in why else [why]


def in_lines(what: str, why: str, after: str) -> str:
    parts = (("", what), ("Why: ", why), ("Next: ", after))
    return "\n".join(f"{name}{said}" for name, said in parts if said)


def _op_and_cause(error: RankError) -> tuple[str, str]:
    """Return the op that was aborted or timed out, and why."""
    said = _REMEDY.split(impersonal(error.rank, error.evalue), maxsplit=1)[0]
    if error.is_abort_echo:
        op, _, why = said.partition(_ABORTED)
        return op, why
    op, *cause = _TIMED_OUT.split(said, maxsplit=1)
    if not cause:
        # Of torch's.
        op, *cause = _DIAGNOSED.split(said, maxsplit=1)
    return op, cause[0] if cause else ""


def summary_of(errors: Iterable[RankError], remedy: bool = True) -> str:
    """Return all failures in one line: causes first, then the aborted ranks."""
    failures = list(errors)
    causes = [error for error in failures if not error.is_abort_echo]
    if not causes:
        causes, failures = failures, []
    # What a group raised may come from what a rank alone did.
    causes.sort(key=lambda error: error.ename.startswith("Dist"))
    parts = []
    for members in group_by(causes, failure_key).values():
        # Of a timeout the shortest message: the others add who was told by whom.
        first = min(members, key=lambda e: len(e.evalue) * (_gist(e) != e.evalue))
        said = impersonal(first.rank, first.evalue)
        if not remedy:
            said = _REMEDY.split(said, maxsplit=1)[0]
        message = _one_line(said)
        if len({impersonal(error.rank, _gist(error)) for error in members}) > 1:
            message = f"{message} (and alike)"
        text = f"{first.ename}: {message}" if message else first.ename
        ranks = name_ranks(error.rank for error in members)
        # Rankscope's messages name the line already.
        place = place_of(first).removeprefix(" at ")
        where = "" if place and place in message else _at(first)
        parts.append(f"{ranks}: {text}{where}")
    parts = _shortened(parts, "errors")
    echoes = [error.rank for error in failures if error.is_abort_echo]
    if echoes:
        parts.append(f"{name_ranks(echoes)}: op aborted")
    return "; ".join(parts)


def _one_line(text: str) -> str:
    """Return the first line of `text`, whose end has the remedy: cut if too long."""
    line = plain(text).strip().partition("\n")[0]
    # The file that a SyntaxError names exists in IPython only.
    line = _SYNTAX_PLACE.sub("", line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
