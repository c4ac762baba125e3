"""The queue over a transport that the test controls: no process, no library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.messaging import queue as queue_module
from rankscope.backends.messaging.algorithms import (
    RECV,
    SEND,
    Flat,
    Schedule,
    Transfer,
)
from rankscope.backends.messaging.queue import MessageQueue, MessageWork
from rankscope.backends.messaging.signature import (
    FIRST,
    KINDS,
    Members,
    Signer,
)
from rankscope.backends.messaging.transport import Received


def members() -> Members:
    """Of a group of which this process is rank 0."""
    return Members(0, range(8))


class Message:
    """A request that the test ends."""

    def __init__(self, array: Flat, peer: int, tag: int) -> None:
        self.array, self.peer, self.tag = array, peer, tag
        self.over = False
        self.came = array.nbytes
        self.error: Exception | None = None


class TooLong(Exception):
    """As a library raises it."""

    def __init__(self, received: Received) -> None:
        super().__init__("a buffer overflow")
        self.received = received


class ByHand:
    """A transport whose messages arrive when the test says so."""

    max_message = 64
    spin = 0.0

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.posted: list[Message] = []
        self.tested: list[Message] = []
        self.abandoned: list[tuple[Message, Flat, bool]] = []
        self.closed = False
        self.ends = 0
        # A message that no collective has received.
        self.left: Received | None = None

    def send(self, array: Flat, peer: int, tag: int) -> Message:
        self.sent.append(Message(array, peer, tag))
        return self.sent[-1]

    def receive(self, array: Flat, source: int, tag: int) -> Message | None:
        self.posted.append(Message(array, source, tag))
        return self.posted[-1]

    def test(self, request: Message, looks: int = 1) -> bool:
        self.tested.append(request)
        if request.error is not None:
            # As MPI does: the request is forgotten with its error.
            error, request.error, request.over = request.error, None, True
            raise error
        return request.over

    def fits(self, request: Message, nbytes: int, tag: int) -> bool:
        return (request.came, request.tag) == (nbytes, tag)

    def received(self, request: Message) -> Received:
        return Received(request.peer, request.came, request.tag)

    def unread(self, tag: int) -> Received | None:
        return self.left

    def too_long(self, error: BaseException) -> Received | None:
        return error.received if isinstance(error, TooLong) else None

    def explain(self, error: BaseException) -> str | None:
        return "the library lost it" if isinstance(error, LookupError) else None

    def abandon(self, requests: Sequence[tuple[Message, Flat, bool]]) -> None:
        self.abandoned.extend(requests)
        self.ends += 1

    def arm(self) -> bool:
        return True

    def sleep(self, timeout: float, idle: float) -> None:
        """Return at once: the test is single-threaded."""

    def wake(self) -> None:
        """Nobody sleeps."""

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def started(
    schedule: Schedule,
    op_type: dist.OpType = dist.OpType.ALL_REDUCE,
    fail: Callable[[Any], None] = lambda reason: None,
) -> tuple[MessageQueue, ByHand, MessageWork]:
    queue, transport = MessageQueue(fail, members), ByHand()
    queue.open(transport)
    work = MessageWork(queue, op_type, schedule, 5)
    queue.submit(work, message=op_type.is_p2p)
    return queue, transport, work


def test_a_stage_starts_once_the_one_before_is_over() -> None:
    data = np.arange(4.0)
    stages: list[list[Transfer]] = [
        [(RECV, 1, data[:2]), (SEND, 2, data[2:])],
        [(SEND, 1, data)],
    ]
    queue, transport, work = started(iter(stages))
    assert [m.tag for m in [*transport.posted, *transport.sent]] == [5, 5]
    transport.sent[0].over = True
    queue.advance()
    assert len(transport.sent) == 1
    transport.posted[0].over = True
    assert queue.advance()
    assert transport.sent[1].array is data
    transport.sent[1].over = True
    queue.advance()
    assert work.is_success()
    assert not queue.busy


def test_a_message_that_was_there_ends_its_stage_at_once() -> None:
    class Early(ByHand):
        def receive(self, array: Flat, source: int, tag: int) -> Message | None:
            if source == 2:
                return super().receive(array, source, tag)
            array[...] = source
            return None

    data = np.zeros(2)
    stages: list[list[Transfer]] = [[(RECV, 1, data)], [(RECV, 2, data)]]
    queue, transport = MessageQueue(lambda reason: None, members), Early()
    queue.open(transport)
    work = MessageWork(queue, dist.OpType.ALL_REDUCE, iter(stages), 5)
    queue.submit(work, message=False)
    assert data.tolist() == [1, 1]
    assert [m.peer for m in transport.posted] == [2]
    assert not work.is_completed()
    receive = MessageWork(queue, dist.OpType.RECV, iter([[(RECV, 3, data)]]), 7)
    queue.submit(receive, message=True)
    assert receive.source_rank() == 3


def test_large_arrays_are_cut_and_empty_ones_are_left_out() -> None:
    data = np.zeros(20)
    _, transport, _ = started(iter([[(SEND, 1, data), (RECV, 1, data[:0])]]))
    assert [m.array.nbytes for m in transport.sent] == [64, 64, 32]
    assert not transport.posted


def test_an_empty_message_of_the_user_is_sent() -> None:
    empty = np.zeros(0)
    _, transport, _ = started(iter([[(SEND, 1, empty)]]), dist.OpType.SEND)
    assert [m.array.nbytes for m in transport.sent] == [0]


def test_messages_pass_collectives_which_keep_their_order() -> None:
    data = np.zeros(1)
    queue, transport, first = started(iter([[(RECV, 1, data)]]))
    second = MessageWork(queue, dist.OpType.BARRIER, iter([[(RECV, 2, data)]]), 6)
    queue.submit(second, message=False)
    receive = MessageWork(queue, dist.OpType.RECV, iter([[(RECV, 3, data)]]), 7)
    queue.submit(receive, message=True)
    assert [m.peer for m in transport.posted] == [1, 3]
    transport.posted[1].over = True
    queue.advance()
    assert receive.source_rank() == 3
    assert not first.is_completed()
    transport.posted[0].over = True
    queue.advance()
    assert first.is_success()
    assert transport.posted[2].peer == 2
    # The second has begun before the end of the first is reported.
    assert first.completed_ns <= second.started_ns


def test_a_shorter_message_fails_the_group() -> None:
    told: list[Any] = []
    queue, transport, work = started(iter([[(RECV, 1, np.zeros(1))]]), fail=told.append)
    transport.posted[0].over, transport.posted[0].came = True, 4
    queue.advance()
    assert told == [
        "all_reduce: rank 1 sent 4 bytes where 8 were expected: the "
        "arrays' sizes differ between ranks"
    ]
    with pytest.raises(dist.DistBackendError, match="rank 1 sent 4"):
        work.wait()


def test_a_message_that_no_collective_has_received_fails_the_group() -> None:
    told: list[Any] = []
    signer = Signer()
    queue, transport = MessageQueue(told.append, members), ByHand()
    queue.open(transport)

    def run(op_type: dist.OpType, root: int) -> MessageWork:
        tag = FIRST + KINDS.index(op_type)
        tag |= signer.sign(np.dtype("f8"), root=root)
        work = MessageWork(queue, op_type, iter([]), tag)
        queue.submit(work, message=False)
        return work

    first = run(dist.OpType.BROADCAST, 0)
    other = Signer().sign(np.dtype("f8"), root=1)
    tag = FIRST + KINDS.index(dist.OpType.BROADCAST) | other
    transport.left = Received(1, 8, tag)
    work = run(dist.OpType.BARRIER, 0)
    until(lambda: work.is_completed())
    reason = (
        "the collective before: broadcast: root 0 on rank 0, 1 on rank 1; its values "
        "may be wrong"
    )
    assert told == [reason]
    assert first.is_success()
    with pytest.raises(dist.DistBackendError, match=f"barrier.* failed: {reason}"):
        work.wait()


def test_a_message_that_failed_is_never_taken_for_one_that_came() -> None:
    """Another thread looks again before the group has heard of the failure."""
    told: list[tuple[str, bool]] = []

    def fail(reason: str | dist.DistError) -> None:
        queue.advance()
        told.append((str(reason), work.is_completed()))

    queue, transport, work = started(iter([[(RECV, 1, np.zeros(1))]]), fail=fail)
    transport.posted[0].error = RuntimeError("the cable was cut")
    queue.advance()
    assert told == [("the cable was cut", False)]
    with pytest.raises(dist.DistBackendError, match="the cable was cut"):
        work.wait()


def test_the_transport_explains_its_errors() -> None:
    told: list[Any] = []
    queue, transport, _ = started(iter([[(RECV, 1, np.zeros(1))]]), fail=told.append)
    transport.posted[0].error = LookupError("code 17")
    queue.advance()
    assert told == ["the library lost it"]


def receive_of(queue: MessageQueue, source: int) -> MessageWork:
    stages: list[list[Transfer]] = [[(RECV, source, np.zeros(1))]]
    work = MessageWork(queue, dist.OpType.RECV, iter(stages), 7)
    queue.submit(work, message=True)
    return work


def test_the_issue_of_an_op_ends_no_other() -> None:
    """It is under the lock of those who issue, which a callback may wait for."""
    queue, transport, work = started(iter([[(RECV, 1, np.zeros(1))]]))
    receive = receive_of(queue, 3)
    called: list[object] = []
    for one in (work, receive):
        one.add_done_callback(called.append)
    for message in transport.posted:
        message.over = True
    transport.tested.clear()
    other = receive_of(queue, 4)
    queue.submit(MessageWork(queue, dist.OpType.BARRIER, iter([]), 6), message=False)
    assert called == []
    assert transport.tested == transport.posted[2:]
    queue.advance()
    assert called == [receive, work]
    assert not other.is_completed()


def test_a_callback_that_issues_an_op_ends_no_other() -> None:
    queue, transport, work = started(iter([[(RECV, 1, np.zeros(1))]]))
    receive = receive_of(queue, 3)
    ends: list[tuple[bool, bool]] = []

    def issue(_: object) -> None:
        barrier = MessageWork(queue, dist.OpType.BARRIER, iter([]), 6)
        queue.submit(barrier, message=False)
        ends.append((barrier.is_completed(), work.is_completed()))

    receive.add_done_callback(issue)
    for message in transport.posted:
        message.over = True
    queue.advance()
    assert ends == [(True, False)]
    assert work.is_success()


def test_an_error_of_an_op_that_is_issued_is_reported_afterwards() -> None:
    class Broken(ByHand):
        def send(self, array: Flat, peer: int, tag: int) -> Message:
            raise LookupError("code 17")

    told: list[tuple[str, int]] = []
    issuing = threading.RLock()

    def fail(reason: str | dist.DistError) -> None:
        with issuing:
            told.append((str(reason), threading.get_ident()))

    queue = MessageQueue(fail, members)
    queue.open(Broken())
    work = MessageWork(queue, dist.OpType.SEND, iter([[(SEND, 1, np.zeros(1))]]), 5)
    with issuing:
        queue.submit(work, message=True)
        assert not work.is_completed()
    until(lambda: work.is_completed())
    ((reason, thread),) = told
    assert reason == "the library lost it"
    assert thread != threading.get_ident()
    with pytest.raises(dist.DistBackendError, match="the library lost it"):
        work.wait()


def test_an_interrupt_that_breaks_an_op_that_is_issued_is_reported_afterwards() -> None:
    def interrupted() -> Schedule:
        raise KeyboardInterrupt
        yield []

    told: list[int] = []
    queue = MessageQueue(lambda reason: told.append(threading.get_ident()), members)
    queue.open(ByHand())
    work = MessageWork(queue, dist.OpType.ALL_REDUCE, interrupted(), 5)
    with pytest.raises(KeyboardInterrupt):
        queue.submit(work, message=False)
    until(lambda: work.is_completed())
    assert len(told) == 1
    assert told != [threading.get_ident()]
    with pytest.raises(dist.DistBackendError, match="failed: KeyboardInterrupt"):
        work.wait()


def test_what_came_during_the_looks_at_a_collective_is_not_left() -> None:
    class Together(ByHand):
        """The looks at the collective take in all that has come."""

        def test(self, request: Message, looks: int = 1) -> bool:
            if request.tag == 5:
                for message in self.posted:
                    message.over = True
            return super().test(request, looks)

    queue, transport = MessageQueue(lambda reason: None, members), Together()
    queue.open(transport)
    receive = receive_of(queue, 3)
    collective = MessageWork(
        queue, dist.OpType.ALL_REDUCE, iter([[(RECV, 1, np.zeros(1))]]), 5
    )
    queue.submit(collective, message=False)
    queue.advance()
    assert collective.is_success()
    assert receive.is_success()


def test_an_interrupt_leaves_no_work_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, transport, work = started(iter([[(RECV, 1, np.zeros(1))]]))
    transport.posted[0].over = True

    def interrupted(self: MessageWork, *args: object, **options: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MessageWork, "mark_completed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.advance()
    assert queue.busy
    assert not work.is_completed()
    assert queue.advance()
    assert work.is_success()
    assert not queue.busy


class Waited(ByHand):
    """The first sleep takes a second of `now`; in each later one a message comes."""

    now = 0.0

    def sleep(self, timeout: float, idle: float) -> None:
        if self.now:
            self.posted[-1].over = True
        self.now = 1.0


@pytest.mark.parametrize("another", [False, True], ids=["itself", "another"])
def test_a_waiter_that_leaves_tells_the_thread_where_one_had_waited_for_long(
    another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks seldom then; also where the last message came soon."""
    queue, transport = MessageQueue(lambda reason: None, members), Waited()
    told: list[tuple[MessageQueue, bool, set[int]]] = []

    def add(of: MessageQueue) -> None:
        told.append((of, of.patient, {*of.waiting}))

    monkeypatch.setattr(queue_module, "progress", SimpleNamespace(add=add))
    clock = SimpleNamespace(monotonic=lambda: transport.now, time_ns=time.time_ns)
    monkeypatch.setattr(queue_module, "time", clock)
    queue.open(transport)
    stages: list[list[Transfer]] = [[(RECV, 1, np.zeros(1))], [(RECV, 2, np.zeros(1))]]
    work = MessageWork(queue, dist.OpType.ALL_REDUCE, iter(stages), 5)
    queue.submit(work, message=False)
    others = set[int]()
    if another:
        others, queue.patient, transport.now = {0}, True, 1.0
        queue.waiting |= others
    work.wait()
    assert told == [(queue, False, others)]


def test_abandon_hands_over_what_is_in_flight_and_refuses_more() -> None:
    data, other = np.zeros(1), np.zeros(1)
    queue, transport, _ = started(iter([[(RECV, 1, data), (SEND, 1, other)]]))
    queue.abandon()
    assert [(a is data, receives) for _, a, receives in transport.abandoned] == [
        (True, True),
        (False, False),
    ]
    assert not queue.busy
    with pytest.raises(dist.DistBackendError, match="were abandoned"):
        queue.submit(
            MessageWork(queue, dist.OpType.BARRIER, iter([]), 0), message=False
        )


class Interrupted(ByHand):
    """A signal handler runs in the midst of a call, on the thread that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.handler: Callable[[], object] = lambda: None
        self.inside: list[bool] = []

    def interrupt(self) -> None:
        handler, self.handler = self.handler, lambda: None
        handler()
        self.inside.append(bool(self.ends or self.closed))

    def test(self, request: Message, looks: int = 1) -> bool:
        self.interrupt()
        return super().test(request, looks)

    def receive(self, array: Flat, source: int, tag: int) -> Message | None:
        self.interrupt()
        return super().receive(array, source, tag)

    def arm(self) -> bool:
        self.interrupt()
        return super().arm()


@pytest.mark.parametrize("call", ["advance", "arm", "submit"])
@pytest.mark.parametrize("end", ["abandon", "close"])
def test_a_handler_that_interrupts_a_call_waits_for_nothing(
    call: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "_ABANDON_PATIENCE", 60.0)
    queue, transport = MessageQueue(lambda reason: None, members), Interrupted()
    queue.open(transport)
    stages: list[list[Transfer]] = [[(RECV, 1, np.zeros(1))], [(SEND, 1, np.zeros(1))]]
    work = MessageWork(queue, dist.OpType.ALL_REDUCE, iter(stages), 5)
    if call != "submit":
        queue.submit(work, message=False)
        transport.posted[0].over = True
    transport.inside.clear()
    transport.handler = getattr(queue, end)
    began = time.monotonic()
    if call == "submit":
        queue.submit(work, message=False)
    else:
        getattr(queue, call)()
    assert time.monotonic() - began < 30
    # The transport is used until the call returns, and no longer than that.
    assert transport.inside[0] is False
    assert transport.ends == 1
    assert not transport.sent
    assert not queue.busy
    with pytest.raises(dist.DistBackendError, match="were abandoned"):
        queue.submit(work, message=False)
    queue.advance()
    queue.abandon()
    assert transport.ends == 1


def test_a_handler_that_interrupts_a_call_may_issue_ops_and_look() -> None:
    queue, transport = MessageQueue(lambda reason: None, members), Interrupted()
    queue.open(transport)
    first, second, third = (
        MessageWork(queue, dist.OpType.SEND, iter([[(kind, 1, np.zeros(1))]]), 5)
        for kind in (RECV, SEND, SEND)
    )
    queue.submit(first, message=True)
    looked: list[bool] = []

    def handler() -> None:
        looked.append(queue.advance())
        looked.append(queue.arm())
        queue.submit(second, message=True)
        queue.submit(third, message=False)

    transport.handler = handler
    queue.advance()
    assert looked == [False, False]
    queue.advance()
    assert len(transport.sent) == 2
    for message in (*transport.sent, *transport.posted):
        message.over = True
    queue.advance()
    assert first.is_success()
    assert second.is_success()
    assert third.is_success()


def test_an_abort_waits_for_a_call_of_another_thread() -> None:
    queue, transport = MessageQueue(lambda reason: None, members), Interrupted()
    queue.open(transport)
    work = MessageWork(queue, dist.OpType.RECV, iter([[(RECV, 1, np.zeros(1))]]), 5)
    queue.submit(work, message=True)
    inside, go_on = threading.Event(), threading.Event()

    def handler() -> None:
        inside.set()
        assert go_on.wait(30)

    transport.handler = handler
    transport.inside.clear()
    advancing = threading.Thread(target=queue.advance)
    advancing.start()
    assert inside.wait(30)
    aborting = threading.Thread(target=queue.abandon)
    aborting.start()
    until(lambda: queue._closed)
    assert not transport.ends
    go_on.set()
    advancing.join(30)
    aborting.join(30)
    assert transport.inside == [False]
    assert transport.ends == 1


def test_a_transport_that_comes_after_the_abort_is_abandoned_too() -> None:
    class Late(ByHand):
        told = False

        def abandon(self, requests: Sequence[tuple[Message, Flat, bool]]) -> None:
            self.told = True

    queue, late = MessageQueue(lambda reason: None, members), Late()
    queue.abandon()
    queue.open(late)
    assert late.told


def test_close_closes_the_transport() -> None:
    queue, transport, work = started(iter([]))
    assert work.is_success()
    queue.close()
    assert transport.closed
