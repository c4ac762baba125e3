"""Work: one operation in flight, its state machine and its timing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any

from ..errors import ConnectionLostError, DistBackendError, DistError, DistTimeoutError
from ..quantities import as_seconds
from .future import Future
from .latch import Latch
from .op_type import OpType
from .record_fields import UNSEEN
from .state import COMPLETED, SCHEDULED, STARTED, Failures, OpRecord, WorkState
from .unwaited import unwaited

__all__ = ["Work", "transition"]

_log = logging.getLogger(__name__)

# The class: threading.RLock() is a Python function that calls it.
_RLock = type(threading.RLock())


def transition(state: WorkState, event: WorkState) -> WorkState:
    """Return the state that follows `state` when `event` is reported.

    The first outcome is the outcome. A Work may end without having started: its start
    may not have been reported.
    """
    if event is SCHEDULED:
        raise ValueError("a Work cannot go back to SCHEDULED")
    if state.is_terminal:
        return state
    return event


class Work:
    """One operation of one group, from its issue to its end.

    An op returns it with ``async_op=True``. Durations run from when the op started to
    execute, never from when it was queued; `timed` is fixed when the Work is made.

    Parameters
    ----------
    op_type : OpType, default UNKNOWN
        The op.
    result : object, optional
        What `result` returns when the op has succeeded; an array or a list of arrays.

    Notes
    -----
    Named after ``torch.distributed.Work``. A backend makes the Work, returns it at once
    and reports on it, from any thread, through :meth:`mark_started`,
    :meth:`mark_completed` and :meth:`mark_failed`. ``await work`` suspends a task, not
    the thread. Its group may end it with these arguments:

    - `error`: what `wait` raises.
    - `state`: how the Work ends.

    Examples
    --------
    >>> x = np.ones(2)
    >>> work = dist.all_reduce(x, async_op=True)
    >>> work.wait()
    True
    >>> work.is_success(), work.result(), work.sequence_number
    (True, [array([1., 1.])], 1)
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_done",
        "_exception",
        "_failures",
        "_lock",
        "_outer",
        "_result",
        "_state",
        "completed_ns",
        "op_type",
        "record",
        "scheduled_ns",
        "since",
        "started_ns",
        "timed",
    )

    #: Whether ``wait()`` orders the caller's stream behind the op, not the host.
    on_device: bool = False
    #: Ns on the device, if its events tell them: from the end of the op before it to
    #: where the rank has come to this one, and from there to its end.
    device_ns: tuple[int, int] | None = None

    def __init__(self, op_type: OpType = OpType.UNKNOWN, result: Any = None) -> None:
        self.op_type = op_type
        self.record: OpRecord | None = None
        self.timed = True
        self.scheduled_ns = time.time_ns()
        #: When it started, or else was made, by the monotonic clock. Ages are told from
        #: this: the wall clock, whose times the records have, may be set meanwhile.
        self.since = time.monotonic()
        self.started_ns = 0
        self.completed_ns = 0
        self._state = SCHEDULED
        self._result = result
        self._exception: BaseException | None = None
        # Made by the first failure, or abort, that a group has a part in.
        self._failures: Failures | None = None
        # Recursive, as a signal handler may abort the group while this thread has it.
        self._lock = _RLock()
        # Made by the first waiter only: most Works are done before anybody
        # has to block.
        self._done: Latch | None = None
        self._callbacks: list[Callable[[Work], None]] | None = None
        # The Work that is made of this one, and starts when this one does.
        self._outer: Work | None = None

    # -- what a caller uses ------------------------------------------------

    @property
    def state(self) -> WorkState:
        """The present state."""
        return self._state

    def is_completed(self) -> bool:
        """Return whether the op is over, well or not (``c10d::Work::isCompleted``)."""
        over = self._state.is_terminal
        if not over:
            self._note_unseen()
        return over

    def is_success(self) -> bool:
        """Return whether the op is over and went well."""
        return self._state is COMPLETED

    def exception(self) -> BaseException | None:
        """Return the error of a Work that did not go well, else ``None``."""
        self._note_waited()
        self._mark_observed()
        return self._exception

    def result(self) -> Any:
        """Return a list of the op's outputs; of one output, too, as in c10d.

        Returns
        -------
        list or object
            The arrays or tensors that the caller gave for them. Empty where this rank
            has no output. The result of a receive is the sender's rank in the group,
            and that of a Work made from a future is the value of the future.

        Raises
        ------
        DistBackendError
            The op is still in flight.
        DistError
            The op failed: its error.

        Examples
        --------
        >>> work = dist.all_reduce(np.ones(2), async_op=True)
        >>> work.wait(), work.result()
        (True, [array([1., 1.])])
        """
        self._note_waited()
        if self._exception is not None:
            self._mark_observed()
            raise self._exception
        if self._state is not COMPLETED:
            raise DistBackendError(
                f"{self.describe()} has no result yet: wait() first", **self.identity()
            )
        return self._outputs()

    def _outputs(self) -> Any:
        """Return the result, as a list if it is one array or nothing."""
        result = self._result
        if result is None:
            return []
        # What exports its memory may say no dtype; a sparse array exports none.
        one = hasattr(result, "dtype") or hasattr(result, "__dlpack_device__")
        return [result] if one else result

    def source_rank(self) -> int:
        """Return the sender's rank in the group, of a receive that is over.

        Returns
        -------
        int
            The rank; -1 if the backend does not know it.

        Raises
        ------
        DistBackendError
            The op is no receive, or still in flight.
        """
        if self.op_type is not OpType.RECV:
            raise DistBackendError(
                f"{self.describe()} has no source_rank(): it is no receive",
                **self.identity(),
            )
        sender = self.result()
        return -1 if sender == [] else int(sender)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until the op is over; return ``True``, or raise its error.

        On a device, without a timeout, as in c10d: the caller's current stream waits
        for the op, the host does not. With a timeout the host waits; so it does in
        `synchronize`, and in ``wait()`` of a barrier.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Bounds this wait only, in seconds if it is a number: when it passes,
            `DistTimeoutError` is raised and the Work stays in flight. The op's own
            timeout, the group's, goes on counting from the op's start.

        Returns
        -------
        bool
            ``True``.

        Raises
        ------
        DistTimeoutError
            `timeout` passed, or the timeout of the op.
        DistAbortedError
            The group was aborted.
        DistBackendError
            The op failed.
        TypeError, ValueError
            `timeout` is no duration, or is negative.

        Examples
        --------
        >>> work = dist.barrier(async_op=True)
        >>> work.wait(timeout=5)
        True
        """
        seconds = None if timeout is None else as_seconds(timeout, "wait: timeout")
        self._note_waited()
        over = self._state.is_terminal
        if not over:
            self._note_wait()
            over = self._is_over(seconds)
        if not over:
            raise DistTimeoutError(
                f"{self.describe()} was not done after wait(timeout={seconds:g} s); "
                "it is still in flight",
                **self.identity(),
                reason=f"wait(timeout={seconds:g} s) passed",
            )
        if self._exception is not None:
            raise self._exception
        return True

    def synchronize(self) -> None:
        """Block until the op is over, on a device too; raise its error.

        In ``torch.distributed`` it does on a device what ``wait()`` does here and
        there: it makes the caller's current stream wait.

        Raises
        ------
        DistTimeoutError, DistAbortedError, DistBackendError
            As `wait` raises them.
        """
        self.wait()

    def poll(self) -> bool:
        """Return whether the op is over; a backend that polls looks once more first.

        The watchdog calls this before it times the op out. May block for a moment.
        """
        return self._state.is_terminal

    def begun_at(self, oldest: bool) -> float | None:
        """Return when the op's timeout began to count (``time.monotonic``).

        ``None``: it has not.

        Parameters
        ----------
        oldest : bool
            Whether the op is the oldest of its group. Without a report of its start,
            its timeout counts from its issue then.
        """
        return self.since if self.started_ns or oldest else None

    def get_future(self) -> Future:
        """Return a future that ends as this Work does; its value is `result()`.

        Returns
        -------
        rankscope.futures.Future
            It has the methods of torch's futures and of ``concurrent.futures``. Its
            callbacks may block, for other Works too.

        Examples
        --------
        >>> work = dist.all_reduce(np.ones(2), async_op=True)
        >>> future = work.get_future()
        >>> future.wait()
        [array([1., 1.])]
        >>> future.then(lambda done: done.value()[0].tolist()).wait()
        [1.0, 1.0]
        """
        future = Future(self)

        def settle(work: Work) -> None:
            # A cancelled future accepts no result.
            if future.set_running_or_notify_cancel():
                if work._exception is not None:
                    work._mark_observed()
                    future.set_exception(work._exception)
                else:
                    future.set_result(work._outputs())

        self._when_over(settle)
        return future

    def __await__(self) -> Generator[Any, None, Any]:
        """``await work``: suspend the task, not the thread; returns the result."""
        return self.get_future().__await__()

    @property
    def sequence_number(self) -> int:
        """``collective_seq_id``, or ``p2p_seq_id`` of a send or recv; -1 if unbound."""
        if self.record is None:
            return -1
        if self.op_type.is_p2p:
            return self.record.p2p_seq_id
        return self.record.collective_seq_id

    @property
    def duration_ns(self) -> int | None:
        """Nanoseconds from start to end; ``None`` if unknown or not timed."""
        if not self.timed or not self.started_ns or not self.completed_ns:
            return None
        return self.completed_ns - self.started_ns

    def get_duration(self) -> float | None:
        """Return the milliseconds from start to end, as ``Work._get_duration`` has it.

        Returns
        -------
        float or None
            ``None`` before the end, and for a Work that is not timed.
        """
        duration = self.duration_ns
        return None if duration is None else duration / 1e6

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Call ``callback(work)`` once, when the Work is over (at once if it is).

        Parameters
        ----------
        callback : callable
            Runs on the thread that ends the Work, which ends others too: a callback
            that blocks belongs to the future (`get_future`). `wait` may return before
            the call.

        Examples
        --------
        >>> import threading
        >>> ended = threading.Event()
        >>> work = dist.all_reduce(np.ones(2), async_op=True)
        >>> work.add_done_callback(lambda work: ended.set())
        >>> ended.wait(5)
        True
        """
        self._when_over(callback)
        if not self._state.is_terminal:
            self._note_unseen()

    def _when_over(self, callback: Callable[[Work], None]) -> None:
        """As `add_done_callback`, for a callback that no caller waits for."""
        self._note_waited()
        with self._lock:
            if not self._state.is_terminal:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def describe(self) -> str:
        """Return ``all_reduce #14 of group 'default' on rank 2 (cell 7 line 3)``.

        As messages name the op; the op alone before it has a number.

        Examples
        --------
        >>> work = dist.barrier(async_op=True)
        >>> work.wait()
        True
        >>> work.describe()  # doctest: +ELLIPSIS
        "barrier #1 of group 'default' on rank 0 (...)"
        """
        if self.record is None:
            return self.op_type.value
        return self.record.describe()

    def identity(self) -> dict[str, Any]:
        """Return rank, group, op and sequence number as attributes of an error."""
        if self.record is None:
            return {"op": self.op_type.value}
        return self.record.identity()

    def __repr__(self) -> str:
        duration = self.get_duration()
        took = "" if duration is None else f", {duration:.3f} ms"
        return f"<Work {self.describe()}: {self._state.value}{took}>"

    # -- what a backend uses -----------------------------------------------

    def detach(self) -> None:
        """Have the op advance while no thread waits for it.

        Called by the dispatcher for ``async_op=True``. A backend whose ops
        advance without a waiter has nothing to do here.
        """

    def finish(self, async_op: bool) -> Work | None:
        """Return the Work if `async_op`, else wait for it and return ``None``.

        Parameters
        ----------
        async_op : bool
            The argument of the op.
        """
        if async_op:
            if not self._state.is_terminal:
                self.detach()
            record = self.record
            # A send has no result to wait for.
            if unwaited.active and record and self.op_type is not OpType.SEND:
                unwaited.note(self, record)
            return self
        record = self.record
        if record is None:
            self.wait()
            return None
        # The call has waited from the beginning, in its start too.
        record.waited_ns = record.created_ns
        self.wait()
        if self.completed_ns:
            # An op of a stream goes on behind its wait.
            record.status.blocked_ns += self.completed_ns - record.created_ns
        return None

    def _note_waited(self) -> None:
        record = self.record
        if record is not None:
            record.waited = True

    def _note_wait(self) -> None:
        """Note since when somebody waits for the op, which is in flight."""
        record = self.record
        if record is not None and record.waited_ns <= 0:
            record.waited_ns = time.time_ns()

    def _note_unseen(self) -> None:
        """Note that somebody may wait for the op where it is not seen.

        A program that polls does, and one that has a callback set an event.
        """
        record = self.record
        if record is not None and not record.waited_ns:
            record.waited_ns = UNSEEN

    def _mark_observed(self) -> None:
        """Mark the error, if any, as observed by the caller; see `async_errors`."""

    def _block(self, timeout: float | None) -> bool:
        """Block until the op is over, for `timeout` seconds; return whether it is."""
        with self._lock:
            if self._state.is_terminal:
                return True
            if self._done is None:
                self._done = Latch()
        return self._done.wait(timeout)

    def _is_over(self, timeout: float | None) -> bool:
        """Block as `_block`, and for a group that has yet to end what has failed."""
        began = time.monotonic()
        if self._block(timeout):
            return True
        if timeout is None or self.withheld is None:
            return False
        return Work._block(self, max(0.0, began + timeout - time.monotonic()))

    def _begin_unreported(self) -> None:
        """Start a Work that no other thread knows yet, and that has no record."""
        self._state = STARTED
        self.started_ns = self.scheduled_ns

    def mark_started(self, at_ns: int | None = None) -> None:
        """Report that the op began to execute.

        Parameters
        ----------
        at_ns : int, optional
            When (``time.time_ns``); the default is now.
        """
        with self._lock:
            if self._state is not SCHEDULED:
                return
            self._state = STARTED
            now, self.since = time.time_ns(), time.monotonic()
            if at_ns is not None:
                self.since -= (now - at_ns) / 1e9
            self.started_ns = at_ns or now
            if self.record is not None:
                self.record.started(self)
        if self._outer is not None:
            self._outer.mark_started(self.started_ns)

    def mark_completed(
        self,
        result: Any = None,
        started_ns: int | None = None,
        completed_ns: int | None = None,
    ) -> bool:
        """Report success; the first outcome is the outcome.

        Parameters
        ----------
        result : object, optional
            Replaces the result that was given at construction.
        started_ns, completed_ns : int, optional
            When (``time.time_ns``), if the library knows it.

        Returns
        -------
        bool
            Whether this call ended the Work.

        Examples
        --------
        >>> work = dist.Work(dist.OpType.BARRIER)
        >>> work.mark_started()
        >>> work.mark_completed()
        True
        >>> work.mark_failed(dist.DistBackendError("too late"))
        False
        >>> work.is_success()
        True
        """
        return self._end(COMPLETED, None, result, started_ns, completed_ns)

    def mark_failed(
        self, error: BaseException, state: WorkState = WorkState.FAILED
    ) -> bool:
        """Report that the op ended badly: FAILED, TIMED_OUT or ABORTED.

        A `ConnectionLostError` does not end a Work of a group: the group does, once it
        knows the cause.

        Parameters
        ----------
        error : BaseException
            What `wait` raises; one that is no `DistError` becomes the cause of one that
            names the op, once the Work is bound to its record.
        state : WorkState, default FAILED
            How it ended.

        Returns
        -------
        bool
            Whether this call ended the Work; ``False`` if it was over already.

        Examples
        --------
        >>> work = dist.Work(dist.OpType.BARRIER)
        >>> work.mark_failed(dist.DistBackendError("the connection broke"))
        True
        >>> work.state, work.exception()
        (<WorkState.FAILED: 'failed'>, DistBackendError('the connection broke'))
        """
        return self._end(state, error, None, None, None)

    def hold_failures(
        self, error: BaseException | None = None, state: WorkState = WorkState.ABORTED
    ) -> None:
        """Keep any failure from now on as `withheld` until the group ends the Work.

        A group calls it when a connection was lost: the failures that follow do not
        name the cause. An abort calls it before it stops the backend, with the `error`
        and the state of the Work's end, which a failure of the backend must not hide;
        a Work without a group ends so at its next failure.
        """
        with self._lock:
            self._failures = self._failures or Failures()
            if error is not None:
                self._failures.cause = error, state

    def fail_by_group(self, error: BaseException) -> None:
        """End the Work, whose backend is stopped and writes to its arrays no more.

        With what `hold_failures` was told, or else with `error`.
        """
        self.hold_failures()
        with self._lock:
            assert self._failures is not None
            self._failures.cause = self._failures.cause or (error, WorkState.ABORTED)
            self._failures.final = True
        self.mark_failed(error, WorkState.ABORTED)

    def disown(self, error: BaseException) -> None:
        """In a forked child: fail with `error`, as the op is the parent's.

        No callback is called, and no lock waited for, which another thread may have
        held at the fork.
        """
        if not self._state.is_terminal:
            self._lock, self._callbacks = _RLock(), None
            self._exception, self._state = error, WorkState.ABORTED

    @property
    def withheld(self) -> BaseException | None:
        """The failure whose cause the group still looks for, if there is one."""
        return None if self._failures is None else self._failures.withheld

    def _end(
        self,
        event: WorkState,
        error: BaseException | None,
        result: Any,
        started_ns: int | None,
        completed_ns: int | None,
    ) -> bool:
        with self._lock:
            if self._state.is_terminal:
                return False
            if error is not None and isinstance(error, ConnectionLostError):
                self.hold_failures()
            if self._failures is not None:
                end = self._failures.admit(error, event, self.record is not None)
                if end is None:
                    return False
                error, event = end
            if started_ns and not self.started_ns:
                self.started_ns = started_ns
            state = transition(self._state, event)
            now = completed_ns or time.time_ns()
            # A signal handler that aborts runs at a call, and there is none from here
            # until the state is set.
            if self._state.is_terminal:
                return False
            self.completed_ns = now
            if result is not None:
                self._result = result
            self._exception = error
            # Before the state: `bind` takes no lock once that is COMPLETED.
            record = self.record
            self._state = state
            if record is not None:
                if error is not None:
                    self._name_error()
                try:
                    record.ended(self)
                except KeyboardInterrupt:
                    # The op must not stay in flight for its group.
                    record.ended(self)
                    raise
            done, callbacks = self._done, self._callbacks
            self._callbacks = None
        if done is not None:
            done.set()
        if callbacks:
            self._call_back(callbacks)
        return True

    def _call_back(self, callbacks: Iterable[Callable[[Work], None]]) -> None:
        left = iter(callbacks)
        for callback in left:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - anybody's code
                # The thread that ends Works has others to end, too.
                _log.exception("a callback of %s", self.describe())
            except BaseException:
                # An interrupt ends one of them.
                self._call_back(left)
                raise

    def bind(self, record: OpRecord, result: Any = None) -> bool:
        """Tie the Work to its flight-recorder slot (the dispatcher does this).

        Parameters
        ----------
        record : OpRecord
            The slot.
        result : object, optional
            The result of the op, if the backend has given none.

        Returns
        -------
        bool
            ``False``, and nothing is done, if the Work has ended with a
            `ConnectionLostError`, whose cause its group could not look for.
        """
        if self._state is COMPLETED:
            # It changes no more, and `_end` had no record to tell.
            self.record = record
            if self._result is None:
                self._result = result
            record.ended(self)
            return True
        with self._lock:
            error = self._exception
            if error is not None and isinstance(error, ConnectionLostError):
                return False
            self.record = record
            if self._result is None:
                self._result = result
            if self._state.is_terminal:
                if error is not None:
                    self._name_error()
                record.ended(self)
            elif self.started_ns:
                record.started(self)
            return True

    def _name_error(self) -> None:
        # What a library, or a backend of somebody else, raised on its own thread
        # says nothing of the op; it may come before the op has its number.
        error = self._exception
        if error is None:
            return
        if isinstance(error, DistError):
            error.fill_in(**self.identity(), reason=str(error))
            return
        reason = f"{type(error).__name__}: {error}"
        self._exception = DistBackendError(
            f"{self.describe()} failed: {reason}", **self.identity(), reason=reason
        )
        self._exception.__cause__ = error
