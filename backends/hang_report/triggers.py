"""What makes a rank ask for a report, beside its own thread: errors and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import DistAbortedError
from ..groups.thread_exceptions import note_exceptions_of_threads
from ..groups.unattended import before_leave, on_overdue
from ..groups.world import world
from ..stores.base import RANK_0, Store
from .c_signals import PausedHandler, end_by, handle_by
from .polling import until
from .reporter import Reporter
from .reports import Wish, is_consequence

if TYPE_CHECKING:
    from ..torch_watch.watch import TorchWatch

__all__ = ["before_termination", "hear_torch", "install_triggers"]

#: Called before SIGTERM ends a rank, which runs no `atexit` functions.
before_termination: list[Callable[[], object]] = []

#: Seconds after which an op that is in flight when a launcher ends the rank is worth a
#: report: before that the job may have been fine.
OLD = 5.0
#: Seconds that an abort of another rank may be on its way.
ABORT_WAIT = 0.5
#: Seconds that a rank which is to end waits for the request of another one.
GRACE = 0.3

#: Attribute of an error that has its verdict.
_REPORTED = "__rankscope_report__"


def install_triggers(reporter: Reporter) -> None:
    """Have `reporter` hear of overdue ops, of errors at the end, and of SIGTERM."""
    on_overdue.append(lambda: reporter.ask(Wish("overdue")))

    def leave(store: Store, rank: int, size: int) -> None:
        if reporter.is_over_hosts(size):
            serves = rank == 0 and store.server == RANK_0
            reporter.leave_groups(store, rank, size, serves=serves)

    before_leave.append(leave)
    install_excepthook(reporter)
    note_exceptions_of_threads()
    install_termination(reporter)


def hear_torch(reporter: Reporter, watch: TorchWatch) -> None:
    """Have `reporter` hear of errors of torch's ops, and of the end of its groups."""
    # Scripts on our own groups do without it.
    from ..torch_watch.creation import made_of
    from ..torch_watch.stores import disconnect, ends_with_rank_0

    def hear(group: Any, error: BaseException) -> None:
        try:
            made = made_of(group)
        except LookupError:
            # It is destroyed.
            add_verdict(reporter, error)
            return
        # Who looks may abort it: the op ends before the abort is known on this rank.
        patience = ABORT_WAIT if reporter.is_attended() else 0.0
        if until(lambda: made.aborted is not None, patience):
            # Its reason is known.
            setattr(error, _REPORTED, True)
        else:
            add_verdict(reporter, error)

    def leave() -> None:
        rank, size = watch.rank, watch.world_size
        if rank is None or size is None or not reporter.is_over_hosts(size):
            return
        store = watch.living_store()
        serves = rank == 0 and ends_with_rank_0(store)
        if not reporter.leave_groups(store, rank, size, serves=serves):
            disconnect(store)

    watch.on_error.append(hear)
    watch.before_destroy.append(leave)
    reporter.before_end.append(leave)


def _follows_from_a_rank(error: BaseException) -> bool:
    if isinstance(error, DistAbortedError) and not error.culprits:
        from ..post_mortem.log import REASON
        from ..post_mortem.rank_facts import STORE_LOST

        # Else somebody wanted it.
        text = str(error)
        return any(one.search(text) is not None for one in (STORE_LOST, REASON))
    return is_consequence(error)


def _is_aborted(reporter: Reporter) -> bool:
    """Whether who looks at the job has ended an op of this rank, which tells why."""
    return reporter.is_attended() and any(
        one.state == "aborted" for one in world.summary()
    )


def add_verdict(reporter: Reporter, error: BaseException, ended: bool = False) -> None:
    """Have a report written of the error of an op; add its verdict to the error."""
    if not is_consequence(error):
        return
    found = reporter.report("error", error, ended)
    if found is not None:
        setattr(error, _REPORTED, True)
        _add_note(error, f"Why, as the ranks' records tell: {found}")


def _add_note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        # Before Python 3.11.
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def install_excepthook(reporter: Reporter) -> None:
    """Have a report written of an exception that ends this rank while others wait."""
    original = sys.excepthook

    def show(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        reporter.ended_by = error
        with contextlib.suppress(Exception):
            world.announce_end()
            if getattr(error, _REPORTED, False) or _is_aborted(reporter):
                pass
            elif _follows_from_a_rank(error):
                add_verdict(reporter, error, ended=True)
            elif isinstance(error, Exception):
                reporter.report("exception", error, ended=True)
        original(kind, error, traceback)

    sys.excepthook = show


def install_termination(reporter: Reporter) -> None:
    """Have a report written when a launcher ends this rank while it waits.

    While the main thread is in an op, no handler in Python runs: the thread of
    `reporter` hears of the signal from Python's own handler, in C. It ends the process
    afterwards as the signal would have, unless the program has its own handler.
    """
    if threading.current_thread() is not threading.main_thread():
        return

    def ignore(number: int, frame: FrameType | None) -> None:
        """Let the thread end the process, also where another descriptor is set."""
        with contextlib.suppress(OSError):
            os.write(reporter.bell, bytes([number]))

    before = signal.set_wakeup_fd(reporter.bell, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, ignore)
    paused = PausedHandler(signal.SIGTERM)

    def is_own() -> bool:
        return signal.getsignal(signal.SIGTERM) is ignore

    def pause() -> None:
        # A child that is ended at once would write into the pipe of this process.
        if is_own():
            paused.pause()

    def hear(number: int) -> None:
        if number != signal.SIGTERM:
            return
        try:
            reporter.report_at_end(OLD, GRACE)
        finally:
            if is_own():
                reporter.leave()
                for call in before_termination:
                    call()
                end_by(signal.SIGTERM)

    def forget() -> None:
        """In the child of a fork: its signals are its own."""
        paused.forget()
        signal.set_wakeup_fd(-1)
        if is_own():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop() -> None:
        # Nobody would hear of the signal.
        if is_own():
            handle_by(signal.SIGTERM, None)

    reporter.on_signal = hear
    reporter.on_stop = stop
    os.register_at_fork(
        before=pause, after_in_parent=paused.resume, after_in_child=forget
    )
