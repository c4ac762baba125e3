"""Sparse all_reduce: sums of scipy.sparse matrices whose patterns may differ.

A rank learns how many entries another one has only from that rank. As an all_gather of
the sizes and one of the entries, the op would take its place among the group's
collectives twice, and what the caller issued in between would come second on one rank
and third on another. So the entries travel as messages, with tags that users do not
have, and the op is one for the recorder, for diagnosis and for deadlines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DistBackendError
from ..groups.process_group import ProcessGroup
from ..interface.base import Backend
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.threads import callback_threads
from ..work.work import Work
from .arguments import Place

__all__ = ["is_sparse", "sparse_all_reduce"]


def is_sparse(value: Any) -> bool:
    """Return whether `value` is a scipy.sparse array or matrix (imports no scipy)."""
    scipy_sparse = sys.modules.get("scipy.sparse")
    return scipy_sparse is not None and bool(scipy_sparse.issparse(value))


def sparse_all_reduce(tensor: Any, op: ReduceOp, pg: ProcessGroup) -> Work:
    """Sum `tensor` (COO or CSR, 2-d) over all ranks, in place; return the Work.

    The entries of all ranks are gathered and added; their number may differ.
    The semantics are those of gloo's sparse allreduce in c10d: SUM alone, one
    shape and dtype on all ranks; the result is canonical (no duplicates, sorted).
    """
    where = Place(OpType.ALL_REDUCE, pg)
    if tensor.format not in ("coo", "csr"):
        raise TypeError(
            f"{where}: tensor is sparse in {tensor.format!r} format; expected 'coo' or "
            "'csr' (tensor.tocsr())"
        )
    if tensor.ndim != 2:
        raise ValueError(f"{where}: tensor has {tensor.ndim} dimensions; expected 2")
    if op is not ReduceOp.SUM:
        raise ValueError(
            f"{where}: op is ReduceOp.{op.name}; sparse arrays can be summed only"
        )
    if pg.capturing:
        raise ValueError(
            f"{where}: tensor is sparse, so the op needs the sizes first, and a "
            "coalescing_manager block issues nothing before its end; call it before or "
            "after the block"
        )
    backend = pg.backend_for("cpu", OpType.ALL_REDUCE)
    for message in ("send", "recv") if pg.size() > 1 else ():
        if getattr(type(backend), message) is getattr(Backend, message):
            raise NotImplementedError(
                f"{where}: the entries of a sparse array are sent as messages, and "
                f"backend {backend.name!r} does not implement {message}"
            )
    work = pg.enter(OpType.ALL_REDUCE, work=Work(OpType.ALL_REDUCE, tensor))
    _Exchange(pg, backend, tensor, work).begin()
    return work


class _Exchange:
    """The messages of one sparse all_reduce on this rank."""

    def __init__(
        self, pg: ProcessGroup, backend: Backend, tensor: Any, work: Work
    ) -> None:
        self._backend, self._tensor, self._work = backend, tensor, work
        self._issue_lock = pg.current.issue_lock
        self._ranks = pg.ranks
        self._peers = [rank for rank in range(pg.size()) if rank != pg.rank()]
        tags = backend.private_tags
        self._tag = tags[work.sequence_number % len(tags)]
        self._parts: list[Work] = []
        # Canonical, so that every rank adds the same numbers in the same order.
        entries = tensor.tocsr().tocoo()
        dtype = entries.dtype
        # The first message of a rank: its number of entries, the shape, and the dtype.
        self._header = np.array(
            [entries.nnz, *tensor.shape, ord(dtype.kind), dtype.itemsize], np.int64
        )
        self._entries = _pack(entries)
        self._headers = {peer: np.empty_like(self._header) for peer in self._peers}

    def begin(self) -> None:
        """Send what this rank has; the rest follows on a thread of its own."""
        # An abort ends the Work alone: its parts are in no list of the group.
        self._work._when_over(self._end_parts)
        try:
            send, recv = self._backend.send, self._backend.recv
            heads = [
                self._start(recv, one, peer) for peer, one in self._headers.items()
            ]
            sends = [self._start(send, self._header, peer) for peer in self._peers]
            if self._entries.size:
                sends += [
                    self._start(send, self._entries, peer) for peer in self._peers
                ]
        except BaseException as error:
            self._work.mark_failed(error)
            raise
        callback_threads.submit(lambda: self._finish(heads, sends))

    def _finish(self, heads: list[Work], sends: list[Work]) -> None:
        try:
            bodies: dict[int, np.ndarray] = {}
            receives = []
            for head, peer in zip(heads, self._peers, strict=True):
                head.wait()
                count, itemsize = self._headers[peer][[0, -1]]
                bodies[peer] = np.empty(count * (16 + itemsize), np.uint8)
                if count:
                    receives.append(self._start(self._backend.recv, bodies[peer], peer))
            for part in [*receives, *sends]:
                part.wait()
            # After all messages are over: later ones with this tag find none of these.
            self._check_headers()
            bodies[self._backend.rank] = self._entries
            total = self._sum([bodies[rank] for rank in range(self._backend.size)])
            if not self._work.state.is_terminal:
                _store(total, self._tensor)
        except Exception as error:  # noqa: BLE001 - it belongs to the Work
            self._work.mark_failed(error)
        else:
            self._work.mark_completed()

    def _start(self, method: Callable[..., Work], data: np.ndarray, peer: int) -> Work:
        with self._issue_lock:
            part = method(data, peer, self._tag)
            part.detach()
            self._parts.append(part)
            if self._work.state.is_terminal:
                self._end_parts(self._work)
            return part

    def _end_parts(self, work: Work) -> None:
        error = work.exception()
        if error is not None:
            for part in self._parts:
                part.mark_failed(error, work.state)

    def _check_headers(self) -> None:
        others = {
            self._ranks[peer]: header
            for peer, header in self._headers.items()
            if not np.array_equal(header[1:], self._header[1:])
        }
        if others:
            rank, header = next(iter(others.items()))
            mine, theirs = _describe(self._header), _describe(header)
            raise DistBackendError(
                f"{self._work.describe()} failed: tensor is {mine} on this rank and "
                f"{theirs} on rank {rank}; expected one shape and dtype on all ranks",
                **self._work.identity(),
                reason="the ranks differ in the shape or dtype of tensor",
            )

    def _sum(self, bodies: list[np.ndarray]) -> Any:
        import scipy.sparse as sp

        dtype = self._tensor.dtype
        parts = [_unpack(body, dtype) for body in bodies]
        rows, columns, values = map(np.concatenate, zip(*parts, strict=True))
        total = sp.coo_array((values, (rows, columns)), shape=self._tensor.shape)
        return total.tocsr()  # which adds up what has one place


def _pack(entries: Any) -> np.ndarray:
    """Return rows, columns and values of a COO array as one array of bytes."""
    arrays = entries.row.astype(np.int64), entries.col.astype(np.int64), entries.data
    return np.concatenate([np.ascontiguousarray(one).view(np.uint8) for one in arrays])


def _unpack(body: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = body.size // (16 + dtype.itemsize)
    places = body[: 16 * count].view(np.int64)
    return places[:count], places[count:], body[16 * count :].view(dtype)


def _store(total: Any, tensor: Any) -> None:
    total.sum_duplicates()
    if tensor.format == "coo":
        result = total.tocoo()
        tensor.data = result.data
        tensor.coords = (result.row, result.col)
        return
    tensor.data, tensor.indices = total.data, total.indices
    tensor.indptr = total.indptr


def _describe(header: np.ndarray) -> str:
    _, rows, columns, kind, itemsize = header.tolist()
    return f"{rows}x{columns} of {np.dtype(chr(kind) + str(itemsize)).name}"
