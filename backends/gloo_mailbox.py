"""The rank's side of the mailbox: frames that small all_reduces pass through."""

from __future__ import annotations

import itertools
import mmap
import os
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import numpy as np

from .gloo_protocol import COMMAND_BYTES, Kind, Mailbox, pack
from .gloo_work import GlooWork, Operation, address_of

__all__ = ["Frame", "FrameOperation", "Frames"]


class Frame(NamedTuple):
    """One frame of the mailbox as the rank sees it."""

    number: int
    content: memoryview
    result: memoryview


class Frames:
    """The frames of one side process, and which of them are free."""

    def __init__(self, size: int) -> None:
        layout = Mailbox(size)
        self._rooms = layout.rooms
        self.fd = os.memfd_create("rankscope-mailbox", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, layout.nbytes)
        self._map = mmap.mmap(self.fd, layout.nbytes)
        self._view = memoryview(self._map)
        self._frames = [
            [self._frame(layout, kind, number) for number in range(Mailbox.FRAMES)]
            for kind in range(len(layout.classes))
        ]
        self._free = [deque(frames) for frames in self._frames]

    def _frame(self, layout: Mailbox, kind: int, number: int) -> Frame:
        nbytes = layout.classes[kind]
        content, result = layout.frame(kind, number), layout.result(kind, number)
        return Frame(
            number,
            self._view[content : content + nbytes],
            self._view[result : result + nbytes],
        )

    def kind_for(self, nbytes: int) -> int | None:
        """The class of frames that an array of this size takes; ``None``: too large."""
        kind = bisect_left(self._rooms, nbytes)
        return kind if kind < len(self._rooms) else None

    def has(self, kind: int) -> bool:
        """Whether a frame of this class is free."""
        return bool(self._free[kind])

    def take(self, kind: int) -> Frame:
        """Take a free frame."""
        return self._free[kind].popleft()

    def put_back(self, kind: int, frame: Frame) -> None:
        """Its op is over and its result is copied."""
        self._free[kind].append(frame)

    def release(self) -> None:
        """Unmap: there is no side process any more."""
        for frame in itertools.chain.from_iterable(self._frames):
            frame.content.release()
            frame.result.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)


class FrameOperation(Operation):
    """A small all_reduce or a barrier, whose data passes through the mailbox."""

    __slots__ = (
        "_dtype",
        "_frame",
        "_frames",
        "_kind",
        "_length",
        "_reduction",
        "_tensor",
    )

    def __init__(
        self,
        work: GlooWork,
        frames: Frames,
        kind: int,
        tensor: np.ndarray | None,
        dtype: int,
        reduction: int,
        length: int,
    ) -> None:
        super().__init__(work, 0, () if tensor is None else (tensor,))
        self._frames = frames
        self._kind = kind
        self._frame: Frame | None = None  # while it has started and is not over
        self._tensor = tensor
        self._dtype = dtype
        self._reduction = reduction
        self._length = length

    def has_room(self) -> bool:
        return self._frames.has(self._kind)

    def start(self) -> bytes:
        frame = self._frame = self._frames.take(self._kind)
        command = pack(
            Kind.FRAME,
            dtype=self._dtype,
            reduction=self._reduction,
            length=self._length,
            sequence=self.sequence,
            number=self.number,
            segment=self._kind,
            target=frame.number,
        )
        frame.content[:COMMAND_BYTES] = command
        if self._tensor is not None:
            data = _bytes_of(self._tensor)
            frame.content[COMMAND_BYTES : COMMAND_BYTES + len(data)] = data
        return command

    def _regions(self) -> list[tuple[int, int]]:
        if self._tensor is None:
            return []
        start = address_of(self._tensor)
        return [(start, start + self._tensor.nbytes)]

    def copy_back(self) -> None:
        if self._tensor is not None:
            assert self._frame is not None
            data = _bytes_of(self._tensor)
            data[:] = self._frame.result[: len(data)]

    def release(self) -> None:
        frame, self._frame = self._frame, None
        if frame is not None:
            self._frames.put_back(self._kind, frame)


def _bytes_of(array: np.ndarray) -> memoryview:
    if array.dtype.kind == "c":  # a memoryview of complex numbers has no cast
        array = array.reshape(-1).view(np.uint8)
    return array.data.cast("B")
