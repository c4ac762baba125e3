"""The keeper of an ssh, srun or salloc: whose end is the end of its stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines.launch import keeper_main

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_leaks")]

WAIT = 30

#: The main program of a controller that is kept, without the controller.
HELD = """
import os, runpy, sys, time
from rankscope.engines.launch import controller_main
def run_module(*args, **options):
    print("held by nobody yet", flush=True)
    time.sleep(100)
runpy.run_module = run_module
sys.argv[1:] = [f"/proc/{os.getppid()}", "kept", "", "", ""]
controller_main.main()
"""

#: A notebook that is killed after one was forked from it: prints the pid of what ends
#: with its stdin.
FORKS = """
import asyncio, os, sys
from rankscope.engines.launch.leashed import LeashedProcess
async def start():
    return LeashedProcess(["cat"], print)
leashed = asyncio.run(start())
if os.fork() == 0:
    # Until the test ends, which alone writes there.
    os.closerange(1, 3)
    os._exit(os.read(0, 1) != b"")
print(leashed.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""

#: Repeats each line, and ends with its stdin.
ECHO = 'while read line; do echo "$line"; done; echo ended >&2; exit 3'


@pytest.fixture
def controller() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a controller."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def kept(script: str = ECHO) -> subprocess.Popen[str]:
    """Start a command with its keeper."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", keeper_main.__file__, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def test_one_that_was_forked_from_a_notebook_keeps_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as notebook:
        assert notebook.stdout is not None
        leashed = psutil.Process(int(notebook.stdout.read()))
        until(lambda: not lives(leashed), WAIT, "the end")


def test_what_is_not_kept_ends_with_its_owner() -> None:
    process = kept()
    assert process.communicate("one\ntwo\n", WAIT) == ("one\ntwo\n", "ended\n")
    assert process.returncode == 3


def test_a_command_ends_with_the_controller(
    controller: subprocess.Popen[bytes],
) -> None:
    process = kept()
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(json.dumps({"keep": controller.pid}) + "\none\n")
    assert process.stdout.readline() == "one\n"
    process.stdin.close()
    process.stdout.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    controller.kill()
    assert process.wait(WAIT) == 3
    assert process.stderr.read() == "ended\n"
    process.stderr.close()


@pytest.mark.parametrize("again", [None, 2**22 + 1], ids=["taken back", "no process"])
def test_the_owner_has_the_leash_again(
    controller: subprocess.Popen[bytes], again: int | None
) -> None:
    """As where the cluster is shut down; or the controller has ended already."""
    process = kept()
    messages = "".join(
        json.dumps({"keep": pid}) + "\n" for pid in (controller.pid, again)
    )
    assert process.communicate(messages, WAIT)[1] == "ended\n"
    assert controller.poll() is None


def test_a_controller_ends_when_nothing_holds_it_any_more() -> None:
    """As where the last ssh has given up its host."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "held by nobody yet\n"
        mine = keeper_main.hold(controller.pid)
        assert mine is not None
        processes = [kept("read line; echo $line; exec sleep 60") for _ in range(2)]
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"keep": controller.pid}) + "\none\n")
            assert process.stdout.readline() == "one\n"
        os.close(mine)
        for process in processes:
            with pytest.raises(subprocess.TimeoutExpired):
                controller.wait(0.3)
            process.terminate()
            process.communicate(timeout=WAIT)
            assert process.returncode == -signal.SIGTERM
        assert controller.wait(WAIT) == -signal.SIGTERM
    assert keeper_main.hold(controller.pid) is None


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_it_ends_as_the_command_does(signum: int) -> None:
    process = kept(f"kill -{signum} $$")
    process.communicate(timeout=WAIT)
    assert process.returncode == -signum


def test_a_signal_is_that_of_the_command() -> None:
    """Both that which it gets, and that by which it has ended."""
    process = kept("echo up; exec sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    process.communicate(timeout=WAIT)
    assert process.returncode == -signal.SIGTERM


def test_a_command_that_does_not_heed_the_end_of_its_stdin_is_ended() -> None:
    """A salloc whose job is pending."""
    process = kept("echo up; exec sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.communicate(timeout=WAIT)
    assert process.returncode == -signal.SIGTERM
