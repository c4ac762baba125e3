"""The watchdog: what it times out, and what it keeps alive."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import inquiry
from rankscope.backends.groups import watchdog as module
from rankscope.backends.groups.watchdog import Watchdog
from rankscope.backends.groups.world import world
from tests.backends.manual import Manual


class Quiet:
    """A group with nothing in flight; it counts how often it was checked."""

    busy = False

    def __init__(self) -> None:
        self.checks = 0

    def expire(self) -> float:
        self.checks += 1
        return float("inf")


class Hung:
    """A group whose op in flight has `end` as its deadline."""

    busy = True

    def __init__(self) -> None:
        self.end = time.monotonic() + 60

    def expire(self) -> float:
        return self.end - time.monotonic()


class Broken(Quiet):
    def expire(self) -> float:
        super().expire()
        raise RuntimeError("no")


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog()
    yield made
    made.stop()


def checked_once(watchdog: Watchdog) -> weakref.ref[Quiet]:
    group = Quiet()
    watchdog.register(group)
    watchdog.wake()
    until(lambda: group.checks)
    return weakref.ref(group)


@pytest.mark.parametrize("linger", [0.0, 60.0])
def test_a_sleeping_watchdog_keeps_no_group_alive(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, linger: float
) -> None:
    monkeypatch.setattr(module, "_LINGER", linger)
    gone = checked_once(watchdog)
    until(lambda: gc.collect() >= 0 and gone() is None)


def test_a_destroyed_group_is_not_kept_alive(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = threading.Event()
    monkeypatch.setattr(Manual, "refresh", lambda _: checked.set())
    made = dist.new_group([0, 1], group_desc="half")
    assert isinstance(made, dist.ProcessGroup)
    work = dist.all_reduce(np.ones(3), async_op=True, group=made)
    assert work is not None
    assert checked.wait(30)
    work.mark_completed()
    dist.destroy_process_group(made)
    gone = weakref.ref(made)
    del made, work
    Manual.made.clear()
    until(lambda: gc.collect() >= 0 and gone() is None)


def test_a_group_that_fails_does_not_stop_the_watchdog(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Broken(), Quiet()
    watchdog.register(broken)
    watchdog.register(other)
    watchdog.wake()
    until(lambda: broken.checks > 1 and other.checks > 1)
    assert "the watchdog failed on" in caplog.text


def test_the_checks_become_rarer_while_one_op_hangs(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAME", 10.0)  # on a machine that stands still
    group = Hung()
    watchdog.register(group)
    first, *_, last = [watchdog._check() for _ in range(8)]
    assert (first, last) == (0.1, 0.25)
    group.end += 60  # another op is the oldest
    assert watchdog._check() == 0.1


@pytest.mark.parametrize("hours", [1, -1])
def test_a_wall_clock_that_is_set_times_no_op_out(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    made = dist.new_group([0, 1], group_desc="half", timeout=60)
    assert isinstance(made, dist.ProcessGroup)
    work = dist.all_reduce(np.ones(3), async_op=True, group=made)
    assert work is not None
    wall_clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: wall_clock() + hours * 3600 * 10**9)
    for started in (False, True):
        assert 0 < made.current.expire() < 60
        assert made.aborted is None
        oldest = made.summary().oldest
        assert oldest is not None
        assert oldest.elapsed is not None
        assert (oldest.state == "started") is started
        assert 0 <= oldest.elapsed < 60
        work.mark_started()
    work.mark_completed()
    dist.destroy_process_group(made)


def test_an_op_that_keeps_its_own_deadline_is_not_timed_out(
    group: dist.ProcessGroup,
) -> None:
    own = group.enter(dist.OpType.MONITORED_BARRIER, 0.05, 0)
    time.sleep(0.1)
    assert group.current.expire() == float("inf")
    assert own.state is dist.WorkState.STARTED
    assert own.record is not None
    assert own.record.timeout == 0.05
    own.mark_completed()


def _issue(group: dist.ProcessGroup) -> None:
    dist.all_reduce(np.ones(3), group=group, async_op=True)


def _issue_batch(group: dist.ProcessGroup) -> None:
    with dist.coalescing_manager(group, async_ops=True):
        _issue(group)


def _enter(group: dist.ProcessGroup) -> None:
    group.enter(dist.OpType.MONITORED_BARRIER)


@pytest.mark.parametrize("start", [_issue, _issue_batch, _enter])
def test_the_watchdog_that_is_woken_for_an_op_finds_the_group_busy(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[dist.ProcessGroup], None],
) -> None:
    """Else it may go idle again before the op starts, which nobody times out then."""
    found: list[bool] = []

    def look() -> None:
        found.append(group.current.busy)

    monkeypatch.setattr(module.watchdog, "idle", True)
    monkeypatch.setattr(module.watchdog, "wake", look)
    start(group)
    assert found == [True]


def test_stop_ends_the_thread(watchdog: Watchdog) -> None:
    before = set(threading.enumerate())
    watchdog.register(Quiet())
    watchdog.wake()
    (thread,) = set(threading.enumerate()) - before
    watchdog.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_an_op_that_times_out_repeats_what_a_diagnosis_found(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow the machine is, the question to the ranks has its result.
    monkeypatch.setattr(inquiry, "LONGEST", 30)
    world.note_causes({group.key.id: ("rank 9 was late for an earlier op", [9])})
    with dist.op_timeout(0.5):
        first = dist.all_reduce(np.ones(3), async_op=True)
    assert first is not None
    with pytest.raises(
        dist.DistTimeoutError, match="ranks 1–3 have not answered"
    ) as caught:
        first.wait(30)
    assert caught.value.culprits == (1, 2, 3)
    group.rebuild()
    with dist.op_timeout(0.5):
        works = [dist.all_reduce(np.ones(3), async_op=True) for _ in range(2)]
    world.note_causes(
        {"another": ("no", [1]), group.key.id: ("rank 2 does not answer", [2])}
    )
    errors = []
    for work in works:
        assert work is not None
        with pytest.raises(dist.DistError, match="rank 2 does not answer") as told:
            work.wait(30)
        errors.append(told.value)
    assert "(its own timeout): diagnosis at " in str(errors[0])
    assert ": the group was aborted: diagnosis at " in str(errors[1])
    assert "; all_reduce #1 of " in str(errors[1])
    assert " timed out after 0.5 s (at " in str(errors[1])
    assert [error.culprits for error in errors] == [(2,), (2,)]


def test_a_diagnosis_that_no_longer_holds_is_not_repeated(
    group: dist.ProcessGroup,
) -> None:
    world.note_causes({group.key.id: ("rank 2 does not answer", [2])})
    assert group.current.deadlines.cause is not None
    world.note_causes({})
    assert group.current.deadlines.cause is None
