"""Session: what it keeps of the verdicts on the present cluster."""

from __future__ import annotations

import time
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.magics.session import Session
from tests.widgets import simulated


def test_a_cell_that_hangs_has_one_output_until_the_verdict_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A question in it would be gone with the next output, a second later."""
    clock = count()
    monkeypatch.setattr("time.strftime", lambda _: f"12:00:{next(clock):02}")
    board: Any = SimpleNamespace(
        show_verdicts=lambda _: None,
        hang_html=lambda text, _, when: f"{when} {text}",
    )
    session = Session()
    session._board = board
    began = time.monotonic()
    _, (verdict,) = simulated.hang(4, 2)

    def told(*verdicts: Any) -> str | None:
        session._tell(verdicts)
        found = session.hang([0, 1, 2, 3], began)
        if found is None:
            return None
        # Where there are no widgets, as in jupyter console, nothing else ends it.
        assert found["text/plain"].endswith(" (an interrupt ends the cell)")
        return found["text/html"]

    first = told(verdict)
    assert first is not None
    assert first.startswith("12:00:00 Missing ranks: ")
    assert told(verdict) == first
    other = simulated.hang(4, 1)[1][0]
    assert (told(other, verdict) or "").startswith("12:00:02 ")
    assert told(verdict) == first
    assert told() is None
    assert told(verdict) == first.replace("12:00:00", "12:00:05")
    # It is why that cell hung, and not the next one.
    assert session.hang([0, 1, 2, 3], time.monotonic()) is None
