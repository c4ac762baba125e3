"""How another process of this host ended, for a process that is not its parent.

A pidfd, opened while the process runs, stands for that process alone: a pid may be
given to a new one. The status is read from ``/proc`` until the parent has reaped the
process, and later from the pidfd, which keeps it since Linux 6.15.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
from pathlib import Path

__all__ = [
    "ProcessEnd",
    "describe_exit_code",
    "host_id",
    "is_stopped",
    "own_process",
    "process_end",
    "process_start_time",
    "stat_fields",
]

# The field exit_code of /proc/PID/stat, counted from the one behind the name.
_EXIT_CODE = 49
# The real, the effective and the saved user.
_USERS = re.compile(rb"^Uid:(?:\s+\d+){3}", re.MULTILINE)
# struct pidfd_info of linux/pidfd.h: a mask of 8 bytes, and the status at byte 60.
_INFO_BYTES, _STATUS_AT = 64, 60
_PIDFD_INFO_EXIT = 1 << 3
# _IOWR(0xFF, 11, struct pidfd_info)
_PIDFD_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11


class ProcessEnd:
    """The end of process `pid`, which runs now; raises `OSError` if that is refused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._known: str | None = None

    def is_under_way(self) -> bool:
        """Whether the process has not ended yet."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    def known(self, timeout: float = 0) -> str | None:
        """Return how the process ended (`describe_exit_code`)."""
        if self._known is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(1000 * timeout):
                status = self._status_of_zombie()
                if status is None:
                    status = self._status_of_reaped()
                if status is not None:
                    code = os.waitstatus_to_exitcode(status)
                    self._known = describe_exit_code(code)
        return self._known

    def _status_of_zombie(self) -> int | None:
        """Return the wait status while the parent has not asked for it, if known."""
        try:
            fields = stat_fields(self.pid)
            users = _USERS.search(Path(f"/proc/{self.pid}/status").read_bytes())
            # Raises if the process is reaped: the fields are then of another one.
            signal.pidfd_send_signal(self._pidfd, 0)
        except OSError:
            return None
        status = int(fields[_EXIT_CODE])
        # The kernel writes 0 as the status of a process of another user.
        own = users is not None and {*map(int, users[0].split()[1:])} == {os.geteuid()}
        return status if status or own else None

    def _status_of_reaped(self) -> int | None:
        info = bytearray(struct.pack("=Q", _PIDFD_INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
        try:
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None  # an older kernel
        if not struct.unpack_from("=Q", info)[0] & _PIDFD_INFO_EXIT:
            return None
        return int(struct.unpack_from("=i", info, _STATUS_AT)[0])

    def close(self) -> None:
        os.close(self._pidfd)


def stat_fields(pid: object) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on."""
    # The name, in parentheses before them, may contain anything.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def is_stopped(pid: object) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    with contextlib.suppress(OSError, IndexError):
        return stat_fields(pid)[0] in (b"T", b"t")
    return False


def describe_exit_code(code: int) -> str:
    """Return ``killed by SIGKILL``, ``exit code 3`` or the like (as `subprocess`)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def host_id(namespace: str) -> str:
    """Return an id of this host and of this process' namespace, ``net`` or ``pid``.

    Containers on one host share its boot id, but not their namespaces.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()
    return f"{boot}/{os.stat(f'/proc/self/ns/{namespace}').st_ino}"


def own_process() -> bytes:
    """Return what names this process to others: host, pid namespace and pid."""
    try:
        return f"{host_id('pid')}/{os.getpid()}".encode()
    except OSError:
        return b""  # no Linux


def process_end(other: bytes) -> ProcessEnd | None:
    """Return the end of the process that `own_process` named as `other`."""
    own = own_process()
    place, _, pid = other.rpartition(b"/")
    if not own or other == own or place != own.rpartition(b"/")[0]:
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return ProcessEnd(int(pid))
    return None


def process_start_time(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since the system's boot.

    The pid together with the start time identifies a process also after the pid was
    given to another one. ``None`` for a pid without a process, and for a zombie.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
