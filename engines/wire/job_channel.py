"""The channel of a script's job: the keys of its store, and queues of messages in it.

The channel is a `TCPStore` that the process of rank 0 serves: authenticated and
encrypted by CURVE, with one port. The ranks and the notebooks are its clients. A rank
keeps its status in a key. Messages to it are the entries of a queue that it watches, so
that it neither polls nor is slowed down while no notebook is attached.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

from rankscope.backends.errors import DistError
from rankscope.backends.stores.tcp import TCPStore

__all__ = [
    "ENDED",
    "JOB",
    "QueueReader",
    "answer_key",
    "append",
    "end_key",
    "status_key",
]

_log = logging.getLogger(__name__)

#: The key with what a notebook has to know of the job.
JOB = "job"

#: What the sentence of a rank says that came to its end without an error.
ENDED = "its script has ended"

#: Entries of a queue that are kept behind the reader: a writer that has read the
#: position a moment ago must not find its entry free again.
_KEPT = 64
#: Seconds before a request is repeated that the store has not answered.
_RETRY = 0.1


def status_key(rank: int) -> str:
    return f"status/{rank}"


def end_key(rank: int) -> str:
    """Return the key that says how `rank` ended, once it has: a sentence."""
    return f"ended/{rank}"


def answer_key(number: str) -> str:
    return f"answer/{number}"


def append(store: TCPStore, queue: str, message: bytes) -> None:
    """Append `message`, which no other equals, to a queue; it has a reader."""
    place = int(store.get(f"{queue}/next"))
    while store.compare_set(f"{queue}/{place}", b"", message) != message:
        place += 1


class QueueReader:
    """Calls ``callback(message)`` for each message of a queue, in their order.

    On the store's thread for callbacks, which goes on where `callback` raises. A queue
    has one reader, which gets no message to one before it: to a process of its rank
    that died. Unless `shared`: then each reader gets every message from the queue's
    start on, and none is deleted.
    """

    def __init__(
        self,
        store: TCPStore,
        queue: str,
        callback: Callable[[bytes], None],
        *,
        shared: bool = False,
    ) -> None:
        self._store, self._queue = store, queue
        self._callback = callback
        self._shared = shared
        self._place = 1
        if not shared and store.check([f"{queue}/next"]):
            self._place = int(store.get(f"{queue}/next"))
            while store.check([f"{queue}/{self._place}"]):
                self._place += 1
            store.set(f"{queue}/next", b"%d" % self._place)
        else:
            # From now on there are messages, and the first ones are for this reader.
            store.compare_set(f"{queue}/next", b"", b"1")
        self._watch()

    def _watch(self) -> None:
        receive = functools.partial(self._receive, self._place)
        self._store.watch(f"{self._queue}/{self._place}", receive)

    def _receive(self, place: int, message: bytes) -> None:
        if place != self._place:
            # Of a watch that was repeated, as its answer did not come in time.
            return
        self._place += 1
        try:
            self._callback(message)
        finally:
            self._await_next()

    def _await_next(self) -> None:
        """Watch the next entry; go on until that is done, or the job has ended.

        The store does not answer in time while rank 0 is stopped, and seems not to
        where this process itself was.
        """
        while not self._store.lost:
            try:
                if not self._shared:
                    self._store.set(f"{self._queue}/next", b"%d" % self._place)
                    self._store.delete_key(f"{self._queue}/{self._place - _KEPT}")
                self._watch()
            except DistError as error:
                _log.debug("queue %s: %s", self._queue, error)
                time.sleep(_RETRY)
            else:
                return
