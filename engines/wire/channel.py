"""The notebook's end of the control channel: requests to the agents."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from ..errors import ClusterError
from . import ipyparallel_private as private
from .message_types import REQUEST
from .requests import Request

__all__ = ["ControlChannel"]


class ControlChannel:
    """Requests to the agents, from any thread, while the main threads are blocked."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._pending: dict[str, set[Future[Any]]] = {}
        self._lock = threading.Lock()
        # Why no reply will be received any more.
        self._closed_because = ""

    def post(self, uuid: str, request: Request[Any]) -> Future[Any]:
        """Send one request without waiting; return the Future of its reply."""
        future = private.send(self._client, "control", REQUEST, request.content(), uuid)
        with self._lock:
            self._pending.setdefault(uuid, set()).add(future)
            closed = self._closed_because
        future.add_done_callback(lambda done: self._forget(uuid, done))
        if closed:
            self.fail_pending(uuid, closed)
        return future

    def _forget(self, uuid: str, future: Future[Any]) -> None:
        with self._lock:
            self._pending.get(uuid, set()).discard(future)

    def drop(self, uuid: str, future: Future[Any]) -> None:
        private.discard_request(self._client, future.msg_id)  # type: ignore[attr-defined]
        self._forget(uuid, future)

    def signal(self, uuid: str, signum: int) -> Future[Any]:
        """Send a signal to an engine by its nanny, or its agent where it has none."""
        return private.send(
            self._client, "control", "signal_request", {"sig": int(signum)}, uuid
        )

    def fail_pending(self, uuid: str, why: str) -> None:
        """Fail the requests to an engine that is gone."""
        with self._lock:
            waiting = self._pending.pop(uuid, set())
        for future in list(waiting):
            if not future.done():
                future.set_exception(ClusterError(why))

    def close(self, why: str) -> None:
        """Fail all requests: who waits would do so for all of its timeout."""
        with self._lock:
            self._closed_because = why
            uuids = list(self._pending)
        for uuid in uuids:
            self.fail_pending(uuid, why)
