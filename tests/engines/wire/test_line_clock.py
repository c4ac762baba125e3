"""How long a rank has been seen at one line."""

from __future__ import annotations

from rankscope.backends.conformance.waiting import until
from rankscope.engines.wire.line_clock import LineClock


def test_time_runs_while_the_line_stays() -> None:
    line = "cell 7 line 3"
    clock = LineClock(lambda: line)
    assert clock.look()["line"] == "cell 7 line 3"
    until(lambda: clock.look()["line_for"] > 0.02, 60, "time to pass")
    line = "cell 7 line 4"
    assert clock.look() == {"line": "cell 7 line 4", "line_for": 0.0}
    line = ""
    assert clock.look() == {"line": "", "line_for": None}
