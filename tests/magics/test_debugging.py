"""The debugger of a rank in a notebook, and what else would ask for input there."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.engines.errors import plain
from tests.magics.kernels import TIMEOUT, Kernel, running_kernel

pytestmark = pytest.mark.processes

#: Something to type, or to do while the prompt is there.
Step = str | Callable[[], None]

FAILS = (
    "%%distributed",
    "def halve(x):",
    "    secret = x * 10",
    "    return 1 / (x - 1)",
    "kept = halve(rank)",
)


@pytest.fixture(scope="module")
def kernel(_module_leaves_nothing: None) -> Iterator[Kernel]:
    """A kernel with two ranks, of which rank 1 has failed."""
    with running_kernel() as kernel:
        kernel("%dist_init -n 2")
        kernel("from rankscope.magics import current_cluster")
        yield kernel
        kernel("%dist_shutdown")


def _debug(kernel: Kernel, *steps: Step, line: str = "%dist_debug -r 1") -> str:
    """Type at the prompts of a cell, as a front end does; return what was shown."""
    left = list(steps)
    client = kernel.client
    request = client.execute(line, allow_stdin=bool(steps))
    shown = ""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            prompt = client.get_stdin_msg(timeout=0.02)["content"]["prompt"]
            shown += prompt
            step = left.pop(0)
            if isinstance(step, str):
                client.input(step)
            else:
                step()
        except queue.Empty:
            pass
        try:
            message = client.get_iopub_msg(timeout=0.02)
        except queue.Empty:
            continue
        content = message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "stream":
            shown += content["text"]
        elif message["msg_type"] == "error":
            shown += "\n".join(content["traceback"])
        elif content.get("execution_state") == "idle":
            kernel._take_reply(request)
            assert left == []
            return plain(shown)
    raise AssertionError(f"no end of {line}: {shown}")


def test_the_failed_frame_is_opened_and_left(kernel: Kernel) -> None:
    assert "no cell has failed on rank 1" in _debug(kernel, line="%dist_debug -r 1")
    kernel(*FAILS)
    shown = _debug(kernel, "p secret", "up", "p x", "q")
    assert "ZeroDivisionError: division by zero" in shown
    assert "----> 4     return 1 / (x - 1)" in shown
    assert shown.count("rank 1 ipdb> ") == 4
    # Cells go by their number, as in every message.
    assert re.search(r"> cell \d+\(4\)halve\(\)", shown), shown
    assert "ipykernel_" not in shown
    assert "[1]   10\n" in shown
    assert "----> 5 kept = halve(rank)" in shown
    assert "NameError: name 'x' is not defined" in shown
    # It may be opened again, and a cell runs. No other rank failed.
    assert "[1]   1\n" in _debug(kernel, "p x", "q", line="%dist_debug")
    assert "no cell has failed on rank 0" in _debug(kernel, line="%dist_debug -r 0")
    assert "[0-1] 2" in kernel("%%distributed", "print(world_size)").stream()


def test_an_interrupt_leaves_the_prompt_and_ends_a_command(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel(
        "%%distributed -r 1",
        "import pathlib, threading",
        "def wait():",
        f"    pathlib.Path({str(tmp_path)!r}, 'waits').touch()",
        "    threading.Event().wait()",
        "1 / 0",
    )
    interrupt = kernel.manager.interrupt_kernel
    assert "ZeroDivisionError" in _debug(kernel, interrupt)

    def interrupt_the_command() -> None:
        kernel.client.input("wait()")
        until((tmp_path / "waits").exists, TIMEOUT, "the command to run")
        interrupt()

    shown = _debug(kernel, interrupt_the_command, "p 6 * 7", "q")
    assert "42" in shown
    assert kernel("%%distributed", "rank").error == ""


def test_without_input_and_without_one_idle_rank_it_says_so(kernel: Kernel) -> None:
    kernel("%%distributed", "1 / 0")
    assert "this front end takes no input" in _debug(kernel)
    several = "-r RANK is missing, the rank whose failure it is: ranks 0-1 have failed"
    assert several.replace("-1", "–1") in _debug(kernel, line="%dist_debug")
    assert "one rank at a time" in _debug(kernel, line="%dist_debug -r 0,1")
    kernel("%%distributed --async", "import threading", "threading.Event().wait()")
    until(
        lambda: "its cell has to end before" in _debug(kernel, line="%dist_debug -r 1"),
        TIMEOUT,
        "the rank to be busy",
    )
    kernel("current_cluster().interrupt()")
    assert kernel("%%distributed", "rank").error == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "input('name: ')",
            "StdinNotImplementedError: input(): nobody types on a rank; ",
        ),
        ("%debug", "%debug: nobody types on a rank; "),
        ("breakpoint()", "breakpoint() at cell "),
    ],
)
def test_what_asks_for_input_names_it(kernel: Kernel, code: str, said: str) -> None:
    cell = kernel("%%distributed", code)
    shown = " ".join([*cell.stream("stderr").split(), *cell.error.split()])
    assert said in shown
    assert "%dist_debug -r RANK opens the frame that failed" in shown
    # It is the same on all ranks, and says so once.
    assert "[0]" not in shown
    assert shown.count(said) == 1
    assert "no_input.py" not in shown


def test_exit_ends_the_cell_and_not_the_rank(kernel: Kernel) -> None:
    cell = kernel("%%distributed", "if rank == 1: exit()", "went_on = rank")
    assert "rank 1: SystemExit: exit() ends the cell on this rank" in cell.error
    assert "%dist_shutdown" in " ".join(cell.error.split())
    assert cell.stream("stderr") == ""
    kept = kernel("%%distributed", "'went_on' in globals()", "dist.barrier(); rank")
    assert kept.error == ""
    assert "exit() ends the cell" in kernel("%%distributed", "quit").stream("stdout")


def test_what_was_typed_instead_leaves_the_failure_to_look_at(kernel: Kernel) -> None:
    kernel("%%distributed", "kept = 42", "1 / 0")
    kernel("%%distributed", "%debug")
    assert "%no_such_magic" in kernel("%%distributed", "%no_such_magic").error
    shown = _debug(kernel, "p kept", "q")
    assert "ZeroDivisionError" in shown
    assert "42" in shown


def test_a_rank_that_does_not_answer_is_named_and_free_afterwards(
    kernel: Kernel,
) -> None:
    kernel("%%distributed", "1 / 0")
    pid = int(kernel("print(current_cluster().pids[1])").stream())

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        kernel.client.input("p 1")

    try:
        assert "rank 1 did not answer for 10 s" in _debug(kernel, freeze)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert kernel("%%distributed", "assert rank in (0, 1)").error == ""


def test_a_rank_that_dies_meanwhile_is_named(kernel: Kernel) -> None:
    kernel("%%distributed", "1 / 0")
    pid = int(kernel("print(current_cluster().pids[1])").stream())

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        kernel.client.input("p 1")

    assert "killed by SIGKILL" in _debug(kernel, kill)


@pytest.mark.soak
def test_a_killed_notebook_leaves_no_rank_at_its_prompt() -> None:
    with running_kernel() as killed:
        killed("%dist_init -n 2 --keep --cluster-id debugged")
        killed(*FAILS)
        killed.client.execute("%dist_debug -r 1", allow_stdin=True)
        killed.client.get_stdin_msg(timeout=TIMEOUT)
        os.kill(killed.manager.provisioner.pid, signal.SIGKILL)
    cluster = Cluster.attach(cluster_id="debugged")
    try:
        assert cluster.status(fresh=True).ranks[1].state == "busy"
        # The notebook's subscription has to run out.
        until(
            lambda: cluster.status(fresh=True).ranks[1].state == "idle",
            TIMEOUT,
            "the debugger to be left",
        )
        cluster.execute("assert rank == 1", ranks=[1]).result(TIMEOUT)
    finally:
        cluster.shutdown()
