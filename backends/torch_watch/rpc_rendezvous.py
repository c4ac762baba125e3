"""The store in which the workers of an ``init_rpc`` meet, made so that it can be left.

Torch's ``TCPStore`` waits in C++ until it is made: on worker 0 for all workers, on the
others for worker 0. Nothing ends that but its timeout, half an hour. Here a worker
looks for the store before it connects, and worker 0 waits for nobody: `meet` does that.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..errors import DistError, DistStoreTimeoutError
from .rpc_waits import Wait

__all__ = ["POLL", "Rendezvous", "check_wanted"]

#: Seconds between two looks for the others.
POLL = 0.02
#: Seconds that a connection to the store's host may take.
_CONNECT = 2.0
#: Torch's own timeout of a store.
_TIMEOUT = timedelta(minutes=30)


def check_wanted(wait: Wait) -> None:
    """Raise `DistError` if no worker waits for the ``init_rpc`` of `wait` any more."""
    if wait.given_up:
        raise DistError("init_rpc was given up")


class Rendezvous:
    """Makes the stores of ``init_rpc``; those of other calls are torch's own."""

    def __init__(self) -> None:
        self._here = threading.local()
        # An earlier store serves the others until the next one does, at the same port.
        self._store: Any = None
        #: Seconds that this worker waits for the others as the host of the last store.
        self.patience = 0.0

    @contextmanager
    def endable(self, wait: Wait) -> Iterator[None]:
        """Make the stores of this thread so that they are left once `wait` is."""
        self._here.wait = wait
        try:
            yield
        finally:
            del self._here.wait

    def wrap(self, original: Any) -> Any:
        """Return what torch's rendezvous calls in the place of ``TCPStore``."""

        def make(
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta = _TIMEOUT,
            **named: Any,
        ) -> Any:
            wait: Wait | None = getattr(self._here, "wait", None)
            if wait is not None:
                named["wait_for_workers"] = False
                if not is_master:
                    seconds = timeout.total_seconds()
                    _await_host(host_name, port, seconds, lambda: check_wanted(wait))
            store = original(
                host_name=host_name,
                port=port,
                world_size=world_size,
                is_master=is_master,
                timeout=timeout,
                **named,
            )
            if wait is not None:
                self._store = store
                self.patience = timeout.total_seconds() if is_master else 0.0
            return store

        return make


def _await_host(
    host: str, port: int, timeout: float, check: Callable[[], None]
) -> None:
    """Wait until a socket listens at `host` and `port`; `check` may raise."""
    deadline = time.monotonic() + timeout
    while True:
        check()
        try:
            socket.create_connection((host, port), _CONNECT).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistStoreTimeoutError(
                    f"init_rpc: nothing listens at {host}:{port} after {timeout:g} s "
                    f"({error}): worker 0 has to call it there"
                ) from None
        time.sleep(POLL)
