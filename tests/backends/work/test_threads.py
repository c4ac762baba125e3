"""The thread of a background loop: when it works, naps, lingers and ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.work.threads import BackgroundLoop

Make = Callable[..., BackgroundLoop]


class Job:
    """Something to do: returns the `delays` one after the other, then ``None``."""

    def __init__(self, *delays: float | None) -> None:
        self.delays = list(delays)
        self.calls = 0
        self.threads: set[threading.Thread] = set()

    def __call__(self) -> float | None:
        self.calls += 1
        self.threads.add(threading.current_thread())
        return self.delays.pop(0) if self.delays else None


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def loop(work: Any, linger: float = 0.0) -> BackgroundLoop:
        made.append(BackgroundLoop("test-loop", work, linger=linger))
        return made[-1]

    yield loop
    for one in made:
        one.stop(10)


def test_no_thread_before_the_first_kick(make: Make) -> None:
    job = Job()
    loop = make(job)
    assert not loop.running
    assert job.calls == 0


def test_it_works_until_there_is_nothing_to_do_and_ends(make: Make) -> None:
    job = Job(0.0, 0.001, 0.001)
    loop = make(job)
    assert loop.kick()
    until(lambda: not loop.running)
    assert not job.delays
    (thread,) = job.threads
    assert thread.daemon
    thread.join(10)
    assert not thread.is_alive()


def test_a_kick_ends_a_nap(make: Make) -> None:
    job = Job(60.0)
    loop = make(job)
    loop.kick()
    until(lambda: job.calls == 1)
    loop.kick()
    until(lambda: job.calls > 1)
    assert len(job.threads) == 1


def test_a_kick_within_the_linger_finds_the_same_thread(make: Make) -> None:
    job = Job()
    loop = make(job, linger=60)
    for calls in (1, 3, 5):
        loop.kick()
        until(lambda calls=calls: job.calls > calls)  # type: ignore[misc]
    assert loop.running
    assert len(job.threads) == 1


def test_the_thread_ends_after_the_linger_and_a_kick_starts_another(make: Make) -> None:
    job = Job()
    loop = make(job, linger=0.05)
    began = time.monotonic()
    loop.kick()
    until(lambda: not loop.running)
    assert time.monotonic() - began >= 0.05
    loop.kick_if_idle()
    until(lambda: len(job.threads) == 2 and not loop.running)


def test_work_that_was_added_without_a_kick_is_seen(make: Make) -> None:
    """Added while `work` had just found nothing, when the loop was not yet idle."""
    todo: list[str] = []
    done: list[str] = []

    def work() -> float | None:
        if todo:
            done.append(todo.pop())
            return 0.0
        if not done:
            todo.append("late")
            # The thread is about to say that it is idle: no kick is needed yet.
            loop.kick_if_idle()
        return None

    loop = make(work, linger=60)
    loop.kick()
    until(lambda: done == ["late"])


def test_kicks_of_many_threads_lose_nothing(make: Make) -> None:
    todo: list[int] = []
    done: list[int] = []

    def work() -> float | None:
        while todo:
            done.append(todo.pop())
        return None

    loop = make(work)

    def add() -> None:
        for number in range(500):
            todo.append(number)
            loop.kick_if_idle()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(done) == 2000)


def test_an_exception_is_logged_and_does_not_end_the_loop(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def work() -> float | None:
        calls.append(threading.current_thread())
        if len(calls) == 1:
            raise KeyError("route")
        return None

    loop = make(work)
    loop.kick()
    until(lambda: len(calls) >= 2)
    assert "KeyError: 'route'" in caplog.text
    assert "test-loop" in caplog.text
    assert len(set(calls)) == 1


def test_it_stops_for_as_long_as_it_is_told(make: Make) -> None:
    job = Job(60.0)
    loop = make(job)
    loop.kick()
    until(lambda: job.calls == 1)
    loop.stop(10)
    (thread,) = job.threads
    assert not thread.is_alive()
    assert not loop.kick()
    loop.kick_if_idle()
    assert not loop.running
    loop.resume()
    assert loop.kick()
    until(lambda: len(job.threads) == 2)


def test_a_loop_that_was_stopped_while_it_worked_starts_again(make: Make) -> None:
    inside, over = threading.Event(), threading.Event()

    def work() -> float | None:
        inside.set()
        assert over.wait(30)
        return next(delays, None)

    # The work during which it is stopped says that there is more to do.
    delays = iter([0.0])
    loop = make(work)
    loop.kick()
    assert inside.wait(30)
    [thread] = [one for one in threading.enumerate() if one.name == "test-loop"]
    loop.stop(0)
    over.set()
    thread.join(30)
    inside.clear()
    loop.resume()
    loop.kick_if_idle()
    assert inside.wait(30)


def test_it_may_be_stopped_by_its_own_work(make: Make) -> None:
    stopped = threading.Event()

    def work() -> float | None:
        loop.stop()
        stopped.set()
        return 60.0

    loop = make(work)
    loop.kick()
    assert stopped.wait(10)
    until(lambda: not loop.running)


def test_what_work_had_in_hand_is_freed_during_a_nap(make: Make) -> None:
    class Group:
        pass

    groups = [Group()]
    gone = weakref.ref(groups[0])

    def work() -> float | None:
        held = list(groups)
        return 60.0 if held else None

    loop = make(work)
    loop.kick()
    until(lambda: loop.running)
    groups.clear()

    def freed() -> bool:
        gc.collect()
        return gone() is None

    until(freed)


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_of_a_kick_leaves_a_loop_that_starts(
    make: Make, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    job = Job()
    loop = make(job)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.kick()
    monkeypatch.undo()
    calls = job.calls
    loop.kick_if_idle()
    until(lambda: job.calls > calls and not loop.running)


REFUSED = """
import threading
from rankscope.backends.work.threads import BackgroundLoop

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

loop = BackgroundLoop("refused", lambda: None)
start, threading.Thread.start = threading.Thread.start, refuse
assert not loop.kick()
loop.kick_if_idle()
assert not loop.running
threading.Thread.start = start
assert loop.kick()
print("went on")
"""


@pytest.mark.processes
def test_a_kick_where_python_starts_no_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
