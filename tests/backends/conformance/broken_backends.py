"""Backends that keep every promise of the conformance suite but one.

Each is `StoreBackend` with one fault. `BROKEN` maps a backend to the rules that fail;
`corrupting` and `not_recovering` break the ops that they are given.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

import rankscope as dist
from rankscope import OpType, ReduceOp, Work
from rankscope.backends.work.composite import chain, completed_work
from rankscope.backends.work.op_type import Argument
from tests.backends.store_backend import StoreBackend

__all__ = [
    "BROKEN",
    "CORRUPTED",
    "HALVES",
    "LEFT",
    "OPS",
    "Bereaved",
    "Reordering",
    "register",
]

Array = Any


class WrongSum(StoreBackend):
    """Adds eight-bit integers in a wider type and saturates."""

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        def run(number: int) -> None:
            total = self._reduced(number, tensor, op)
            if tensor.dtype == np.uint8 and op is ReduceOp.PRODUCT:
                total = np.minimum(total, 3)
            tensor[...] = total

        return self._run(OpType.ALL_REDUCE, run)


class WrongRoot(StoreBackend):
    """Writes the result of a reduce on every rank."""

    def reduce(self, tensor: Array, dst: int, op: ReduceOp) -> Work:
        def run(number: int) -> None:
            tensor[...] = self._reduced(number, tensor, op)

        return self._run(OpType.REDUCE, run)


class InputClobbered(StoreBackend):
    """Uses the input of an all_to_all as scratch memory."""

    def all_to_all(
        self, output_list: Sequence[Array], input_list: Sequence[Array]
    ) -> Work:
        def run(number: int) -> None:
            everybody = self._exchange(number, list(input_list))
            for output, parts in zip(output_list, everybody, strict=True):
                output[...] = parts[self.rank].reshape(output.shape)
            for entry in input_list:
                entry[...] = 0

        return self._run(OpType.ALL_TO_ALL, run)


class RaisesLate(StoreBackend):
    """Refuses a dtype on its thread, where check() ought to."""

    def broadcast(self, tensor: Array, src: int) -> Work:
        if tensor.dtype.kind != "c":
            return super().broadcast(tensor, src)

        def run(number: int) -> None:
            raise TypeError("no complex numbers here")

        return self._run(OpType.BROADCAST, run)


class Blocking(StoreBackend):
    """Returns the Work when the op is over, or after 1.5 s."""

    def all_gather(self, tensor_list: Sequence[Array], tensor: Array) -> Work:
        work = super().all_gather(tensor_list, tensor)
        work._block(1.5)
        return work


class Reordering(StoreBackend):
    """Runs ops that are issued within 10 ms in the reverse order."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        self._stack: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def _run(self, kind: OpType, function: Callable[..., Any], *args: Any) -> Work:
        self._ops += 1
        number, work = self._ops, Work(kind)

        def run() -> None:
            work.mark_started()
            try:
                function(number, *args)
            except Exception as error:  # noqa: BLE001 - it is the Work's
                work.mark_failed(error)
            else:
                work.mark_completed()

        with self._lock:
            self._stack.append(run)
            if len(self._stack) == 1:
                self._thread.submit(self._drain)
        return work

    def _drain(self) -> None:
        time.sleep(0.01)
        with self._lock:
            runs, self._stack = self._stack, []
        for run in reversed(runs):
            run()


class SilentStart(StoreBackend):
    """Reports no start."""

    def _run(self, kind: OpType, function: Callable[..., Any], *args: Any) -> Work:
        inner, silent = super()._run(kind, function, *args), Work(kind)

        def end(done: Work) -> None:
            if done._exception is None:
                silent.mark_completed()
            else:
                silent.mark_failed(done._exception)

        inner.add_done_callback(end)
        return silent


class _LazyWork(Work):
    __slots__ = ("finish_op",)
    finish_op: Callable[[float | None], None]

    def _block(self, timeout: float | None) -> bool:
        self.finish_op(timeout)
        return super()._block(0 if timeout is not None else None)


class OnlyWhenWaited(StoreBackend):
    """Reports the end of a large all_reduce to a thread that waits, and to no other."""

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        inner = super().all_reduce(tensor, op)
        if tensor.size != 1000:
            return inner
        work = _LazyWork(OpType.ALL_REDUCE)

        def finish(timeout: float | None) -> None:
            if inner._block(timeout):
                if inner._exception is None:
                    work.mark_completed()
                else:
                    work.mark_failed(inner._exception)

        def give_up(done: Work) -> None:
            # A call that was still queued is not made: nothing else ends its Work.
            if done._exception is not None:
                inner.mark_failed(done._exception)

        work.finish_op = finish
        work.add_done_callback(give_up)
        work.mark_started()
        return work


class SlowAbort(StoreBackend):
    """Waits for 1.5 s in an abort by a user, while an op hangs."""

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if "hang in" in reason:
            time.sleep(1.5)


class BreaksRebuild(StoreBackend):
    """Fails for good once it was aborted in an op of many bytes."""

    _spoilt: ClassVar[set[int]] = set()

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        if self.rank in self._spoilt and tensor.nbytes < 1000:
            self._spoilt.discard(self.rank)
            raise RuntimeError("the library is in a bad state")
        self._big = tensor.nbytes > 1 << 20
        return super().all_reduce(tensor, op)

    def abort(self, reason: str) -> None:
        if getattr(self, "_big", False) and self.rank == 0 and "while it ran" in reason:
            self._spoilt.add(self.rank)
        super().abort(reason)


class WritesLate(StoreBackend):
    """Writes the result of an op that was aborted, a moment later."""

    def all_reduce(self, tensor: Array, op: ReduceOp) -> Work:
        if tensor.nbytes > 1 << 19:
            self._last = tensor
        return super().all_reduce(tensor, op)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        tensor = getattr(self, "_last", None)
        if tensor is not None:

            def write() -> None:
                tensor[:100] = 0

            timer = threading.Timer(0.1, write)
            timer.daemon = True
            timer.start()


class SlowDestroy(StoreBackend):
    """Takes its time to stop what is in flight when its group is destroyed."""

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if reason.startswith("destroy"):
            time.sleep(1.5)


#: What `Leaking...` hold, so that a test can free it.
LEFT: list[Callable[[], Any]] = []


class LeaksDescriptors(StoreBackend):
    """Opens a file for each group, and closes none."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        number = os.open(os.devnull, os.O_RDONLY)
        LEFT.append(lambda: os.close(number))


class LeaksThreads(StoreBackend):
    """Starts a thread for each group that does not end with it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        end = threading.Event()
        threading.Thread(target=end.wait, name="leaked", daemon=True).start()
        LEFT.append(end.set)


class LeaksProcesses(StoreBackend):
    """Starts a process for each group that does not end with it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        child = subprocess.Popen(["sleep", "60"])

        def end() -> None:
            child.kill()
            child.wait()

        LEFT.append(end)


# -- one fault in any op ---------------------------------------------------------

#: The ops that a backend has a method for.
OPS = tuple(op for op in OpType if op.spec.arguments is not None)
#: The dtype of the arrays that are corrupted: no rule but those of single ops has it.
CORRUPTED = "float32"
_WRITES = (
    *(Argument.WRITTEN, Argument.UPDATED, Argument.FROM_ROOT, Argument.TO_ROOT),
    Argument.WRITTEN_LIST,
)


def corrupting(*ops: OpType) -> type[StoreBackend]:
    """Return a backend whose `ops` alter an element of a result, or do not wait."""
    return _derived("Corrupting", StoreBackend, {op.value: _corrupts(op) for op in ops})


def not_recovering(base: type[Bereaved], *ops: OpType) -> type[StoreBackend]:
    """Return `base` with `ops` that fail in the group made after a death."""
    methods = {op.value: _fails_after_a_death(op, base) for op in ops}
    return _derived("NotRecovering", base, methods)


def _derived(
    name: str, base: type[StoreBackend], methods: dict[str, Callable[..., Work]]
) -> type[StoreBackend]:
    return type(name, (base,), dict(methods))


def _corrupts(op: OpType) -> Callable[..., Work]:
    method = getattr(StoreBackend, op.value)

    def corrupt(self: StoreBackend, *given: Any) -> Work:
        if op is OpType.BARRIER:
            return completed_work(op)
        if op is OpType.SEND:
            tensor, *rest = given
            return method(self, _altered(tensor.copy()), *rest)
        arguments = zip(op.spec.arguments or (), given, strict=False)
        written = next(array for kind, array in arguments if kind in _WRITES)
        array = written[-1] if isinstance(written, Sequence) else written
        # The result of a receive is the sender.
        result = given[1] if op is OpType.RECV else None
        return chain(method(self, *given), op, lambda: _alter(array), result)

    return corrupt


def _alter(array: Array | None) -> None:
    """Change the first element."""
    if array is not None and array.dtype == CORRUPTED and array.size:
        array.reshape(-1)[0] += 1


def _altered(array: Array) -> Array:
    _alter(array)
    return array


class Bereaved(StoreBackend):
    """Notes that a peer has died in the group before."""

    _death = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        super().__init__(store, rank, size, timeout)
        self.bereaved, Bereaved._death = Bereaved._death, False

    def abort(self, reason: str) -> None:
        if "is gone" in reason:
            Bereaved._death = True
        super().abort(reason)


def _fails_after_a_death(op: OpType, base: type[Bereaved]) -> Callable[..., Work]:
    method = getattr(base, op.value)

    def call(self: Bereaved, *given: Any) -> Work:
        if self.bereaved:
            raise RuntimeError(f"{op.value}: the library needs a restart")
        return method(self, *given)

    return call


# -- all of them -----------------------------------------------------------------

#: Backend → the rules that fail.
BROKEN: dict[type[StoreBackend], set[str]] = {
    # The base class makes the others of all_reduce.
    WrongSum: {
        "exact: all_reduce",
        "exact: reduce_scatter",
        "exact: reduce_scatter_tensor",
    },
    WrongRoot: {"exact: reduce"},
    InputClobbered: {"exact: all_to_all"},
    RaisesLate: {"exact: broadcast"},
    Blocking: {"contract: returns at once"},
    Reordering: {"contract: runs in order"},
    SilentStart: {"contract: reports start and end"},
    OnlyWhenWaited: {"contract: goes on alone"},
    SlowAbort: {"contract: abort while hung"},
    BreaksRebuild: {"contract: abort while running"},
    WritesLate: {"contract: no write after the end"},
    SlowDestroy: {"contract: destroy in flight"},
    LeaksDescriptors: {"contract: leaves nothing behind"},
    LeaksThreads: {"contract: leaves nothing behind"},
    LeaksProcesses: {"contract: leaves nothing behind"},
}


class _FirstHalf(
    Blocking, Reordering, OnlyWhenWaited, SlowAbort, BreaksRebuild, Bereaved
):
    """Half of what breaks the contract, in one backend."""


class _SecondHalf(
    SilentStart, WritesLate, SlowDestroy, LeaksDescriptors, LeaksThreads, Bereaved
):
    """The other half, but for `LeaksProcesses`: what it starts outlives its rank."""


def _basis(op: OpType) -> OpType:
    """The op that `op` is made of in the end, or is tried with."""
    if op.is_p2p:
        return OpType.SEND
    return _basis(OpType(op.spec.fallback)) if op.spec.fallback else op


_BASES = list(dict.fromkeys(map(_basis, OPS)))
#: Half of what breaks the contract → the ops that do not recover either: none of them
#: is made of one in the other half.
HALVES: dict[type[Bereaved], tuple[OpType, ...]] = {
    _FirstHalf: tuple(op for op in OPS if _basis(op) in _BASES[::2]),
    _SecondHalf: tuple(op for op in OPS if _basis(op) in _BASES[1::2]),
}


def register() -> None:
    """Make all of them known, by their class names in lower case."""
    for kind in BROKEN:
        dist.Backend.register_backend(kind.__name__.lower(), kind, devices="cpu")
    for op in OPS:
        dist.Backend.register_backend(
            f"corrupts_{op.value}", corrupting(op), devices="cpu"
        )
    dist.Backend.register_backend("corrupts_all", corrupting(*OPS), devices="cpu")
    for half, ops in HALVES.items():
        name = half.__name__.strip("_").lower()
        dist.Backend.register_backend(name, not_recovering(half, *ops), devices="cpu")
