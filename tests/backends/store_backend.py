"""A whole backend in plain Python: it talks through the group's store.

Slow, and complete: what every backend is held to can be seen on it without a
communication library.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import rankscope as dist
from rankscope import OpType, ReduceOp, Work

__all__ = ["StoreBackend", "register"]

Array = Any

# The dispatcher keeps the deadlines; the store's own must not come before.
_FOREVER = 1e6

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


class StoreBackend(dist.Backend):
    """Collectives run on one thread; a receive is a watch on the store."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = f"store-backend-{id(self):x}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._ops = 0
        self._messages: Counter[str] = Counter()

    # -- one exchange carries every collective -----------------------------

    def _run(self, kind: OpType, function: Callable[..., Any], *args: Any) -> Work:
        self._ops += 1
        return dist.create_work_from_call(
            self._thread, function, self._ops, *args, op_type=kind
        )

    def _exchange(self, number: int, mine: Any) -> list[Any]:
        """What every rank brings to op `number`."""
        self._store.set(f"{number}/{self.rank}", pickle.dumps(mine))
        everybody = [
            pickle.loads(self._store.get(f"{number}/{rank}", _FOREVER))
            for rank in range(self.size)
        ]
        # All ranks are in this op, so none reads what was left for the last one.
        self._store.delete_key(f"{number - 1}/{self.rank}")
        return everybody

    def _reduced(self, number: int, tensor: Array, op: ReduceOp) -> Array:
        total, *rest = self._exchange(number, tensor)
        for part in rest:
            total = _UFUNCS[op](total, part).astype(tensor.dtype)
        return total

    # -- collectives -------------------------------------------------------

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        def run(number: int) -> None:
            tensor[...] = self._reduced(number, tensor, op)

        return self._run(OpType.ALL_REDUCE, run)

    def reduce(self, tensor: Array, dst: int, op: ReduceOp) -> Work:
        def run(number: int) -> None:
            total = self._reduced(number, tensor, op)
            if self.rank == dst:
                tensor[...] = total

        return self._run(OpType.REDUCE, run)

    def broadcast(self, tensor: Array, src: int) -> Work:
        def run(number: int) -> None:
            mine = tensor if self.rank == src else None
            got = self._exchange(number, mine)[src]
            if self.rank != src:
                tensor[...] = got.reshape(tensor.shape)

        return self._run(OpType.BROADCAST, run)

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        def run(number: int) -> None:
            _fill(tensor_list, self._exchange(number, tensor))

        return self._run(OpType.ALL_GATHER, run)

    def gather(
        self, tensor: Array, gather_list: Sequence[Array] | None, dst: int
    ) -> Work:
        def run(number: int) -> None:
            _fill(gather_list or (), self._exchange(number, tensor))

        return self._run(OpType.GATHER, run)

    def scatter(
        self, tensor: Array, scatter_list: Sequence[Array] | None, src: int
    ) -> Work:
        def run(number: int) -> None:
            _fill([tensor], [self._exchange(number, scatter_list)[src][self.rank]])

        return self._run(OpType.SCATTER, run)

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        def run(number: int) -> None:
            everybody = self._exchange(number, list(input_list))
            _fill(output_list, [parts[self.rank] for parts in everybody])

        return self._run(OpType.ALL_TO_ALL, run)

    def barrier(self) -> Work:
        return self._run(OpType.BARRIER, lambda number: self._exchange(number, None))

    # -- point to point ----------------------------------------------------

    def _key(self, src: int, dst: int, tag: int) -> str:
        channel = f"{src}-{dst}-{tag}"
        self._messages[channel] += 1
        return f"{channel}/{self._messages[channel]}"

    def send(self, tensor: Array, dst: int, tag: int) -> Work:
        work = Work(OpType.SEND)
        work.mark_started()
        self._store.set(self._key(self.rank, dst, tag), pickle.dumps(tensor))
        work.mark_completed()
        return work

    def recv(self, tensor: Array, src: int | None, tag: int) -> Work:
        if src is None:
            raise NotImplementedError(
                f"backend {self.name!r} does not implement recv from any rank"
            )
        work, key = Work(OpType.RECV), self._key(src, self.rank, tag)

        def arrived(value: bytes) -> None:
            if not work.is_completed():
                _fill([tensor], [pickle.loads(value)])
                self._store.delete_key(key)
                work.mark_completed(src)

        work.mark_started()
        self._store.watch(key, arrived)
        return work

    # -- end of life -------------------------------------------------------

    def abort(self, reason: str) -> None:
        self._store.close()  # ends every wait on it
        # An op that waits no longer may write yet, and its Work ends after this call.
        # A callback of a Work runs on the thread itself.
        inside = threading.current_thread().name.startswith(self._name)
        self._thread.shutdown(wait=not inside, cancel_futures=True)

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._store.close()


def _fill(outputs: Sequence[Array], parts: Sequence[Array]) -> None:
    for output, part in zip(outputs, parts, strict=False):
        output[...] = part.reshape(output.shape)


def register(name: str = "store") -> None:
    """Make it known, for host memory."""
    dist.Backend.register_backend(name, StoreBackend, devices="cpu")
