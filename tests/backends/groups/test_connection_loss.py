"""A backend reports a closed connection: the error names the cause, not the symptom."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import abort_reason
from rankscope.backends.work.flight_recorder import recorder
from tests.backends.manual import Manual

LOST = dist.ConnectionLostError("closed by peer", peer=2)

Report = Callable[[], dist.Work]


def issue() -> dist.Work:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    return work


def by_on_failure() -> dist.Work:
    work = issue()
    Manual.made[0].on_failure(LOST)
    # What follows from it is no cause.
    assert not Manual.made[0].works[0].mark_failed(OSError("bad descriptor"))
    return work


def by_the_work() -> dist.Work:
    work = issue()
    assert not Manual.made[0].works[0].mark_failed(LOST)
    # It has failed, whatever the library makes of it later.
    assert not Manual.made[0].works[0].mark_completed()
    return work


def by_a_part_of_a_work() -> dist.Work:
    work = dist.all_reduce(np.ones(3), op=dist.ReduceOp.AVG, async_op=True)
    assert work is not None
    Manual.made[0].works[0].mark_failed(LOST)
    return work


def by_one_of_several_joined() -> dist.Work:
    with dist.coalescing_manager(async_ops=True) as batch:
        dist.all_reduce(np.ones(3, np.float32))
        dist.all_reduce(np.ones(3, np.float64))
    first, second = Manual.made[0].works
    second.mark_completed()
    first.mark_failed(LOST)
    return batch.work


@pytest.fixture
def raises(monkeypatch: pytest.MonkeyPatch) -> Report:
    def by_the_method() -> dist.Work:
        def all_reduce(*_: object) -> dist.Work:
            raise LOST

        with monkeypatch.context() as patch:
            patch.setattr(Manual, "all_reduce", all_reduce)
            return issue()

    return by_the_method


@pytest.fixture
def returns_a_failed_work(monkeypatch: pytest.MonkeyPatch) -> Report:
    def by_a_work_that_is_over() -> dist.Work:
        def all_reduce(self: Manual, *_: object) -> dist.Work:
            work = self._new(dist.OpType.ALL_REDUCE)
            work.mark_failed(LOST)
            return work

        with monkeypatch.context() as patch:
            patch.setattr(Manual, "all_reduce", all_reduce)
            return issue()

    return by_a_work_that_is_over


@pytest.fixture(
    params=[
        by_on_failure,
        by_the_work,
        by_a_part_of_a_work,
        by_one_of_several_joined,
        "raises",
        "returns_a_failed_work",
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def report(request: pytest.FixtureRequest, group: dist.ProcessGroup) -> Report:
    """A way in which a backend reports that it lost the connection to rank 2."""
    way = request.param
    made: Report = request.getfixturevalue(way) if isinstance(way, str) else way
    return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(abort_reason, "VERDICT_WAIT", 0.2)
    return 0.2


def error_of(work: dist.Work) -> dist.DistError:
    with pytest.raises(dist.DistAbortedError) as caught:
        work.wait(30)
    assert work.state is dist.WorkState.ABORTED
    return caught.value


def tell_of_a_death(group: dist.ProcessGroup, rank: int = 3) -> None:
    """Do what the store does where a process is gone."""
    notice = {"text": f"rank {rank} is gone", "by": "the store", "culprits": [rank]}
    group.store.set("abort", json.dumps(notice))


def test_a_death_that_the_store_reports_afterwards_is_the_cause(
    group: dist.ProcessGroup, report: Report
) -> None:
    work = report()
    assert not work.is_completed()
    assert group.aborted is None
    tell_of_a_death(group)
    error = error_of(work)
    assert error.reason == "rank 3 is gone"
    assert error.culprits == (3,)
    assert error.group == "default"
    assert "the group was aborted: rank 3 is gone (at" in str(error)
    assert "closed by peer" not in str(error)
    until(lambda: not group.status.in_flight)
    assert recorder.dump()[-1]["state"] == "aborted"


def test_a_loss_without_a_cause_names_the_peer(
    group: dist.ProcessGroup, report: Report, short: float
) -> None:
    began = time.monotonic()
    work = report()
    error = error_of(work)
    assert time.monotonic() - began > short
    assert error.reason == "rank 0 lost the connection to rank 2: closed by peer"
    assert error.culprits == (2,)
    assert (error.rank, error.op, error.sequence_number) == (0, "all_reduce", 1)
    assert "all_reduce #1 of group 'default' on rank 0" in str(error)
    # The other ranks end for the same reason.
    published = json.loads(group.store.get("abort", timeout=10))
    assert published["text"] == error.reason
    assert published["culprits"] == [2]


def test_a_death_reported_before_stays_the_cause(group: dist.ProcessGroup) -> None:
    work = issue()
    tell_of_a_death(group)
    error_of(work)
    Manual.made[0].on_failure(LOST)
    Manual.made[0].works[0].mark_failed(LOST)
    assert error_of(work).reason == "rank 3 is gone"
    assert group.current.loss is None


def test_the_failure_is_the_cause_of_the_error(group: dist.ProcessGroup) -> None:
    work = by_the_work()
    tell_of_a_death(group)
    assert error_of(work).__cause__ is LOST


def test_an_abort_is_not_delayed(group: dist.ProcessGroup, report: Report) -> None:
    work = report()
    dist.abort_process_group(reason="enough")
    assert work.is_completed()
    assert error_of(work).reason == "enough"
    assert error_of(work).culprits == ()


def test_a_wait_keeps_to_its_timeout(group: dist.ProcessGroup, report: Report) -> None:
    work = report()
    began = time.monotonic()
    with pytest.raises(dist.DistTimeoutError, match="it is still in flight"):
        work.wait(0.05)
    assert time.monotonic() - began < abort_reason.VERDICT_WAIT / 2
    assert group.aborted is None


def test_an_op_keeps_to_its_timeout(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far apart: on a loaded machine half a second may pass between two lines.
    monkeypatch.setattr(abort_reason, "VERDICT_WAIT", 60.0)
    began = time.monotonic()
    with dist.op_timeout(1.0):
        work = by_the_work()
    error = error_of(work)
    assert time.monotonic() - began < 30
    assert error.reason == "rank 0 lost the connection to rank 2: closed by peer"


def test_other_groups_go_on(group: dist.ProcessGroup) -> None:
    other = dist.new_group([0, 1], group_desc="tp")
    lost = by_the_work()
    work = dist.all_reduce(np.ones(3), group=other, async_op=True)
    assert work is not None
    Manual.made[-1].works[-1].mark_completed()
    assert work.wait(10)
    assert not lost.is_completed()
    tell_of_a_death(group)
    error_of(lost)
    assert other.aborted is None


def test_the_backend_gets_no_further_op(group: dist.ProcessGroup) -> None:
    by_on_failure()
    late = issue()
    assert late.sequence_number == 2
    assert len(Manual.made[0].works) == 1
    tell_of_a_death(group)
    assert error_of(late).reason == "rank 3 is gone"


def test_an_op_that_gets_through_completes(group: dist.ProcessGroup) -> None:
    first, second = issue(), issue()
    Manual.made[0].on_failure(LOST)
    Manual.made[0].works[0].mark_completed()
    assert first.wait(10)
    tell_of_a_death(group)
    error_of(second)


def test_without_an_op_in_flight_it_is_no_failure(
    group: dist.ProcessGroup, short: float
) -> None:
    issue()
    Manual.made[0].works[0].mark_completed()
    Manual.made[0].on_failure(LOST)
    loss = group.current.loss
    assert loss is not None
    until(lambda: loss.left < -short)
    assert group.aborted is None
    # There has been time for a cause.
    work = issue()
    assert "lost the connection to rank 2" in str(error_of(work))


def test_the_loss_that_a_rank_reported_first_is_the_reason_on_all(
    group: dist.ProcessGroup, short: float
) -> None:
    first = {"text": "rank 1 lost the connection to rank 3", "by": "rank 1", "at": 0}
    group.store.set("loss", json.dumps({**first, "culprits": [3]}))
    error = error_of(by_the_work())
    assert error.reason == "rank 1 lost the connection to rank 3"
    assert error.culprits == (3,)


def test_the_peer_is_a_rank_in_the_group(
    group: dist.ProcessGroup, short: float
) -> None:
    half = dist.new_group([0, 3], group_desc="half")
    work = dist.all_reduce(np.ones(3), group=half, async_op=True)
    assert work is not None
    Manual.made[0].on_failure(dist.ConnectionLostError(peer=1))
    error = error_of(work)
    assert error.reason == "rank 0 lost the connection to rank 3"
    assert error.culprits == (3,)


def test_a_peer_that_the_backend_cannot_name(
    group: dist.ProcessGroup, short: float
) -> None:
    work = issue()
    Manual.made[0].on_failure(dist.ConnectionLostError())
    error = error_of(work)
    assert error.reason == "rank 0 lost the connection to a peer"
    assert error.culprits == ()


def test_a_backend_that_loses_a_connection_while_it_is_made(
    group: dist.ProcessGroup,
) -> None:
    making = threading.Event()

    def create(*_: object) -> dist.Backend:
        making.set()
        raise LOST

    dist.Backend.register_backend("manual", create, devices=("cpu", "cuda"))
    errors: list[dist.DistError] = []

    def call() -> None:
        try:
            dist.all_reduce(np.ones(3))
        except dist.DistAbortedError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert making.wait(10)
    tell_of_a_death(group)
    caller.join(10)
    assert errors[0].reason == "rank 3 is gone"
    assert errors[0].culprits == (3,)
    assert errors[0].op == "all_reduce"


def test_nobody_knows_why_a_backend_lost_a_connection_while_it_was_made(
    group: dist.ProcessGroup, short: float
) -> None:
    def create(*_: object) -> dist.Backend:
        raise LOST

    dist.Backend.register_backend("manual", create, devices=("cpu", "cuda"))
    with pytest.raises(dist.DistAbortedError) as caught:
        dist.all_reduce(np.ones(3))
    assert "rank 0 lost the connection to rank 2: closed by peer" in str(caught.value)
    assert caught.value.culprits == (2,)


def test_a_failure_may_name_its_culprits(group: dist.ProcessGroup) -> None:
    half = dist.new_group([0, 3], group_desc="half")
    work = dist.all_reduce(np.ones(3), group=half, async_op=True)
    assert work is not None
    Manual.made[0].on_failure(dist.DistBackendError("it crashed", culprits=[1]))
    error = error_of(work)
    assert error.reason == "it crashed"
    assert error.culprits == (3,)
    assert json.loads(half.store.get("abort", timeout=10))["culprits"] == [3]


def test_the_peer_survives_pickling_and_a_prefix() -> None:
    for one in (LOST, pickle.loads(pickle.dumps(LOST)), LOST.prefixed("early")):
        assert isinstance(one, dist.ConnectionLostError)
        assert one.peer == 2
