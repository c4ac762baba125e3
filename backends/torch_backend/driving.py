"""Futures of ops for torch, and who waits for the ops: in a backward pass, backward().

Torch's own code waits for a future in C++: no interrupt reaches it there, and the error
of the op becomes a RuntimeError. So the thread of ``backward()`` waits in Python, in a
callback of the autograd engine that is called before DDP's: `Backward`. It ends the
futures in the order of their ops, so what their callbacks issue has one order on all
ranks.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import DistBackendError
from ..work.threads import callback_threads
from ..work.work import Work
from . import private

__all__ = ["Backward", "ChainedFuture", "OpFuture", "future_of"]


class _Failed(Sequence[Any]):
    """The result of an op that failed: whoever reads an entry gets the error.

    A future that Python code ends cannot have an error for C++: see `future_of`. C++
    holds the result, where no garbage collector sees it: it must not hold the error,
    whose traceback leads to the future again.
    """

    def __init__(self, future: _Future, error: BaseException) -> None:
        self._future = weakref.ref(future)
        self._text = f"{type(error).__name__}: {error}"

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        future = self._future()
        if future is not None and future._failure is not None:
            raise future._failure
        raise DistBackendError(f"what this future waited for has failed: {self._text}")


class _Future(torch.futures.Future):  # type: ignore[misc]
    """A future whose waiter drives what it waits for, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self._failure: BaseException | None = None
        self._claim = threading.Lock()

    def drive(self) -> None:
        """Wait for what ends this future, and end it."""
        raise NotImplementedError

    def _end(self, value: Any, failure: BaseException | None) -> None:
        # The callbacks run in set_result, on this thread.
        if self._claim.acquire(blocking=False):
            self._failure = failure
            self.set_result(value if failure is None else _Failed(self, failure))

    def wait(self) -> Any:
        if not self.done():
            self.drive()
        value = super().wait()
        if self._failure is not None:
            raise self._failure
        return value

    def value(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        child = ChainedFuture(self, callback)
        # Torch passes a future that is not of this class: the child knows this one.
        super().add_done_callback(lambda _: child.run())
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        super().add_done_callback(lambda _: callback(self))


def future_of(
    work: Work, outputs: Sequence[torch.Tensor], waited: bool
) -> torch.futures.Future:
    """Return a future of an op: its value is the list of the output tensors.

    `waited`: somebody has waited for the op before. DDP's join does, and reads the
    value at once.
    """
    if waited and work.is_success():
        return OpFuture(work, outputs, None)
    backward = Backward.current()
    if backward is None and private.in_backward():
        return _failable(work, outputs)
    return OpFuture(work, outputs, backward)


def _failable(work: Work, outputs: Sequence[torch.Tensor]) -> torch.futures.Future:
    """Return a future that has an error for C++, too: who waits for it drives nothing.

    C++ code that reads a `_Failed` would end the process. It waits in C++ where DDP
    reduces in a callback of the backward pass, and where the pass cannot be driven.
    """
    over = torch.futures.Future()

    def outcome(_: Any) -> Sequence[torch.Tensor]:
        work.wait()
        return outputs

    future = over.then(outcome)
    work._when_over(lambda _: callback_threads.submit(lambda: over.set_result(None)))
    return future


class OpFuture(_Future):
    """The future of an op: its value is the list of the output tensors."""

    def __init__(
        self, work: Work, outputs: Sequence[torch.Tensor], backward: Backward | None
    ) -> None:
        super().__init__()
        self.work, self.outputs, self.backward = work, outputs, backward
        if self.backward is not None:
            # An op that is over, too: its callbacks have their turn, on all ranks.
            self.backward.pending.append(self)
        elif work.state.is_terminal:
            self.settle()
        else:
            work._when_over(lambda _: callback_threads.submit(self.settle))

    def settle(self) -> None:
        self._end(self.outputs, self.work.exception())

    def synchronize(self) -> None:
        """Wait for the op, and end as it has ended."""
        try:
            # On a device wait() would let this thread go on before the op is over.
            self.work.synchronize()
        finally:
            if self.work.state.is_terminal:
                self.settle()

    def drive(self) -> None:
        if self.backward is None:
            self.synchronize()
            return
        # In order: those before it, too.
        while self.backward.pending and not self.done():
            self.backward.settle_next()


class ChainedFuture(_Future):
    """The future of a callback, which is called when another future is done."""

    def __init__(self, parent: _Future, callback: Callable[[Any], Any]) -> None:
        super().__init__()
        self._parent: _Future | None = parent
        self._callback: Callable[[Any], Any] | None = callback
        self.backward: Backward | None = getattr(parent, "backward", None)

    def run(self) -> None:
        """Call the callback with the future that is done; end as it ends."""
        parent, callback = self._parent, self._callback
        assert parent is not None
        assert callback is not None
        try:
            value = callback(parent)
        except BaseException as error:  # noqa: BLE001 - it belongs to the future
            if self.backward is not None:
                self.backward.failure = self.backward.failure or error
            self._end(None, error)
        else:
            self._end(value, None)
        finally:
            self._parent = self._callback = None

    def drive(self) -> None:
        parent = self._parent
        if parent is not None and not parent.done():
            parent.drive()


class Backward:
    """The ops in flight of one backward pass, whose thread waits for them at its end.

    Autograd holds the object as a callback of the pass, and drops it when the pass
    fails.
    """

    def __init__(self) -> None:
        self.pending: collections.deque[OpFuture] = collections.deque()
        #: The first error of a callback.
        self.failure: BaseException | None = None

    @staticmethod
    def current() -> Backward | None:
        """Return the backward pass that this thread is in; ``None``: in none."""
        driving: Backward | None = getattr(_driving, "backward", None)
        if driving is not None:
            return driving
        task = private.graph_task()
        if task == -1:
            return None
        known = _passes.get(task)
        if known is None:
            known = _passes[task] = Backward()
            assert private.queue_callback is not None
            private.queue_callback(known)
        return known

    def __call__(self) -> None:
        """Wait for all ops, in order; called by autograd when the graph is done."""
        outer = getattr(_driving, "backward", None)
        _driving.backward = self
        try:
            while self.pending:
                self.settle_next()
        finally:
            _driving.backward = outer

    def settle_next(self) -> None:
        """Wait for the oldest op, end its future and call its callbacks."""
        self.pending.popleft().synchronize()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


# By the number of the pass: passes can be nested (checkpointing).
_passes: weakref.WeakValueDictionary[int, Backward] = weakref.WeakValueDictionary()
# The pass whose ops a thread waits for: what their callbacks issue belongs to it.
_driving = threading.local()
