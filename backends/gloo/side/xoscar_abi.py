"""The library of xoscar 0.12.2: gloo over TCP sockets, for CPython 3.10 to 3.14.

The wheels, for Linux on x86-64 and aarch64, have it beside xoscar's own modules, and
none of these is imported.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from ctypes import c_int, c_long, c_size_t, c_uint32, c_void_p
from typing import Any

from .abi import Function, Gloo, RendezvousStore
from .wire import REDUCTIONS

__all__ = ["Xoscar"]


class Xoscar(Gloo):
    """gloo as xoscar's wheels have it."""

    library = "xoscar"
    version = "0.12.2"
    transport = "tcp"

    _module_name = "xoscar_pygloo"
    # void xoscar::allreduce_wrapper(
    #     const std::shared_ptr<gloo::Context>& context,
    #     intptr_t sendbuf, intptr_t recvbuf, size_t size,
    #     glooDataType_t datatype, ReduceOp reduceop,
    #     gloo::AllreduceOptions::Algorithm algorithm, uint32_t tag)
    # The binding's allreduce holds the GIL while it waits for peers, and the
    # threads that wait for messages could then report none.
    _wrapper = Function(
        "_ZN6xoscar17allreduce_wrapperERKSt10shared_ptrIN4gloo7ContextEEllmNS_"
        "14glooDataType_tENS_8ReduceOpENS1_6detail20AllreduceOptionsImpl9AlgorithmEj",
        None,
        (c_void_p, c_long, c_long, c_size_t, c_int, c_int, c_int, c_uint32),
        releases_gil=True,
    )
    # gloo::Context has no vtable, and follows that of gloo::rendezvous::Context.
    _base_offset = 8
    _rank_offset = 0
    _dtype_enum, _algorithm_enum = "GlooDataType_t", "AllreduceAlgorithm"

    @classmethod
    def _reduction(cls, library: ctypes.PyDLL, cpp_type: str, number: int) -> int:
        # template <typename T>
        # void gloo::sum(void* c_, const void* a_, const void* b_, size_t n)
        # and product, min and max likewise.
        name = REDUCTIONS[number]
        function = library[f"_ZN4gloo{len(name)}{name}I{cpp_type}EEvPvPKvS3_m"]
        return ctypes.cast(function, c_void_p).value or 0

    def connect(self, store: RendezvousStore, address: str) -> None:
        """As `Gloo.connect`; then exchange the addresses of the connections.

        gloo names a lost peer by the address of the peer's end of the connection,
        which the rank looks up in what the peers publish here.
        """
        super().connect(store, address)
        store.set(f"ends/{self.rank}", _own_ends())
        for rank in range(self.size):
            if rank != self.rank:
                store.get(f"ends/{rank}")

    def _make_device(self, address: str) -> Any:
        tcp = self._module.transport.tcp
        return tcp.CreateDevice(tcp.attr(address))

    def _wrap_store(self, store: RendezvousStore) -> object:
        return _TcpCallbacks(store)


def _own_ends() -> bytes:
    """Return the addresses of this process's ends of its connections, one by one.

    Each as in a sockaddr: port, for IPv6 the flow information, address.
    """
    ends = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                copy.getpeername()  # raises if it is not connected
                host, port = copy.getsockname()[:2]
                flow = bytes(4) if copy.family == socket.AF_INET6 else b""
                end = struct.pack("!H", port) + flow
                ends.append(end + socket.inet_pton(copy.family, host))
        except OSError:
            continue  # no socket, no connected one, or closed meanwhile
    return b"".join(ends)


class _TcpCallbacks:
    """A store under the names by which xoscar's CustomStore calls it."""

    def __init__(self, store: RendezvousStore) -> None:
        self.set_tcp = store.set
        self.get_tcp = store.get
        self.wait = store.wait
