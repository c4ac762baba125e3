"""How long a rank has been seen at one line, and how many cores it has used."""

from __future__ import annotations

from rankscope.backends.conformance.waiting import until
from rankscope.engines.wire.summaries import PERIOD, CpuClock, LineClock


def test_time_runs_while_the_line_stays() -> None:
    line = "cell 7 line 3"
    clock = LineClock(lambda: line)
    assert clock.look()[0] == "cell 7 line 3"
    until(lambda: (clock.look()[1] or 0.0) > 0.02, 60, "time to pass")
    line = "cell 7 line 4"
    assert clock.look() == ("cell 7 line 4", 0.0)
    # It has issued an op since: in a loop, it comes to the same line again.
    until(lambda: (clock.look()[1] or 0.0) > 0.02, 60, "time to pass")
    assert clock.look(1) == ("cell 7 line 4", 0.0)
    line = ""
    assert clock.look() == ("", None)


def test_processor_time_is_measured_over_a_second() -> None:
    now, used = 100.0, 7.0
    clock = CpuClock(lambda: (now, used))
    assert clock.look() is None
    now, used = now + PERIOD / 2, used + PERIOD / 2
    assert clock.look() is None
    now, used = now + PERIOD / 2, used + PERIOD
    assert clock.look() == 1.5
    # As it was, until the next second is over.
    now, used = now + PERIOD / 2, used + PERIOD
    assert clock.look() == 1.5
    now += 3 * PERIOD / 2
    assert clock.look() == 0.5


def test_it_is_that_of_this_process() -> None:
    clock = CpuClock()

    def work_and_look() -> float | None:
        # A wait alone takes less than is shown.
        sum(range(100_000))
        return clock.look()

    until(work_and_look, 60, "a second of work")
