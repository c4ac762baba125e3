"""Reads of another process's memory: one copy, where sockets need two.

``process_vm_readv`` of Linux reads the sender's array straight into the receiver's. The
kernel allows it between processes of one user. Yama (``ptrace_scope`` 1, the default of
several distributions) allows it to ancestors alone; `allow_siblings` adds the processes
that have the same parent, which are the other ranks of this host as a rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import struct
from pathlib import Path

__all__ = ["PIECE", "PeerMemory", "Probe", "allow_siblings"]

#: Bytes of one call, which nothing can end: about a millisecond.
PIECE = 8 << 20

_PR_SET_PTRACER = 0x59616D61
_PROBE = struct.Struct("<Q16s")


class _Part(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_size_t), ("nbytes", ctypes.c_size_t))


def _find_call() -> ctypes._NamedFuncPointer | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None  # another system than Linux
    word, pointer = ctypes.c_ulong, ctypes.POINTER(_Part)
    call.argtypes = (ctypes.c_int, pointer, word, pointer, word, word)
    call.restype = ctypes.c_ssize_t
    return call


_read = _find_call()


class PeerMemory:
    """The memory of process `pid` of this host."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._own, self._other = _Part(), _Part()
        self._parts = ctypes.byref(self._own), ctypes.byref(self._other)

    def read(self, own: int, other: int, nbytes: int) -> int:
        """Copy from address `other` of the process to `own`; return how many bytes."""
        assert _read is not None
        self._own.base, self._other.base = own, other
        self._own.nbytes = self._other.nbytes = min(nbytes, PIECE)
        here, there = self._parts
        done = _read(self._pid, here, 1, there, 1, 0)
        if done <= 0:
            number = ctypes.get_errno() if done else errno.EFAULT
            raise OSError(number, os.strerror(number))
        return int(done)


class Probe:
    """A number in this process's memory: who can read it may read the arrays too."""

    #: Bytes of `message`.
    SIZE = _PROBE.size

    def __init__(self, readable: bool) -> None:
        self._content = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        address = ctypes.addressof(self._content) if readable and _read else 0
        #: Where the number is, and what it is; address 0: do not read.
        self.message = _PROBE.pack(address, self._content.raw)

    @staticmethod
    def memory(message: bytes, pid: int) -> PeerMemory | None:
        """Return the memory of `pid`, if it can be read, and has the number."""
        address, content = _PROBE.unpack(message)
        if not address or pid <= 0 or _read is None:
            return None
        found = ctypes.create_string_buffer(len(content))
        memory = PeerMemory(pid)
        with contextlib.suppress(OSError):
            memory.read(ctypes.addressof(found), address, len(content))
        return memory if secrets.compare_digest(found.raw, content) else None


def allow_siblings() -> None:
    """Have Yama allow the processes of the same parent to read this one's memory."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return  # no Yama: every process of this user may
    # The parent of an orphan is that of all processes.
    if scope == "1" and os.getppid() > 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
