"""How long a rank has been seen at one line."""

from __future__ import annotations

from rankscope.backends.conformance.waiting import until
from rankscope.engines.wire.summaries import LineClock


def test_time_runs_while_the_line_stays() -> None:
    line = "cell 7 line 3"
    clock = LineClock(lambda: line)
    assert clock.look()[0] == "cell 7 line 3"
    until(lambda: (clock.look()[1] or 0.0) > 0.02, 60, "time to pass")
    line = "cell 7 line 4"
    assert clock.look() == ("cell 7 line 4", 0.0)
    line = ""
    assert clock.look() == ("", None)
