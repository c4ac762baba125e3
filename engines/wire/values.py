"""Values of variables on their way between a notebook and its ranks."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
from ipyparallel.serialize import deserialize_object, serialize_object

__all__ = ["pack", "size_of", "unpack"]

#: What a frame of a value is: an object with a buffer.
Frame = Any

_PICKLED, _CANNED = b"pickled", b"canned"
_CODE = (types.FunctionType, type)


def pack(value: Any) -> list[Frame]:
    """Return the frames of a value; functions and classes are sent with their code."""
    if _has_code(value):
        return [_CANNED, *serialize_object(value)]
    buffers: list[pickle.PickleBuffer] = []
    data = io.BytesIO()
    _Pickler(data, 5, buffer_callback=buffers.append).dump(value)
    return [_PICKLED, data.getbuffer(), *(one.raw() for one in buffers)]


class _Pickler(pickle.Pickler):
    """Pickles arrays so that their copies are writable."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)
        return NotImplemented


def _has_code(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        entries = value.values() if isinstance(value, dict) else value
        return any(isinstance(one, _CODE) for one in entries)
    return isinstance(value, _CODE)


def unpack(frames: Sequence[Frame], namespace: dict[str, Any]) -> Any:
    """Return the value of `frames`; its arrays are writable, and nobody else's.

    A `bytearray` or an array among `frames`, as `receive_frames` returns them, becomes
    the memory of an array. `namespace` is that of functions which were sent with their
    code.
    """
    how, *rest = frames
    if bytes(how) == _CANNED:
        return deserialize_object(rest, namespace)[0]
    data, *buffers = rest
    mine = (bytearray, np.ndarray)
    own = [one if isinstance(one, mine) else bytearray(one) for one in buffers]
    return pickle.loads(data, buffers=own)


def size_of(frames: Sequence[Frame]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
