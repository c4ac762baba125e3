"""What one file of evidence was: its kind, its ranks, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..observe.evidence import RankEvidence

__all__ = [
    "EvidenceFile",
    "RawFile",
    "Reader",
    "UnreadableError",
    "only",
    "parse_json",
]

T = TypeVar("T")


class UnreadableError(ValueError):
    """A file looks like evidence, and cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file as it was found: on disk, or a member of an archive."""

    #: The path as a person would write it; of a member ``dumps.tar.gz/rank_3``.
    path: str
    data: bytes
    #: When it was last modified, ``time.time_ns``; None: not known.
    modified_ns: int | None = None

    def text(self, most: int = 64 << 20) -> str:
        """Return its text; raises `UnreadableError` beyond `most` bytes."""
        if len(self.data) > most:
            raise UnreadableError(f"it has more than {most >> 20} MiB")
        return self.data.decode("utf-8", errors="replace")

    @property
    def name(self) -> str:
        """The last part of its path, without ``.gz``: ``bz2`` has a digit."""
        last = self.path.replace("\\", "/").rpartition("/")[2]
        stem, _, suffix = last.rpartition(".")
        return stem if stem and suffix in ("gz", "bz2", "xz") else last


def parse_json(text: str) -> Any:
    """Return what a file has as JSON; raises `UnreadableError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"its JSON cannot be read: {error}") from error


def only(kind: type[T], value: Any) -> T | None:
    """Return a value of this very type: a truth value is no number.

    Of what a file has in its place, which `str` may write without end, nothing.
    """
    return value if type(value) is kind else None


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """One file of the report: what it was, and what it was used for."""

    path: str
    #: ``flight recorder``, ``stack``, ``log``, …; ``other``: nothing that is known.
    kind: str
    #: The ranks that it tells about.
    ranks: tuple[int, ...] = ()
    #: Why it was not used, or what is to be known about it; empty: nothing.
    problem: str = ""


class Reader(Protocol):
    """Reads one kind of file, one file at a time, and executes nothing of it."""

    #: What `EvidenceFile.kind` names.
    kind: str

    def recognises(self, file: RawFile) -> bool:
        """Return whether the file is of this kind, by its first bytes and its name."""
        ...

    def read(self, file: RawFile) -> list[RankEvidence]:
        """Return what the file tells of each rank; raises `UnreadableError`."""
        ...
