"""gloo's C++ functions, as the side process calls them, against numpy.

A wrong prototype or number would be memory corruption, so each is used here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.gloo import backend as gloo
from rankscope.backends.gloo.side import pygloo_abi
from rankscope.backends.gloo.side.pygloo_abi import LIBRARY_SHA256, Gloo
from rankscope.backends.gloo.side.wire import DTYPES, REDUCTIONS
from rankscope.backends.stores.base import Store

pytestmark = pytest.mark.skipif(
    gloo.unavailable() is not None, reason="pygloo has no wheel for this Python"
)

UFUNCS = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def library() -> str:
    spec = importlib.util.find_spec("pygloo")
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def test_the_library_is_the_one_the_offsets_are_of() -> None:
    assert hashlib.sha256(Path(library()).read_bytes()).hexdigest() == LIBRARY_SHA256


def test_an_unknown_library_is_named_with_its_hash(tmp_path: Path) -> None:
    other = tmp_path / "pygloo.so"
    other.write_bytes(b"another")
    found = hashlib.sha256(b"another").hexdigest()
    remedy = pygloo_abi._remedy(str(other))
    assert "pip install pygloo==0.2.1" in remedy
    assert re.search(f"{LIBRARY_SHA256}.*{other} is {found}", remedy)
    assert "please report this" in pygloo_abi._remedy(library())


def other_layout(me: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pygloo_abi, "_RANK_OFFSET", 12)
        with pytest.raises(RuntimeError, match=r"laid out differently.*\(0, 2\)"):
            Gloo(library(), 0, 2)
    with pytest.MonkeyPatch.context() as patch:
        row = pygloo_abi._FUNCTIONS["send"]
        patch.setitem(pygloo_abi._FUNCTIONS, "send", ("_ZN4gone", *row[1:]))
        with pytest.raises(RuntimeError, match=r"lacks a function.*_ZN4gone.*report"):
            Gloo(library(), 0, 2)


def test_a_library_of_another_layout_is_refused() -> None:
    run_ranks(1, other_layout)


class _KeyValue:
    """The store that pygloo asks while it connects the ranks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def wait(self, keys: list[str]) -> None:
        for key in keys:
            self._store.get(key)


def every_function(me: Rank) -> None:
    with me.store("abi") as store:
        context = Gloo(library(), me.rank, me.size)
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
    """gloo's functions for two arrays; float16 is passed as float32."""
    for number, name in enumerate(DTYPES):
        dtype = np.dtype("float32" if name == "float16" else name)
        a, b = np.arange(1, 8, dtype=dtype), np.arange(8, 1, -1, dtype=dtype)
        for op, reduction in enumerate(REDUCTIONS):
            result = np.zeros_like(a)
            context.reduction(number, op)(
                result.ctypes.data, a.ctypes.data, b.ctypes.data, a.size
            )
            assert np.array_equal(result, UFUNCS[reduction](a, b)), (name, reduction)


def all_reduces(context: Gloo) -> None:
    tag = 0
    for number, name in enumerate(DTYPES):
        dtype = np.dtype("float32" if name == "float16" else name)
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


def test_every_function_does_what_its_prototype_says() -> None:
    run_ranks(2, every_function)
