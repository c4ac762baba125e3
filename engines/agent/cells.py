"""Cells: what the agent does before and after each cell, on the main thread."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Any

from rankscope.backends.errors import DistAbortedError, DistError
from rankscope.backends.groups.inquiry import (
    AT_ITS_END,
    IN_NO_CELL,
    LONGEST_TEXT,
    Place,
)
from rankscope.backends.groups.world import world
from rankscope.backends.printable import printable
from rankscope.backends.torch_watch.errors import explain, settle
from rankscope.backends.work.async_errors import take_async_error
from rankscope.backends.work.flight_recorder import Batch, recorder
from rankscope.backends.work.sigint import interrupt
from rankscope.backends.work.unwaited import unwaited
from rankscope.backends.work.user_code import users_frame

from ..errors import ClusterError, pack_details
from ..wire import ipyparallel_private as private
from ..wire import message_types, requests
from .post_mortem import PostMortem, linked, links_of
from .printing import CellSource, PrintMarks
from .process import end_child
from .publisher import StatusPublisher
from .reservations import Reservations

__all__ = ["Cells"]

#: Ops without a waiter that are named at the end of a cell.
MOST_UNWAITED = 3


class Cells:
    """Which cell of this rank runs, since when, and how the last one ended."""

    def __init__(
        self,
        kernel: Any,
        publisher: StatusPublisher,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._kernel = kernel
        self._shell = kernel.shell
        self._publisher = publisher
        self._before, self._after = before, after
        self._main = threading.main_thread().ident or 0
        self._pid = os.getpid()
        #: The number of the running cell, and when it began (``time.monotonic()``).
        self.number: int | None = None
        self.began: float | None = None
        #: How the last cell of a notebook ended: ``left cell 7 with ValueError …``.
        self.last_exit = ""
        #: The group, the op and the sequence number whose error ended it; 0: the op
        #: was refused before it had one.
        self.last_op: tuple[str, str, int] | None = None
        self.last_failed = False
        self.source = CellSource(self._shell)
        self.reservations = Reservations(self._current, publisher.note_change)
        # What runs the cell, and may be suspended in it.
        self._task: asyncio.Task[Any] | None = None
        self._scope = ExitStack()
        self._interruptible = False
        # The keys of the last cells that are over.
        self._over: deque[str] = deque(maxlen=16)
        # Why the `init_process_group` that the cell waits in will not end.
        self._in_vain: requests.EndInit | None = None
        self._print_marks = PrintMarks()
        #: The debugger on the last cell that failed.
        self.post_mortem = PostMortem(
            self._publish, self._is_heard, self.source.cell_of
        )
        self._shell.input_transformers_cleanup.append(self._admit)
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._shell.events.register("post_run_cell", self._after_cell)
        self._show_traceback = self._shell.showtraceback
        self._shell.showtraceback = self._show_explained

    @property
    def running(self) -> bool:
        return self.began is not None

    def _current(self) -> tuple[int | None, float] | None:
        """Return number and begin of the running cell; ``None`` where none runs."""
        began = self.began
        return None if began is None else (self.number, began)

    def exit_while_idle(self) -> str:
        """Return how the last cell ended; empty while one runs."""
        return "" if self.running else self.last_exit or IN_NO_CELL

    def place(self) -> Place:
        """Return where the main thread is, for a rank that asks why its op waits."""
        if not self.running:
            return Place("", self.last_exit)
        return Place(self.source.innermost(self._main, self.suspended()))

    def suspended(self) -> list[FrameType]:
        """Return the calls of a cell that awaits something, the innermost last."""
        return self.source.suspended(self._task)

    # -- requests, on the control thread ------------------------------------

    @requests.AnswerPrompt.handler
    def _answer_prompt(self, typed: requests.AnswerPrompt) -> None:
        self.post_mortem.prompts.answer(typed.number, typed.line)

    @requests.Interrupt.handler
    def _interrupt(self, wanted: requests.Interrupt) -> bool:
        if not self.running or wanted.key in self._over:
            return False
        # To the main thread itself, so that a system call it waits in returns.
        signal.pthread_kill(self._main, signal.SIGINT)
        return True

    @requests.EndInit.handler
    def _end_init(self, wanted: requests.EndInit) -> bool:
        if not self.running or world.joining_since is None:
            return False
        self._in_vain = wanted
        signal.pthread_kill(self._main, signal.SIGINT)
        return True

    # -- hooks of IPython, on the main thread --------------------------------

    def _request(self) -> dict[str, Any] | None:
        """Return what the notebook wants of the cell; ``None`` for other code."""
        return private.request_metadata(self._kernel).get("rankscope")

    def _header(self) -> dict[str, Any]:
        return self._kernel.get_parent("shell")["header"]

    def _is_heard(self) -> bool:
        """Whether the notebook that sent the running cell renews its subscription."""
        return self._publisher.is_watched_by(self._header()["session"])

    def _publish(
        self, content: Mapping[str, Any], kind: str = message_types.DATA
    ) -> None:
        """Send what belongs to the running cell, and is no output of it."""
        private.publish(self._kernel, kind, content, self._header())

    def _admit(self, lines: list[str]) -> list[str]:
        """Refuse a cell if the rank is reserved for another client's.

        Sets IPython's cell number to the notebook's, for tracebacks and source lines.
        An input transformer that returns the code unchanged: its error keeps the cell
        from being run, and newer IPythons read the number before ``pre_run_cell``.
        """
        request = self._request()
        if request is None:
            return lines
        holder = self.reservations.begin(
            request["key"], self._header()["session"], request["cell"]
        )
        if holder:
            raise ClusterError(
                f"the cell was not run on this rank: a cell of {holder} has reserved "
                "it, since the rank did not answer when this cell was sent"
            )
        if request["cell"] is not None:
            self._shell.execution_count = request["cell"]
        return lines

    def _before_cell(self, info: Any) -> None:
        request = self._request()
        if request is not None:
            self._prepare(request)
            if self.number is not None:
                sender = self._header()["session"]
                self.source.note(info.raw_cell, self.number, sender)
        # An error that no cell caused, and that the group has reported.
        take_async_error()
        # A thread that an earlier cell has lost is no reason for what this one awaits.
        world.thread_exception = ""
        self._before()
        unwaited.begin()
        with suppress(RuntimeError):
            # None where the cell runs outside of any event loop.
            self._task = asyncio.current_task()
        # Last: from now on an interrupt is for the cell.
        self.began = time.monotonic()
        self._publisher.note_change()

    def _prepare(self, request: Mapping[str, Any]) -> None:
        self.number = request["cell"]
        self._print_marks.begin()
        world.note_dead(request["dead"])
        if request["group"] is not None:
            self._scope.enter_context(world.default_group(request["group"]))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # ipykernel restores its own handler after the cell. Until then an
            # interrupt that arrives after the end of the cell must do nothing.
            self._interruptible = True
            signal.signal(signal.SIGINT, self._on_sigint)

    def _after_cell(self, result: Any) -> None:
        if os.getpid() != self._pid:
            end_child(None)
        self._interruptible = False
        interrupt.cancel()
        self._report_unwaited()
        self._scope.close()
        self._print_marks.end()
        error = None
        late = world.async_error()
        if result is not None:
            if late is not None and result.success:
                # The cell ran to its end on invalid results of an aborted op.
                result.error_in_exec = late
                self._shell.showtraceback((type(late), late, late.__traceback__))
            if result.error_in_exec is not None:
                # What the reply says: the traceback shows it already.
                result.error_in_exec = explain(result.error_in_exec)
            error = result.error_before_exec or result.error_in_exec
            self.post_mortem.note(result.error_in_exec)
        line = None if error is None else self.source.line_of(error)
        request = self._request()
        if request is not None:
            if request["keep_value"] and result is not None:
                self._shell.push(
                    {message_types.CELL_VALUE: result.result}, interactive=False
                )
            self._over.append(request["key"])
            self.reservations.end(request["key"])
            if not self.post_mortem.opened:
                self.last_exit = _describe_exit(self.number, error, line)
                self.last_op = _failed_op(error)
                self.last_failed = error is not None
        self.number = self.began = self._task = None
        self.post_mortem.opened = False
        settle()
        self._after()
        if error is not None:
            # With the status, for which the notebook would have to ask each rank.
            details = pack_details(error, line) | {"summary": self._publisher.summary()}
            self._publish(details, message_types.ERROR)
        self._publisher.note_change()

    def _report_unwaited(self) -> None:
        """Name the ops of the cell whose result may have been used before it came."""
        places = {
            f"{recorder.name_source(record.frames[0])} `{record.op_type.value}`": None
            for record in unwaited.end()
            if not isinstance(record, Batch) and record.frames
        }
        if places:
            shown = ", ".join([*places][:MOST_UNWAITED])
            more = " and others" if len(places) > MOST_UNWAITED else ""
            print(
                f"nobody waited for {shown}{more}: the result may not have been there "
                "when the array was used; keep what async_op=True returns, and call "
                "its wait()",
                file=sys.stderr,
            )

    def _show_explained(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show the traceback of a cell; of torch's error, that it was aborted."""
        error = (exc_tuple or sys.exc_info())[1]
        if os.getpid() != self._pid:
            end_child(error)
        shown = None if error is None else explain(error)
        if shown is not error or isinstance(shown, DistAbortedError):
            assert shown is not None
            exc_tuple = (type(shown), *_users_part(shown))
        self._show_traceback(exc_tuple, *args, **kwargs)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        ended, self._in_vain = self._in_vain, None
        if ended is not None:
            # Else the others have come since.
            if world.joining_since is not None:
                raise DistAbortedError(
                    f"init_process_group: {ended.reason}, and will not come",
                    op="init_process_group",
                    culprits=ended.culprits,
                    reason=ended.reason,
                )
            return
        # A notebook interrupts again what has not ended. While IPython shows where the
        # first interrupt came, a second one would end that, or be reported as ignored.
        shown = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if self._interruptible and not (shown and not self.source.is_in_cell(frame)):
            interrupt(frame)


def _users_part(error: BaseException) -> tuple[BaseException, TracebackType | None]:
    """Return an error and its traceback, down to the user's innermost line.

    What is inside of an op that was aborted says nothing, nor does the connection that
    it lost by the abort, and IPython reads the whole source of each file in a
    traceback: half a second for torch's.
    """
    if not isinstance(error, DistAbortedError):
        return error, error.__traceback__
    shown = copy.copy(error)
    shown.__context__ = error.__context__
    shown.__suppress_context__ = error.__suppress_context__
    links = links_of(error.__traceback__)
    while links and users_frame(links[-1].tb_frame) is not links[-1].tb_frame:
        links.pop()
    return shown, linked(links) or error.__traceback__


def _describe_exit(
    cell: int | None, error: BaseException | None, line: int | None
) -> str:
    """Return ``left cell 7 with ValueError at line 4``, or the known part of it."""
    which = "its cell" if cell is None else f"cell {cell}"
    if error is None:
        return f"left {which} {AT_ITS_END}"
    place = "" if line is None else f" at line {line}"
    said = f"left {which} with {printable(type(error).__name__)}{place}"
    if not isinstance(error, DistError):
        return said
    # What ended it may be the fault of another rank.
    return f"{said} ({printable(error.reason or str(error))[:LONGEST_TEXT]})"


def _failed_op(error: BaseException | None) -> tuple[str, str, int] | None:
    if not isinstance(error, DistError) or not error.group or not error.op:
        return None
    return error.group, error.op, error.sequence_number or 0
