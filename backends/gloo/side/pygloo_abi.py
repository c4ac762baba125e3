"""gloo's C++ interface inside the pygloo 0.2.1 wheel, called through ctypes.

For the side process only: an exception in gloo ends the calling process, with a
message on stderr. In exchange the GIL is free while a call waits, so that one
process serves collectives, sends and receives at once; pygloo's own functions
hold it, and its `send` and `recv` block.

This relies on the exported symbols and on where pybind11 keeps the pointer to a
C++ object, which `Gloo` checks at the start; and on the Itanium C++ ABI (an object
returned by value is written through a hidden first argument, a non-trivial
argument goes by address) and the numbers of enums, which the tests check.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
from collections.abc import Callable
from ctypes import (
    byref,
    c_bool,
    c_int,
    c_long,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from types import ModuleType
from typing import Any, Protocol

from .wire import DTYPES, REDUCTIONS

__all__ = ["Gloo", "Reduction", "RendezvousStore", "UnboundBuffer"]

#: ``f(result, a, b, count)``: elementwise, `result` may be `a` or `b`.
Reduction = Callable[[int, int, int, int], None]

# gloo's own timeouts must never show: the group's is the only one. Ten years is far
# from the overflow of nanoseconds since 1970, to which the waits add it.
_FOREVER_MS = 10 * 365 * 86_400_000

_MS = "NSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_BUFFER = "_ZN4gloo9transport2uv13UnboundBuffer"
# Mangled names of the C++ types of DTYPES.
_CPP_TYPES = ("a", "h", "i", "j", "l", "m", "f", "f", "d")
_FLOAT16, _FLOAT32 = DTYPES.index("float16"), DTYPES.index("float32")

# name: (symbol, result, arguments, whether the GIL is released meanwhile).
# A function that cannot wait keeps it: releasing it costs more than the call.
# Above each row its prototype in gloo's headers at pygloo 0.2.1. A member function
# takes the object first; `milliseconds` is passed as its count.
_FUNCTIONS: dict[str, tuple[str, Any, tuple[Any, ...], bool]] = {
    # void gloo::Context::setTimeout(std::chrono::milliseconds timeout)
    "set_timeout": (
        f"_ZN4gloo7Context10setTimeoutE{_MS}",
        None,
        (c_void_p, c_long),
        False,
    ),
    # std::unique_ptr<transport::UnboundBuffer>
    # gloo::Context::createUnboundBuffer(void* ptr, size_t size)
    # The result is written to where the hidden first argument points.
    "create": (
        "_ZN4gloo7Context19createUnboundBufferEPvm",
        None,
        (c_void_p, c_void_p, c_void_p, c_size_t),
        False,
    ),
    # virtual gloo::transport::uv::UnboundBuffer::~UnboundBuffer()
    # D0, the deleting destructor: frees the memory of the object, too.
    "delete": (f"{_BUFFER}D0Ev", None, (c_void_p,), False),
    # void gloo::transport::uv::UnboundBuffer::send(
    #     int dstRank, uint64_t slot, size_t offset, size_t nbytes)
    "send": (
        f"{_BUFFER}4sendEimmm",
        None,
        (c_void_p, c_int, c_uint64, c_size_t, c_size_t),
        False,
    ),
    # void gloo::transport::uv::UnboundBuffer::recv(
    #     int srcRank, uint64_t slot, size_t offset, size_t nbytes)
    "recv": (
        f"{_BUFFER}4recvEimmm",
        None,
        (c_void_p, c_int, c_uint64, c_size_t, c_size_t),
        False,
    ),
    # void gloo::transport::uv::UnboundBuffer::recv(
    #     std::vector<int> srcRanks, uint64_t slot, size_t offset, size_t nbytes)
    # The vector goes by address, as its copy constructor is not trivial.
    "recv_any": (
        f"{_BUFFER}4recvESt6vectorIiSaIiEEmmm",
        None,
        (c_void_p, c_void_p, c_uint64, c_size_t, c_size_t),
        False,
    ),
    # bool gloo::transport::uv::UnboundBuffer::waitSend(
    #     int* rank, std::chrono::milliseconds timeout)
    "wait_send": (
        f"{_BUFFER}8waitSendEPi{_MS}",
        c_bool,
        (c_void_p, c_void_p, c_long),
        True,
    ),
    # bool gloo::transport::uv::UnboundBuffer::waitRecv(
    #     int* rank, std::chrono::milliseconds timeout)
    "wait_recv": (
        f"{_BUFFER}8waitRecvEPi{_MS}",
        c_bool,
        (c_void_p, c_void_p, c_long),
        True,
    ),
    # void pygloo::allreduce_wrapper(
    #     const std::shared_ptr<gloo::Context>& context,
    #     intptr_t sendbuf, intptr_t recvbuf, size_t size, glooDataType_t datatype,
    #     ReduceOp reduceop, gloo::AllreduceOptions::Algorithm algorithm,
    #     uint32_t tag)
    "all_reduce": (
        "_ZN6pygloo17allreduce_wrapperERKSt10shared_ptrIN4gloo7ContextEEllmNS_"
        "14glooDataType_tENS_8ReduceOpENS1_6detail20AllreduceOptionsImpl9AlgorithmEj",
        None,
        (c_void_p, c_long, c_long, c_size_t, c_int, c_int, c_int, c_uint32),
        True,
    ),
}

# gloo::AllreduceOptions::Algorithm
_RING, _BCUBE = 1, 2

# A pybind11 instance is an object header, the pointer to the C++ object, and the
# shared_ptr that owns the object. gloo::Context is its vtable, rank and size.
_POINTER_OFFSET, _OWNER_OFFSET = 16, 24
_RANK_OFFSET = 8

#: Of the library in the wheel of pygloo 0.2.1 (CPython 3.10, Linux, x86-64).
LIBRARY_SHA256 = "06da2fcdeea7dd943f99d710a19792c59ea6d267e1224eeb9e12b9175b9a7238"


class RendezvousStore(Protocol):
    """What pygloo's CustomStore calls while the ranks connect."""

    def set(self, key: str, value: bytes) -> None:
        """Publish `value`."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that `wait` has seen."""

    def wait(self, keys: list[str]) -> None:
        """Block until all `keys` are set."""


class _IntVector(ctypes.Structure):
    # A std::vector<int>: begin, end, end of the storage.
    _fields_ = [("begin", c_void_p), ("end", c_void_p), ("storage", c_void_p)]


class Gloo:
    """The gloo context of one rank in one group, over the uv transport."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._module = _load(path)
        with_gil, without_gil = ctypes.PyDLL(path), ctypes.CDLL(path)
        try:
            for name, (symbol, result, arguments, releases) in _FUNCTIONS.items():
                function = (without_gil if releases else with_gil)[symbol]
                function.restype, function.argtypes = result, arguments
                setattr(self, f"_{name}", function)
            self._reductions = _reductions(with_gil)
        except AttributeError as error:
            raise RuntimeError(
                f"this pygloo lacks a function ({error}); {_remedy(path)}"
            ) from error
        self._context = self._module.rendezvous.Context(rank, size)
        base = id(self._context)
        self._owner = base + _OWNER_OFFSET
        self._pointer = c_void_p.from_address(base + _POINTER_OFFSET).value or 0
        found = (c_int * 2).from_address(self._pointer + _RANK_OFFSET)
        owned = c_void_p.from_address(self._owner).value
        if tuple(found) != (rank, size) or owned != self._pointer:
            raise RuntimeError(
                f"this pygloo is laid out differently: rank and size are {tuple(found)}"
                f" where {(rank, size)} was expected; {_remedy(path)}"
            )
        others = [peer for peer in range(size) if peer != rank]
        self._others = (c_int * len(others))(*others)
        first = ctypes.addressof(self._others)
        end = first + ctypes.sizeof(self._others)
        self._any = _IntVector(first, end, end)

    def connect(self, store: RendezvousStore, address: str) -> None:
        """Listen on `address` and connect to every peer; block until that is done."""
        uv = self._module.transport.uv
        self._device = uv.CreateDevice(uv.attr(address))
        # Before the ranks connect: the pairs take it over from the context.
        self._set_timeout(self._pointer, _FOREVER_MS)
        self._store = self._module.rendezvous.CustomStore(store)
        self._context.connectFullMesh(self._store, self._device)

    def buffer(self, address: int, nbytes: int) -> UnboundBuffer:
        """Return a buffer that sends from and receives into this memory."""
        pointer = c_void_p()
        self._create(byref(pointer), self._pointer, address, nbytes)
        return UnboundBuffer(self, pointer.value or 0)

    def all_reduce(
        self,
        address: int,
        count: int,
        dtype: int,
        reduction: int,
        *,
        ring: bool,
        tag: int,
    ) -> None:
        """Run gloo's own all_reduce in place: by a ring, or else by BCUBE."""
        algorithm = _RING if ring else _BCUBE
        dtype = _FLOAT32 if dtype == _FLOAT16 else dtype
        self._all_reduce(
            self._owner, address, address, count, dtype, reduction, algorithm, tag
        )

    def reduction(self, dtype: int, reduction: int) -> Reduction:
        """Return gloo's own function for two arrays (numbers as in the protocol)."""
        return self._reductions[dtype][reduction]

    # Set in __init__, from the table.
    _set_timeout: Callable[..., None]
    _create: Callable[..., None]
    _delete: Callable[..., None]
    _send: Callable[..., None]
    _recv: Callable[..., None]
    _recv_any: Callable[..., None]
    _wait_send: Callable[..., bool]
    _wait_recv: Callable[..., bool]
    _all_reduce: Callable[..., None]


class UnboundBuffer:
    """A gloo::transport::uv::UnboundBuffer; `free` it when nothing is posted.

    A receive must be exactly as long as the send it matches: gloo ends the
    process if it is shorter, and waits for more if it is longer.
    """

    __slots__ = ("_gloo", "_pointer")

    def __init__(self, gloo: Gloo, pointer: int) -> None:
        self._gloo = gloo
        self._pointer = pointer

    def send(self, peer: int, slot: int, offset: int, nbytes: int) -> None:
        """Post a send; it is matched by slot, in the order of posting."""
        self._gloo._send(self._pointer, peer, slot, offset, nbytes)

    def recv(self, peer: int, slot: int, offset: int, nbytes: int) -> None:
        """Post a receive from `peer`."""
        self._gloo._recv(self._pointer, peer, slot, offset, nbytes)

    def recv_any(self, slot: int, offset: int, nbytes: int) -> None:
        """Post a receive from whichever peer sends first."""
        self._gloo._recv_any(
            self._pointer, byref(self._gloo._any), slot, offset, nbytes
        )

    def wait_sends(self, count: int = 1) -> None:
        """Wait until `count` of the sends posted have left the memory."""
        for _ in range(count):
            self._gloo._wait_send(self._pointer, None, _FOREVER_MS)

    def wait_recvs(self, count: int = 1) -> None:
        """Wait until `count` of the receives posted have arrived."""
        for _ in range(count):
            self._gloo._wait_recv(self._pointer, None, _FOREVER_MS)

    def wait_recv_from(self) -> int:
        """Wait for one receive; return the rank it came from."""
        peer = c_int(-1)
        self._gloo._wait_recv(self._pointer, byref(peer), _FOREVER_MS)
        return peer.value

    def free(self) -> None:
        """Delete the C++ object."""
        self._gloo._delete(self._pointer)


def _remedy(path: str) -> str:
    """Say whether `path` is the library that the offsets and symbols are of."""
    with open(path, "rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found == LIBRARY_SHA256:
        return f"{path} is the library of pygloo 0.2.1: please report this"
    return (
        f"Rankscope needs the wheel of pygloo 0.2.1 (pip install pygloo==0.2.1): the "
        f"SHA-256 of its library is {LIBRARY_SHA256}, that of {path} is {found}"
    )


def _load(path: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("pygloo", path)
    spec = importlib.util.spec_from_loader("pygloo", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _reductions(library: ctypes.PyDLL) -> list[list[Reduction]]:
    prototype = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)
    table: list[list[Reduction]] = [
        [
            prototype(_reduction_address(library, cpp_type, number))
            for number in range(len(REDUCTIONS))
        ]
        for cpp_type in _CPP_TYPES[: len(DTYPES)]
    ]
    return table


def _reduction_address(library: ctypes.PyDLL, cpp_type: str, number: int) -> int:
    choose = library[f"_ZN6pygloo10toFunctionI{cpp_type}EEPFvPvPKvS3_mERKNS_8ReduceOpE"]
    choose.restype, choose.argtypes = c_void_p, (c_void_p,)
    return choose(byref(ctypes.c_uint8(number)))
