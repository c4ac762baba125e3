"""The Python calls of torch's groups: what torch's Flight Recorder does not have.

The methods of the class ``ProcessGroup`` are replaced by wrappers, through which each
call passes that Python code makes. They note the user's line, the reduce op, the root,
and the sends and receives over gloo, which torch does not record at all.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ..work.flight_recorder import recorder
from ..work.op_type import OpType
from ..work.record_fields import Frame, Splits
from ..work.unwaited import unwaited
from ..work.user_code import Place, frame_at
from .aborting import refusal
from .creation import Made, made_of
from .frames import calling_frames, user_places
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


class _Read(NamedTuple):
    """What the options of an op say: its root, or other side, and its reduce op."""

    root: int | None
    reduce_op: str | None


class _Group:
    """What the calls of one group share."""

    def __init__(self, made: Made, backends: Mapping[str, str]) -> None:
        self.made = made
        #: Name of its backend by type of device.
        self.backends = backends
        several = len(set(backends.values())) > 1
        #: Its only backend; ``None`` where it has several.
        self.backend = None if several else next(iter(backends.values()), "")
        #: How many sends and receives, and how many monitored barriers, it has issued.
        self.p2p = self.barriers = 0


class Call:
    """One call of a group's method. Times are ``time.time_ns``; 0: not yet."""

    # What most calls do not have stands in the class: each field that is set costs.
    #: Where the user's line is, and those that led to it.
    places: Sequence[Place] = ()
    #: In their place where this thread has no line of the user's; as of a `Record`.
    other_frames: tuple[Frame, ...] = ()
    backend = ""
    #: Of the inputs, then of the outputs: the lengths of the lists around it, shape and
    #: dtype of the first array.
    arrays: Sequence[tuple[Sequence[int], Sequence[int], Any]] = ()
    tag: int | None = None
    splits: Splits | None = None
    collective_seq_id = 0
    p2p_seq_id = 0
    #: The place among the collectives that torch does not count.
    uncounted = 0
    began_ns = 0
    returned_ns = 0
    ended_ns = 0
    #: When a thread began to wait for the op, which was in flight; ``None``: that is
    #: not seen, and `ended_ns` is only when somebody looked.
    waited_ns: int | None = None
    error: str | None = None
    work: weakref.ref[Any] | None = None
    #: Whether the op was over when the first thread came to wait for it.
    was_over = False
    #: Whether Python code waited for the op, looked at it, or took its future.
    waited = False
    #: What torch got beside the arrays, which takes longer to read than all else here:
    #: read when somebody asks.
    options: _Read | Sequence[Any] = ()

    def __init__(self, group: Any, op_type: OpType, thread: int | None = None) -> None:
        self.group = group
        self.op_type = op_type
        self.thread = thread or threading.get_ident()

    @property
    def frames(self) -> tuple[Frame, ...]:
        """As of a `Record`."""
        return tuple(frame_at(*one) for one in self.places) or self.other_frames

    @property
    def sizes(self) -> list[list[int]]:
        """Shapes of the inputs, then of the outputs; a list is one stacked array."""
        return [[*around, *shape] for around, shape, _ in self.arrays]

    @property
    def dtypes(self) -> list[str]:
        """Names of torch's dtypes of the inputs, then of the outputs."""
        return [str(dtype).removeprefix("torch.") for *_, dtype in self.arrays]

    @property
    def peer(self) -> int | None:
        """The root, or the other side of a send or recv: a rank in the group."""
        return self._read_options().root

    @peer.setter
    def peer(self, peer: int | None) -> None:
        self.options = _Read(peer, None)

    @property
    def reduce_op(self) -> str | None:
        return self._read_options().reduce_op

    def _read_options(self) -> _Read:
        options = self.options
        if not isinstance(options, _Read):
            # Two threads may do so at once: they read the same.
            options = self.options = _read(options)
        return options

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
        #: Each is called as ``listener(group, error)`` with an error that ends an op,
        #: before it is raised.
        self.on_error: list[Callable[[Any, BaseException], None]] = []
        #: Whether a call began or ended since this was last set to False.
        self.changed = False
        self._names = names
        self._new: deque[Call] = deque(maxlen=_KEPT)
        # By weak references that drop the entry without a call of Python code.
        self._of_work: dict[weakref.ref[Any], Call] = {}
        self._of_group: weakref.WeakKeyDictionary[Any, _Group] = (
            weakref.WeakKeyDictionary()
        )
        # In it torch makes the options of an op anew for each.
        self._makes_options = names.c10d.__file__
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
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
        begin, returned = self._begin, self._returned

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values()) if kwargs else args
            call = begin(group, op_type, given[:arrays], given[arrays:])
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                self._fail(call, error)
                raise
            call.returned_ns = time.time_ns()
            returned(call, work)
            return work

        return method

    def _wrap_wait(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._of_work.get(weakref.ref(work))
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
            call = self._of_work.get(weakref.ref(work))
            if call is not None:
                call.waited = True
            return original(work, *args, **kwargs)

        return look

    def _begin(
        self, group: Any, op_type: OpType, arrays: Sequence[Any], rest: Sequence[Any]
    ) -> Call:
        known = self._of_group.get(group)
        if known is None:
            known = _Group(made_of(group), self._names.config(group))
            self._of_group[group] = known
        made = known.made
        made.used = True
        if made.aborted is not None:
            raise refusal(group, made, op_type.value)
        call = Call(group, op_type)
        caller = sys._getframe(2)
        call.places = user_places(caller)
        if not call.places:
            call.other_frames = calling_frames()
        call.arrays = _note_arrays(arrays)
        if op_type.is_p2p:
            numbers = [one for one in rest if isinstance(one, int)]
            call.tag = numbers[-1] if numbers else None
            # `recv_anysource` has a tag alone.
            call.peer = numbers[0] if len(numbers) > 1 else None
            call.p2p_seq_id = known.p2p = known.p2p + 1
        else:
            if op_type is OpType.ALL_TO_ALL_SINGLE and len(rest) > 1:
                # A list is empty where all parts are of one size.
                call.splits = list(rest[0] or ()), list(rest[1] or ())
            # Others may use their options again, with another value.
            fresh = caller.f_code.co_filename == self._makes_options
            call.options = rest if fresh else _read(rest)
        if op_type is OpType.MONITORED_BARRIER:
            # Torch does not count it: it has the number of the collective before it.
            call.collective_seq_id = self._names.issued(group)
            call.uncounted = known.barriers = known.barriers + 1
        backend = known.backend
        if backend is None:
            # A barrier has no tensors.
            backend = known.backends.get(_device(arrays), "")
        call.backend = backend
        call.began_ns = time.time_ns()
        self._new.append(call)
        self._tell()
        return call

    def _returned(self, call: Call, work: Any) -> None:
        if work is None:
            # The call has waited itself.
            call.waited_ns = call.began_ns
            self._end(call)
            return
        if not call.is_p2p:
            call.collective_seq_id = self._names.issued(call.group)
        call.work = weakref.ref(work, self._of_work.pop)
        self._of_work[call.work] = call
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


def _note_arrays(arguments: Sequence[Any]) -> list[tuple[Sequence[int], Any, Any]]:
    """Return `Call.arrays`; the outputs are the first argument of torch's methods."""
    noted = []
    for argument in reversed(arguments):
        # The outer list has one element for each device, which is always one.
        is_single = type(argument) in (list, tuple) and len(argument) == 1
        first = argument[0] if is_single else argument
        around: Sequence[int] = ()
        while isinstance(first, (list, tuple)) and first:
            around = (*around, len(first))
            first = first[0]
        shape = getattr(first, "shape", None)
        if shape is not None:
            noted.append((around, shape, first.dtype))
    return noted


def _device(arguments: Sequence[Any]) -> str:
    for first in arguments:
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if hasattr(first, "device"):
            return str(first.device.type)
    return ""


def _read(options: Sequence[Any]) -> _Read:
    """Read root and reduce op, from torch's options or from bare arguments."""
    root = name = None
    for one in options:
        # A bare number is the root: no other op of torch takes one.
        number = one if type(one) is int else getattr(one, "rootRank", None)
        if number is not None:
            root = int(number)
        reduce_op = getattr(one, "reduceOp", one)
        reduce_op = getattr(reduce_op, "op", reduce_op)
        if type(reduce_op).__name__ == "RedOpType":
            name = reduce_op.name.lower()
    return _Read(root, name)
