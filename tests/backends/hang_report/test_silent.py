"""Stacks of a process that runs no Python, and of one that was thought to run none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.hang_report.c_signals import send_to_thread
from rankscope.backends.hang_report.silent import Silent, request_stacks
from rankscope.backends.post_mortem.stacks import threads_in

pytestmark = pytest.mark.processes

#: It tells its signal and its threads once they run, and what it is asked for.
PREAMBLE = """
import ctypes, sys, threading
from pathlib import Path
from rankscope.backends.conformance.waiting import until
from rankscope.backends.hang_report.c_signals import send_to_thread
from rankscope.backends.hang_report.silent import SilentStacks, other_threads
stacks = SilentStacks(Path(sys.argv[1]))
def ready():
    print(stacks.signal, *other_threads(), flush=True)
def start(*functions):
    for one in functions:
        threading.Thread(target=one, daemon=True).start()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> tuple[Silent, subprocess.Popen[str]]:
        path = tmp_path / "stacks"
        running = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(running)
        assert running.stdout is not None
        number, *threads = map(int, running.stdout.readline().split())
        return Silent(running.pid, number, threads, path), running

    yield start
    for one in started:
        one.kill()
        one.communicate()


def functions(silent: Silent) -> list[list[str]]:
    """The functions of each thread that has written its stack, the innermost first."""
    (found,) = threads_in(silent.path.read_text().splitlines())
    return [[frame.function for frame in one.frames] for one in found.threads]


def test_all_threads_write_where_one_holds_the_gil_and_the_main_one_is_last(
    process: Any,
) -> None:
    silent, _ = process(
        """
        def holds():
            ctypes.PyDLL(None).sleep(60)
        def waits():
            event.wait()
        event = threading.Event()
        def main():
            ready()
            start(holds)
            event.wait()
        start(waits)
        main()
        """
    )
    request_stacks([silent], 10)
    *others, main = functions(silent)
    assert main[-2:] == ["main", "<module>"]
    assert any("waits" in one for one in others)


def test_a_thread_reads_the_frames_of_no_other(process: Any) -> None:
    """They may run, and be gone as they are read: that ends the process by SIGSEGV."""
    silent, _ = process(
        """
        def waits():
            event.wait()
        event = threading.Event()
        start(waits)
        ready()
        sys.stdin.readline()
        """
    )
    for thread in (silent.pid, *silent.threads):
        before = silent.written()
        assert send_to_thread(silent.pid, thread, silent.signal)
        until(lambda: silent.written() > before)  # noqa: B023 - called here
    found = functions(silent)
    assert [one[-1] for one in found] == ["<module>", "_bootstrap"]
    assert "waits" in found[1]


def test_others_write_nothing_where_the_main_thread_does_not(process: Any) -> None:
    silent, _ = process(
        """
        import signal, time
        start(lambda: time.sleep(60))
        signal.pthread_sigmask(signal.SIG_BLOCK, [stacks.signal])
        ready()
        time.sleep(60)
        """
    )
    request_stacks([silent], 0.2)
    assert silent.path.read_text() == ""
