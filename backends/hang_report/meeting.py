"""Where the ranks of one host find each other: a private folder for files of the job.

Each rank has a file there with its process id, and holds a lock on it: a lock ends with
its process, so that a peer's number is that of a living rank of this job as long as the
file is locked. Beside it is a FIFO by which peers wake the rank. The folder is gone
when the last rank has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from .settings import this_host

__all__ = ["Meeting", "find_meeting"]


class Meeting:
    """One rank's place among those of its job on this host.

    Raises `BlockingIOError`, which names it, if another process has it, and `OSError`
    where there can be none.
    """

    def __init__(self, key: str, rank: int) -> None:
        self.rank = rank
        self._about: dict[str, Any] = {"pid": os.getpid(), "host": this_host()}
        with _private_folder() as parent:
            # What is left of jobs whose ranks were all killed.
            for folder in parent.iterdir():
                _remove_unless_used(folder)
            self.folder = parent / key
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(self._path(rank), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._take_place()
                bell = self._bell(rank)
                # What the rank's process of before has left has no reader.
                bell.unlink(missing_ok=True)
                os.mkfifo(bell, 0o600)
                #: Readable when a peer has rung.
                self.bell = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
            except OSError:
                os.close(self._file)
                raise

    def _take_place(self) -> None:
        # Of this process alone: no child inherits it.
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _told(self._path(self.rank)).get("pid")
            raise BlockingIOError(
                error.errno, f"process {pid} is rank {self.rank} of the same job"
            ) from None
        self.tell({})

    @property
    def is_there(self) -> bool:
        """Whether its files are: somebody may have cleaned the temporary folder."""
        return os.fstat(self._file).st_nlink > 0

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}"

    def _bell(self, rank: int) -> Path:
        return self.folder / f"bell_{rank}"

    def ring(self) -> None:
        for rank in self.known():
            # Its process has ended, or has been woken often enough.
            with contextlib.suppress(OSError):
                peer = os.open(self._bell(rank), os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(peer, b"\0")
                finally:
                    os.close(peer)

    def answer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 4096)

    def tell(self, about: dict[str, Any]) -> None:
        """Write what peers are to know of this rank, unless they do."""
        if about and about.items() <= self._about.items():
            return
        self._about.update(about)
        data = json.dumps(self._about).encode()
        # In one call, and padded: a reader sees the old text or the new one.
        os.pwrite(self._file, data.ljust(512), 0)

    def known(self) -> dict[int, dict[str, Any]]:
        """Return what each rank of this host has told, this one included."""
        found = {}
        for path in self.folder.glob("rank_*"):
            number = path.name.removeprefix("rank_")
            if number.isdecimal() and int(number) == self.rank:
                # To close any descriptor of the own file would end the lock.
                found[self.rank] = dict(self._about)
            elif number.isdecimal() and (about := _told(path)):
                found[int(number)] = about
        return found

    def lives(self, rank: int) -> bool:
        return rank == self.rank or _is_locked(self._path(rank))

    def living(self) -> list[int]:
        return sorted(rank for rank in self.known() if self.lives(rank))

    # -- files that all ranks of the host see -----------------------------------------

    def put(self, name: str, content: dict[str, Any]) -> bool:
        """Write a file that no rank writes twice; False: another one was first."""
        own = self.folder / f".{name}.{self.rank}"
        own.write_text(json.dumps(content))
        try:
            os.link(own, self.folder / name)
        except FileExistsError:
            return False
        finally:
            own.unlink(missing_ok=True)
        return True

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file that a rank has put, None before that."""
        try:
            content: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return None
        return content

    def last_words(self, rank: int) -> Path:
        return self.folder / f"last_words_{rank}"

    def leave_nothing(self) -> None:
        """Leave, as one that is no rank, or no more: its files go with it."""
        # Else they may be those of another process by now.
        if self.is_there:
            self._path(self.rank).unlink(missing_ok=True)
            self._bell(self.rank).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leave; the last rank removes the folder."""
        with _private_folder() as parent:
            os.close(self._file)
            os.close(self.bell)
            _remove_unless_used(self.folder)
            with contextlib.suppress(OSError):
                parent.rmdir()


def find_meeting(pids: Collection[int]) -> str | None:
    """Return the key of the job that has one of these processes as a rank."""
    folder = _path_of_user()
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None
        for path in folder.glob("*/rank_*"):
            about = _told(path)
            # Hosts may share the folder.
            here = about.get("pid") in pids and about.get("host") == this_host()
            if here and _is_locked(path):
                return path.parent.name
    return None


def _told(path: Path) -> dict[str, Any]:
    """Return what a rank has told of itself; nothing, where it just begins."""
    with contextlib.suppress(OSError, ValueError):
        about: dict[str, Any] = json.loads(path.read_bytes())
        return about
    return {}


def _path_of_user() -> Path:
    return Path(tempfile.gettempdir(), f"rankscope-report-{os.getuid()}")


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Return the folder of this user, while no other process comes or leaves."""
    folder = _path_of_user()
    lock = None
    while lock is None:
        # Who has left last may have removed it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            lock = _locked(folder)
    try:
        yield folder
    finally:
        # Also for a child that was forked just now, and has it, too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Make and lock the folder; None if it was replaced before it was locked."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        status = os.fstat(lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{folder} is not a folder of this user alone")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(status, folder.lstat()):
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _remove_unless_used(folder: Path) -> None:
    if not any(map(_is_locked, folder.glob("rank_*"))):
        shutil.rmtree(folder, ignore_errors=True)
