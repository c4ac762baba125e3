"""The "gloo ABI": what the side process calls in a gloo library, whichever it is.

A library is a Python extension with a pybind11 binding, and its file exports gloo's
C++ symbols too. The binding turns a C++ exception into a Python one, so the binding is
used for contexts, devices, stores and connections. What the binding lacks, or does
while it holds the GIL, is called through ctypes: timeouts, unbound buffers, reductions,
all_reduce. The GIL is free while such a call waits, so that one process serves
collectives, sends and receives at once. A C++ exception in such a call ends the
process, with a message on stderr: only a side process may load a library.

The calls rely on the Itanium C++ ABI: an object returned by value is written through a
hidden first argument, a non-trivial argument goes by address. Symbols are found by
mangled names, which state the types of the arguments. `Gloo` checks what the names do
not state: where an object lies in another one, and the numbers of enums.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
from collections.abc import Callable
from ctypes import (
    byref,
    c_bool,
    c_int,
    c_long,
    c_size_t,
    c_uint64,
    c_void_p,
)
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

from .bitwise import bitwise
from .scheduling import yielding_threads
from .wire import DTYPES, ENUM_DTYPES, REDUCTIONS, WIDENED

__all__ = [
    "CPP_TYPES",
    "Function",
    "Gloo",
    "Reduction",
    "RendezvousStore",
    "UnboundBuffer",
    "UnknownLibrary",
    "base_offset",
]

#: ``f(result, a, b, count)``: elementwise, `result` may be `a` or `b`.
Reduction = Callable[[int, int, int, int], None]

#: Mangled names of the C++ types as which DTYPES are passed.
CPP_TYPES = ("a", "h", "i", "j", "l", "m", "f", "f", "d", "f", "i", "j")

# gloo's own timeouts must never show: the group's is the only one. Ten years is far
# from the overflow of nanoseconds since 1970, to which the waits add it.
_FOREVER_MS = 10 * 365 * 86_400_000

_MS = "NSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_PASSED_AS = tuple(DTYPES.index(WIDENED.get(name, name)) for name in DTYPES)

# gloo::AllreduceOptions::Algorithm
_ALGORITHMS = {"RING": 1, "BCUBE": 2}

# A pybind11 instance is an object header, the pointer to the C++ object, and the
# std::shared_ptr that owns the object.
_POINTER_OFFSET, _OWNER_OFFSET = 16, 24


class UnknownLibrary(RuntimeError):
    """The library lacks a function, or is laid out differently."""


class RendezvousStore(Protocol):
    """What gloo asks for while the ranks connect."""

    def set(self, key: str, value: bytes) -> None:
        """Publish `value`."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that `wait` has seen."""

    def wait(self, keys: list[str]) -> None:
        """Block until all `keys` are set."""


class Function(NamedTuple):
    """A C++ function: symbol, result, arguments, whether the GIL is released.

    A function that cannot wait keeps the GIL: releasing it costs more than the call.
    """

    symbol: str
    result: Any
    arguments: tuple[Any, ...]
    releases_gil: bool = False


def _shared_functions(transport: str) -> dict[str, Function]:
    """Return the functions that every library has, by the names they get here.

    Above each row its prototype in gloo's headers. A member function takes the object
    first; `milliseconds` is passed as its count.
    """
    mangled = f"{len(transport)}{transport}"
    buffer = f"_ZN4gloo9transport{mangled}13UnboundBuffer"
    return {
        # void gloo::Context::setTimeout(std::chrono::milliseconds timeout)
        "set_timeout": Function(
            f"_ZN4gloo7Context10setTimeoutE{_MS}", None, (c_void_p, c_long)
        ),
        # std::chrono::milliseconds gloo::Context::getTimeout() const
        "get_timeout": Function("_ZNK4gloo7Context10getTimeoutEv", c_long, (c_void_p,)),
        # std::unique_ptr<transport::UnboundBuffer>
        # gloo::Context::createUnboundBuffer(void* ptr, size_t size)
        # The result is written to where the hidden first argument points.
        "create": Function(
            "_ZN4gloo7Context19createUnboundBufferEPvm",
            None,
            (c_void_p, c_void_p, c_void_p, c_size_t),
        ),
        # virtual gloo::transport::…::UnboundBuffer::~UnboundBuffer()
        # D0, the deleting destructor: frees the memory of the object, too.
        "delete": Function(f"{buffer}D0Ev", None, (c_void_p,)),
        # void gloo::transport::…::UnboundBuffer::send(
        #     int dstRank, uint64_t slot, size_t offset, size_t nbytes)
        "send": Function(
            f"{buffer}4sendEimmm",
            None,
            (c_void_p, c_int, c_uint64, c_size_t, c_size_t),
        ),
        # void gloo::transport::…::UnboundBuffer::recv(
        #     int srcRank, uint64_t slot, size_t offset, size_t nbytes)
        "recv": Function(
            f"{buffer}4recvEimmm",
            None,
            (c_void_p, c_int, c_uint64, c_size_t, c_size_t),
        ),
        # void gloo::transport::…::UnboundBuffer::recv(
        #     std::vector<int> srcRanks, uint64_t slot, size_t offset, size_t nbytes)
        # The vector goes by address, as its copy constructor is not trivial.
        "recv_any": Function(
            f"{buffer}4recvESt6vectorIiSaIiEEmmm",
            None,
            (c_void_p, c_void_p, c_uint64, c_size_t, c_size_t),
        ),
        # bool gloo::transport::…::UnboundBuffer::waitSend(
        #     int* rank, std::chrono::milliseconds timeout)
        "wait_send": Function(
            f"{buffer}8waitSendEPi{_MS}",
            c_bool,
            (c_void_p, c_void_p, c_long),
            releases_gil=True,
        ),
        # bool gloo::transport::…::UnboundBuffer::waitRecv(
        #     int* rank, std::chrono::milliseconds timeout)
        "wait_recv": Function(
            f"{buffer}8waitRecvEPi{_MS}",
            c_bool,
            (c_void_p, c_void_p, c_long),
            releases_gil=True,
        ),
    }


class _IntVector(ctypes.Structure):
    # A std::vector<int>: begin, end, end of the storage.
    _fields_ = [("begin", c_void_p), ("end", c_void_p), ("storage", c_void_p)]


class _SharedPtr(ctypes.Structure):
    # A std::shared_ptr: the object, and the block that counts the references.
    _fields_ = [("object", c_void_p), ("control", c_void_p)]


class Gloo:
    """The gloo context of one rank in one group; a library is a subclass.

    Raises `UnknownLibrary` if the file at `path` is not the library that the subclass
    describes. What differs between the libraries is in the attributes and methods up
    to `_wrap_store`.
    """

    #: The distribution, and the version whose symbols and layout the subclass states.
    library: ClassVar[str]
    version: ClassVar[str]
    transport: ClassVar[str]
    #: What the extension's init function is named after.
    _module_name: ClassVar[str]
    #: The binding's wrapper of gloo's all_reduce.
    _wrapper: ClassVar[Function]
    #: Where gloo::Context lies in gloo::rendezvous::Context.
    _base_offset: ClassVar[int]
    #: Where rank and size lie in gloo::Context.
    _rank_offset: ClassVar[int]
    #: The names of the binding's enums of ENUM_DTYPES and of `_ALGORITHMS`.
    _dtype_enum: ClassVar[str]
    _algorithm_enum: ClassVar[str]

    @classmethod
    def _reduction(cls, library: ctypes.PyDLL, cpp_type: str, number: int) -> int:
        """Return the address of the function that reduces two arrays."""
        raise NotImplementedError

    def _make_device(self, address: str) -> Any:
        """Return the transport's device that listens on `address`."""
        raise NotImplementedError

    def _wrap_store(self, store: RendezvousStore) -> object:
        """Return the object whose methods the library's CustomStore calls."""
        raise NotImplementedError

    # -- the same for all --------------------------------------------------

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        with_gil, without_gil = ctypes.PyDLL(path), ctypes.CDLL(path)
        try:
            functions = _shared_functions(self.transport)
            functions["all_reduce"] = self._wrapper
            for name, row in functions.items():
                function = (without_gil if row.releases_gil else with_gil)[row.symbol]
                function.restype, function.argtypes = row.result, row.arguments
                setattr(self, f"_{name}", function)
            self._reductions = self._find_reductions(with_gil)
            self._buffer_vtable = _vtable(with_gil, self.transport)
            found = base_offset(with_gil, "_ZTIN4gloo10rendezvous7ContextE")
        except AttributeError as error:
            raise UnknownLibrary(
                f"this {self.library} lacks a function ({error})"
            ) from error
        except ValueError as error:
            raise UnknownLibrary(
                f"this {self.library} lacks a symbol ({error})"
            ) from error
        self._expect("gloo::Context in rendezvous::Context", found, self._base_offset)
        self._module = _load(path, self._module_name)
        self._check_enums()
        self._context = self._module.rendezvous.Context(rank, size)
        base = id(self._context)
        derived = c_void_p.from_address(base + _POINTER_OFFSET).value or 0
        owner = _SharedPtr.from_address(base + _OWNER_OFFSET)
        self._expect("the holder's pointer", owner.object, derived)
        self._pointer = derived + self._base_offset
        # A std::shared_ptr<gloo::Context>, which the binding's holder of a
        # gloo::rendezvous::Context keeps alive.
        self._owner = _SharedPtr(self._pointer, owner.control)
        self._check_context()
        others = [peer for peer in range(size) if peer != rank]
        self._others = (c_int * len(others))(*others)
        first = ctypes.addressof(self._others)
        end = first + ctypes.sizeof(self._others)
        self._any = _IntVector(first, end, end)

    def connect(self, store: RendezvousStore, address: str) -> None:
        """Listen on `address` and connect to every peer; block until that is done."""
        with yielding_threads(self.size):
            self._device = self._make_device(address)
        self._callbacks = self._wrap_store(store)
        self._store = self._module.rendezvous.CustomStore(self._callbacks)
        self._context.connectFullMesh(self._store, self._device)
        self._check_buffer()

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
        algorithm = _ALGORITHMS["RING" if ring else "BCUBE"]
        self._all_reduce(
            byref(self._owner),
            address,
            address,
            count,
            _PASSED_AS[dtype],
            reduction,
            algorithm,
            tag,
        )

    def reduction(self, dtype: int, reduction: int) -> Reduction:
        """Return the function for two arrays, gloo's own but for the bitwise ones.

        `dtype` and `reduction` are numbers of the protocol.
        """
        if reduction < len(REDUCTIONS):
            return self._reductions[dtype][reduction]
        return bitwise(reduction - len(REDUCTIONS), dtype)

    # -- checks ------------------------------------------------------------

    def _expect(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            raise UnknownLibrary(
                f"this {self.library} is laid out differently: {what} is {found}; "
                f"expected {expected}"
            )

    def _check_enums(self) -> None:
        dtypes = vars(getattr(self._module, self._dtype_enum))
        reductions = vars(self._module.ReduceOp)
        algorithms = vars(getattr(self._module, self._algorithm_enum))
        for number, name in enumerate(ENUM_DTYPES):
            self._expect(name, int(dtypes[f"gloo{name.capitalize()}"]), number)
        for number, name in enumerate(REDUCTIONS):
            self._expect(name, int(reductions[name.upper()]), number)
        for name, number in _ALGORITHMS.items():
            self._expect(name, int(algorithms[name]), number)

    def _check_context(self) -> None:
        found = (c_int * 2).from_address(self._pointer + self._rank_offset)
        self._expect("(rank, size)", tuple(found), (self.rank, self.size))
        # Before the ranks connect: the pairs take it over from the context.
        self._set_timeout(self._pointer, _FOREVER_MS)
        found_ms = self._get_timeout(self._pointer)
        self._expect("the timeout set", found_ms, _FOREVER_MS)

    def _check_buffer(self) -> None:
        # The functions above are those of the transport's class, not virtual calls. An
        # UnboundBuffer is its vtable, `void* const ptr` and `const size_t size`.
        memory = ctypes.create_string_buffer(8)
        buffer = self.buffer(ctypes.addressof(memory), 8)
        found = tuple((c_uint64 * 3).from_address(buffer.pointer))
        expected = (self._buffer_vtable, ctypes.addressof(memory), 8)
        self._expect("an UnboundBuffer", found, expected)
        buffer.free()

    @classmethod
    def _find_reductions(cls, library: ctypes.PyDLL) -> list[list[Reduction]]:
        prototype = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)
        table: list[list[Reduction]] = []
        for cpp_type in CPP_TYPES:
            numbers = range(len(REDUCTIONS))
            found = [cls._reduction(library, cpp_type, number) for number in numbers]
            table.append([prototype(address) for address in found])
        return table

    # Set in __init__, from the tables.
    _set_timeout: Callable[..., None]
    _get_timeout: Callable[..., int]
    _create: Callable[..., None]
    _delete: Callable[..., None]
    _send: Callable[..., None]
    _recv: Callable[..., None]
    _recv_any: Callable[..., None]
    _wait_send: Callable[..., bool]
    _wait_recv: Callable[..., bool]
    _all_reduce: Callable[..., None]


class UnboundBuffer:
    """A transport's UnboundBuffer; `free` it when nothing is posted.

    A receive must be exactly as long as the send it matches: gloo ends the
    process if it is shorter, and waits for more if it is longer.
    """

    __slots__ = ("_gloo", "pointer")

    def __init__(self, gloo: Gloo, pointer: int) -> None:
        self._gloo = gloo
        #: The address of the C++ object.
        self.pointer = pointer

    def send(self, peer: int, slot: int, offset: int, nbytes: int) -> None:
        """Post a send; it is matched by slot, in the order of posting."""
        self._gloo._send(self.pointer, peer, slot, offset, nbytes)

    def recv(self, peer: int, slot: int, offset: int, nbytes: int) -> None:
        """Post a receive from `peer`."""
        self._gloo._recv(self.pointer, peer, slot, offset, nbytes)

    def recv_any(self, slot: int, offset: int, nbytes: int) -> None:
        """Post a receive from whichever peer sends first."""
        self._gloo._recv_any(self.pointer, byref(self._gloo._any), slot, offset, nbytes)

    def wait_sends(self, count: int = 1) -> None:
        """Wait until `count` of the sends posted have left the memory."""
        for _ in range(count):
            self._gloo._wait_send(self.pointer, None, _FOREVER_MS)

    def wait_recvs(self, count: int = 1) -> None:
        """Wait until `count` of the receives posted have arrived."""
        for _ in range(count):
            self._gloo._wait_recv(self.pointer, None, _FOREVER_MS)

    def wait_recv_from(self) -> int:
        """Wait for one receive; return the rank it came from."""
        peer = c_int(-1)
        self._gloo._wait_recv(self.pointer, byref(peer), _FOREVER_MS)
        return peer.value

    def free(self) -> None:
        """Delete the C++ object."""
        self._gloo._delete(self.pointer)


def base_offset(library: ctypes.PyDLL, symbol: str) -> int:
    """Return where the base class lies in a C++ class, from its std::type_info.

    `ValueError` if the library does not export `symbol`.
    """
    info = ctypes.addressof(c_void_p.in_dll(library, symbol))
    kind = c_void_p.from_address(info).value or 0
    single = "_ZTVN10__cxxabiv120__si_class_type_infoE"
    # A vtable pointer points behind the offset to the top and the type_info.
    if kind == ctypes.addressof(c_void_p.in_dll(library, single)) + 16:
        return 0
    # abi::__vmi_class_type_info: vtable, name, flags and number of bases, and for each
    # base its type_info and its offset, above 8 bits of flags.
    return c_long.from_address(info + 32).value >> 8


def _vtable(library: ctypes.PyDLL, transport: str) -> int:
    symbol = f"_ZTVN4gloo9transport{len(transport)}{transport}13UnboundBufferE"
    return ctypes.addressof(c_void_p.in_dll(library, symbol)) + 16


def _load(path: str, name: str) -> ModuleType:
    """Load the extension at `path`, without its package."""
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
