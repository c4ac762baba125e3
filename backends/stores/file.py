"""FileStore: a store in one file that all ranks can open."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from ..errors import DistStoreError, DistStoreTimeoutError
from .base import Store, missing_keys_error, remaining, sum_of, to_bytes, to_seconds

__all__ = ["FileStore"]

_log = logging.getLogger(__name__)

_MAGIC = b"rankscope store 1\n"
# Kind, length of key, length of value, CRC of these three, the key and the value.
_HEAD = struct.Struct(">BIQI")
_SET, _DELETE = 1, 2

# Offsets of the locked bytes, far behind the data: a process locks one while it
# reads or writes, and the other as long as it has the file open.
_DATA_LOCK, _ALIVE_LOCK = 1 << 40, (1 << 40) + 1

_POLL_MIN, _POLL_MAX = 0.001, 0.05


class _Log:
    """The file: a log of set and delete records, replayed into `values`.

    One per file and process: POSIX locks belong to the process, and closing
    any descriptor of a file drops all locks that the process has on it.
    A file with locks is used instead of a directory with a file per key: a lock
    makes an NFS client revalidate the file with the server, whereas directory
    listings, and the absence of a name, are cached for seconds.
    """

    _opened: dict[Path, _Log] = {}  # noqa: RUF012 - guarded by _guard
    # Reentrant: the garbage collector may close a store on any thread.
    _guard = threading.RLock()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition(threading.RLock())
        self._users = 0
        self._end = len(_MAGIC)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def open(cls, path: Path, discard_stale: bool, timeout: float) -> _Log:
        """Return the log of `path` and count the caller as a user of it."""
        with cls._guard:
            log = cls._opened.get(path)
            if log is None or not log._is_at(path):
                try:
                    log = cls(path)
                except OSError as error:
                    raise DistStoreError(
                        f"the file store {path} cannot be opened ({error.strerror}): "
                        "its directory must exist and be writable on every rank"
                    ) from error
                try:
                    log._begin(discard_stale, timeout)
                except BaseException:
                    os.close(log._descriptor)
                    raise
                cls._opened[path] = log
            log._users += 1
            return log

    def release(self) -> None:
        """End one use of the log; the last one closes the file."""
        with self._guard:
            self._users -= 1
            if self._users == 0:
                if self._opened.get(self.path) is self:
                    del self._opened[self.path]
                os.close(self._descriptor)

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
            pause = _POLL_MIN
            while not self._try_lock(kind, _DATA_LOCK):
                # Not a blocking lock: the process that holds the lock may be stopped.
                if time.monotonic() >= deadline:
                    raise DistStoreTimeoutError(
                        f"the lock of {self.path} is held by another process, "
                        "which may be stopped"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _POLL_MAX)
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
            if kind == _SET:
                self.values[key] = value
            else:
                self.values.pop(key, None)
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


class FileStore(Store):
    """A store in the file `path` on a file system that all ranks share.

    The file is made if it does not exist; in an existing directory, the file
    ``rankscope-store`` is used. The keys outlive the processes: the death of a
    rank, even while it writes, does not damage the store. With `discard_stale`,
    the content of a file that no live process uses (the rest of an earlier run)
    is dropped. `world_size` is the number of expected ranks (for messages only;
    c10d has the parameter in this position). `timeout` is the default of every
    wait in seconds. Changes by other processes are seen within 50 ms.

    Raises `DistStoreError` if the file cannot be opened or locked, or is not a
    store. Every process that can write the file can write the store, so the
    file is made with mode 0600.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world_size: int | None = None,
        timeout: float | timedelta = 300.0,
        *,
        discard_stale: bool = False,
    ) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "rankscope-store"
        self.world_size = world_size
        self.timeout = to_seconds(timeout, 300.0)
        self.path = file.resolve()
        self._log = _Log.open(self.path, discard_stale, self.timeout)
        self._watches = _Watches(self._log)
        self._finalizer = weakref.finalize(self, _close, self._log, self._watches)

    def set(self, key: str, value: bytes | str) -> None:
        """Set `key`, replacing what was there."""
        data = to_bytes(value)
        with self._writing() as log:
            log.append(_SET, key, data)

    def get(self, key: str, timeout: float | timedelta | None = None) -> bytes:
        """Return the value of `key`, waiting for it to be set."""
        return self._await([key], timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the integer at `key` (absent: 0), atomically; return the sum."""
        with self._writing() as log:
            total = sum_of(key, log.values.get(key), amount)
            log.append(_SET, key, total)
        return int(total)

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str
    ) -> bytes:
        """Set `key` to `desired` if it is `expected`; return what it holds."""
        wanted, wish = to_bytes(expected), to_bytes(desired)
        with self._writing() as log:
            held = log.values.get(key, b"")
            if held == wanted:
                log.append(_SET, key, wish)
                held = wish
        return held

    def wait(
        self, keys: Sequence[str], timeout: float | timedelta | None = None
    ) -> None:
        """Block until all of `keys` are set."""
        self._await(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` are set, without waiting."""
        with self._reading() as log:
            return all(key in log.values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return whether it was set."""
        with self._writing() as log:
            present = key in log.values
            if present:
                log.append(_DELETE, key)
        return present

    def num_keys(self) -> int:
        """Return how many keys are set."""
        with self._reading() as log:
            return len(log.values)

    def watch(self, key: str, callback: Callable[[bytes], None]) -> Callable[[], None]:
        """Call ``callback(value)`` once, when `key` is set; see `Store.watch`."""
        self._check_open()
        return self._watches.add(key, callback)

    def close(self) -> None:
        """End the waits and watches of this object; the file stays."""
        self._finalizer()

    def _await(
        self, keys: Sequence[str], timeout: float | timedelta | None
    ) -> list[bytes]:
        limit = to_seconds(timeout, self.timeout)
        deadline = time.monotonic() + limit
        pause = _POLL_MIN
        while True:
            with self._reading() as log:
                missing = [key for key in keys if key not in log.values]
                if not missing:
                    return [log.values[key] for key in keys]
                if time.monotonic() >= deadline:
                    raise missing_keys_error(missing, limit)
                # Other processes are polled; this one, and close(), notify.
                log.changed.wait(min(pause, remaining(deadline)))
                pause = min(2 * pause, _POLL_MAX)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise DistStoreError(f"the file store {self.path} was closed")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[_Log]:
        with self._log.changed:
            self._check_open()
            with self._log.locked(fcntl.LOCK_SH, time.monotonic() + self.timeout):
                self._log.refresh()
            yield self._log

    @contextlib.contextmanager
    def _writing(self) -> Iterator[_Log]:
        with self._log.changed:
            self._check_open()
            with self._log.locked(fcntl.LOCK_EX, time.monotonic() + self.timeout):
                self._log.refresh()
                yield self._log

    def __repr__(self) -> str:
        ranks = "" if self.world_size is None else f", {self.world_size} ranks"
        return f"<FileStore {str(self.path)!r}{ranks}>"


class _Watches:
    """The watches of one store, and the thread that polls while a watch is open."""

    def __init__(self, log: _Log) -> None:
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
                    log.changed.wait(_POLL_MAX if self._waiting else None)
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


def _close(log: _Log, watches: _Watches) -> None:
    watches.close()
    log.release()
