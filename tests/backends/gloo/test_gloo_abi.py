"""gloo's C++ functions, as the side process calls them, against numpy.

A wrong prototype or number would be memory corruption, so each is used here, in every
library that is installed.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.gloo.library import Library, installed, unavailable
from rankscope.backends.gloo.side import abi
from rankscope.backends.gloo.side.abi import Function, Gloo, UnknownLibrary
from rankscope.backends.gloo.side.bitwise import bitwise
from rankscope.backends.gloo.side.libraries import LIBRARIES
from rankscope.backends.gloo.side.wire import BITWISE, DTYPES, REDUCTIONS, WIDENED
from rankscope.backends.stores.base import Store

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason="no gloo library for this Python"
)

UFUNCS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

each_library = pytest.mark.parametrize("library", installed().values(), ids=str)


@each_library
def test_the_library_is_of_the_version_that_was_verified(library: Library) -> None:
    assert library.version == LIBRARIES[library.name].version


def other_layout(me: Rank, library: Library) -> None:
    kind = LIBRARIES[library.name]

    def refused(reason: str, *patches: tuple[object, str, object]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for target, name, value in patches:
                patch.setattr(target, name, value)
            with pytest.raises(UnknownLibrary, match=f"this {library.name}.*{reason}"):
                kind(library.path, 0, 2)

    # The other library's layout: rank and size are found with it, too.
    other = 8 - kind._base_offset
    refused(
        f"rendezvous::Context is {kind._base_offset}; expected {other}",
        (kind, "_base_offset", other),
    )
    refused("differently: .*size", (kind, "_rank_offset", kind._rank_offset + 4))
    refused("holder's pointer", (abi, "_OWNER_OFFSET", 32))
    refused("RING is 1; expected 2", (abi, "_ALGORITHMS", {"RING": 2}))
    refused("uint8 is 1; expected 0", (abi, "ENUM_DTYPES", DTYPES[1:]))
    refused("product is 1; expected 0", (abi, "REDUCTIONS", REDUCTIONS[1:]))
    row: Function = kind._wrapper._replace(symbol="_ZN4gone")
    refused("lacks a function .*_ZN4gone", (kind, "_wrapper", row))


@each_library
def test_a_library_of_another_layout_is_refused(library: Library) -> None:
    run_ranks(1, other_layout, library)


class _KeyValue:
    """The store that gloo asks while it connects the ranks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str]) -> None:
        for key in keys:
            self._store.get(key)


def every_function(me: Rank, library: Library) -> None:
    with me.store("abi") as store:
        context = LIBRARIES[library.name](library.path, me.rank, me.size)
        context.connect(_KeyValue(store), "127.0.0.1")
        buffers(context)
        reductions(context)
        all_reduces(context)
        store.add("done", 1)
        while store.add("done", 0) < me.size:
            threading.Event().wait(0.01)


def buffers(context: Gloo) -> None:
    """Offsets, lengths, slots, and who sent, each different from the others."""
    other = 1 - context.rank
    x = np.arange(100, dtype=np.uint8) + 100 * context.rank
    y = np.zeros(100, np.uint8)
    source, target = (context.buffer(a.ctypes.data, a.nbytes) for a in (x, y))
    target.recv(other, (7 << 40) + 1, 10, 5)
    target.recv(other, (7 << 40) + 2, 20, 3)
    source.send(other, (7 << 40) + 2, 50, 3)
    source.send(other, (7 << 40) + 1, 40, 5)
    source.wait_sends(2)
    target.wait_recvs(2)
    wanted = np.zeros(100, np.uint8)
    wanted[10:15] = np.arange(40, 45) + 100 * other
    wanted[20:23] = np.arange(50, 53) + 100 * other
    assert np.array_equal(y, wanted)
    target.recv_any(9, 90, 10)
    source.send(other, 9, 0, 10)
    assert target.wait_recv_from() == other
    source.wait_sends()
    assert np.array_equal(y[90:], np.arange(10) + 100 * other)
    source.free()
    target.free()


def reductions(context: Gloo) -> None:
    """gloo's functions for two arrays; narrow floats are passed as float32."""
    for number, name in enumerate(DTYPES):
        dtype = np.dtype(WIDENED.get(name, name))
        a, b = np.arange(1, 8, dtype=dtype), np.arange(8, 1, -1, dtype=dtype)
        for op, reduction in enumerate(REDUCTIONS):
            result = np.zeros_like(a)
            context.reduction(number, op)(
                result.ctypes.data, a.ctypes.data, b.ctypes.data, a.size
            )
            assert np.array_equal(result, UFUNCS[reduction](a, b)), (name, reduction)


@pytest.mark.parametrize("name", [n for n in DTYPES if "float" not in n])
@pytest.mark.parametrize("reduction", BITWISE)
def test_bitwise_reductions_are_numpys(name: str, reduction: str) -> None:
    dtype = np.dtype(WIDENED.get(name, name))
    limits = np.iinfo(dtype)
    # More than one piece, and a last one that is shorter.
    a, b = np.random.default_rng(3).integers(
        limits.min, limits.max, (2, 20_011), dtype, endpoint=True
    )
    reduce = bitwise(BITWISE.index(reduction), DTYPES.index(name))
    wanted = getattr(np, f"bitwise_{reduction[1:]}")(a, b)
    result = np.zeros_like(a)
    reduce(result.ctypes.data, a.ctypes.data, b.ctypes.data, a.size)
    assert np.array_equal(result, wanted)
    reduce(b.ctypes.data, a.ctypes.data, b.ctypes.data, a.size)  # in place
    assert np.array_equal(b, wanted)


def all_reduces(context: Gloo) -> None:
    tag = 0
    for number, name in enumerate(DTYPES):
        dtype = np.dtype(WIDENED.get(name, name))
        held = [np.arange(r + 1, r + 8).astype(dtype) for r in range(context.size)]
        for op, reduction in enumerate(REDUCTIONS):
            for ring in (False, True):
                x = held[context.rank].copy()
                tag += 1
                context.all_reduce(
                    x.ctypes.data, x.size, number, op, ring=ring, tag=tag
                )
                wanted = UFUNCS[reduction](*held)
                assert np.array_equal(x, wanted), (name, reduction, ring)


@each_library
def test_every_function_does_what_its_prototype_says(library: Library) -> None:
    run_ranks(2, every_function, library)
