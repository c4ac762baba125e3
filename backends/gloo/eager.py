"""The rank's side of the eager protocol: buffers for small all_reduces."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import numpy as np

from .dtypes import Reduction
from .memfd import MappedMemfd
from .operations import Operation, address_of
from .side.wire import COMMAND_BYTES, Command, EagerLayout, Kind
from .work import GlooWork

__all__ = ["EagerBuffer", "EagerBuffers", "EagerOperation"]


class EagerBuffer(NamedTuple):
    """One eager buffer, as the rank sees it, and the result that belongs to it."""

    number: int
    content: memoryview
    result: memoryview


class EagerBuffers:
    """The eager buffers of one side process, and which of them are free.

    Raises `OSError` if the system refuses the memory.
    """

    def __init__(self, size: int) -> None:
        layout = EagerLayout(size)
        self._capacities = layout.capacities
        self._memory = MappedMemfd("rankscope-eager", layout.nbytes)
        self._view = memoryview(self._memory.map)
        self._buffers = [
            [
                self._buffer(layout, size_class, index)
                for index in range(EagerLayout.BUFFERS)
            ]
            for size_class in range(len(layout.capacities))
        ]
        self._free = [deque(buffers) for buffers in self._buffers]

    def _buffer(self, layout: EagerLayout, size_class: int, index: int) -> EagerBuffer:
        nbytes = layout.buffer_bytes[size_class]
        content = layout.buffer(size_class, index)
        result = layout.result(size_class, index)
        return EagerBuffer(
            index,
            self._view[content : content + nbytes],
            self._view[result : result + nbytes],
        )

    @property
    def fd(self) -> int:
        """The descriptor that the side process inherits."""
        return self._memory.fd

    def size_class(self, nbytes: int) -> int | None:
        """Return the size class of an array; ``None``: too large for any."""
        size_class = bisect_left(self._capacities, nbytes)
        return size_class if size_class < len(self._capacities) else None

    def has(self, size_class: int) -> bool:
        """Whether a buffer of this size class is free."""
        return bool(self._free[size_class])

    def take(self, size_class: int) -> EagerBuffer:
        """Take a free buffer."""
        return self._free[size_class].popleft()

    def put_back(self, size_class: int, buffer: EagerBuffer) -> None:
        """Free a buffer: its op is over and its result is copied."""
        self._free[size_class].append(buffer)

    def release(self) -> None:
        """Unmap: there is no side process any more."""
        for buffer in itertools.chain.from_iterable(self._buffers):
            buffer.content.release()
            buffer.result.release()
        self._view.release()
        self._memory.close()


class EagerOperation(Operation):
    """A small all_reduce, or a barrier (without `tensor` and `reduction`)."""

    __slots__ = (
        "_buffer",
        "_buffers",
        "_data",
        "_reduction",
        "_size_class",
        "_tensor",
    )

    def __init__(
        self,
        work: GlooWork,
        buffers: EagerBuffers,
        size_class: int,
        tensor: np.ndarray | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(work, 0, () if tensor is None else (tensor,))
        self._buffers = buffers
        self._size_class = size_class
        self._buffer: EagerBuffer | None = None  # from the start to the end of the op
        self._tensor = tensor
        self._data = None if tensor is None else _bytes_of(tensor)
        self._reduction = reduction

    def has_room(self) -> bool:
        return self._buffers.has(self._size_class)

    def start(self) -> bytes:
        buffer = self._buffer = self._buffers.take(self._size_class)
        dtype = op = length = 0
        if self._tensor is not None and self._reduction is not None:
            dtype, op, factor = self._reduction
            length = self._tensor.size * factor
        data = self._data
        if data is not None:
            buffer.content[COMMAND_BYTES : COMMAND_BYTES + len(data)] = data
        message = Command(
            Kind.EAGER,
            dtype=dtype,
            reduction=op,
            length=length,
            sequence=self.sequence,
            number=self.number,
            segment=self._size_class,
            target=buffer.number,
        ).pack()
        buffer.content[:COMMAND_BYTES] = message
        return message

    def _regions(self) -> list[tuple[int, int]]:
        if self._tensor is None:
            return []
        start = address_of(self._tensor)
        return [(start, start + self._tensor.nbytes)]

    def copy_back(self) -> None:
        data = self._data
        if data is not None:
            assert self._buffer is not None
            data[:] = self._buffer.result[: len(data)]

    def release(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.put_back(self._size_class, buffer)


def _bytes_of(array: np.ndarray) -> memoryview:
    if array.dtype.kind == "c":  # a memoryview of complex numbers has no cast
        array = array.reshape(-1).view(np.uint8)
    return array.data.cast("B")
