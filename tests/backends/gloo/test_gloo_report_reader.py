"""Reading reports: who reads, and what happens at the end of the side process."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.gloo.channel import Channel
from rankscope.backends.gloo.fd_poller import FdPoller
from rankscope.backends.gloo.operations import Operation
from rankscope.backends.gloo.report_reader import ReportReader
from rankscope.backends.gloo.side.wire import Report, Status
from rankscope.backends.gloo.work import GlooWork
from rankscope.backends.work.op_type import OpType


class Side:
    """The other end of the socket, and the reader with ops in flight."""

    def __init__(self) -> None:
        near, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.poller = FdPoller()
        self.channel = Channel(near, self.poller)
        self.in_flight: dict[int, Operation] = {}
        self.removed: list[int] = []
        self.granted: list[tuple[int, int]] = []
        self.gone = threading.Event()
        self.reader = ReportReader(
            self.channel,
            self.poller,
            self.in_flight,
            lambda number, chunk: self.granted.append((number, chunk)),
            self._remove,
        )
        self._reports = 0
        self.poller.call(lambda: self.channel.watch(self._on_event))

    def _remove(self, operation: Operation) -> None:
        self.removed.append(operation.number)
        self.in_flight.pop(operation.number, None)

    def _on_event(self, events: int) -> None:
        if events & select.EPOLLHUP:
            self.channel.unwatch()
            self.reader.finish(self.gone.set)
        elif events & select.EPOLLIN:
            self.reader.read_all()

    def op(self, number: int, kind: type[Operation] = Operation) -> GlooWork:
        operation = kind(GlooWork(OpType.ALL_REDUCE, None, self.reader))
        operation.number = number
        self.in_flight[number] = operation
        return operation.work

    def report(self, number: int, status: int = Status.DONE, extra: int = 0) -> None:
        self._reports += 1
        report = Report(self._reports, number, status, 0, 1, 2, extra)
        self.end.send(report.pack())

    def poller_serves(self) -> bool:
        served = threading.Event()
        self.poller.call(served.set)
        return served.wait(5)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    with contextlib.suppress(OSError):
        made.end.shutdown(socket.SHUT_RDWR)
    made.end.close()
    assert made.gone.wait(5)
    made.channel.close()


def test_a_waiter_reads_the_reports_of_the_works_before_its_own(side: Side) -> None:
    works = [side.op(number) for number in (1, 2, 3)]
    for number in (1, 2, 3):
        side.report(number)
    works[2].wait()
    assert all(work.is_success() for work in works)
    assert side.removed == [1, 2, 3]
    assert works[0].duration_ns == 1


class SlowCopy(Operation):
    """Its results are being copied until `go_on` is set."""

    copying, go_on = threading.Event(), threading.Event()

    def copy_back(self) -> None:
        self.copying.set()
        assert self.go_on.wait(10)


def test_an_abort_waits_for_a_copy_and_lets_none_begin(side: Side) -> None:
    works = [side.op(number, SlowCopy) for number in (1, 2)]
    for work in works:
        work.detach()
    side.report(1)
    assert SlowCopy.copying.wait(5)
    stopped = threading.Event()

    def stop() -> None:
        side.reader.stop_copies()
        stopped.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert not stopped.wait(0.1)
    SlowCopy.go_on.set()
    stopping.join(5)
    assert stopped.is_set()
    until(works[0].is_success)
    # Nothing is copied for the second op: its Work is the abort's to end.
    SlowCopy.copying.clear()
    side.report(2)
    until(lambda: not side.in_flight)
    assert side.poller_serves()
    assert not SlowCopy.copying.is_set()
    assert not works[1].is_completed()


def test_a_wait_ends_at_its_deadline_and_the_poller_goes_on(side: Side) -> None:
    work = side.op(1)
    assert not work._block(0.01)
    assert work.detached
    side.report(1)
    until(work.is_success)
    assert not side.in_flight


def test_the_poller_reads_for_works_that_no_thread_waits_for(side: Side) -> None:
    works = [side.op(number) for number in (1, 2)]
    for work in works:
        work.detach()
        work.detach()
    side.report(1)
    side.report(2)
    until(lambda: all(work.is_success() for work in works))
    until(lambda: not side.channel.wants_input)


class _Chunked(Operation):
    """Three chunks, of which there is room for two."""

    def chunk_done(self, chunk: int) -> int | None:
        return chunk + 2 if chunk + 2 < 3 else None


def test_a_chunk_that_is_over_makes_room_for_another(side: Side) -> None:
    work = side.op(7, _Chunked)
    side.report(7, Status.CHUNK, extra=0)
    side.report(7, Status.CHUNK, extra=1)
    side.report(7)
    work.wait()
    assert side.granted == [(7, 2)]


class _Interrupted(Operation):
    """Ctrl-C arrives while its report is handled."""

    interrupts = 1

    def release(self) -> None:
        if type(self).interrupts:
            type(self).interrupts -= 1
            raise KeyboardInterrupt


def test_a_report_that_an_interrupt_broke_off_is_handled_again(side: Side) -> None:
    work = side.op(1, _Interrupted)
    side.report(1)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    until(work.is_success)
    until(lambda: side.removed == [1])


class _Stuck(Operation):
    """Its reader stands still until `go` is set."""

    def __init__(self, work: GlooWork) -> None:
        super().__init__(work)
        self.entered, self.go = threading.Event(), threading.Event()

    def collect(self, report: Report) -> None:
        self.entered.set()
        assert self.go.wait(30)


@contextlib.contextmanager
def stuck_reader(side: Side) -> Iterator[Callable[[], None]]:
    """A thread that stands still while it reads; the function lets it go on."""
    work = side.op(1, _Stuck)
    operation = side.in_flight[1]
    assert isinstance(operation, _Stuck)
    thread = threading.Thread(target=work.wait)
    thread.start()
    side.report(1)
    assert operation.entered.wait(5)
    try:
        yield operation.go.set
    finally:
        operation.go.set()
        thread.join(5)
    assert not thread.is_alive()


def test_the_poller_does_not_wait_for_the_thread_that_reads(side: Side) -> None:
    with stuck_reader(side) as let_go:
        side.end.close()
        assert side.poller_serves()
        assert not side.gone.is_set()
        let_go()
        assert side.gone.wait(5)
    assert side.reader.ended


def test_the_reports_before_the_end_are_handled(side: Side) -> None:
    with stuck_reader(side) as let_go:
        later = [side.op(number) for number in (2, 3)]
        side.report(2)
        side.report(3)
        side.end.close()
        assert side.poller_serves()
        let_go()
        assert side.gone.wait(5)
    until(lambda: all(work.is_success() for work in later))


def test_the_end_is_handed_over_by_a_waiter_that_sees_it_first(side: Side) -> None:
    work = side.op(1)
    done = threading.Thread(target=work._block, args=(30,))
    done.start()
    side.end.close()
    assert side.gone.wait(5)
    work.mark_failed(RuntimeError("the process ended"))
    done.join(5)
    assert not done.is_alive()
