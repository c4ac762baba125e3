"""Batch: the ops of a coalescing block, which are issued as one NCCL group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DistBackendError
from .stream import NCCLStream
from .work import Call, NCCLWork

__all__ = ["Batch"]


class Batch:
    """The Works, calls and arrays of a block, all of one stream."""

    def __init__(self) -> None:
        self._stream: NCCLStream | None = None
        self._works: list[NCCLWork] = []
        self._calls: list[Call] = []
        self._arrays: list[Any] = []

    def add(
        self,
        where: str,
        stream: NCCLStream,
        work: NCCLWork,
        calls: Sequence[Call],
        arrays: Sequence[Any],
    ) -> None:
        """Add an op; raise `ValueError`, which begins with `where`, on a second device.

        `arrays` are what the op reads and writes.
        """
        if self._stream not in (None, stream):
            assert self._stream is not None
            raise ValueError(
                f"{where}: the arrays of one batch lie on devices "
                f"{self._stream.comm.device} and {stream.comm.device}; expected one"
            )
        self._stream = stream
        self._works.append(work)
        self._calls += calls
        self._arrays += arrays

    def submit(self) -> None:
        """Issue the ops as one NCCL group; nothing happens without an op."""
        if self._stream is not None:
            self._stream.submit(self._works, self._calls, self._arrays)

    def fail(self, error: BaseException) -> None:
        """Fail every Work, because no op was issued: a wait for it would not end.

        Raises `DistBackendError`, which names the first op, for an error of that type.
        """
        for work in self._works:
            work.mark_failed(error)
        if self._works and isinstance(error, DistBackendError):
            what = self._works[0].describe()
            raise DistBackendError(f"{what}: {error}") from error
