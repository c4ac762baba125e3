"""The process of an engine: its end by SIGTERM, and the children that it forks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import Any, NoReturn

__all__ = ["end_by_sigterm", "end_child", "give_children_their_signals"]


def end_by_sigterm(app: Any) -> None:
    """Have SIGTERM end the engine of `app` as a signal does, once its cell has ended.

    ipyparallel stops the event loop: the process ends with a traceback and exit code 1.
    """

    def end() -> None:
        app.restore_output()
        atexit._run_exitfuncs()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def handle(signum: int, frame: FrameType | None) -> None:
        app.loop.add_callback_from_signal(end)

    signal.signal(signal.SIGTERM, handle)


def give_children_their_signals() -> None:
    """Have the children that this engine forks heed signals as Python's own do.

    The engine's handler of SIGTERM stops an event loop, which a child does not run:
    `multiprocessing.Pool` ends its workers by that signal, and waits for their ends.
    A handler that the user has set is kept, as a plain Python keeps it.
    """
    of_engine = {
        signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    plain: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = threading.local()

    def block() -> None:
        # A signal that came before its handler is restored would be lost.
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, of_engine)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def restore() -> None:
        for signum, handler in of_engine.items():
            if signal.getsignal(signum) is handler:
                signal.signal(signum, plain[signum])
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child that has left the cell: else it goes on as a second engine."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)
