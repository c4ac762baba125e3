"""FileStore: a store in one file that all ranks can open."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from ..errors import DistStoreError
from ..quantities import as_int
from .base import (
    DEFAULT_TIMEOUT,
    Store,
    empty_queue_error,
    missing_keys_error,
    remaining,
    sum_of,
    to_bytes,
    to_pairs,
)
from .file_log import DELETE, POLL_MAX, POLL_MIN, POP, PUSH, SET, FileLog

__all__ = ["FileStore"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class FileStore(Store):
    """A store in a file that all ranks can open, on this host or a shared file system.

    The file is made, with mode 0600, if it does not exist: every process that can write
    the file can write the store. The keys outlive the processes: the death of a rank,
    even while it writes, does not damage the store. Changes by other processes are seen
    within 50 ms.

    Parameters
    ----------
    file_name : str or path-like
        The file; in an existing directory it is ``rankscope-store``.
    world_size : int, optional
        The number of expected ranks (in c10d's position).
    timeout : float or timedelta, default 300
        The default of every wait, in seconds if it is a number.
    discard_stale : bool, default False
        Whether the content of a file that no live process uses, the rest of an earlier
        run, is dropped.
    temporary : bool, default False
        Whether the file is removed when the last store is closed, at the latest at
        exit, provided that `world_size` stores have opened it.

    Raises
    ------
    DistStoreError
        The file cannot be opened or locked, or is not a store.
    ValueError
        `temporary` without `world_size`, or a negative timeout.

    Notes
    -----
    Named after ``torch.distributed.FileStore``; the format of the file is another one.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = dist.FileStore(folder, 1)
    ...     store.set("key", "value")
    ...     store.close()
    ...     again = dist.FileStore(folder, 1)
    ...     value = again.get("key")
    ...     again.close()
    >>> value
    b'value'
    """

    #: The file.
    path: Path

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        *,
        discard_stale: bool = False,
        temporary: bool = False,
    ) -> None:
        file = Path(file_name)
        if file.is_dir():
            file = file / "rankscope-store"
        if world_size is not None:
            world_size = as_int(world_size, "FileStore: world_size")
        users = world_size if temporary else None
        if temporary and users is None:
            raise ValueError("FileStore: temporary=True needs world_size")
        self.world_size = world_size
        self.timeout = timeout
        self.path = file.resolve()
        self._log = FileLog.open(self.path, discard_stale, self._timeout)
        self._watches = _Watches(self._log)
        self._finalizer = weakref.finalize(
            self, _close, self._log, self._watches, users
        )
        if users is not None:
            self._log.count_user(self._timeout)

    def set(self, key: str, value: bytes | str) -> None:
        data = to_bytes(value)
        with self._writing() as log:
            log.append(SET, key, data)

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def append(self, key: str, value: bytes | str) -> None:
        data = to_bytes(value)
        with self._writing() as log:
            log.append(SET, key, log.values.get(key, b"") + data)

    def multi_get(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> list[bytes]:
        limit = self._limit(timeout)
        missing: list[str] = []

        def find(log: FileLog) -> list[bytes] | None:
            missing[:] = [key for key in keys if key not in log.values]
            return None if missing else [log.values[key] for key in keys]

        found = self._await(self._reading, find, limit)
        if found is None:
            raise missing_keys_error(missing, limit)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        pairs = to_pairs(keys, values)
        with self._writing() as log:
            for key, value in pairs:
                log.append(SET, key, value)

    def add(self, key: str, amount: int) -> int:
        with self._writing() as log:
            total = sum_of(key, log.values.get(key), as_int(amount, "add: amount"))
            log.append(SET, key, total)
        return int(total)

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        wanted, wish = to_bytes(expected), to_bytes(desired)
        with self._writing() as log:
            held = log.values.get(key, b"")
            if held == wanted:
                log.append(SET, key, wish)
                held = wish
        return held

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        self.multi_get(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        with self._reading() as log:
            return all(key in log.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._writing() as log:
            present = key in log.values
            if present:
                log.append(DELETE, key)
        return present

    def num_keys(self) -> int:
        with self._reading() as log:
            return len(log.values)

    def list_keys(self) -> list[str]:
        with self._reading() as log:
            return list(log.values)

    def queue_push(self, key: str, value: bytes | str) -> None:
        data = to_bytes(value)
        with self._writing() as log:
            log.append(PUSH, key, data)

    def queue_pop(
        self,
        key: str,
        block: bool = True,
        timeout: float | timedelta | None = None,
    ) -> bytes:
        limit = self._limit(timeout) if block else 0.0

        def take(log: FileLog) -> bytes | None:
            if not log.queues.get(key):
                return None
            value = log.queues[key][0]
            log.append(POP, key)
            return value

        value = self._await(self._writing, take, limit)
        if value is None:
            raise empty_queue_error(key, limit if block else None)
        return value

    def queue_len(self, key: str) -> int:
        with self._reading() as log:
            return len(log.queues.get(key, ()))

    def clone(self) -> FileStore:
        return FileStore(self.path, self.world_size, self._timeout)

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        self._check_open()
        return self._watches.add(key, callback)

    def close(self) -> None:
        self._finalizer()

    def _await(
        self,
        opened: Callable[[], contextlib.AbstractContextManager[FileLog]],
        attempt: Callable[[FileLog], T | None],
        limit: float,
    ) -> T | None:
        """Try ``attempt(log)`` until it returns something, for `limit` seconds."""
        deadline = time.monotonic() + limit
        pause = POLL_MIN
        while True:
            with self._log.changed:
                with opened() as log:
                    found = attempt(log)
                if found is not None or time.monotonic() >= deadline:
                    return found
                # Other processes are polled; this one, and close(), notify.
                log.changed.wait(min(pause, remaining(deadline)))
                pause = min(2 * pause, POLL_MAX)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise DistStoreError(f"the file store {self.path} was closed")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[FileLog]:
        with self._log.changed:
            self._check_open()
            with self._log.locked(fcntl.LOCK_SH, time.monotonic() + self._timeout):
                self._log.refresh()
            yield self._log

    @contextlib.contextmanager
    def _writing(self) -> Iterator[FileLog]:
        with self._log.changed:
            self._check_open()
            with self._log.locked(fcntl.LOCK_EX, time.monotonic() + self._timeout):
                self._log.refresh()
                yield self._log

    def __repr__(self) -> str:
        ranks = "" if self.world_size is None else f", {self.world_size} ranks"
        return f"<FileStore {str(self.path)!r}{ranks}>"


class _Watches:
    """The watches of one store, and the thread that polls while a watch is open."""

    def __init__(self, log: FileLog) -> None:
        self._log = log
        self._waiting: list[tuple[str, Callable[[bytes], None]]] = []
        self._thread: threading.Thread | None = None
        self.closed = False

    def add(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        entry = (key, callback)
        with self._log.changed:
            self._waiting.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rankscope-store-watch", daemon=True
                )
                self._thread.start()
            self._log.changed.notify_all()

        def cancel() -> None:
            with self._log.changed:
                self._waiting = [item for item in self._waiting if item is not entry]

        return cancel

    def _run(self) -> None:
        log = self._log
        while True:
            with log.changed:
                if self.closed:
                    return
                if self._waiting:
                    with log.locked(fcntl.LOCK_SH, time.monotonic() + 300.0):
                        log.refresh()
                ready = [item for item in self._waiting if item[0] in log.values]
                values = [log.values[key] for key, _ in ready]
                self._waiting = [i for i in self._waiting if i not in ready]
                if not ready:
                    log.changed.wait(POLL_MAX if self._waiting else None)
            for (_, callback), value in zip(ready, values, strict=True):
                try:
                    callback(value)
                except Exception:  # noqa: BLE001 - whatever a callback raises
                    _log.exception("a callback of a store's watch failed")

    def close(self) -> None:
        with self._log.changed:
            self.closed = True
            self._waiting = []
            self._log.changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _close(log: FileLog, watches: _Watches, users: int | None) -> None:
    watches.close()
    log.release(users)
