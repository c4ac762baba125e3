"""Waits inside of torch's RPC, which an abort or an interrupt ends.

Torch waits in C++, where neither reaches it. Here a thread waits for an event, which
torch's future sets when it is done, and which an abort sets as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..groups.abort_reason import AbortReason

__all__ = ["Wait", "call_apart", "wait_for"]

T = TypeVar("T")


class Wait:
    """One wait of one thread; other threads end it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        #: Why it was aborted, ``None`` where it was not.
        self.aborted: AbortReason | None = None
        #: Whether the thread waits no longer, though the end has not come.
        self.given_up = False

    def end(self, _: Any = None) -> None:
        """Let the waiting thread go on."""
        self._over.set()

    def abort(self, reason: AbortReason) -> None:
        """Let the waiting thread fail with `reason`."""
        if not self._over.is_set():
            self.aborted = reason
            self._over.set()

    @property
    def over(self) -> bool:
        """Whether the thread may go on, or has to fail."""
        return self._over.is_set()

    def block(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it came within `timeout` seconds."""
        return self._over.wait(timeout)


def wait_for(future: Any, wait: Wait) -> None:
    """Wait until torch's `future` is done, or `wait` is aborted."""
    future.add_done_callback(wait.end)
    wait.block()


def call_apart(function: Callable[[], T], wait: Wait) -> Callable[[], T]:
    """Call `function`, which blocks in C++, on a thread; wait until it has returned.

    Returns what gives its result or raises its error; it is not to be called where
    `wait` was aborted. The thread then stays until torch lets it go.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            errors.append(error)
        wait.end()

    def result() -> T:
        if errors:
            raise errors[0]
        return results[0]

    threading.Thread(target=run, name="rankscope-torch-rpc", daemon=True).start()
    wait.block()
    return result
