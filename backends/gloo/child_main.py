"""The program of the side process: the only place where gloo runs.

A script that imports nothing of Rankscope and nothing of site-packages, which makes
its start fast. It connects to its peers through the store of the group, which the rank
asks for it. Then it reads one command after another from a socket, runs it on memory
that it shares with the rank, and answers ``done``, or ``error`` and what gloo said.
Some C++ exceptions end the process instead; the rank reads its last lines of output.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import mmap
import os
import resource
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MESSAGE_BYTES = 1 << 16

# The group's timeout is the only one that is to show.
_FOREVER = timedelta(days=3650)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with the thread that started it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"rankscope-gloo", 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _receive(channel: socket.socket) -> bytes:
    message = channel.recv(_MESSAGE_BYTES)
    if not message:
        os._exit(0)  # the rank is gone, or has closed this process
    return message


class _Store:
    """The store of the group, by the names that a library's CustomStore calls."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def set(self, key: str, value: bytes) -> None:
        self._channel.send(b"set\0" + key.encode() + b"\0" + value)

    def get(self, key: str) -> bytes:
        self._channel.send(b"get\0" + key.encode() + b"\0")
        # An empty value and the rank's end would look alike: one byte more.
        return _receive(self._channel)[1:]

    def wait(self, keys: list[str]) -> None:
        for key in keys:
            self.get(key)

    # pygloo uses the names above, xoscar these two.
    set_tcp, get_tcp = set, get


def _load(library: str, path: str) -> Any:
    """Load the extension at `path` without its package."""
    name = {"pygloo": "pygloo", "xoscar": "xoscar_pygloo"}[library]
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class _Group:
    """The gloo context of this rank."""

    def __init__(self, library: str, path: str, rank: int, size: int) -> None:
        gloo = self._gloo = _load(library, path)
        self._context = gloo.rendezvous.Context(rank, size)
        if library == "pygloo":
            self._transport = gloo.transport.uv
        else:
            self._transport = gloo.transport.tcp
            self._context.setTimeout(_FOREVER)  # pygloo's cannot be called

    def connect(self, address: str, store: _Store) -> None:
        """Listen at `address` and connect to every peer; block until that is done."""
        transport = self._transport
        self._device = transport.CreateDevice(transport.attr(address))
        self._store = self._gloo.rendezvous.CustomStore(store)
        self._context.connectFullMesh(self._store, self._device)

    def run(
        self,
        address: int,
        kind: str,
        count: int,
        dtype: str,
        reduction: str,
        root: int,
        output: int,
        tag: int,
    ) -> None:
        """Run one collective on memory at `address`; see `SideProcess.call`."""
        gloo, context = self._gloo, self._context
        out = address + output
        number = getattr(gloo, f"gloo{dtype.capitalize()}")
        op = getattr(gloo.ReduceOp, reduction)
        if kind == "all_reduce":
            # By the ring, in which one rank reduces a part and the others receive it:
            # the same bits on every rank.
            gloo.allreduce(context, address, out, count, number, op, gloo.RING, tag)
        elif kind == "reduce":
            gloo.reduce(context, address, out, count, number, op, root, tag)
        elif kind == "broadcast":
            gloo.broadcast(context, address, out, count, number, root, tag)
        elif kind == "all_gather":
            gloo.allgather(context, address, out, count, number, tag)
        elif kind == "barrier":
            gloo.barrier(context, tag)
        else:
            raise ValueError(f"no command is called {kind}")


def main() -> None:
    """Serve the rank that started this process; never returns."""
    channel_fd, memory_fd, parent, rank, size = map(int, sys.argv[1:6])
    library, path = sys.argv[6:8]
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # gloo may end the process when a peer dies: no core file for that.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=channel_fd)
    memory = mmap.mmap(memory_fd, 0)
    pin = ctypes.c_char.from_buffer(memory)
    group = _Group(library, path, rank, size)
    address = _receive(channel).decode()
    try:
        group.connect(address, _Store(channel))
        channel.send(b"ready")
        while True:
            command = json.loads(_receive(channel))
            group.run(ctypes.addressof(pin), *command)
            channel.send(b"done")
    except Exception as error:  # noqa: BLE001 - the rank shows it to the user
        # Of gloo, which has no other class for a connection that is closed.
        channel.send(b"error\0" + f"{error}".encode()[: _MESSAGE_BYTES // 2])
    os._exit(1)


if __name__ == "__main__":
    main()
