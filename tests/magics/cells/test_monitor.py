"""The monitor and the cell's wait, on a cluster that only notes what it is told."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import (
    Cluster,
    ClusterError,
    ClusterStatus,
    Execution,
    RankError,
)
from rankscope.magics.cells import monitor
from rankscope.magics.cells.cell import CellRun
from rankscope.magics.cells.monitor import CellMonitor
from rankscope.magics.output.failures import (
    CellError,
    CellTimeout,
    Interrupted,
    tell,
)
from rankscope.magics.output.render import Renderer
from tests.widgets.statuses import cluster, group, op, rank

pytestmark = pytest.mark.processes


class Told:
    """A cluster whose `status` a test sets; `calls` are what it was told to do."""

    def __init__(self, status: ClusterStatus) -> None:
        self.now = status
        self.calls: list[tuple[Any, ...]] = []
        self.restarts_together = False
        self.on_interrupt: Callable[[], None] = lambda: None
        self.verdicts: list[Verdict] = []
        #: What the errors on the ranks say.
        self.told_why: list[Verdict] = []

    def status(
        self, *, fresh: Collection[int] = (), timeout: float = 1
    ) -> ClusterStatus:
        return self.now

    def glance(self, ranks: Sequence[int]) -> ClusterStatus:
        return cluster(*(one for one in self.now.ranks if one.rank in ranks))

    def explain(self) -> list[Verdict]:
        return self.verdicts

    def abort(
        self, groups: Sequence[GroupKey], reason: str, *, verdicts: Sequence[Verdict]
    ) -> None:
        self.calls += [("abort", group.name, reason) for group in groups]
        self.told_why += verdicts

    def end_init(
        self, ranks: Sequence[int], reason: str, culprits: Sequence[int]
    ) -> None:
        self.calls.append(("end_init", tuple(ranks), reason, tuple(culprits)))

    def rebuild(self, group: GroupKey) -> None:
        self.calls.append(("rebuild", group.name))

    def interrupt(self, ranks: Sequence[int], execution: Execution) -> None:
        self.calls.append(("interrupt", tuple(ranks)))
        self.on_interrupt()


class Lines:
    """A screen of which only what is said is looked at."""

    can_redraw = False
    is_rich = True
    is_provisional = False

    def __init__(self) -> None:
        self.said: list[str] = []
        self.hangs: list[Mapping[str, str] | None] = []

    def notify(self, text: str) -> None:
        self.said.append(text)

    def hang(self, bundle: Mapping[str, str] | None) -> None:
        if not self.hangs or bundle != self.hangs[-1]:
            self.hangs.append(bundle)

    def show(self, items: object) -> None: ...

    def partials(self, lines: object) -> None: ...


WAITING = op("all_reduce", 15, elapsed=9.0, source="cell 7 line 5")
STUCK = cluster(
    rank(0, group(enqueued=WAITING, in_flight=1, oldest=WAITING)),
    rank(1, group(enqueued=WAITING, in_flight=1, oldest=WAITING)),
    rank(2, group()),
)
IDLE = cluster(*(rank(number, group(ranks=range(3))) for number in range(3)))


def failed(number: int, ename: str = "ValueError") -> RankError:
    return RankError(number, ename, "boom", cell=7, line=3)


def supervised(status: ClusterStatus, cell: int = 7) -> tuple[Told, CellMonitor, Lines]:
    told, lines = Told(status), Lines()
    execution = Execution("", range(3), cell, None)
    return told, CellMonitor(cast(Cluster, told), execution, lines.notify), lines


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "GRACE", 0.0)


@pytest.mark.usefixtures("no_grace")
def test_ranks_that_wait_for_one_that_raised_are_let_go_with_the_reason() -> None:
    told, monitor, lines = supervised(STUCK)
    monitor.tick({2: failed(2)})
    reason = "rank 2 raised ValueError at cell 7 line 3"
    assert told.calls == [("abort", "default", reason)]
    assert lines.said == [
        "ranks 0–1 in all_reduce #15 at cell 7 line 5, which rank 2 will not join: "
        "group 'default' aborted"
    ]


@pytest.mark.usefixtures("no_grace")
def test_ranks_that_meet_in_init_are_let_go_with_the_first_cause() -> None:
    told, monitor, lines = supervised(
        cluster(rank(0), rank(1, joining_for=3.0), rank(2, joining_for=2.0))
    )
    monitor.tick({0: failed(0, "DistAbortedError"), 3: failed(3)})
    reason = "rank 3 raised ValueError at cell 7 line 3"
    assert told.calls == [("end_init", (1, 2), reason, (3,))]
    assert lines.said == [
        "ranks 1–2 in init_process_group, which rank 3 will not join: ended"
    ]


def test_they_are_given_time_first() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.tick({2: failed(2)})
    assert told.calls == []


@pytest.mark.usefixtures("no_grace")
def test_nobody_is_let_go_while_nobody_has_failed() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.tick({})
    assert told.calls == []


@pytest.mark.usefixtures("no_grace")
def test_the_reason_is_the_first_cause_not_its_consequence() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.tick({2: failed(2, "DistAbortedError"), 1: failed(1, "KeyError")})
    assert told.calls[0][2] == "rank 1 raised KeyError at cell 7 line 3"


@pytest.mark.usefixtures("no_grace")
def test_a_group_that_was_aborted_from_here_is_rebuilt() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.tick({2: failed(2)})
    finish(monitor)
    assert monitor.restore(False) == "group 'default' rebuilt"
    assert told.calls[-1] == ("rebuild", "default")


def finish(monitor: CellMonitor) -> None:
    for number in monitor._execution.ranks_running:
        monitor._execution.finish(number)


@pytest.mark.usefixtures("no_grace")
def test_a_group_that_ended_with_its_cell_is_not_rebuilt() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.tick({2: failed(2)})
    finish(monitor)
    told.now = cluster(*(rank(number, group("other")) for number in range(3)))
    assert monitor.restore(True) == ""
    assert told.calls[-1][0] == "abort"


@pytest.mark.usefixtures("no_grace")
def test_a_rebuild_that_fails_is_told_of() -> None:
    told, monitor, _ = supervised(STUCK)
    told.rebuild = _refuse_rebuild  # type: ignore[method-assign]
    monitor.tick({2: failed(2)})
    finish(monitor)
    assert monitor.restore(False) == ("rebuilding group 'default': rank 1: no answer")


def _refuse_rebuild(group: GroupKey) -> None:
    raise ClusterError("rank 1: no answer")


def test_a_group_that_others_aborted_is_left_for_a_person_to_look_at() -> None:
    gone = cluster(rank(0, group(ranks=(0,), state="aborted")))
    told, monitor, _ = supervised(gone)
    finish(monitor)
    hint = monitor.restore(False)
    assert hint == "group 'default' aborted: %dist_rebuild makes it usable"
    assert told.calls == []


@pytest.mark.parametrize(
    ("ename", "status", "why"),
    [
        ("DistTimeoutError", STUCK, "rank 2 has not entered all_reduce #15"),
        # A wait that has passed, and the op has ended since; and no wait at all.
        ("DistTimeoutError", IDLE, ""),
        ("ValueError", STUCK, ""),
    ],
)
def test_ops_that_a_wait_was_too_short_for_are_explained(
    ename: str, status: ClusterStatus, why: str
) -> None:
    told, monitor, _ = supervised(status)
    text = "rank 2 has not entered all_reduce #15"
    key = group().key
    found = Verdict(Fault.MISSING_RANKS, key, (2,), (0, 1), "all_reduce", 15, text)
    told.verdicts = [found]
    errors = {0: failed(0, ename)}
    assert monitor.explain(errors) == why
    assert (f"\nWhy: {text}\n" in tell(errors.values(), "next", why)) == bool(why)


def test_a_dead_rank_comes_first() -> None:
    dead = cluster(rank(0, group()), rank(1, group(), state="dead"))
    _, monitor, _ = supervised(dead)
    finish(monitor)
    assert monitor.restore(False) == ("%dist_restart and %dist_rebuild replace rank 1")


def test_a_dead_rank_of_an_mpi_job_ends_the_job() -> None:
    dead = cluster(rank(0, group()), rank(1, group(), state="dead"))
    told, monitor, _ = supervised(dead)
    told.restarts_together = True
    finish(monitor)
    assert monitor.restore(False) == (
        "rank 1 dead: %dist_restart all restarts the MPI job"
    )


def test_ranks_that_failed_out_of_step_are_told_how_to_get_even() -> None:
    uneven = cluster(rank(0, group(enqueued=op(seq=15))), rank(1, group()))
    told, monitor, _ = supervised(uneven)
    finish(monitor)
    hint = monitor.restore(False)
    assert hint == "group 'default' out of step: %dist_rebuild resets it"
    assert told.calls == []


def test_after_an_interrupt_they_are_evened_without_asking() -> None:
    uneven = cluster(rank(0, group(enqueued=op(seq=15))), rank(1, group()))
    told, monitor, _ = supervised(uneven)
    finish(monitor)
    assert monitor.restore(True) == "group 'default' rebuilt"
    assert told.calls == [("rebuild", "default")]


def test_stopping_interrupts_who_is_free_and_aborts_what_is_in_flight() -> None:
    told, monitor, _ = supervised(STUCK)
    monitor.stop("interrupted from the notebook")
    assert told.calls == [
        # The others are ended by the abort.
        ("interrupt", (2,)),
        ("abort", "default", "interrupted from the notebook"),
    ]
    monitor._execution.finish(2, failed(2, "KeyboardInterrupt"))
    assert monitor.places() == (
        "ranks 0–1 in all_reduce #15 at cell 7 line 5, rank 2 at cell 7 line 3"
    )


@pytest.mark.usefixtures("no_grace")
def test_ranks_that_do_not_answer_an_abort_are_told_of() -> None:
    told, monitor, lines = supervised(STUCK)
    told.abort = _refuse  # type: ignore[method-assign]
    monitor.tick({2: failed(2)})
    assert lines.said[0] == "aborting group 'default': rank 1: no answer"
    monitor.stop("deadline")
    assert len(lines.said) == 2
    assert monitor.restore(True) == "group 'default' aborted"


def _refuse(groups: Sequence[GroupKey], reason: str, **options: Any) -> None:
    raise ClusterError("rank 1: no answer")


# -- the wait --------------------------------------------------------------------


def cell_on(told: Told, limit: float | None = None) -> tuple[Execution, CellRun]:
    execution = Execution("", range(3), 7, None)
    run = CellRun(
        cast(Cluster, told),
        execution,
        cast(Renderer, Lines()),
        serve=lambda: None,
        limit=limit,
    )
    return execution, run


def end(execution: Execution, ename: str | None = None) -> None:
    for number in execution.ranks_running:
        execution.finish(number, failed(number, ename) if ename else None)


def test_a_cell_that_goes_well_ends_quietly() -> None:
    execution, run = cell_on(Told(IDLE))
    end(execution)
    run.run()


def test_a_cell_that_hangs_shows_why_until_it_goes_on() -> None:
    execution, lines = Execution("", range(3), 7, None), Lines()
    why = {"text/plain": "Missing ranks: rank 2 has not entered"}
    asked: list[Collection[int]] = []

    def hang(ranks: Collection[int]) -> Mapping[str, str] | None:
        asked.append(ranks)
        if len(asked) > 2:
            end(execution)
        return why if len(asked) > 1 else None

    CellRun(
        cast(Cluster, Told(STUCK)),
        execution,
        cast(Renderer, lines),
        serve=lambda: None,
        hang=hang,
    ).run()
    assert list(asked[0]) == [0, 1, 2]
    assert lines.hangs == [None, why, None]


@pytest.mark.usefixtures("no_grace")
def test_a_cell_says_which_rank_an_abort_has_left_in_it() -> None:
    told, monitor, _ = supervised(STUCK)
    execution = monitor._execution
    aborted = {number: failed(number, "DistAbortedError") for number in (0, 1)}
    for number, error in aborted.items():
        execution.finish(number, error)
    told.now = cluster(rank(2, group(), state="busy", line="cell 7 line 9"))
    said = monitor.left_running({0: failed(0)})
    assert said is not None
    # A call that no status tells of, such as torch's init_process_group.
    assert said["text/plain"] == (
        "rank 0 raised ValueError at cell 7 line 3; rank 2 is still at cell 7 line 9 "
        "(an interrupt ends the cell)"
    )
    said = monitor.left_running(aborted)
    assert said is not None
    assert said["text/plain"] == (
        "Aborted on ranks 0–1; rank 2 is still at cell 7 line 9, which an abort does "
        "not end (an interrupt ends the cell)"
    )
    # That one still waits: it is not left in its code.
    told.now = cluster(rank(2, group(enqueued=WAITING, in_flight=1, oldest=WAITING)))
    assert monitor.left_running(aborted) is None
    execution.finish(2, None)
    assert monitor.left_running(aborted) is None


def test_a_cell_that_failed_ends_with_one_line() -> None:
    execution, run = cell_on(Told(IDLE))
    end(execution, "ValueError")
    with pytest.raises(CellError) as caught:
        run.run()
    assert str(caught.value) == "ranks 0–2: ValueError: boom at cell 7 line 3"
    assert set(caught.value.errors) == {0, 1, 2}


def test_the_deadline_stops_the_ranks() -> None:
    told = Told(STUCK)
    execution, run = cell_on(told, limit=0.01)
    told.on_interrupt = lambda: end(execution, "KeyboardInterrupt")
    with pytest.raises(CellTimeout) as caught:
        run.run()
    reason = "cell 7 passed its deadline of 0.01 s"
    assert ("abort", "default", reason) in told.calls
    assert str(caught.value).startswith(
        "not done after 0.01 s; ranks 0–1 in all_reduce"
    )
    assert str(caught.value).endswith("\nNext: group 'default' rebuilt")


def test_the_deadline_says_why_the_ranks_waited_here_and_on_them() -> None:
    told = Told(STUCK)
    (key,) = STUCK.group_keys
    other = GroupKey("tp", (0, 1))
    why, elsewhere = (
        Verdict(Fault.MISSING_RANKS, one, (2,), (0, 1), "all_reduce", 4, text)
        for one, text in ((key, "rank 2 has not entered"), (other, "elsewhere"))
    )
    told.verdicts = [why, elsewhere]
    execution, run = cell_on(told, limit=0.01)
    told.on_interrupt = lambda: end(execution, "KeyboardInterrupt")
    with pytest.raises(CellTimeout) as caught:
        run.run()
    # Once: the verdict has the places of its ranks.
    said = str(caught.value)
    assert said == (
        "not done after 0.01 s\nWhy: rank 2 has not entered; elsewhere\n"
        "Next: group 'default' rebuilt"
    )
    # The cluster chooses those of the group.
    assert told.told_why == [why, elsewhere]


def test_ctrl_c_stops_the_ranks_and_says_where_they_were() -> None:
    told = Told(IDLE)
    execution, run = cell_on(told)
    told.on_interrupt = lambda: end(execution, "KeyboardInterrupt")
    pump, pumped = run._stream.pump, threading.Event()

    def interrupted(timeout: float) -> None:
        if not pumped.is_set():
            pumped.set()
            raise KeyboardInterrupt
        pump(timeout)

    run._stream.pump = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted) as caught:
        run.run()
    said = str(caught.value)
    assert re.fullmatch(r"after \d+\.\d s; ranks 0–2 at cell 7 line 3", said)
    assert told.calls == [("interrupt", (0, 1, 2))]


def test_a_cell_that_ends_while_it_is_to_be_stopped_leaves_the_next_one_alone() -> None:
    told = Told(STUCK)
    execution, run = cell_on(told, limit=0.01)
    begun, ended = threading.Event(), threading.Event()

    def explain() -> list[Verdict]:
        begun.set()
        assert ended.wait(60)
        return []

    told.explain = explain  # type: ignore[method-assign]

    def end_late() -> None:
        assert begun.wait(60)
        end(execution)
        ended.set()

    ender = threading.Thread(target=end_late)
    ender.start()
    with pytest.raises(CellTimeout):
        run.run()
    ender.join()
    until(lambda: not any(t.name == "rankscope-stop" for t in threading.enumerate()))
    assert [one for one in told.calls if one[0] != "rebuild"] == []


def test_ranks_that_do_not_stop_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankscope.magics.cells.cell.STOP", 0.5)
    monkeypatch.setattr("rankscope.magics.cells.cell.STOP_RANK", 0.0)
    monkeypatch.setattr("rankscope.magics.cells.cell.AGAIN", 0.0)
    told = Told(IDLE)
    execution, run = cell_on(told, limit=0.01)
    told.on_interrupt = lambda: execution.finish(0)
    with pytest.raises(CellTimeout) as caught:
        run.run()
    message = str(caught.value)
    assert message.splitlines() == [
        "not done after 0.01 s; ranks 1–2 did not stop yet",
        "Next: %dist_rebuild once they have stopped (%dist_status); %dist_restart 1-2 "
        "replaces them, which loses their variables",
    ]
    # They were told more than once: a first interrupt may be caught.
    until(lambda: len(told.calls) > 1)


def test_a_second_interrupt_ends_the_wait_for_ranks_that_do_not_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rankscope.magics.cells.cell.STOP", 3600.0)
    told = Told(IDLE)
    _, run = cell_on(told)
    interrupts = iter([KeyboardInterrupt, KeyboardInterrupt])

    def interrupted(timeout: float) -> None:
        raise next(interrupts)

    run._stream.pump = interrupted  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="; ranks 0–2 did not stop yet\nNext: "):
        run.run()
    # Nothing interrupts the next cell.
    until(lambda: not any(t.name == "rankscope-stop" for t in threading.enumerate()))
