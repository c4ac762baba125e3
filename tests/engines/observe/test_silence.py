"""Why a process does not answer, by `/proc`: of real processes, and of samples."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.observe.verdicts import Fault, Verdict
from rankscope.engines import ClusterStatus
from rankscope.engines.observe import diagnosing
from rankscope.engines.observe.diagnosing import (
    STALL,
    StallWatch,
    by_cause,
    causes_by_group,
    diagnose_once,
)
from rankscope.engines.observe.flight_records import FlightRecords
from rankscope.engines.observe.profiling import RankStacks
from rankscope.engines.observe.rank_slots import SILENCE
from rankscope.engines.observe.silence import (
    Cause,
    Sample,
    cause_of,
    describe,
    sample,
    take_samples,
)
from rankscope.engines.wire.requests import NcclReport
from tests.widgets import statuses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

#: A process with a thread that beats, as the status thread of an agent; a line on its
#: input makes the main thread call `sleep` with the GIL held.
CHILD = """
import ctypes, sys, threading
stop = threading.Event()
def beat():
    while not stop.wait(0.1):
        pass
thread = threading.Thread(target=beat, daemon=True)
thread.start()
print(thread.native_id, flush=True)
sys.stdin.readline()
ctypes.PyDLL(None).sleep(60)
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and its beating thread."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def cause(child: tuple[subprocess.Popen[str], int]) -> Cause | None:
    """The cause between two samples that are a second apart."""
    process, thread = child
    before = sample(process.pid, thread)
    assert before is not None

    def after() -> Sample | None:
        found = sample(process.pid, thread)
        return found if found and found.at - before.at >= 1 else None

    return cause_of(before, until(after))


@pytest.mark.processes
def test_a_process_that_beats_has_no_cause(
    child: tuple[subprocess.Popen[str], int],
) -> None:
    # A busy machine may let it wait for a CPU, which is not taken for the GIL.
    assert cause(child) in (None, Cause.STARVED)
    until(lambda: cause(child) is None)


@pytest.mark.processes
def test_a_process_that_is_stopped(child: tuple[subprocess.Popen[str], int]) -> None:
    process, thread = child
    os.kill(process.pid, signal.SIGSTOP)
    # One sample is enough.
    until(lambda: cause_of(None, sample(process.pid, thread)) is Cause.STOPPED)
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: cause_of(None, sample(process.pid, thread)) is None)


@pytest.mark.processes
def test_a_call_that_holds_the_gil(child: tuple[subprocess.Popen[str], int]) -> None:
    process, _ = child
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    # On a machine with much to do the scheduler may be what it waits for, at times.
    until(lambda: cause(child) is Cause.HOLDS_GIL)


@pytest.mark.processes
def test_a_process_that_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert sample(process.pid, None) is None
    assert cause_of(None, None) is None


def at(seconds: float, sleeps: int | None, *delays: float, state: str = "S") -> Sample:
    return Sample(seconds, state, sleeps, {str(i): d for i, d in enumerate(delays)})


def test_a_thread_that_gets_no_cpu_is_not_taken_for_one_that_wants_the_gil() -> None:
    assert cause_of(at(0, 0, 1.0), at(1, 200, 1.8)) is Cause.STARVED
    assert cause_of(at(0, 0, 1.0), at(1, 200, 1.7)) is Cause.HOLDS_GIL
    # What a thread waited for before it was seen first is not known.
    assert cause_of(at(0, 0), at(1, 200, 30.0)) is Cause.HOLDS_GIL


def test_what_is_not_known_is_not_claimed() -> None:
    assert cause_of(at(0, 0), at(1, 49)) is None
    assert cause_of(at(0, None), at(1, 300)) is None
    assert cause_of(None, at(1, 300)) is None
    assert describe(None, 2, 7, "far") == ""


def test_only_ranks_of_this_host_that_are_late_are_looked_at() -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    ranks = [
        statuses.rank(0, heartbeat_age=1.1, **here),
        statuses.rank(1, heartbeat_age=0.9, **here),
        statuses.rank(2, heartbeat_age=1.1, **{**here, "host": "far"}),
        statuses.rank(3, heartbeat_age=None, **here),
        statuses.rank(4, heartbeat_age=9, status_thread=None, **here),
        statuses.rank(5, heartbeat_age=9, state="dead", **here),
    ]
    found = take_samples(ranks)
    assert sorted(found) == [0, 3, 4]
    assert found[4].sleeps is None


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Cause.STOPPED, "is stopped .*: kill -CONT 7 continues it, %dist_restart 2"),
        (Cause.HOLDS_GIL, "a call holds the GIL.* --pid 7 .*: %dist_restart 2"),
        (Cause.STARVED, "its threads wait for a CPU"),
        (Cause.ALONE, "other ranks of far answer.* --pid 7.*: %dist_restart 2"),
        (Cause.HOST, "no rank of far answers: the host or the network to it is down"),
    ],
)
def test_each_cause_is_described_with_what_to_do(found: Cause, text: str) -> None:
    assert re.search(text, describe(found, 2, 7, "far"))
    # What a notebook watches only, it cannot replace.
    of_script = describe(found, 2, 7, "far", script=True)
    assert "%dist_restart" not in of_script
    assert ("kill -9 7 ends it, and torchrun" in of_script) == ("%dist" in text)


class Ranks:
    """A cluster of rank 0 on this host and ranks 1 and 2 on another one.

    Rank 2 has not been heard of for `age` seconds; with `neighbour` rank 1 answers.
    """

    aborting = False

    def __init__(self, age: float, neighbour: bool) -> None:
        op = statuses.op(state="started", elapsed=0.1)
        group = statuses.group(ranks=range(3), oldest=op, in_flight=1)
        self.found = statuses.cluster(
            statuses.rank(0, group, host=socket.gethostname(), pid=os.getpid()),
            statuses.rank(
                1, group, host="far", heartbeat_age=0.1 if neighbour else age + 0.7
            ),
            statuses.rank(2, group, host="far", heartbeat_age=age),
        )

    def status(self, *, fresh: bool = False, timeout: float = 2.0) -> ClusterStatus:
        return self.found

    def glance(self) -> ClusterStatus:
        return self.found

    def flight_records(
        self, ranks: Iterable[int], *, last: int | None = None
    ) -> FlightRecords:
        return FlightRecords()

    def stacks(self, ranks: Iterable[int]) -> RankStacks:
        return RankStacks({})

    def nccl_report(self, rank: int) -> NcclReport | None:
        return None

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None:
        raise NotImplementedError("a diagnosis tells the ranks nothing")


class Slow(Ranks):
    """Ranks that are waited for while `answers` is cleared."""

    def __init__(self) -> None:
        super().__init__(2.4, neighbour=True)
        self.asked, self.answers = threading.Event(), threading.Event()
        self.told: list[Sequence[Verdict]] = []

    def status(self, *, fresh: bool = False, timeout: float = 2.0) -> ClusterStatus:
        self.asked.set()
        assert self.answers.wait(60)
        return self.found

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None:
        self.told.append(verdicts)


def test_the_end_of_a_watch_waits_for_no_rank() -> None:
    ranks = Slow()
    watch = StallWatch(ranks, ranks.told.append)
    assert ranks.asked.wait(60)
    watch.close()
    ranks.answers.set()
    watch._thread.join(60)
    assert not watch._thread.is_alive()
    assert ranks.told == []


class Clocked(Ranks):
    """A rank is silent. Each diagnosis takes half a second of `now`."""

    def __init__(self) -> None:
        super().__init__(2.4, neighbour=True)
        self.now, self.looks, self.asked = 0.0, 0, 0
        self.told: list[Sequence[Verdict]] = []

    def monotonic(self) -> float:
        return self.now

    def glance(self) -> ClusterStatus:
        self.looks += 1
        return self.found

    def status(self, *, fresh: bool = False, timeout: float = 2.0) -> ClusterStatus:
        self.asked += 1
        self.now += 0.5
        return self.found

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None:
        self.told.append(verdicts)


def test_a_watch_rests_between_diagnoses_that_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of many ranks, which an abort would wait for; not before it has told."""
    ranks = Clocked()
    clock = SimpleNamespace(monotonic=ranks.monotonic, time_ns=time.time_ns)
    monkeypatch.setattr(diagnosing, "time", clock)
    watch = StallWatch(ranks, lambda verdicts: None)

    def look_twice() -> None:
        seen = ranks.looks
        until(lambda: ranks.looks >= seen + 2)

    until(lambda: ranks.told)
    look_twice()
    assert ranks.asked == 1
    ranks.now += diagnosing.RESTS * 0.5
    until(lambda: ranks.asked == 2)
    # Nor while an abort asks the same ranks.
    ranks.aborting = True
    ranks.now += diagnosing.RESTS * 0.5
    look_twice()
    assert ranks.asked == 2
    ranks.aborting = False
    until(lambda: ranks.asked == 3)
    # Its end is told at once.
    ranks.found = statuses.cluster(*(statuses.rank(n) for n in range(3)))
    until(lambda: ranks.told[-1] == [])
    assert ranks.asked == 3
    watch.close()
    watch._thread.join(60)
    assert not watch._thread.is_alive()


def test_a_rank_alone_silent_on_another_host_is_named_at_once() -> None:
    (verdict,) = diagnose_once(Ranks(2.4, neighbour=True), STALL, SILENCE)
    assert verdict.culprits == (2,)
    # No second diagnosis is needed: it is there within 3 s.
    assert verdict.certain
    assert "other ranks of far answer, so its process is stopped" in verdict.text
    assert diagnose_once(Ranks(1.9, neighbour=True), STALL, SILENCE) == []


def test_a_silent_host_is_named_at_once() -> None:
    """It was a process that is stopped, or holds the GIL, first of all."""
    (verdict,) = diagnose_once(Ranks(2.4, neighbour=False), STALL, SILENCE)
    assert verdict.culprits == (1, 2)
    assert verdict.certain
    said = r"ranks 1–2 have not answered since [\d:]{8}: no rank of far answers:"
    assert re.match(said, verdict.text)


def test_what_the_ranks_are_told_is_by_group() -> None:
    one, two = GroupKey("one", (0, 1)), GroupKey("two", (0, 2))
    found = [
        Verdict(Fault.RANK_NOT_RESPONDING, one, (1,), (0,), "all_reduce", 1, "frozen"),
        Verdict(Fault.MISSING_RANKS, two, (2,), (0,), "all_reduce", 1, "missing"),
        Verdict(Fault.EXECUTION_HANG, two, (0, 2), (), "all_reduce", 1, "hangs"),
    ]
    assert causes_by_group(found) == {
        one.id: ("frozen", (1,)),
        two.id: ("missing; hangs", (2,)),
    }
    assert by_cause([two, one], found) == [([two], found[1:]), ([one], found[:1])]
