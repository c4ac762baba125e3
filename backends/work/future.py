"""Future: the end of a Work as a future, as ``torch.futures.Future`` is one."""

from __future__ import annotations

import concurrent.futures
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

from ..errors import DistBackendError
from .threads import callback_threads

__all__ = ["Future", "collect_all", "wait_all"]

_log = logging.getLogger(__name__)

# As Future.done(), where it is not the program that asks.
_is_done = concurrent.futures.Future.done


class _Waiter(Protocol):
    """What a future waits for; see the methods of `Work`."""

    def _block(self, timeout: float | None) -> bool: ...

    def _note_wait(self) -> None: ...

    def _note_unseen(self) -> None: ...


class Future(concurrent.futures.Future[Any]):
    """A result that is there later; callbacks can be chained to it.

    It has the methods of ``torch.futures.Future`` and those of
    `concurrent.futures.Future`, and it can be awaited. What `Work.get_future` returns
    ends as the Work does; its value is ``work.result()``, a list of the output arrays.
    A `timeout` is the seconds to wait at most.

    Parameters
    ----------
    waits_for : Work, optional
        What ends the future; a program that makes a future and ends it itself, by
        ``set_result`` or ``set_exception``, gives nothing.

    Notes
    -----
    Callbacks run on threads for callbacks, each on one of its own, so that a callback
    may block: it may issue ops, wait for Works and for other futures. Where the future
    is done already, the callback runs at once, on the thread that adds it. Callbacks
    of one future run in no particular order; chain them with `then` for one. Each
    thread has its own current CUDA device: a callback that uses GPU arrays selects it.
    """

    def __init__(self, waits_for: _Waiter | None = None) -> None:
        super().__init__()
        self._waits_for = waits_for
        #: The futures that this one is made of, until it is done.
        self._parts: Sequence[Future] = ()

    def done(self) -> bool:
        """Return whether the future has its value, or an error, or is cancelled."""
        over = _is_done(self)
        if not over:
            self._note_unseen()
        return over

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the future is done; return its value, or raise its error.

        Returns
        -------
        object
            The value.

        Raises
        ------
        TimeoutError
            `timeout` passed; on Python 3.10 it is that of ``concurrent.futures``.
        """
        return self.result(timeout)

    def value(self) -> Any:
        """Return the value of a future that is done, or raise its error; never block.

        Raises
        ------
        DistBackendError
            The future is not done.
        """
        if not _is_done(self):
            raise DistBackendError("the future has no value yet: wait() first")
        return super().result()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of ``callback(self)``, which is called when this one is done.

        The new future fails with what the callback raises. `callback` is called, too,
        if this future has failed; ``self.value()`` raises the error there.

        Parameters
        ----------
        callback : callable
            Gets this future; what it returns is the value of the new one.
        """
        chained = Future()
        chained._parts = (self,)

        def run(done: Future) -> None:
            chained._parts = ()
            if not chained.set_running_or_notify_cancel():
                return
            try:
                value = callback(done)
            except BaseException as error:  # noqa: BLE001 - it belongs to the future
                chained.set_exception(error)
            else:
                chained.set_result(value)

        self._when_done(run)
        return chained

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call ``fn(self)`` once, when the future is done (at once if it is).

        It is logged where `fn` raises an error. See `then` for a future of the call.

        Parameters
        ----------
        fn : callable
            Gets this future.
        """
        self._when_done(fn)
        if not _is_done(self):
            self._note_unseen()

    def _when_done(self, fn: Callable[[Any], object]) -> None:
        call: Callable[[], object] = partial(contextvars.copy_context().run, fn, self)
        if not _is_done(self):
            super().add_done_callback(lambda _: callback_threads.submit(call))
            return
        try:
            call()
        except Exception:  # noqa: BLE001 - anybody's code
            _log.exception("a callback of a future")

    def result(self, timeout: float | None = None) -> Any:
        """Block until the future is done; return its value, or raise its error: `wait`.

        Returns
        -------
        object
            The value.
        """
        return super().result(self._block(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Block until the future is done; return its error, ``None`` if it has none.

        Returns
        -------
        BaseException or None
            The error.
        """
        return super().exception(self._block(timeout))

    def _block(self, timeout: float | None) -> float | None:
        """Wait for the Work, if there is one; return what is left of `timeout`."""
        self._note_wait()
        # It may be the waiter who makes the op advance.
        if self._waits_for is None or _is_done(self):
            return timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        self._waits_for._block(timeout)
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _note_wait(self) -> None:
        """Note that somebody waits for the ops that end this future."""
        if not _is_done(self):
            for one in self._ends_with():
                one._note_wait()

    def _note_unseen(self) -> None:
        """Note that somebody may wait for them where it is not seen; see `Work`."""
        for one in self._ends_with():
            one._note_unseen()

    def _ends_with(self) -> Sequence[Future | _Waiter]:
        return self._parts if self._waits_for is None else (self._waits_for,)

    def __await__(self) -> Generator[Any, None, Any]:
        """``await future``: suspend the task, not the thread; returns the value."""
        import asyncio  # takes 25 ms, and a program that awaits has it

        self._note_wait()
        # Without a thread for callbacks: the event loop has one.
        relay: concurrent.futures.Future[Any] = concurrent.futures.Future()
        super().add_done_callback(lambda _: _pass_on(self, relay))
        return asyncio.wrap_future(relay).__await__()


def _pass_on(done: Future, relay: concurrent.futures.Future[Any]) -> None:
    if done.cancelled():
        relay.cancel()
    if not relay.set_running_or_notify_cancel():
        return
    error = concurrent.futures.Future.exception(done)
    if error is None:
        relay.set_result(concurrent.futures.Future.result(done))
    else:
        relay.set_exception(error)


def collect_all(futures: Sequence[Future]) -> Future:
    """Return a future whose value is the list of `futures`, once all are done.

    It fails at once with the error of the first of them that fails.

    Parameters
    ----------
    futures : sequence of Future
        The futures.

    Returns
    -------
    Future
        Its value is the list of futures, not of their values, as in ``torch.futures``.
    """
    collected, lock, left = Future(), threading.Lock(), len(futures)
    collected._parts = tuple(futures)

    def follow(done: concurrent.futures.Future[Any]) -> None:
        nonlocal left
        error = (
            concurrent.futures.CancelledError()
            if done.cancelled()
            else concurrent.futures.Future.exception(done)
        )
        with lock:
            left -= 1
            if _is_done(collected) or (left and error is None):
                return
            collected._parts = ()
            if error is None:
                collected.set_result(list(futures))
            else:
                collected.set_exception(error)

    for future in futures:
        # It blocks for nothing: no thread for callbacks is needed.
        concurrent.futures.Future.add_done_callback(future, follow)
    if not futures:
        collected.set_result([])
    return collected


def wait_all(futures: Sequence[Future], timeout: float | None = None) -> list[Any]:
    """Block until all of `futures` are done; return their values in order.

    Parameters
    ----------
    futures : sequence of Future
        The futures.
    timeout : float, optional
        Seconds to wait for all of them together.

    Returns
    -------
    list of object
        Their values.

    Raises
    ------
    Exception
        The error of the first of `futures` that failed.
    TimeoutError
        `timeout` passed; on Python 3.10 it is that of ``concurrent.futures``.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    for future in futures:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        future.exception(left)
    return [future.value() for future in futures]
