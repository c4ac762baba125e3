"""The types of operations: one row for each op, with every fact that others need.

`OpType` is the one table of ops. Bandwidths, the Flight Recorder's format, the
diagnosis of hangs, coalescing, staging, the benchmark and the support table read
the `OpSpec` of an op and keep no table of their own. A new op is a row here, a
method of `Backend`, a public function, and its implementation in the backends.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .enums import direct_members

__all__ = [
    "Argument",
    "OpSpec",
    "OpType",
    "algbw",
    "bus_factor",
    "busbw",
    "payload",
    "spec_of",
]

Counts = Sequence[int]
A = TypeVar("A")


class Argument(enum.Enum):
    """An array argument of a `Backend` method: who reads it, who writes it."""

    READ = "read"
    WRITTEN = "written"
    #: Read and written, on every rank.
    UPDATED = "updated"
    #: Read on the root, written on the other ranks.
    FROM_ROOT = "from root"
    #: Read on every rank, written on the root.
    TO_ROOT = "to root"
    #: Lists with one array per rank; ``None`` where only the root has one.
    READ_LIST = "read list"
    WRITTEN_LIST = "written list"


# S of nccl-tests, in elements: of the inputs' and then the outputs' element counts
# on one rank, and the number of ranks.


def _first(counts: Counts, ranks: int) -> int:
    return counts[0]


def _first_of_each_rank(counts: Counts, ranks: int) -> int:
    # nccl-tests counts the array that is gathered as a whole.
    return counts[0] * ranks


def _all_but_own_part(ranks: int) -> float:
    """The bus factor of nccl-tests: what part of S crosses each rank's link."""
    return (ranks - 1) / ranks


#: Of the arrays of an op, inputs first.
_FIRST, _LAST = slice(0, 1), slice(-1, None)
_ALL_BUT_FIRST, _ALL_BUT_LAST = slice(1, None), slice(0, -1)
_READ, _WRITTEN = Argument.READ, Argument.WRITTEN
_READ_LIST, _WRITTEN_LIST = Argument.READ_LIST, Argument.WRITTEN_LIST


@dataclass(frozen=True)
class OpSpec:
    """The facts about one op; the defaults are those of an op without arrays."""

    #: The array arguments of the method of `Backend`, in order, before all others.
    #: ``None``: no method of a backend runs the op.
    arguments: tuple[Argument, ...] | None = None
    #: Counted by ``p2p_seq_id`` instead of ``collective_seq_id``.
    is_p2p: bool = False
    #: S of nccl-tests in elements, of element counts (inputs, then outputs) and ranks.
    payload: Callable[[Counts, int], int] = _first
    #: Bus bandwidth over algorithm bandwidth, of the number of ranks (2 at least).
    bus_factor: Callable[[int], float] = lambda ranks: 1.0
    #: Which of its arrays, inputs first, have the same sizes on all ranks; ``None``:
    #: none.
    same_sizes: slice | None = None
    #: No rank leaves it before every rank has entered.
    joint: bool = False
    #: The backend runs it also where all arrays of this rank are empty: those of the
    #: other ranks need not be, and a message without an element is a message.
    runs_empty: bool = False
    #: Runs of it in a coalesced batch become one call, of ``<name>_coalesced``.
    fused: bool = False
    #: `benchmark` measures it.
    measured: bool = False
    #: The method of `Backend` that the base class builds it from, for a backend that
    #: lacks it; empty: such a backend cannot do it.
    fallback: str = ""
    #: Its name in PyTorch's Flight Recorder, if that is another one; its name there
    #: in a coalesced batch, and where sizes differ from rank to rank.
    torch_name: str = ""
    torch_coalesced: str = ""
    torch_uneven: str = ""

    @property
    def divided(self) -> bool:
        """Whether S is the array of all ranks together, of which each has a part."""
        return self.bus_factor is _all_but_own_part

    @property
    def in_place(self) -> bool:
        """Whether its one array is input and output."""
        return self.arguments is not None and len(self.arguments) == 1

    def inputs(self, arrays: int) -> int:
        """Return how many of an op's recorded arrays are inputs; they come first."""
        arguments = self.arguments or ()
        if _READ in arguments:
            return min(1, arrays)
        if _READ_LIST in arguments:
            return arrays - (arrays // 2 if _WRITTEN_LIST in arguments else 1)
        return arrays

    def read_of(self, arrays: Sequence[A], calls: int = 1) -> Sequence[A]:
        """Return those of `arrays`, in the order of `arguments`, that the op reads."""
        if not self.arguments or self.arguments == (_WRITTEN,):
            return ()
        if len(self.arguments) == 1:
            return arrays
        first, second = self.arguments
        if first in (_READ, _WRITTEN) and second in (_READ_LIST, _WRITTEN_LIST):
            place = calls
        elif first in (_READ_LIST, _WRITTEN_LIST) and second in (_READ, _WRITTEN):
            place = len(arrays) - calls
        else:
            place = len(arrays) // 2
        return arrays[:place] if first in (_READ, _READ_LIST) else arrays[place:]


@direct_members
class OpType(enum.Enum):
    """The types of ops, by the names of their functions.

    A member has the name of the function as its value and, as `spec`, the `OpSpec` with
    what diagnosis, bandwidths and the Flight Recorder know of the op.

    Named after ``c10d::OpType``.

    Examples
    --------
    >>> dist.OpType("all_reduce")
    <OpType.ALL_REDUCE: 'all_reduce'>
    >>> dist.OpType.SEND.is_p2p
    True
    """

    BROADCAST = (
        "broadcast",
        OpSpec(arguments=(Argument.FROM_ROOT,), same_sizes=_FIRST, measured=True),
    )
    ALL_REDUCE = (
        "all_reduce",
        OpSpec(
            arguments=(Argument.UPDATED,),
            joint=True,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
            same_sizes=_FIRST,
            fused=True,
            measured=True,
            torch_coalesced="allreduce_coalesced",
        ),
    )
    REDUCE = (
        "reduce",
        OpSpec(arguments=(Argument.TO_ROOT,), same_sizes=_FIRST, measured=True),
    )
    ALL_GATHER = (
        "all_gather",
        OpSpec(
            arguments=(_WRITTEN_LIST, _READ),
            joint=True,
            payload=_first_of_each_rank,
            bus_factor=_all_but_own_part,
            fused=True,
            same_sizes=_ALL_BUT_FIRST,
            torch_uneven="all_gather_v",
        ),
    )
    ALL_GATHER_INTO_TENSOR = (
        "all_gather_into_tensor",
        OpSpec(
            arguments=(_WRITTEN, _READ),
            joint=True,
            payload=_first_of_each_rank,
            bus_factor=_all_but_own_part,
            same_sizes=_FIRST,
            fused=True,
            measured=True,
            fallback="all_gather",
            torch_name="_all_gather_base",
            torch_coalesced="all_gather_into_tensor_coalesced",
        ),
    )
    GATHER = (
        "gather",
        OpSpec(
            arguments=(_READ, _WRITTEN_LIST),
            payload=_first_of_each_rank,
            bus_factor=_all_but_own_part,
            same_sizes=_FIRST,
            measured=True,
        ),
    )
    SCATTER = (
        "scatter",
        OpSpec(
            arguments=(_WRITTEN, _READ_LIST),
            payload=lambda counts, ranks: counts[-1] * ranks,
            bus_factor=_all_but_own_part,
            same_sizes=_LAST,
            measured=True,
        ),
    )
    REDUCE_SCATTER = (
        "reduce_scatter",
        OpSpec(
            arguments=(_WRITTEN, _READ_LIST),
            joint=True,
            payload=lambda counts, ranks: sum(counts[:-1]),
            bus_factor=_all_but_own_part,
            fallback="all_reduce",
            same_sizes=_ALL_BUT_LAST,
            torch_uneven="reduce_scatter_v",
        ),
    )
    REDUCE_SCATTER_TENSOR = (
        "reduce_scatter_tensor",
        OpSpec(
            arguments=(_WRITTEN, _READ),
            joint=True,
            bus_factor=_all_but_own_part,
            same_sizes=_FIRST,
            fused=True,
            measured=True,
            fallback="reduce_scatter",
            torch_name="_reduce_scatter_base",
            torch_coalesced="reduce_scatter_tensor_coalesced",
        ),
    )
    ALL_TO_ALL = (
        "all_to_all",
        OpSpec(
            arguments=(_WRITTEN_LIST, _READ_LIST),
            joint=True,
            payload=lambda counts, ranks: sum(counts[:ranks]),
            bus_factor=_all_but_own_part,
            runs_empty=True,
        ),
    )
    ALL_TO_ALL_SINGLE = (
        "all_to_all_single",
        OpSpec(
            arguments=(_WRITTEN, _READ),
            joint=True,
            bus_factor=_all_but_own_part,
            measured=True,
            runs_empty=True,
            fallback="all_to_all",
            torch_name="all_to_all",
        ),
    )
    BARRIER = "barrier", OpSpec(arguments=(), joint=True)
    SEND = "send", OpSpec(arguments=(_READ,), is_p2p=True, runs_empty=True)
    RECV = "recv", OpSpec(arguments=(_WRITTEN,), is_p2p=True, runs_empty=True)
    # PyTorch's analyser must not take it for a barrier: ranks that are in one do not
    # wait for ranks in the other.
    MONITORED_BARRIER = "monitored_barrier", OpSpec(torch_name="all_reduce_barrier")
    #: The Work of a coalesced batch; its ops are recorded each by its own type.
    COALESCED = "coalesced", OpSpec()
    UNKNOWN = "unknown", OpSpec()

    _value_: str
    #: The name of the method of `Backend` that runs the op.
    method: str
    #: The row of this op.
    spec: OpSpec
    #: Whether the op is counted by ``p2p_seq_id``: `spec` has it too, a look-up later.
    is_p2p: bool

    # A default, so that type checkers accept ``OpType("send")`` too.
    def __new__(cls, value: str, spec: OpSpec | None = None) -> OpType:
        if spec is None:
            raise TypeError(f"the op type {value!r} has no OpSpec")
        member = object.__new__(cls)
        member._value_ = member.method = value
        member.spec = spec
        member.is_p2p = spec.is_p2p
        return member


def spec_of(op: str) -> OpSpec:
    """Return the row of the op called `op`, as in records; an empty one if none is."""
    try:
        return OpType(op).spec
    except ValueError:
        return OpType.UNKNOWN.spec


# Bandwidths by the formulas of nccl-tests: see its doc/PERFORMANCE.md, and ``*GetBw``
# of its tests for the ops that are not explained there.


def payload(
    op: str, sizes: Sequence[Sequence[int]], itemsize: int, ranks: int
) -> int | None:
    """Return S, the bytes that `op` counts as moving; ``None`` if it moves none."""
    counts = [math.prod(size) for size in sizes]
    if not counts:
        return None
    return spec_of(op).payload(counts, ranks) * itemsize


def bus_factor(op: str, ranks: int) -> float:
    """Return what `algbw` is multiplied by to compare it with a link's speed."""
    return spec_of(op).bus_factor(ranks) if ranks > 1 else 1.0


def algbw(size: int, seconds: float) -> float:
    """Return S/t in GB/s (10⁹ bytes), 0 for an op that took no time at all."""
    return size / seconds / 1e9 if seconds > 0 else 0.0


def busbw(op: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s: independent of the number of ranks."""
    return algbw(size, seconds) * bus_factor(op, ranks)
