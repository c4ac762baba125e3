"""The array ops of the object collectives, on a device type of the group.

A group without a backend for host memory moves pickled bytes in arrays of its
first device type, as c10d does in CUDA arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import DistBackendError, DistError
from ..interface.staging import Copies, copies_of
from ..work.op_type import OpType
from ..work.work import Work
from .arguments import Array, Place, take_device
from .data_movement import all_gather, broadcast, gather, scatter
from .point_to_point import irecv, isend

__all__ = ["ObjectTransport"]

# Flat arrays of bytes and numbers on the host.
Host = Any


class ObjectTransport:
    """The array ops of one object collective, on host arrays."""

    def __init__(self, where: Place, kind: OpType, device: Any = None) -> None:
        self._where, self._pg = where, where.pg
        if self._pg.capturing:
            raise ValueError(
                f"{where}: it needs the sizes first, and a coalescing_manager block "
                "issues nothing before its end; call it before or after the block"
            )
        self._index: int | None = None
        served = self._pg.config.device_backend_map
        if device is not None:
            chosen, self._index = take_device(device, where)
        else:
            chosen = "cpu" if "cpu" in served else self._pg.first_device()
        if chosen not in served:
            raise ValueError(
                f"{where}: device={device!r}: no backend for device type {chosen!r}; "
                f"the group has {self._pg.config}"
            )
        self._copies: Copies | None = None
        if chosen != "cpu":
            self._copies = self._copies_to(chosen, kind)

    def _copies_to(self, device: str, kind: OpType) -> Copies:
        with self._named():
            # Before any array is made: the backend has the best error for a
            # missing library.
            backend = self._pg.backend_for(device, kind)
            copies = copies_of(device)
        if copies is None or copies.to_device is None:
            raise DistBackendError(
                f"{self._where}: no function that makes arrays of device type "
                f"{device!r} is registered: call register_staging(..., to_device=...), "
                "or name a backend for 'cpu' in the group's config"
            )
        if self._index is None:
            self._index = backend.default_device()
        return copies

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the public function in the errors of the ops in the block."""
        try:
            yield
        except DistError as error:
            raise error.prefixed(self._where.name) from error
        except (NotImplementedError, TypeError, ValueError) as error:
            raise type(error)(f"{self._where.name}: {error}") from error

    @property
    def _away(self) -> bool:
        """Return whether the arrays are on a device; the ops then return Works."""
        return self._copies is not None

    def _put(self, data: Host) -> Array:
        if self._copies is None:
            return data
        assert self._copies.to_device is not None
        return self._copies.to_device(data, self._index)

    def _put_all(self, rows: Sequence[Host] | None) -> list[Array] | None:
        return None if rows is None else [self._put(row) for row in rows]

    def _end(self, work: Work | None) -> None:
        # Not wait(): on a GPU wait() returns before the host can read the result,
        # and the host would read the undefined content that an abort leaves.
        if work is not None:
            work.synchronize()

    def _fetch(self, array: Array, data: Host) -> None:
        if self._copies is not None:
            np.copyto(data, self._copies.to_host(array))

    def all_gather(self, rows: Sequence[Host], mine: Host) -> None:
        with self._named():
            there = self._put_all(rows) or []
            source = self._put(mine)
            self._end(all_gather(there, source, self._pg, self._away))
            for array, row in zip(there, rows, strict=True):
                self._fetch(array, row)

    def broadcast(self, data: Host, root: int) -> None:
        with self._named():
            there = self._put(data)
            self._end(broadcast(there, None, self._pg, self._away, root))
            if self._pg.rank() != root:
                self._fetch(there, data)

    def gather(self, mine: Host, rows: Sequence[Host] | None, root: int) -> None:
        with self._named():
            there, source = self._put_all(rows), self._put(mine)
            self._end(gather(source, there, None, self._pg, self._away, root))
            for array, row in zip(there or (), rows or (), strict=True):
                self._fetch(array, row)

    def scatter(self, mine: Host, rows: Sequence[Host] | None, root: int) -> None:
        with self._named():
            there, sources = self._put(mine), self._put_all(rows)
            self._end(scatter(there, sources, None, self._pg, self._away, root))
            self._fetch(there, mine)

    def send(self, data: Host, peer: int, tag: int) -> None:
        with self._named():
            self._end(isend(self._put(data), None, self._pg, tag, peer))

    def recv(self, data: Host, peer: int | None, tag: int) -> int:
        """Receive into `data`; return the sender's rank in the group."""
        with self._named():
            there = self._put(data)
            work = irecv(there, None, self._pg, tag, peer)
            self._end(work)
            self._fetch(there, data)
            assert work is not None
            return work.source_rank()
