"""The gloo backend: the collectives of gloo, in a side process per rank and group.

What the Python bindings of gloo lack goes over the messages of the host engine
(`TCPBackend`): sends and receives (the binding serves one at a time, without an end but
the process's), bitwise reductions, dtypes that gloo does not have, forms whose arrays
may differ in size between ranks, and MIN and MAX of floats, whose NaN gloo may drop.
So does reduce_scatter: gloo's has no tag, and ends the process where ranks disagree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..errors import DistBackendError, DistError
from ..interface.base import Array, Backend
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..tcp.backend import TCPBackend
from ..work.op_type import OpType
from ..work.reduce_op import ReduceOp
from ..work.work import Work
from . import collectives
from .collectives import Reduction, reduces
from .library import chosen, has_options, unavailable
from .side_process import SideProcess

__all__ = ["GlooBackend"]


class GlooBackend(Backend):
    """gloo for one group on this rank; see `Backend` for the contract.

    Collectives run in the order of issue, whichever way each of them goes.
    """

    name = "gloo"
    interface_version = 1
    reduce_ops = TCPBackend.reduce_ops
    private_tags = TCPBackend.private_tags
    buffers_messages = TCPBackend.buffers_messages
    # The side process of another rank fails where a call finds a connection closed.
    lingers = True

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._messages = TCPBackend(PrefixStore("messages", store), rank, size)
        self._messages.name = self.name  # for its errors
        self._messages.on_failure = self._failed
        # The last collective over messages, which a task of gloo must not overtake.
        self._last: Work | None = None
        self._connecting = False
        self._aborted = False
        # A group of one has no peer, and gloo refuses to make it.
        self._side: SideProcess | None = None
        if size > 1:
            self._side = SideProcess(
                chosen(),
                PrefixStore("gloo", store),
                rank,
                size,
                self._messages._name,
                self._failed,
            )

    def _failed(self, cause: str | DistError) -> None:
        if not self._aborted:
            self.on_failure(cause)

    def prepare(self, arrays: Sequence[Array] = (), index: int | None = None) -> None:
        """Begin to connect: an op of other ranks needs all of them."""
        if self._connecting or self._aborted:
            return
        self._connecting = True
        self._messages.place = self.place
        self._messages.global_ranks = self.global_ranks
        self._messages.prepare()
        if self._side is not None:
            self._side.start()

    # -- the two ways --------------------------------------------------------

    def _over_messages(
        self, op_type: OpType, result: Any, issue: Callable[[], Work]
    ) -> Work:
        """Issue a collective on the host engine: now, or after the tasks of gloo."""
        self.prepare()
        side = self._side
        if side is None or side.idle:
            self._last = work = issue()
            return work
        work = Work(op_type, result)
        return side.submit(work, lambda: _await(issue(), work))

    def _over_gloo(
        self, op_type: OpType, result: Any, run: Callable[[SideProcess], None]
    ) -> Work:
        """Run a collective of gloo after those that were issued before."""
        self.prepare()
        side, last, self._last = self._side, self._last, None
        assert side is not None
        work = Work(op_type, result)

        def task() -> None:
            if last is not None:
                with contextlib.suppress(DistError):  # its own, not this op's
                    last.wait()
            if not side.library.waits:
                _await(self._messages.barrier(), work)
            run(side)

        return side.submit(work, task)

    def _by_gloo(self, op: Reduction) -> bool:
        return self._side is not None and reduces(op)

    def check(
        self, op: OpType, dtype: Any, reduce_op: ReduceOp | None
    ) -> Reduction | None:
        """Return the reduction in the words of both; refuse what numpy lacks."""
        ufunc = self._messages.check(op, dtype, reduce_op)
        if ufunc is None or reduce_op is None:
            return None
        return Reduction(ufunc, dtype.name, reduce_op.name)

    # -- collectives -----------------------------------------------------------

    def all_reduce(self, tensor: Array, op: Reduction) -> Work:
        """Reduce `tensor` over all ranks, in place, on every rank."""
        kind = OpType.ALL_REDUCE
        if not self._by_gloo(op):
            issue = partial(self._messages.all_reduce, tensor, op.ufunc)
            return self._over_messages(kind, tensor, issue)
        flat = tensor.reshape(-1)
        return self._over_gloo(
            kind, tensor, lambda side: collectives.all_reduce(side, flat, op)
        )

    def reduce(self, tensor: Array, dst: int, op: Reduction) -> Work:
        """Reduce into `tensor` of `dst`; the other ranks' arrays stay as they are."""
        kind = OpType.REDUCE
        if not self._by_gloo(op):
            issue = partial(self._messages.reduce, tensor, dst, op.ufunc)
            return self._over_messages(kind, tensor, issue)
        flat, here = tensor.reshape(-1), dst == self.rank
        return self._over_gloo(
            kind, tensor, lambda side: collectives.reduce(side, flat, op, dst, here)
        )

    def broadcast(self, tensor: Array, src: int) -> Work:
        """Copy `tensor` of `src` into that of every rank."""
        kind = OpType.BROADCAST
        if self._side is None:
            issue = partial(self._messages.broadcast, tensor, src)
            return self._over_messages(kind, tensor, issue)
        flat, here = tensor.reshape(-1), src == self.rank
        return self._over_gloo(
            kind, tensor, lambda side: collectives.broadcast(side, flat, src, here)
        )

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        """Set ``tensor_list[r]`` to `tensor` of rank r (sizes may differ by rank)."""
        kind = OpType.ALL_GATHER
        if self._side is None or any(one.size != tensor.size for one in tensor_list):
            issue = partial(self._messages.all_gather, tensor_list, tensor)
            return self._over_messages(kind, tensor_list, issue)
        flat = tensor.reshape(-1)
        outputs = [one.reshape(-1) for one in tensor_list]
        return self._over_gloo(
            kind, tensor_list, lambda side: collectives.all_gather(side, outputs, flat)
        )

    def barrier(self) -> Work:
        """End when every rank has entered."""
        kind = OpType.BARRIER
        if self._side is None:
            return self._over_messages(kind, None, self._messages.barrier)
        return self._over_gloo(kind, None, lambda side: side.call("barrier"))

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        """Set ``gather_list[r]`` on `dst` to `tensor` of rank r."""
        issue = partial(self._messages.gather, tensor, gather_list, dst)
        return self._over_messages(OpType.GATHER, gather_list, issue)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        """Set `tensor` to ``scatter_list[rank]`` of rank `src`."""
        issue = partial(self._messages.scatter, tensor, scatter_list, src)
        return self._over_messages(OpType.SCATTER, tensor, issue)

    def reduce_scatter(
        self, output: Array, input_list: Sequence[Array], op: Reduction
    ) -> Work:
        """Set `output` to the reduction of all ranks' ``input_list[rank]``."""
        issue = partial(self._messages.reduce_scatter, output, input_list, op.ufunc)
        return self._over_messages(OpType.REDUCE_SCATTER, output, issue)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        """Set ``output_list[r]`` to ``input_list[rank]`` of rank r; sizes vary."""
        issue = partial(self._messages.all_to_all, output_list, input_list)
        return self._over_messages(OpType.ALL_TO_ALL, output_list, issue)

    # -- messages ----------------------------------------------------------

    def check_message(self, op: OpType, peer: int | None, tag: int) -> None:
        """Raise `ValueError` for a tag that the host engine does not have."""
        self._messages.place = self.place
        self._messages.check_message(op, peer, tag)

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        """Send at once, without waiting for earlier collectives."""
        self.prepare()
        return self._messages.send(tensor, dst, tag)

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        """Receive at once, without waiting for earlier collectives."""
        self.prepare()
        return self._messages.recv(tensor, src, tag)

    # -- state and end of life -----------------------------------------------

    def refresh(self) -> None:
        """Advance the messages in flight."""
        self._messages.refresh()

    def transports(self) -> dict[int, tuple[str, ...]]:
        """Return gloo's transport to every other rank, once they are connected."""
        if self._side is None or not self._side.connected:
            return {}
        peers = (peer for peer in range(self.size) if peer != self.rank)
        name = {"tcp": "tcp", "uv": "libuv"}[self._side.library.transport]
        return dict.fromkeys(peers, (name,))

    def abort(self, reason: str) -> None:
        """Kill the side process and abandon the messages; from any thread."""
        self._aborted = True
        self._messages.abort(reason)
        if self._side is not None:
            self._side.kill()

    def shutdown(self) -> None:
        """End the side process and close the connections."""
        if self._side is not None:
            self._side.close()
        self._messages.shutdown()


def _await(part: Work, whole: Work) -> None:
    """Wait for `part` on the thread of the side process; raise its error.

    No group knows `part`: the end of `whole`, as by an abort, ends it.
    """

    def end(whole: Work) -> None:
        part.mark_failed(DistBackendError(f"{whole.op_type.value} has been ended"))

    whole.add_done_callback(end)
    part.wait()


def _create(store: Store, rank: int, size: int, timeout: float) -> Backend:
    return GlooBackend(store, rank, size)


Backend.register_backend(
    "gloo",
    _create,
    devices="cpu",
    unavailable=unavailable,
    has_options=has_options,
)
