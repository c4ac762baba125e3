"""Inquiry: why an op did not end, as the ranks of its group say themselves.

A rank whose op has timed out asks the others through the store for their records and
for the place of their main threads. The first one to ask compares the answers, and all
ranks learn what it found before the group is aborted.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import DistError, DistStoreError
from ..stores.base import Store
from ..work.flight_recorder import Record, recorder
from ..work.record_fields import newest
from ..work.user_code import is_installed, users_frame
from .spec import GroupSpec

__all__ = [
    "Explanation",
    "Inquiry",
    "Place",
    "current_exception",
    "explain_with",
    "handled_exception",
    "locate_with",
    "main_thread_place",
]

_log = logging.getLogger(__name__)

#: Seconds that the other ranks get to answer.
ANSWER_WAIT = 0.9
#: Seconds after which an error goes without an explanation: the store may not answer.
LONGEST = 1.0
#: Characters of an exception's text.
LONGEST_TEXT = 200
#: Records of the group that a rank sends, the newest ones.
RECORDS = 50


class Place(NamedTuple):
    """Where the main thread of a rank is."""

    #: ``cell 7 line 3`` or ``train.py:31``; empty where no code of the user runs.
    location: str
    #: How the last cell ended, if none runs: ``left cell 7 at its end``.
    last_cell_exit: str = ""
    #: What `handled_exception` returns.
    exception: str = ""
    exception_line: str = ""


@dataclass(frozen=True)
class Explanation:
    """Why an op of a group did not end."""

    text: str
    #: The global ranks at fault.
    culprits: tuple[int, ...]


#: Group rank → the answer of that rank, ``None`` if it did not answer.
Answers = Mapping[int, "dict[str, Any] | None"]
Explain = Callable[[GroupSpec, int, Answers], Explanation | None]


def main_thread_place() -> Place:
    """Return the innermost line of the main thread that is no library's."""
    ident = threading.main_thread().ident
    inner = None if ident is None else sys._current_frames().get(ident)
    frame = users_frame(inner)
    if frame is None:
        return Place("")
    code = frame.f_code
    line = (code.co_filename, frame.f_lineno, code.co_name)
    return Place(recorder.name_source(line), "", *handled_exception())


def handled_exception() -> tuple[str, str]:
    """Return what the main thread handles, and the line that raised it.

    ``("ValueError: no data", "train.py:31")``; empty where it handles none, or the
    error of an op, which is a consequence.
    """
    error = current_exception()
    if error is None or isinstance(error, DistError):
        return "", ""
    name, text = type(error).__qualname__, str(error).partition("\n")[0]
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_installed(code.co_filename):
            line = recorder.name_source((code.co_filename, number, code.co_name))
    return (f"{name}: {text}" if text else name)[:LONGEST_TEXT], line


def current_exception() -> BaseException | None:
    """Return the exception that the main thread handles."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # A tuple before Python 3.12.
    return found[1] if isinstance(found, tuple) else found


_explain: Explain = lambda spec, generation, answers: None  # noqa: E731
_locate: Callable[[], Place] = main_thread_place


def explain_with(explain: Explain) -> None:
    """Have ``explain(spec, generation, answers)`` compare the answers of the ranks."""
    global _explain
    _explain = explain


def locate_with(locate: Callable[[], Place]) -> None:
    """Have ``locate()`` say where the main thread of this process is."""
    global _locate
    _locate = locate


class Inquiry:
    """One generation's question to its ranks, and this rank's answer."""

    def __init__(self, spec: GroupSpec, generation: int, store: Store) -> None:
        self._spec, self._generation, self._store = spec, generation, store
        self._begun: float | None = None
        self._done = threading.Event()
        self._discarded = False
        #: What was found; ``None`` before, and where nothing was.
        self.found: Explanation | None = None

    # -- the question --------------------------------------------------------

    def ask(self) -> bool:
        """Begin, at the first call; return whether there is nothing to wait for.

        Never blocks. The answer is `found`.
        """
        if self._spec.size == 1:
            return True
        if self._begun is None:
            self._begun = time.monotonic()
            self._start(self._find)
        return self._done.is_set() or time.monotonic() - self._begun > LONGEST

    def discard(self) -> None:
        """Forget what was found; nothing is found after that."""
        self._discarded, self.found = True, None

    def _find(self) -> None:
        try:
            found = self._ask_ranks()
            if not self._discarded:
                self.found = found
        except DistError as error:
            _log.warning(
                "%s: the ranks could not be asked why an op did not end: %s",
                self._spec.describe(),
                error,
            )
        finally:
            self._done.set()

    def _ask_ranks(self) -> Explanation | None:
        deadline = time.monotonic() + ANSWER_WAIT
        me = str(self._spec.rank).encode()
        if self._store.compare_set("inquiry", b"", me) != me:
            found = json.loads(self._store.get("inquiry/found", timeout=LONGEST))
            return None if found is None else Explanation(**found)
        answers = {
            rank: self._answer_of(rank, deadline) for rank in range(self._spec.size)
        }
        explanation = _explain(self._spec, self._generation, answers)
        found = None if explanation is None else asdict(explanation)
        self._store.set("inquiry/found", json.dumps(found))
        return explanation

    def _answer_of(self, rank: int, deadline: float) -> dict[str, Any] | None:
        left = max(0.001, deadline - time.monotonic())
        try:
            return json.loads(self._store.get(f"inquiry/{rank}", timeout=left))
        except DistStoreError:
            return None

    # -- the answer ----------------------------------------------------------

    def answer(self, _asker: bytes) -> None:
        """Answer the question of another rank; called on a thread of the store."""
        self._start(self._answer)

    def _answer(self) -> None:
        place, records = _locate(), self._records()
        answer = {
            "now_ns": time.time_ns(),
            **place._asdict(),
            "records": [one.as_dict() for one in records],
            "groups": {one.status.group_id: list(one.status.ranks) for one in records},
        }
        try:
            self._store.set(f"inquiry/{self._spec.rank}", json.dumps(answer))
        except DistError as error:
            _log.warning(
                "%s: no answer to a rank that asks why an op does not end: %s",
                self._spec.describe(),
                error,
            )

    def _records(self) -> list[Record]:
        """Return the newest records of the group, and what hangs in others."""
        group = self._spec.key.id
        own: list[Record] = []
        others: list[Record] = []
        for record in recorder.records():
            (own if record.status.group_id == group else others).append(record)
        return [*newest(others, 0, Record.course), *newest(own, RECORDS, Record.course)]

    def _start(self, target: Callable[[], None]) -> None:
        threading.Thread(
            target=target, name=f"rankscope-inquiry-{self._spec.name}", daemon=True
        ).start()
