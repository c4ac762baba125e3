"""Carrier: the array ops of an object collective, on whichever device a group has.

A group without a backend for host memory carries pickled bytes on arrays of its
first device type, as c10d does on CUDA arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .arguments import Array, Place, take_device
from .collectives import all_gather, broadcast, gather, scatter
from .errors import DistBackendError, DistError
from .point_to_point import irecv, isend
from .staging import Copies, copies_of
from .work import OpType, Work

__all__ = ["Carrier"]

# Flat arrays of bytes and numbers on the host.
Host = Any


class Carrier:
    """The array ops of one call, on host arrays: what is written is there on return.

    `kind` is the call's main op.
    """

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
            # Before any array is made: what the library lacks, its backend says best.
            backend = self._pg._backend_for(device, kind)
            copies = copies_of(device)
        if copies is None or copies.to_device is None:
            raise DistBackendError(
                f"{self._where}: nobody has said how to make arrays of device type "
                f"{device!r}: register_staging(..., to_device=...) does; or name a "
                "backend for 'cpu' in the group's config"
            )
        if self._index is None:
            self._index = backend.own_device()
        return copies

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever an op in the block raises says which call it was for."""
        try:
            yield
        except (DistError, NotImplementedError, TypeError, ValueError) as error:
            raise type(error)(f"{self._where.name}: {error}") from error

    @property
    def _away(self) -> bool:
        """Whether the arrays lie elsewhere: only then a Work is asked for."""
        return self._copies is not None

    def _put(self, data: Host) -> Array:
        if self._copies is None:
            return data
        assert self._copies.to_device is not None
        return self._copies.to_device(data, self._index)

    def _put_all(self, rows: Sequence[Host] | None) -> list[Array] | None:
        return None if rows is None else [self._put(row) for row in rows]

    def _end(self, work: Work | None) -> None:
        # Not wait(): on a GPU that leaves the host to read what is not there yet,
        # and what an abort leaves behind.
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
            if self._pg.rank != root:
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
        """The sender's rank in the group."""
        with self._named():
            there = self._put(data)
            work = irecv(there, None, self._pg, tag, peer)
            self._end(work)
            self._fetch(there, data)
            return int(work.result())
