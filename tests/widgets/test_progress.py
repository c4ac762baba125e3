"""The line of progress: in place in a notebook and a terminal, once elsewhere."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import cast

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rankscope.backends.conformance.waiting import until
from rankscope.widgets import ProgressLine


class Publisher:
    """Notes what is published."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.names: list[str] = []

    def publish(
        self, data: dict[str, str], *, update: bool, transient: dict[str, str]
    ) -> None:
        self.events.append((data["text/plain"], update))
        self.names.append(transient["display_id"])


def line_on(kernel: bool) -> tuple[ProgressLine, Publisher]:
    shell = SimpleNamespace(display_pub=Publisher())
    if kernel:
        shell.kernel = object()
    return ProgressLine(cast(InteractiveShell, shell)), shell.display_pub


def test_a_notebook_keeps_one_display_with_the_last_text() -> None:
    line, publisher = line_on(kernel=True)
    with line:
        line.update("starting")
        line.update("still starting")
        line.done("ready")
    assert publisher.events == [
        ("starting", False),
        ("still starting", True),
        ("ready", True),
    ]


def test_a_line_has_the_name_of_no_other_one() -> None:
    """Where a line is gone, the next may lie at the same place in memory."""
    names = []
    for _ in range(100):
        line, publisher = line_on(kernel=True)
        line.done("ready")
        line.done("ready again")
        names.append(set(publisher.names))
    assert {len(own) for own in names} == {1}
    assert len(set.union(*names)) == 100


def test_a_line_that_came_to_nothing_is_taken_away() -> None:
    line, publisher = line_on(kernel=True)

    def start() -> None:
        with line:
            line.update("starting")
            raise KeyError

    with pytest.raises(KeyError):
        start()
    assert publisher.events == [("starting", False), ("", True)]


def test_a_step_that_takes_long_has_its_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the next one begins, and never after the end."""
    monkeypatch.setattr("rankscope.widgets.progress.TICK", 0.001)
    monkeypatch.setattr("rankscope.widgets.progress.PATIENCE", 0.0)
    line, publisher = line_on(kernel=True)
    with line:
        line.update("starting")
        until(lambda: ("starting (0 s)", True) in publisher.events, 10, "the seconds")
        line.done("ready")
    assert publisher.events[-1] == ("ready", True)


def test_a_terminal_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    line, _ = line_on(kernel=False)
    with line:
        line.update("starting")
        line.done("ready")
    assert terminal.getvalue() == "\r\x1b[2Kstarting\r\x1b[2Kready\n"


def test_a_file_gets_the_last_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    line, _ = line_on(kernel=False)
    with line:
        line.update("starting")
        line.done("ready")
    assert capsys.readouterr().out == "ready\n"


def test_a_transfer_shows_a_bar_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("rankscope.widgets.progress.time.monotonic", lambda: now)
    line, publisher = line_on(kernel=True)
    with line:
        show = line.transfer("x → rank 0")
        now = 0.9
        show(1 << 20, 4 << 20)
        now = 2.0
        show(0, 0)
        show(3 << 20, 4 << 20)
    shown = f"x → rank 0  {'█' * 18}{'░' * 6}  3 MiB of 4 MiB · 1.57 MB/s"
    assert publisher.events == [(shown, False), ("", True)]
