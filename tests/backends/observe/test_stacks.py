"""Stacks of threads: what is shown of them, and the seconds that they get."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups.inquiry import main_thread_place
from rankscope.backends.observe.stacks import (
    MAIN,
    Frame,
    Stack,
    StackSampler,
    ThreadStacks,
)

WAIT = 60


@pytest.fixture
def waiting() -> Iterator[threading.Event]:
    """An event that a thread called ``worker`` waits for, and one of our own."""
    go_on = threading.Event()
    began = threading.Barrier(3)

    def wait_here() -> None:
        began.wait(WAIT)
        go_on.wait(WAIT)

    threads = [
        threading.Thread(target=wait_here, name=name)
        for name in ("worker", "rankscope-own")
    ]
    for one in threads:
        one.start()
    began.wait(WAIT)
    yield go_on
    go_on.set()
    for one in threads:
        one.join()


def _functions(stack: Stack) -> list[str]:
    return [frame.function.rpartition(".")[2] for frame in stack.frames]


def test_the_main_thread_comes_first_and_our_own_only_when_asked(
    waiting: threading.Event,
) -> None:
    found = ThreadStacks().now()
    assert found[0].thread == MAIN
    assert "rankscope-own" not in [one.thread for one in found]
    (worker,) = [one for one in found if one.thread == "worker"]
    assert "wait_here" in _functions(worker)
    frame = next(one for one in worker.frames if one.function.endswith("wait_here"))
    assert frame.place == __file__
    assert not frame.internal
    every = [one.thread for one in ThreadStacks().now(every=True)]
    assert "rankscope-own" in every


def test_threads_that_were_there_before_are_left_out(waiting: threading.Event) -> None:
    known = sys._current_frames()
    assert [one.thread for one in ThreadStacks(quiet=known).now()] == [MAIN]


def _from_another_thread(stacks: ThreadStacks) -> list[Stack]:
    found: list[Stack] = []
    looker = threading.Thread(target=lambda: found.extend(stacks.now()))
    looker.start()
    looker.join()
    return found


def test_the_main_thread_begins_with_its_cell() -> None:
    found: list[Stack] = []
    stacks = ThreadStacks(lambda file: "Cell In[7]" if file == "/tmp/7.py" else None)

    def look() -> None:
        found.extend(_from_another_thread(stacks))

    exec(compile("look()", "/tmp/7.py", "exec"), {"look": look})
    first = found[0].frames[0]
    assert (first.place, first.line, first.function) == ("Cell In[7]", 1, "<module>")


def test_a_main_thread_whose_tasks_await_is_at_the_await() -> None:
    found: list[str] = []

    async def train() -> None:
        await load()

    async def load() -> None:
        await asyncio.get_running_loop().run_in_executor(None, look)

    def names() -> list[str]:
        frames = ThreadStacks().now()[0].frames
        return [one.function.rpartition(".")[2] for one in frames]

    def look() -> None:
        # Nothing of what the loop itself calls meanwhile.
        wanted = ["run_until_complete", "train", "load"]
        until(lambda: names()[-3:] == wanted, 20)
        found.append(main_thread_place().location)

    asyncio.run(train())
    assert found == [f"test_stacks.py:{load.__code__.co_firstlineno + 1}"]


def test_without_a_cell_an_idle_main_thread_has_no_frames() -> None:
    idle = _from_another_thread(ThreadStacks(is_busy=lambda: False))
    assert idle[0] == Stack(MAIN, ())
    busy = _from_another_thread(ThreadStacks(is_busy=lambda: True))
    assert busy[0].frames


def test_code_of_the_package_is_internal() -> None:
    frames: list[Frame] = []
    code = compile("look()", "/somewhere/op.py", "exec")

    def look() -> None:
        frames.extend(ThreadStacks().now()[0].frames)

    exec(code, {"__name__": "rankscope.backends.op", "look": look})
    (one,) = [frame for frame in frames if frame.place == "/somewhere/op.py"]
    assert one.internal


def test_seconds_go_to_where_threads_are(waiting: threading.Event) -> None:
    sampler = StackSampler(ThreadStacks(), 60, 200)
    until(lambda: sampler.is_running, WAIT, "the sampler")
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        _spin()
    found = sampler.result()
    assert not sampler.is_running
    assert found.looks > 0
    spent: dict[str, float] = {}
    for stack, seconds in found.weights:
        spent[stack.thread] = spent.get(stack.thread, 0.0) + seconds
    # Each thread has the whole time, whatever the sampler missed.
    assert spent[MAIN] == pytest.approx(found.seconds)
    assert spent["worker"] == pytest.approx(found.seconds)
    assert any("_spin" in _functions(stack) for stack, _ in found.weights)
    assert len(found.course) == found.looks
    assert [at for at, _ in found.course] == sorted(at for at, _ in found.course)
    assert {found.weights[place][0].thread for _, place in found.course} == {MAIN}


def _spin() -> int:
    return sum(number for number in range(20_000))


def test_a_sampler_ends_by_itself() -> None:
    sampler = StackSampler(ThreadStacks(), 0.05, 100)
    until(lambda: not sampler.is_running, WAIT, "its end")
    found = sampler.result()
    assert found.seconds >= 0.05
    assert found.weights
