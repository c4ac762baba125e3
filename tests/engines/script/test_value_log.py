"""Numbers about a rank for the log of its program, every few seconds."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.world import world
from rankscope.engines.script.value_log import ValueLog, Values
from tests.widgets import statuses

DEADLINE = 30.0
GROUP = statuses.group(
    issued=10,
    op_seconds=2.0,
    blocked_seconds=1.5,
    moved={"all_reduce": (8, 800), "barrier": (2, 0)},
)


def test_what_grows_is_told_since_the_last_look() -> None:
    values = Values()
    values.look([GROUP])
    hung = statuses.op(seq=13, state="started", elapsed=7.0)
    later = replace(
        GROUP,
        op_seconds=2.5,
        blocked_seconds=1.75,
        moved={"all_reduce": (9, 900), "barrier": (3, 0)},
        in_flight=1,
        oldest=hung,
    )
    assert values.look([later]) == {
        "rankscope/ops": 2.0,
        "rankscope/bytes": 100.0,
        "rankscope/op_seconds": 0.5,
        "rankscope/waiting_seconds": 0.25,
        "rankscope/in_flight": 1.0,
        "rankscope/oldest_seconds": 7.0,
        "rankscope/stalls": 0.0,
        "rankscope/aborts": 0.0,
    }
    # Made anew, it counts from the start.
    fresh = replace(GROUP, generation=1, moved={"all_reduce": (1, 100)}, issued=1)
    assert values.look([fresh])["rankscope/ops"] == 1.0


def test_an_op_stalls_once_and_a_group_is_aborted_once() -> None:
    values = Values(after=5.0)
    one = replace(GROUP, oldest=statuses.op(seq=13, elapsed=7.0), in_flight=1)
    two = replace(one, oldest=statuses.op(seq=13, elapsed=17.0))
    three = replace(GROUP, state="aborted", aborts=1)
    # Aborted and made anew since the last look.
    four = replace(GROUP, generation=2, aborts=2)
    looks = [values.look([group]) for group in (GROUP, one, two, three, three, four)]
    assert [one["rankscope/stalls"] for one in looks] == [0, 1, 0, 0, 0, 0]
    assert [one["rankscope/aborts"] for one in looks] == [0, 0, 0, 1, 0, 1]


def test_what_a_group_does_not_know_has_no_name() -> None:
    torchs = replace(GROUP, name="tp", op_seconds=None, blocked_seconds=None, moved={})
    unused = replace(torchs, issued=0, completed=None)
    assert "rankscope/ops" in Values().look([GROUP, unused])
    found = Values().look([GROUP, torchs])
    assert found.keys() == {
        f"rankscope/{name}"
        for name in ("in_flight", "oldest_seconds", "stalls", "aborts")
    }


def test_it_is_called_on_a_thread_of_its_own_until_it_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    looks = threading.Semaphore(0)

    def look() -> list[object]:
        looks.release()
        return []

    monkeypatch.setattr(world, "summary", look)

    def log(values: dict[str, float]) -> None:
        calls.append(threading.current_thread().name)
        assert values["rankscope/in_flight"] == 0
        if len(calls) == 3:
            raise RuntimeError("no network")

    with caplog.at_level(logging.ERROR):
        made = ValueLog(log, 0.01)
        until(lambda: not made._thread.is_alive(), DEADLINE)
    assert calls == ["rankscope-log"] * 3
    assert "is not called again" in caplog.text
    assert "no network" in caplog.text
    made.close()


def test_it_ends_with_the_script() -> None:
    called = threading.Event()
    made = ValueLog(lambda values: called.set(), 0.01)
    assert called.wait(DEADLINE)
    made.close()
    assert not made._thread.is_alive()
