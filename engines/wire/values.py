"""Values of variables on their way between a notebook and its ranks.

A value is packed into frames: its pickle, and then the memory of its arrays. Large
frames do not travel as messages where both sides share a host: the sender writes them
to an unnamed file in memory, which the receiver opens by the sender's descriptor.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ipyparallel.serialize import deserialize_object, serialize_object

__all__ = ["MemoryFile", "pack", "read_memory_file", "size_of", "unpack"]

#: What a frame of a value is: an object with a buffer.
Frame = Any

_PICKLED, _CANNED = b"pickled", b"canned"
_CODE = (types.FunctionType, type)


def pack(value: Any) -> list[Frame]:
    """Return the frames of a value; raise what `pickle` raises.

    Functions and classes, alone or in a list, tuple or dict, are sent with their code,
    as ipyparallel does.
    """
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

    A `bytearray` or an array among `frames`, as `read_memory_file` and `receive_frames`
    return, becomes the memory of an array. `namespace` is that of functions which were
    sent with their code.
    """
    how, *rest = frames
    if bytes(how) == _CANNED:
        return deserialize_object(rest, namespace)[0]
    data, *buffers = rest
    mine = (bytearray, np.ndarray)
    own = [one if isinstance(one, mine) else bytearray(one) for one in buffers]
    return pickle.loads(data, buffers=own)


def size_of(frames: Sequence[Frame]) -> int:
    """Return the bytes of `frames`."""
    return sum(memoryview(frame).nbytes for frame in frames)


@dataclass(frozen=True)
class MemoryFile:
    """Frames in a file without a name, which lives as long as its descriptor."""

    pid: int
    descriptor: int
    #: The beginning of the file: that of another process's file is another one.
    token: bytes
    lengths: list[int]

    @classmethod
    def write(cls, frames: Sequence[Frame]) -> MemoryFile | None:
        """Write `frames`; ``None`` where the system has no such files, or no space."""
        create = getattr(os, "memfd_create", None)
        if create is None:
            return None
        descriptor = create("rankscope-values")
        token = secrets.token_bytes(16)
        views = [memoryview(frame).cast("B") for frame in frames]
        try:
            for view in [memoryview(token), *views]:
                while view:
                    view = view[os.write(descriptor, view) :]
        except OSError:
            os.close(descriptor)
            return None
        return cls(os.getpid(), descriptor, token, [view.nbytes for view in views])

    def close(self) -> None:
        """Free the memory, once no receiver has it open."""
        os.close(self.descriptor)


def read_memory_file(file: MemoryFile) -> list[Frame] | None:
    """Return the frames of a file of another process; ``None`` if it cannot be had.

    A process of another host or container has another file there, or none.
    """
    with contextlib.suppress(OSError), _opened(file) as descriptor:
        if os.read(descriptor, len(file.token)) != file.token:
            return None
        frames: list[Frame] = []
        for length in file.lengths:
            frame = bytearray(length)
            view = memoryview(frame)
            while view:
                count = os.readv(descriptor, [view])
                if not count:
                    return None
                view = view[count:]
            frames.append(frame)
        return frames
    return None


@contextlib.contextmanager
def _opened(file: MemoryFile) -> Iterator[int]:
    descriptor = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
