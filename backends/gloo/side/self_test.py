"""The self-test of a gloo library: a group of two on loopback calls every function.

It runs in a process that ends afterwards, or crashes if the library is another one:
exit code 0 says that the library is the one that its module describes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from .abi import Gloo, UnknownLibrary
from .libraries import LIBRARIES
from .wire import DTYPES, REDUCTIONS

__all__ = ["main"]

_C_TYPES: tuple[Any, ...] = (
    ctypes.c_int8,
    ctypes.c_uint8,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_float,
    ctypes.c_float,
    ctypes.c_double,
    ctypes.c_float,
    ctypes.c_int32,
    ctypes.c_uint32,
)
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": min,
    "max": max,
}
_TESTED = [DTYPES.index("float32"), DTYPES.index("int64")]


class _PairStore:
    """A store of two processes: each sends what it sets to the other one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._end.send(key.encode() + b"\0" + value)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            name, _, value = self._end.recv(1 << 16).partition(b"\0")
            if not name:
                raise RuntimeError("the other process of the test has ended")
            self._values[name.decode()] = value
        return self._values[key]

    def wait(self, keys: list[str]) -> None:
        for key in keys:
            self.get(key)


def _expect(what: str, found: Sequence[float], expected: Sequence[float]) -> None:
    if list(found) != list(expected):
        raise UnknownLibrary(f"{what}: the result is {list(found)}, not {expected}")


def _reductions(gloo: Gloo) -> None:
    for number, name in enumerate(DTYPES):
        array = _C_TYPES[number] * 5
        a, b = range(1, 6), range(9, 4, -1)
        for op, reduction in enumerate(REDUCTIONS):
            left, right, result = array(*a), array(*b), array()
            where = ctypes.addressof
            gloo.reduction(number, op)(where(result), where(left), where(right), 5)
            expected = [*map(_OPERATORS[reduction], a, b)]
            _expect(f"{reduction} of {name}", result, expected)


def _all_reduces(gloo: Gloo) -> None:
    tag = 0
    for number in _TESTED:
        for op, reduction in enumerate(REDUCTIONS):
            for ring in (False, True):
                held = [range(rank + 1, rank + 8) for rank in range(gloo.size)]
                array = (_C_TYPES[number] * 7)(*held[gloo.rank])
                tag += 1
                gloo.all_reduce(
                    ctypes.addressof(array), 7, number, op, ring=ring, tag=tag
                )
                expected = [reduce(_OPERATORS[reduction], each) for each in zip(*held)]  # noqa: B905
                _expect(f"all_reduce {reduction} of {DTYPES[number]}", array, expected)


def _messages(gloo: Gloo) -> None:
    """Parts of arrays, each of its own length and place, on slots out of order."""
    other = 1 - gloo.rank
    for number in _TESTED:
        c_type = _C_TYPES[number]
        item = ctypes.sizeof(c_type)
        source = (c_type * 50)(*(100 * gloo.rank + i for i in range(50)))
        target = (c_type * 50)()
        out = gloo.buffer(ctypes.addressof(source), 50 * item)
        into = gloo.buffer(ctypes.addressof(target), 50 * item)
        first, second, third = ((number << 40) + slot for slot in (1, 2, 3))
        into.recv(other, first, 10 * item, 5 * item)
        into.recv(other, second, 20 * item, 3 * item)
        into.recv_any(third, 40 * item, 10 * item)
        out.send(other, second, 30 * item, 3 * item)
        out.send(other, first, 0, 5 * item)
        out.send(other, third, 40 * item, 10 * item)
        out.wait_sends(3)
        into.wait_recvs(2)
        _expect("the sender", [into.wait_recv_from()], [other])
        base = 100 * other
        expected = [0] * 50
        expected[10:15] = range(base, base + 5)
        expected[20:23] = range(base + 30, base + 33)
        expected[40:] = range(base + 40, base + 50)
        _expect(f"messages of {DTYPES[number]}", target, expected)
        out.free()
        into.free()


def _test(rank: int, end: socket.socket, name: str, path: str) -> None:
    gloo = LIBRARIES[name](path, rank, 2)
    _reductions(gloo)
    store = _PairStore(end)
    gloo.connect(store, "127.0.0.1")
    _all_reduces(gloo)
    _messages(gloo)
    # Neither process ends, and closes its connections, before both are through.
    store.set(f"through/{rank}", b"")
    store.get(f"through/{1 - rank}")


def main() -> None:
    """Test the library that the arguments name: name, file, seconds; never returns."""
    name, path, limit = sys.argv[1:4]
    # A crash is a result, and nobody reads a core file of it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    rank = 0 if child else 1
    ends[1 - rank].close()
    # The default action of the signal ends the process, whatever it hangs in.
    signal.alarm(int(limit))
    try:
        _test(rank, ends[rank], name, path)
    except (UnknownLibrary, OSError) as error:
        print(error, flush=True)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - the rank reports it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if not child:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os._exit(1 if status else 0)
