"""Why an op of a group does not end, as its ranks say themselves.

A rank whose op has timed out asks the others through the store for their records and
for the place of their main threads. The first one to ask compares the answers, and all
ranks learn what it found before the group is aborted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NamedTuple

from ..errors import DistError, DistNetworkError, DistStoreError
from ..stores.base import Store
from ..thread_start import start_thread
from ..work.flight_recorder import Record, recorder
from ..work.record_fields import newest
from ..work.user_code import (
    calls_of_loop,
    frame_of,
    frame_of_thread,
    is_installed,
    users_frame,
)
from . import unattended
from .spec import GroupSpec

__all__ = [
    "Explanation",
    "Inquiry",
    "Place",
    "Question",
    "current_exception",
    "handled_exception",
    "line_of",
    "locate_with",
    "main_thread_place",
    "message_of",
    "raised_at",
]

_log = logging.getLogger(__name__)

#: Seconds that the other ranks get to answer.
ANSWER_WAIT = 0.9
#: Seconds after which an error goes without an explanation where the store does not
#: answer, and where it has: what the ranks said is compared and sent.
LONGEST = 1.0
LONGEST_HEARD = 3.0
#: Characters of an exception's text.
LONGEST_TEXT = 200
#: Stands in the text of an error before the traceback of a worker.
_FROM_WORKER = "\nOriginal Traceback (most recent call last):\n"
#: How the account ends of a cell that no error has ended.
AT_ITS_END = "at its end"
#: What a rank does that waits for the first cell.
IN_NO_CELL = "runs no cell"
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
    #: Whether it cannot end any more, whatever a rank does that is late.
    final: bool = False
    #: Whether the ranks at fault are those that have not answered.
    silent: bool = False


#: Group rank → the answer of that rank, ``None`` if it did not answer.
Answers = Mapping[int, "dict[str, Any] | None"]


def main_thread_place() -> Place:
    """Return the innermost line of the main thread that is no library's.

    Where it waits for a thread to end, that of the thread; for a task, of the task.
    """
    frame = users_frame(_innermost())
    if frame is None:
        return Place("", "is in no line of its script")
    where = recorder.name_source(frame_of(frame))
    return Place(where, "", *handled_exception())


def _innermost() -> FrameType | None:
    found = frame = frame_of_thread(threading.main_thread().ident)
    for call in reversed(calls_of_loop(frame)):
        if users_frame(call) is not None:
            return call
    while frame is not None:
        if frame.f_code is threading.Thread.join.__code__:
            joined = frame_of_thread(frame.f_locals["self"].ident)
            return found if users_frame(joined) is None else joined
        frame = frame.f_back
    return found


def message_of(error: BaseException) -> str:
    """Return what an error says, or the one of a data loader's worker in it."""
    text = str(error)
    caught, found, trace = text.partition(_FROM_WORKER)
    lines = trace.strip().splitlines() if found else []
    return f"{caught.rstrip('.')}: {lines[-1]}" if lines else text


def handled_exception() -> tuple[str, str]:
    """Return what the main thread handles, and the line that raised it."""
    error = current_exception()
    if error is None or isinstance(error, DistError):
        return "", ""
    return _raised(error)


def raised_at(error: BaseException) -> str:
    """Return an exception and the line that raised it: ``KeyError: 7 at data.py:5``."""
    text, line = _raised(error)
    return f"{text} at {line}" if line else text


def _raised(error: BaseException) -> tuple[str, str]:
    name, text = type(error).__qualname__, message_of(error).partition("\n")[0]
    return (f"{name}: {text}" if text else name)[:LONGEST_TEXT], line_of(error)


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user that an error has passed; empty: none."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not is_installed(code.co_filename):
            line = recorder.name_source((code.co_filename, number, code.co_name))
    return line


def current_exception() -> BaseException | None:
    """Return the exception that the main thread handles."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    # A tuple before Python 3.12.
    return found[1] if isinstance(found, tuple) else found


_locate: Callable[[], Place] = main_thread_place


def locate_with(locate: Callable[[], Place]) -> None:
    """Have ``locate()`` say where the main thread of this process is."""
    global _locate
    _locate = locate


class Question:
    """One question to the ranks of a group: the first one to ask has the answers."""

    def __init__(self, store: Store) -> None:
        self._begun = time.monotonic()
        self._store = store
        self._found: Explanation | None = None
        # Whether the store has answered.
        self._heard = False
        self._done = threading.Event()
        #: Whether this rank was the first.
        self.is_own = False

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        longest = LONGEST_HEARD if self._heard else LONGEST
        return self._done.is_set() or time.monotonic() - self._begun > longest

    @property
    def found(self) -> Explanation | None:
        """What was found, be it that the store is silent; ``None`` before."""
        if self._heard or self._found is not None or not self.is_over:
            return self._found
        silent = self._store.no_answer()
        return None if silent is None else Explanation(str(silent), silent.culprits)

    def heard(self) -> None:
        """Note that the store answers."""
        self._heard = True

    def end(self, found: Explanation | None = None) -> None:
        """Note what was found, and that nothing more is."""
        self._found = found
        self._done.set()


class Inquiry:
    """One generation's questions to its ranks, and this rank's answers."""

    def __init__(self, spec: GroupSpec, generation: int, store: Store) -> None:
        self._spec, self._generation, self._store = spec, generation, store
        self._thread_name = f"inquiry-{spec.name}"
        # How many questions this rank has heard of.
        self._count = 0

    # -- the question --------------------------------------------------------

    def ask(self) -> Question:
        """Ask the ranks why an op does not end. Never blocks."""
        question = Question(self._store)
        if self._spec.size == 1:
            question.end()
        else:
            start_thread(self._thread_name, self._find, question)
        return question

    def _find(self, question: Question) -> None:
        found = None
        try:
            found = self._ask_ranks(question)
        except DistError as error:
            # That the store is silent or gone is what the op's own error says.
            _log.log(
                logging.DEBUG
                if isinstance(error, DistNetworkError)
                else logging.WARNING,
                "%s: the ranks could not be asked why an op does not end: %s",
                self._spec.describe(),
                error,
            )
        finally:
            question.end(found)

    def _ask_ranks(self, question: Question) -> Explanation | None:
        deadline = time.monotonic() + ANSWER_WAIT
        me = str(self._spec.rank).encode()
        place = f"inquiry/{self._count + 1}"
        first = self._store.compare_set(place, b"", me)
        question.heard()
        if first != me:
            said = self._store.get(f"{place}/found", timeout=LONGEST_HEARD)
            found = json.loads(said)
            told = None if found is None else Explanation(**found)
            own = self._spec.ranks[self._spec.rank]
            # This rank runs: its answer is late, as on a busy host.
            return None if told and told.silent and own in told.culprits else told
        question.is_own = True
        answers = {
            rank: self._answer_of(rank, place, deadline)
            for rank in range(self._spec.size)
        }
        found = (
            explain(self._spec, self._generation, answers)
            for explain in unattended.explainers
        )
        explanation: Explanation | None = next(filter(None, found), None)
        found = None if explanation is None else asdict(explanation)
        self._store.set(f"{place}/found", json.dumps(found))
        return explanation

    def _answer_of(
        self, rank: int, place: str, deadline: float
    ) -> dict[str, Any] | None:
        left, key = max(0.001, deadline - time.monotonic()), f"{place}/{rank}"
        try:
            answer = self._store.get(key, timeout=left)
        except DistStoreError:
            return None
        # There may be many questions.
        self._store.delete_key(key)
        return json.loads(answer)

    # -- the answer ----------------------------------------------------------

    def answer(self, number: int) -> None:
        """Answer the question `number` of a rank; called on a thread of the store."""
        self._count = number
        # At its end Python starts no thread (3.12), and the rank says that it ends.
        with contextlib.suppress(RuntimeError):
            start_thread(self._thread_name, self._answer, number)

    def _answer(self, number: int) -> None:
        place, records = _locate(), self._records()
        answer = {
            "now_ns": time.time_ns(),
            **place._asdict(),
            "records": [one.as_dict() for one in records],
            "groups": {one.status.group_id: list(one.status.ranks) for one in records},
        }
        try:
            self._store.set(f"inquiry/{number}/{self._spec.rank}", json.dumps(answer))
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
