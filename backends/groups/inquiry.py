"""Which op of a group is overdue, and why it did not end, as its ranks say themselves.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..errors import DistError, DistStoreError, DistTimeoutError
from ..stores.base import Store
from ..work.flight_recorder import Record, recorder
from ..work.record_fields import newest
from ..work.user_code import is_installed, users_frame
from ..work.work import Work
from .abort_reason import REBUILD_HINT, AbortReason, FoundCause
from .spec import GroupSpec
from .unattended import on_overdue

__all__ = [
    "Deadlines",
    "Explanation",
    "Inquiry",
    "Place",
    "current_exception",
    "explain_with",
    "handled_exception",
    "locate_with",
    "main_thread_place",
    "message_of",
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


#: Group rank → the answer of that rank, ``None`` if it did not answer.
Answers = Mapping[int, "dict[str, Any] | None"]
Explain = Callable[[GroupSpec, int, Answers], Explanation | None]


def main_thread_place() -> Place:
    """Return the innermost line of the main thread that is no library's."""
    ident = threading.main_thread().ident
    inner = None if ident is None else sys._current_frames().get(ident)
    frame = users_frame(inner)
    if frame is None:
        return Place("", "is in no line of its script")
    code = frame.f_code
    line = (code.co_filename, frame.f_lineno, code.co_name)
    return Place(recorder.name_source(line), "", *handled_exception())


def message_of(error: BaseException) -> str:
    """Return what an error says; of one from a worker of torch's data loader, its own.

    ``Caught KeyError in DataLoader worker process 0: KeyError: 'lr'``
    """
    text = str(error)
    caught, found, trace = text.partition(_FROM_WORKER)
    lines = trace.strip().splitlines() if found else []
    return f"{caught.rstrip('.')}: {lines[-1]}" if lines else text


def handled_exception() -> tuple[str, str]:
    """Return what the main thread handles, and the line that raised it.

    ``("ValueError: no data", "train.py:31")``; empty where it handles none, or the
    error of an op, which is a consequence.
    """
    error = current_exception()
    if error is None or isinstance(error, DistError):
        return "", ""
    name, text = type(error).__qualname__, message_of(error).partition("\n")[0]
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
        # Whether the store has answered.
        self._heard = False
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
        longest = LONGEST_HEARD if self._heard else LONGEST
        return self._done.is_set() or time.monotonic() - self._begun > longest

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
        first = self._store.compare_set("inquiry", b"", me)
        self._heard = True
        if first != me:
            found = json.loads(self._store.get("inquiry/found", timeout=LONGEST_HEARD))
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


#: Seconds that an abort waits for what is done `on_overdue`.
_OVERDUE_WAIT = 6.0


class Deadlines:
    """The deadlines of the ops in flight of one generation, for the watchdog.

    `inquiry` finds out why an overdue op did not end.
    """

    def __init__(self, spec: GroupSpec, inquiry: Inquiry) -> None:
        self._spec, self._inquiry = spec, inquiry
        # Of the ops in flight: when they began, as `begun_ns` says and by the monotonic
        # clock.
        self._begun_at: dict[Work, tuple[int, float]] = {}
        #: Why the ops hang, if a diagnosis over all ranks has found it.
        self.cause: FoundCause | None = None
        #: The Work that is past its deadline, while its group lives on.
        self.overdue: Work | None = None
        # What is done about the overdue op by others, and until when that may last.
        self._pending: tuple[list[threading.Event], float] | None = None

    def check(self, in_flight: Iterable[Work]) -> float:
        """Look for an `overdue` op; return the seconds to the next deadline."""
        begun_at, self._begun_at = self._begun_at, {}
        was, self.overdue = self.overdue, None
        nearest = float("inf")
        for place, work in enumerate(in_flight):
            record = work.record
            if record is None:
                continue
            begun_ns = work.begun_ns(oldest=not place)
            if not begun_ns:
                continue
            # The wall clock may be set while the op runs.
            known = begun_at.get(work)
            if known is None or known[0] != begun_ns:
                ran = (time.time_ns() - begun_ns) / 1e9
                known = begun_ns, time.monotonic() - ran
            self._begun_at[work] = known
            left = known[1] + record.timeout - time.monotonic()
            if left > 0:
                nearest = min(nearest, left)
            elif self.overdue is None and not work.poll():
                self.overdue = work
        if was is not None and was is not self.overdue:
            # The op has ended after all: what was found does not hold any more.
            self._inquiry.discard()
            self._pending = None
        return nearest

    def asked(self) -> bool:
        """Ask the ranks why the op is `overdue`; return whether they have answered.

        Never blocks. True also where no answer is to be expected any more, and where
        a diagnosis has found the cause. So do those who hear of the op `on_overdue`.
        """
        if self._pending is None:
            heard = [hear() for hear in on_overdue]
            self._pending = heard, time.monotonic() + _OVERDUE_WAIT
        told = self._diagnosed() is not None or self._inquiry.ask()
        heard, deadline = self._pending
        done = all(one.is_set() for one in heard) or time.monotonic() > deadline
        return told and done

    def _diagnosed(self) -> FoundCause | None:
        """Return what a diagnosis has found since the overdue op began."""
        cause, overdue = self.cause, self.overdue
        if cause is None or overdue is None:
            return None
        began = self._begun_at.get(overdue)
        return cause if began is not None and cause.at > began[1] else None

    def _found(self) -> tuple[str, tuple[int, ...]]:
        """Return why the overdue op did not end, ``""`` if it is not known, and who."""
        cause, found = self._diagnosed(), self._inquiry.found
        if cause is not None:
            return str(cause), tuple(cause.culprits)
        if found is not None:
            return found.text, found.culprits
        return "", ()

    def reason(self) -> AbortReason:
        """Return why the group ends for the `overdue` op."""
        assert self.overdue is not None
        record = self.overdue.record
        assert record is not None
        found, culprits = self._found()
        text = f"{record.describe()} timed out after {record.timeout:g} s"
        return AbortReason(
            f"{found}; {text}" if found else text,
            f"rank {self._spec.global_rank}",
            culprits=culprits,
            diagnosis=found,
        )

    def error(self, work: Work, reason: AbortReason) -> DistTimeoutError:
        """Return the error of `work`, which was overdue when its group was aborted."""
        record = work.record
        assert record is not None
        timeout = record.timeout
        found, _ = self._found()
        # Another rank may have asked, and aborted, before this one had the answer.
        found = found or reason.diagnosis
        whose = "the group's" if timeout == self._spec.timeout else "its own"
        why = "not every rank entered it, or one is stuck"
        if found:
            why = found
        elif reason.by != f"rank {self._spec.global_rank}":
            # Another rank, or a person, was faster.
            why = str(reason)
        return DistTimeoutError(
            f"{work.describe()} was not done {timeout:g} s after it began "
            f"({whose} timeout): {why}. The group was aborted; {REBUILD_HINT}",
            **work.identity(),
            culprits=reason.culprits,
            reason=f"not done {timeout:g} s after it began",
        )
