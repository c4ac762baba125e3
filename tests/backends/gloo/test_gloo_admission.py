"""The flow control of the gloo backend: pure, without process and socket."""

from __future__ import annotations

import numpy as np

from rankscope.backends.gloo.admission import Admission
from rankscope.backends.gloo.operations import Operation
from rankscope.backends.gloo.work import GlooWork
from rankscope.backends.work.op_type import OpType


class _Unread:
    """Nobody waits for the Works of these tests."""

    def drive(self, work: GlooWork, timeout: float | None) -> None: ...

    def detach(self, work: GlooWork) -> None: ...


class _Op(Operation):
    """An op that takes `staged` bytes, reads `reads` and writes `writes`."""

    def __init__(
        self,
        number: int,
        staged: int = 0,
        reads: np.ndarray | None = None,
        writes: np.ndarray | None = None,
        collective: bool = True,
    ) -> None:
        work = GlooWork(OpType.ALL_REDUCE, None, _Unread())
        super().__init__(work, staged, () if reads is None else (reads,))
        self.number = number
        self.sequence = number if collective else 0
        self.free = True
        self._writes = writes

    def has_room(self) -> bool:
        return self.free

    def _regions(self) -> list[tuple[int, int]]:
        if self._writes is None:
            return []
        start = self._writes.ctypes.data
        return [(start, start + self._writes.nbytes)]


def test_ops_start_until_the_budget_is_used_up() -> None:
    admission = Admission(budget=100)
    ops = [_Op(number, staged=40) for number in range(1, 5)]
    assert [admission.add(op) for op in ops] == [True, True, False, False]
    assert admission.next() is None
    admission.remove(ops[0])
    assert admission.next() is ops[2]
    assert admission.next() is None
    assert set(admission.in_flight.values()) == set(ops[1:])


def test_an_op_above_the_budget_runs_alone() -> None:
    admission = Admission(budget=100)
    large, small = _Op(1, staged=500), _Op(2, staged=1)
    assert admission.add(large)
    assert not admission.add(small)
    admission.remove(large)
    assert admission.next() is small
    later = _Op(3, staged=500)
    assert not admission.add(later)
    admission.remove(small)
    assert admission.next() is later


def test_no_op_overtakes_one_that_waits() -> None:
    admission = Admission(budget=100)
    first, second, third = _Op(1, staged=90), _Op(2, staged=20), _Op(3)
    assert [admission.add(op) for op in (first, second, third)] == [True, False, False]
    admission.remove(first)
    assert [admission.next(), admission.next(), admission.next()] == [
        second,
        third,
        None,
    ]


def test_an_op_waits_for_what_else_it_needs() -> None:
    admission = Admission()
    first, second = _Op(1), _Op(2)
    second.free = False
    assert admission.add(first)
    assert not admission.add(second)
    admission.remove(first)
    assert admission.next() is None
    second.free = True
    assert admission.next() is second


def test_an_op_waits_for_the_collective_that_writes_its_input() -> None:
    x = np.zeros(10)
    admission = Admission()
    writer = _Op(1, writes=x[:5])
    beside, behind = _Op(2, reads=x[5:]), _Op(3, reads=x[4:])
    assert admission.add(writer)
    assert admission.add(beside)
    assert not admission.add(behind)
    admission.remove(writer)
    assert admission.next() is behind


def test_no_op_waits_for_a_message() -> None:
    # A receive may be in flight for ever, and the caller orders what reads it.
    x = np.zeros(10)
    admission = Admission()
    assert admission.add(_Op(1, writes=x, collective=False))
    assert admission.add(_Op(2, reads=x))


def test_an_op_is_removed_once() -> None:
    # An interrupt may have the handling of its report repeated.
    admission = Admission(budget=100)
    ops = [_Op(number, staged=60) for number in (1, 2, 3)]
    assert [admission.add(op) for op in ops] == [True, False, False]
    admission.remove(ops[0])
    admission.remove(ops[0])
    assert admission.next() is ops[1]
    assert admission.next() is None
