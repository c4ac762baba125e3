"""FileLog: the file of a `FileStore`, a log that all processes append to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from ..errors import DistStoreError, DistStoreTimeoutError

__all__ = ["DELETE", "POLL_MAX", "POLL_MIN", "POP", "PUSH", "SET", "FileLog"]

_log = logging.getLogger(__name__)

_MAGIC = b"rankscope store 2\n"
# Kind, length of key, length of value, CRC of these three, the key and the value.
_HEAD = struct.Struct(">BIQI")
SET, DELETE, PUSH, POP = 1, 2, 3, 4

# The queue in which each user of a file that is to be removed has an entry. A
# caller's names hold no zero byte.
_USERS = "\0users"
# Seconds that the removal waits for the lock: another process may be stopped.
_REMOVE_WAIT = 1.0

# Offsets of the locked bytes, far behind the data: a process locks one while it
# reads or writes, and the other as long as it has the file open.
_DATA_LOCK, _ALIVE_LOCK = 1 << 40, (1 << 40) + 1

POLL_MIN, POLL_MAX = 0.001, 0.05


class FileLog:
    """The file: a log of records, replayed into `values` and `queues`.

    One per file and process: POSIX locks belong to the process, and closing
    any descriptor of a file drops all locks that the process has on it.
    A file with locks is used instead of a directory with a file per key: a lock
    makes an NFS client revalidate the file with the server, whereas directory
    listings, and the absence of a name, are cached for seconds.
    """

    _opened: dict[Path, FileLog] = {}  # noqa: RUF012 - guarded by _guard
    # Reentrant: the garbage collector may close a store on any thread.
    _guard = threading.RLock()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.changed = threading.Condition(threading.RLock())
        self._users = 0
        self._end = len(_MAGIC)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def open(cls, path: Path, discard_stale: bool, timeout: float) -> FileLog:
        """Return the log of `path` and count the caller as a user of it."""
        with cls._guard:
            log = cls._opened.get(path)
            if log is None or not log._is_at(path):
                log = cls._open_file(path, discard_stale, timeout)
                cls._opened[path] = log
            log._users += 1
            return log

    @classmethod
    def _open_file(cls, path: Path, discard_stale: bool, timeout: float) -> FileLog:
        deadline = time.monotonic() + timeout
        while True:
            try:
                log = cls(path)
            except OSError as error:
                raise DistStoreError(
                    f"the file store {path} cannot be opened ({error.strerror}): "
                    "its directory must exist and be writable on every rank"
                ) from error
            try:
                log._begin(discard_stale, timeout)
                if log._is_at(path):
                    return log
                # The last process of an earlier run removed the file meanwhile.
                if time.monotonic() >= deadline:
                    raise DistStoreTimeoutError(f"{path} is removed again and again")
            except BaseException:
                os.close(log._descriptor)
                raise
            os.close(log._descriptor)

    def release(self, users: int | None = None) -> None:
        """End one use of the log; the last one closes the file.

        With `users`, the file is removed if as many have opened it in all
        (`count_user`) and no other process has it open.
        """
        with self._guard:
            self._users -= 1
            if self._users == 0:
                if self._opened.get(self.path) is self:
                    del self._opened[self.path]
                try:
                    if users is not None:
                        self._remove(users)
                except DistStoreTimeoutError as error:
                    # The next run drops what the file holds.
                    _log.warning("%s is not removed: %s", self.path, error)
                finally:
                    os.close(self._descriptor)

    def count_user(self, timeout: float) -> None:
        """Write down that one more store has opened the file."""
        with self.locked(fcntl.LOCK_EX, time.monotonic() + timeout):
            self.refresh()
            self.append(PUSH, _USERS)

    def _remove(self, users: int) -> None:
        with self.locked(fcntl.LOCK_EX, time.monotonic() + _REMOVE_WAIT):
            self.refresh()
            came = len(self.queues.get(_USERS, ()))
            if came < users or not self._is_at(self.path):
                return
            if self._try_lock(fcntl.LOCK_EX, _ALIVE_LOCK):
                self.path.unlink()

    def _is_at(self, path: Path) -> bool:
        """Return whether `path` is still this file; it may have been deleted since."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _begin(self, discard_stale: bool, timeout: float) -> None:
        with self.locked(fcntl.LOCK_EX, time.monotonic() + timeout):
            if discard_stale and self._try_lock(fcntl.LOCK_EX, _ALIVE_LOCK):
                os.ftruncate(self._descriptor, 0)
            if not self._try_lock(fcntl.LOCK_SH, _ALIVE_LOCK):
                raise DistStoreError(f"{self.path}: the file system keeps no locks")
            head = os.pread(self._descriptor, len(_MAGIC), 0)
            if not head or (head != _MAGIC and _MAGIC.startswith(head)):
                # A new file, or the process that made it died during this write.
                self._write(0, _MAGIC)
            elif head != _MAGIC:
                raise DistStoreError(
                    f"{self.path} is not a store of this Rankscope version: "
                    "give the path of a file that does not exist yet"
                )

    @contextlib.contextmanager
    def locked(self, kind: int, deadline: float) -> Iterator[None]:
        """Hold the file's lock, alone (``LOCK_EX``) or with readers (``LOCK_SH``)."""
        with self.changed:
            pause = POLL_MIN
            while not self._try_lock(kind, _DATA_LOCK):
                # Not a blocking lock: the process that holds the lock may be stopped.
                if time.monotonic() >= deadline:
                    raise DistStoreTimeoutError(
                        f"the lock of {self.path} is held by another process, "
                        "which may be stopped"
                    )
                time.sleep(pause)
                pause = min(2 * pause, POLL_MAX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _DATA_LOCK)

    def _try_lock(self, kind: int, where: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB, 1, where)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise DistStoreError(
                f"{self.path} cannot be locked ({error.strerror}): "
                "choose a file system with POSIX locks"
            ) from error
        return True

    def refresh(self) -> None:
        """Replay the records written since the last call. Needs the lock."""
        size = os.fstat(self._descriptor).st_size
        if size <= self._end:
            return
        data = os.pread(self._descriptor, size - self._end, self._end)
        at, news = 0, False
        while (record := _parse(data, at)) is not None:
            kind, key, value, at = record
            news = True
            if kind == SET:
                self.values[key] = value
            elif kind == DELETE:
                self.values.pop(key, None)
            elif kind == PUSH:
                self.queues.setdefault(key, deque()).append(value)
            else:
                self.queues[key].popleft()
        self._end += at
        if news:
            self.changed.notify_all()

    def append(self, kind: int, key: str, value: bytes = b"") -> None:
        """Write a record. Needs the exclusive lock, and a refresh under that lock."""
        name = key.encode()
        crc = zlib.crc32(value, zlib.crc32(name, zlib.crc32(b"%d" % kind)))
        record = _HEAD.pack(kind, len(name), len(value), crc) + name + value
        # Bytes behind the last whole record are of a process that died while writing.
        if os.fstat(self._descriptor).st_size > self._end:
            os.ftruncate(self._descriptor, self._end)
        self._write(self._end, record)
        self.refresh()

    def _write(self, at: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written


def _parse(data: bytes, at: int) -> tuple[int, str, bytes, int] | None:
    """Return kind, key, value and end of the record at `at`; ``None``: not whole."""
    start = at + _HEAD.size
    if len(data) < start:
        return None
    kind, key_size, value_size, crc = _HEAD.unpack_from(data, at)
    middle, end = start + key_size, start + key_size + value_size
    if len(data) < end:
        return None
    name, value = data[start:middle], data[middle:end]
    if zlib.crc32(value, zlib.crc32(name, zlib.crc32(b"%d" % kind))) != crc:
        return None
    return kind, name.decode(), value, end
