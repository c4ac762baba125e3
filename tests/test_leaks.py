"""The leak check finds leaked processes, threads and descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from tests import leaks


def test_nothing_new_is_no_leak() -> None:
    assert leaks.wait_until_clean(leaks.take(), 0) == []


@pytest.mark.processes
def test_an_orphan_is_found_and_killed() -> None:
    before = leaks.take()
    script = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE,"
        " start_new_session=True); import os; os._exit(0)"
    )
    reader, writer = os.pipe()
    try:
        # The grandchild gets a pipe of ours, or its input would end at once.
        subprocess.run(
            [sys.executable, "-c", script.replace("subprocess.PIPE", str(reader))],
            pass_fds=[reader],
            check=True,
        )
        left = leaks.wait_until_clean(before, 0)
        assert any("input()" in line for line in left), left
        leaks.kill(before)
    finally:
        os.close(reader)
        os.close(writer)
    assert leaks.wait_until_clean(before) == []


def test_a_thread_and_a_descriptor_are_found() -> None:
    before = leaks.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten")
    thread.start()
    reader, writer = os.pipe()
    try:
        left = leaks.wait_until_clean(before, 0)
    finally:
        release.set()
        thread.join()
        os.close(reader)
        os.close(writer)
    assert any("thread forgotten" in line for line in left)
    assert any("2 descriptors" in line for line in left)


@pytest.mark.processes
def test_waiting_gives_a_slow_end_its_time() -> None:
    before = leaks.take()
    start = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    left = leaks.wait_until_clean(before)
    child.wait()
    assert left == []
    assert time.monotonic() - start < 10
