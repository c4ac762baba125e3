"""The Python calls of torch's groups: what torch's Flight Recorder does not have.

The methods of the class ``ProcessGroup`` are replaced by wrappers, through which each
call passes that Python code makes. They note the user's line, the reduce op, the root,
and the sends and receives over gloo, which torch does not record at all.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..work.flight_recorder import recorder
from ..work.op_type import OpType
from ..work.record_fields import Frame, Splits
from ..work.unwaited import unwaited
from .frames import calling_frames
from .patching import replace
from .private.groups import Names

__all__ = ["Call", "CallLog", "failed_call"]

#: Method of ``ProcessGroup`` → op, and how many arguments are tensors.
_METHODS: dict[str, tuple[OpType, int]] = {
    "allreduce": (OpType.ALL_REDUCE, 1),
    "allreduce_coalesced": (OpType.ALL_REDUCE, 1),
    "broadcast": (OpType.BROADCAST, 1),
    "reduce": (OpType.REDUCE, 1),
    "allgather": (OpType.ALL_GATHER, 2),
    "allgather_coalesced": (OpType.ALL_GATHER, 2),
    "_allgather_base": (OpType.ALL_GATHER_INTO_TENSOR, 2),
    "all_gather_single": (OpType.ALL_GATHER_INTO_TENSOR, 2),
    "all_gather_single_coalesced": (OpType.ALL_GATHER_INTO_TENSOR, 2),
    "allgather_into_tensor_coalesced": (OpType.ALL_GATHER_INTO_TENSOR, 2),
    "gather": (OpType.GATHER, 2),
    "scatter": (OpType.SCATTER, 2),
    "reduce_scatter": (OpType.REDUCE_SCATTER, 2),
    "_reduce_scatter_base": (OpType.REDUCE_SCATTER_TENSOR, 2),
    "reduce_scatter_single": (OpType.REDUCE_SCATTER_TENSOR, 2),
    "reduce_scatter_single_coalesced": (OpType.REDUCE_SCATTER_TENSOR, 2),
    "reduce_scatter_tensor_coalesced": (OpType.REDUCE_SCATTER_TENSOR, 2),
    "alltoall": (OpType.ALL_TO_ALL, 2),
    "alltoall_base": (OpType.ALL_TO_ALL_SINGLE, 2),
    "all_to_all_single": (OpType.ALL_TO_ALL_SINGLE, 2),
    "barrier": (OpType.BARRIER, 0),
    "monitored_barrier": (OpType.MONITORED_BARRIER, 0),
    "send": (OpType.SEND, 1),
    "recv": (OpType.RECV, 1),
    "recv_anysource": (OpType.RECV, 1),
}

#: What of a Work tells that somebody waits for its op, or will, beside `wait`.
_WAITS = (
    *("block_current_stream", "exception", "get_future", "get_future_result"),
    *("is_completed", "is_success", "result", "synchronize"),
)

#: Backends whose Work ends `wait` when the op is over; NCCL's ends it at once.
_BLOCKING = ("gloo", "mpi")

# Attribute of an error: the call of the op that it has ended.
_FAILED = "__rankscope_call__"

# Nanoseconds after its call in which an op that is waited for at once cannot have ended
# long before: its end is when the wait returns.
_AT_ONCE = 100_000

# Calls that no poll has taken yet, at most.
_KEPT = 4096


@dataclass(slots=True, eq=False)
class Call:
    """One call of a group's method. Times are ``time.time_ns``; 0: not yet."""

    group: Any
    op_type: OpType
    thread: int = field(default_factory=threading.get_ident)
    #: As of a `Record`.
    frames: tuple[Frame, ...] = ()
    backend: str = ""
    #: Shapes and torch's dtypes of the inputs, then of the outputs.
    sizes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    #: The root, or the other side of a send or recv: a rank in the group.
    peer: int | None = None
    reduce_op: str | None = None
    tag: int | None = None
    splits: Splits | None = None
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    #: The place among the collectives that torch does not count.
    uncounted: int = 0
    began_ns: int = 0
    returned_ns: int = 0
    ended_ns: int = 0
    #: When a thread began to wait for the op, which was in flight; ``None``: that is
    #: not seen, and `ended_ns` is only when somebody looked.
    waited_ns: int | None = None
    error: str | None = None
    work: weakref.ref[Any] | None = None
    #: Whether the op was over when the first thread came to wait for it.
    was_over: bool = False
    #: Whether Python code waited for the op, looked at it, or took its future.
    waited: bool = False

    @property
    def seq(self) -> int:
        """Its p2p number if it is a send or recv, else its collective number."""
        return self.p2p_seq_id if self.is_p2p else self.collective_seq_id

    @property
    def is_p2p(self) -> bool:
        return self.op_type.is_p2p

    @property
    def over(self) -> bool:
        """Whether its op has ended, as far as Python can see."""
        if self.ended_ns:
            return True
        if not self.returned_ns or self.backend not in _BLOCKING:
            return False
        work = self.work() if self.work is not None else None
        # Nobody can wait for a Work that is gone. Only a wait ends one of a send.
        if work is None or _is_completed(work):
            self.ended_ns = time.time_ns()
        return bool(self.ended_ns)


class CallLog:
    """The calls of this process, from `install` on."""

    def __init__(self, names: Names) -> None:
        #: Each is called as ``guard(group, op)`` before a call; it may raise.
        self.guards: list[Callable[[Any, str], None]] = []
        #: Each is called as ``listener(group, error)`` with an error that ends an op,
        #: before it is raised.
        self.on_error: list[Callable[[Any, BaseException], None]] = []
        #: Whether a call began or ended since this was last set to False.
        self.changed = False
        self._names = names
        self._new: deque[Call] = deque(maxlen=_KEPT)
        self._of_work: dict[int, Call] = {}
        self._backends: weakref.WeakKeyDictionary[Any, dict[str, str]] = (
            weakref.WeakKeyDictionary()
        )
        self._p2p: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: The number of monitored barriers.
        self._barriers: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put the wrappers into torch's classes."""
        c10d: ModuleType = self._names.c10d
        for name, (op_type, arrays) in _METHODS.items():
            wrap = functools.partial(self._wrap, op_type=op_type, arrays=arrays)
            self._undo.append(replace(c10d.ProcessGroup, name, wrap))
        self._undo.append(replace(c10d.Work, "wait", self._wrap_wait))
        for name in _WAITS:
            self._undo.append(replace(c10d.Work, name, self._wrap_look))

    def remove(self) -> None:
        """Put torch's own methods back, unless others have replaced them since."""
        while self._undo:
            self._undo.pop()()

    def take(self) -> list[Call]:
        """Return the calls since the last `take`, oldest first."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return taken

    # -- the wrappers --------------------------------------------------------

    def _wrap(self, original: Any, op_type: OpType, arrays: int) -> Any:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            for guard in self.guards:
                guard(group, op_type.value)
            call = self._begin(group, op_type, arrays, [*args, *kwargs.values()])
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                self._fail(call, error)
                raise
            call.returned_ns = time.time_ns()
            self._returned(call, work)
            return work

        return method

    def _wrap_wait(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._of_work.get(id(work))
            if call is None:
                return original(work, *args, **kwargs)
            looked, call.waited = call.waited, True
            if call.backend in _BLOCKING:
                now = time.time_ns()
                if now - call.returned_ns < _AT_ONCE or not _is_completed(work):
                    call.waited_ns = now
                else:
                    call.was_over = not looked
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                self._fail(call, error)
                raise
            if call.backend in _BLOCKING:
                if call.op_type is OpType.RECV and call.peer is None:
                    call.peer = work._source_rank()
                self._end(call)
            return result

        return wait

    def _wrap_look(self, original: Any) -> Any:
        def look(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._of_work.get(id(work))
            if call is not None:
                call.waited = True
            return original(work, *args, **kwargs)

        return look

    def _begin(
        self, group: Any, op_type: OpType, arrays: int, arguments: Sequence[Any]
    ) -> Call:
        call = Call(group, op_type)
        call.frames = calling_frames()
        device = _note_arrays(call, arguments[:arrays])
        rest = arguments[arrays:]
        if op_type.is_p2p:
            numbers = [one for one in rest if isinstance(one, int)]
            call.tag = numbers[-1] if numbers else None
            # `recv_anysource` has a tag alone.
            call.peer = numbers[0] if len(numbers) > 1 else None
            call.p2p_seq_id = self._p2p[group] = self._p2p.get(group, 0) + 1
        else:
            _note_options(call, rest)
        if op_type is OpType.MONITORED_BARRIER:
            # Torch does not count it: it has the number of the collective before it.
            call.collective_seq_id = self._names.issued(group) or 0
            call.uncounted = self._barriers[group] = self._barriers.get(group, 0) + 1
        call.backend = self._backend(group, device)
        call.began_ns = time.time_ns()
        self._new.append(call)
        self._tell()
        return call

    def _backend(self, group: Any, device: str) -> str:
        known = self._backends.get(group)
        if known is None:
            known = self._backends[group] = self._names.config(group)
        if device in known:
            return known[device]
        # A barrier has no tensors.
        return next(iter(known.values())) if len(set(known.values())) == 1 else ""

    def _returned(self, call: Call, work: Any) -> None:
        if work is None:
            # The call has waited itself.
            call.waited_ns = call.began_ns
            self._end(call)
            return
        if not call.is_p2p:
            call.collective_seq_id = self._names.issued(call.group) or 0
        number = id(work)

        def forget(_: weakref.ref[Any]) -> None:
            self._of_work.pop(number, None)

        call.work = weakref.ref(work, forget)
        self._of_work[number] = call
        # Those of NCCL's batches have one Work more, which the caller waits for; a Work
        # of another class has methods of its own.
        batched = call.is_p2p and call.backend not in _BLOCKING
        if unwaited.active and not batched and type(work) is self._names.c10d.Work:
            unwaited.note(work, call)

    def _end(self, call: Call) -> None:
        if not call.ended_ns:
            call.ended_ns = time.time_ns()
            self._tell()

    def _tell(self) -> None:
        self.changed = True
        recorder.changed()

    def _fail(self, call: Call, error: BaseException) -> None:
        call.error = str(error) or type(error).__name__
        setattr(error, _FAILED, call)
        for listener in self.on_error:
            listener(call.group, error)
        self._end(call)


def failed_call(error: BaseException) -> Call | None:
    """Return the call whose op `error` has ended, if Python code issued the op."""
    return getattr(error, _FAILED, None)


def _is_completed(work: Any) -> bool:
    # Without the wrapper: it is not the user who looks.
    method = type(work).is_completed
    return bool(getattr(method, "__wrapped__", method)(work))


def _note_arrays(call: Call, arguments: Sequence[Any]) -> str:
    """Note shapes and dtypes, of a list as one stacked array; return the device.

    The outputs are the first argument of torch's methods, here they come last.
    """
    device = ""
    for argument in reversed(arguments):
        first, stacked = argument, []
        while isinstance(first, (list, tuple)):
            if not first:
                break
            stacked.append(len(first))
            first = first[0]
        shape = getattr(first, "shape", None)
        if shape is None:
            continue
        # The outer list has one element for each device, which is always one.
        if isinstance(argument, (list, tuple)) and stacked[0] == 1:
            stacked = stacked[1:]
        call.sizes.append([*stacked, *shape])
        call.dtypes.append(str(first.dtype).removeprefix("torch."))
        device = first.device.type
    return device


def _note_options(call: Call, rest: Sequence[Any]) -> None:
    """Note root, reduce op and splits, from torch's options or from bare arguments."""
    if call.op_type is OpType.ALL_TO_ALL_SINGLE and len(rest) > 1:
        # A list is empty where all parts are of one size.
        call.splits = list(rest[0] or ()), list(rest[1] or ())
    for one in rest:
        # A bare number is the root: no other op of torch takes one.
        root = one if type(one) is int else getattr(one, "rootRank", None)
        if root is not None:
            call.peer = int(root)
        reduce_op = getattr(one, "reduceOp", one)
        reduce_op = getattr(reduce_op, "op", reduce_op)
        if type(reduce_op).__name__ == "RedOpType":
            call.reduce_op = reduce_op.name.lower()
