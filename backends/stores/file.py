"""FileStore: a store in one file that all ranks can open.

The file is a log of the requests that changed the store, one JSON list a line; each
store replays it into a `KeyTable`. Not a folder with a file per key: a lock makes an
NFS client look at the file again, whereas listings of folders are cached for seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from ..errors import DistStoreError, DistStoreTimeoutError
from ..quantities import as_int
from .base import DEFAULT_TIMEOUT, Store, join, remaining
from .key_table import KeyTable, Reply

__all__ = ["FileStore"]

_log = logging.getLogger(__name__)

_MAGIC = b"rankscope store 3\n"
_POPS = (b"pop", b"pop now")
_CHANGES = (
    *(b"set", b"sets", b"append", b"add", b"swap", b"delete", b"clear", b"push"),
    *_POPS,
)
# The queue with an entry for each store that has opened a temporary file.
_USERS = b"\0users"
# Offsets of the locked bytes, far behind the data: a store locks one while it reads or
# writes, and the other as long as it is open.
_DATA, _ALIVE = 1 << 40, (1 << 40) + 1
_FLOCK = struct.Struct("hhqqi4x")
_POLL_MIN, _POLL_MAX = 0.001, 0.05


class FileStore(Store):
    """A store in a file that all ranks can open, on this host or a shared file system.

    The file has mode 0600: every process that can write it can write the store. Keys
    outlive the processes, and a rank that is killed while it writes does no damage.
    Changes by others are seen within 50 ms. A forked process opens a store of its own.
    Named after ``torch.distributed.FileStore``; the format of the file is another one.

    Parameters
    ----------
    file_name : str or path-like
        The file; in an existing directory it is ``rankscope-store``.
    world_size : int, optional
        The number of expected ranks (in c10d's position).
    timeout : float or timedelta, default 300
        The default of every wait, in seconds if it is a number.
    discard_stale : bool, default False
        Whether to drop the content of a file that no live process has open.
    temporary : bool, default False
        Whether the last store to be closed, at the latest at exit, removes the file,
        provided that `world_size` stores have opened it.

    Raises
    ------
    DistStoreError
        The file cannot be opened or locked, or is not a store.
    ValueError
        `temporary` without `world_size`, or a negative timeout.

    Examples
    --------
    >>> store = dist.FileStore("rendezvous", world_size=1, temporary=True)
    >>> store.set("key", "value")
    >>> store.get("key")
    b'value'
    >>> store.close()
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
        if world_size is not None:
            world_size = as_int(world_size, "FileStore: world_size")
        elif temporary:
            raise ValueError("FileStore: temporary=True needs world_size")
        self.world_size, self.timeout = world_size, timeout
        self.path = (file / "rankscope-store" if file.is_dir() else file).resolve()
        self._file = _File(self.path, discard_stale, self._timeout)
        users = world_size if temporary else None
        self._finalizer = weakref.finalize(self, self._file.close, users)
        if temporary:
            self._call(b"push", _USERS, b"")

    def clone(self) -> FileStore:
        return FileStore(self.path, self.world_size, self._timeout)

    def _watch(
        self, names: Sequence[bytes], callback: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:
        return self._file.watch(names, callback)

    def close(self) -> None:
        self._finalizer()

    def _call(self, op: bytes, *args: bytes) -> Sequence[bytes]:
        return self._file.request(op, args, self._timeout)[1]

    def _await(
        self, op: bytes, names: Sequence[bytes], limit: float
    ) -> tuple[bool, Sequence[bytes]]:
        deadline, pause = time.monotonic() + limit, _POLL_MIN
        while True:
            status, found = self._file.request(op, names, self._timeout)
            if status == b"ok" or time.monotonic() >= deadline:
                return status == b"ok", found
            self._file.closed.wait(min(pause, remaining(deadline)))
            pause = min(2 * pause, _POLL_MAX)

    def __repr__(self) -> str:
        ranks = "" if self.world_size is None else f", {self.world_size} ranks"
        return f"<FileStore {str(self.path)!r}{ranks}>"


class _File:
    """The open file of one store, what it holds, and the thread of the watches."""

    def __init__(self, path: Path, discard_stale: bool, timeout: float) -> None:
        self._path, self._process = path, os.getpid()
        self.closed = threading.Event()
        # Reentrant: a signal handler may use the store.
        self._lock = threading.RLock()
        self._watches: list[
            tuple[Sequence[bytes], Callable[[Sequence[bytes]], None]]
        ] = []
        self._thread = threading.Thread(
            target=self._watch, name="rankscope-store-watch", daemon=True
        )
        self._forget()
        while not self._open(discard_stale, timeout):
            os.close(self._descriptor)

    def _open(self, discard_stale: bool, timeout: float) -> bool:
        """Open the file; return whether no other process has removed it meanwhile."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise DistStoreError(
                f"the file store {self._path} cannot be opened ({error.strerror}): "
                "its directory must exist and be writable on every rank"
            ) from error
        try:
            with self.locked(timeout):
                if discard_stale and self._try_lock(fcntl.F_WRLCK, _ALIVE):
                    os.ftruncate(self._descriptor, 0)
                self._try_lock(fcntl.F_RDLCK, _ALIVE)
                head = os.pread(self._descriptor, len(_MAGIC), 0)
                # A part of it is from a process that died while it made the file.
                if not _MAGIC.startswith(head):
                    raise DistStoreError(
                        f"{self._path} is not a store of this Rankscope version: "
                        "give the path of a file that does not exist yet"
                    )
                if head != _MAGIC:
                    os.pwrite(self._descriptor, _MAGIC, 0)
                return self._is_at_path()
        except BaseException:
            os.close(self._descriptor)
            raise

    def request(self, op: bytes, args: Sequence[bytes], timeout: float) -> Reply:
        """Do `op`; the status of a get or pop that would wait is ``missing``."""
        with self._in_use(), self.locked(timeout):
            try:
                self._refresh()
                status, answer = self._handle(op, *args)
                if status == b"ok" and op in _CHANGES:
                    self._append(op, *args)
            except BaseException:
                # The table may be ahead of the file: read all of it once more.
                self._forget()
                raise
        return status, answer

    def watch(
        self, keys: Sequence[bytes], call: Callable[[Sequence[bytes]], None]
    ) -> Callable[[], None]:
        entry = (keys, call)
        with self._in_use():
            self._watches.append(entry)
            if self._thread.ident is None:
                self._thread.start()

        def cancel() -> None:
            with self._lock:
                self._watches = [item for item in self._watches if item is not entry]

        return cancel

    def _watch(self) -> None:
        """Call the watches whose keys are set, until the store is closed."""
        while not self.closed.wait(_POLL_MAX):
            ready = []
            # A process that has the lock may be stopped: the next turn looks again.
            with contextlib.suppress(DistStoreTimeoutError), self._lock:
                if self._watches:
                    with self.locked(_POLL_MAX):
                        self._refresh()
                for entry in list(self._watches):
                    status, values = self._handle(b"get", *entry[0])
                    if status == b"ok":
                        self._watches.remove(entry)
                        ready.append((entry[1], values))
            for callback, values in ready:
                try:
                    callback(values)
                except Exception:  # noqa: BLE001 - whatever a callback raises
                    _log.exception("a callback of a store's watch failed")

    def close(self, users: int | None) -> None:
        """Close the file; the last of so many `users` removes it."""
        self.closed.set()
        if self._process != os.getpid():
            return
        if self._thread.ident:
            join(self._thread, f"the thread that watches {self._path}")
        with self._lock:
            try:
                if users is not None:
                    with self.locked(1.0):
                        self._refresh()
                        opened = int(self._handle(b"queued", _USERS)[1][0])
                        last = self._try_lock(fcntl.F_WRLCK, _ALIVE)
                        if opened >= users and last and self._is_at_path():
                            self._path.unlink()
            except DistStoreTimeoutError as error:
                # The next run drops what the file holds.
                _log.warning("%s is not removed: %s", self._path, error)
            finally:
                os.close(self._descriptor)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        if self._process != os.getpid():
            # Parent and child share one lock of the file; ours may be held for ever.
            raise DistStoreError(f"{self._path} was opened before a fork: open it anew")
        with self._lock:
            if self.closed.is_set():
                raise DistStoreError(f"the file store {self._path} was closed")
            yield

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the file's lock; `DistStoreTimeoutError` after `timeout` seconds."""
        deadline, pause = time.monotonic() + timeout, _POLL_MIN
        # Not a blocking lock: the process that holds the lock may be stopped.
        while not self._try_lock(fcntl.F_WRLCK, _DATA):
            if time.monotonic() >= deadline:
                raise DistStoreTimeoutError(
                    f"the lock of {self._path} is held by another process, "
                    "which may be stopped"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MAX)
        try:
            yield
        finally:
            self._try_lock(fcntl.F_UNLCK, _DATA)

    def _try_lock(self, kind: int, where: int) -> bool:
        # A lock of the open file, not of the process: one process may have two stores.
        lock = _FLOCK.pack(kind, os.SEEK_SET, where, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DistStoreError(
                f"{self._path} cannot be locked ({error.strerror}): "
                "choose a file system with POSIX locks"
            ) from error
        return True

    def _forget(self) -> None:
        # No request waits in the table: stores poll.
        self._table, self._end = KeyTable(lambda *_: None), len(_MAGIC)

    def _handle(self, op: bytes, *args: bytes) -> Reply:
        if op == b"get":
            missing = [key for key in args if self._handle(b"check", key)[1] == [b"0"]]
            if missing:
                return b"missing", missing
        now = b"pop now" if op in _POPS else op
        reply = self._table.handle((b"", b""), now, list(args))
        assert reply is not None
        return (b"missing", []) if op in _POPS and not reply[1] else reply

    def _refresh(self) -> None:
        """Replay the lines written since the last call. Needs the lock."""
        size = os.fstat(self._descriptor).st_size - self._end
        data = os.pread(self._descriptor, size, self._end) if size > 0 else b""
        # What follows the last newline is from a process that died while it wrote.
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                self._handle(*(frame.encode("latin-1") for frame in json.loads(line)))
                self._end += len(line)

    def _append(self, *frames: bytes) -> None:
        """Write a request that was done. Needs the exclusive lock, and `_refresh`."""
        line = (
            json.dumps([frame.decode("latin-1") for frame in frames]).encode() + b"\n"
        )
        os.ftruncate(self._descriptor, self._end)
        rest = memoryview(line)
        while rest:
            at = self._end + len(line) - len(rest)
            rest = rest[os.pwrite(self._descriptor, rest, at) :]
        self._end += len(line)
