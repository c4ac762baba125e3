"""How a process ended, as another one that is not its parent finds it out."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.stores.base import UNKNOWN_END
from rankscope.backends.stores.key_table import KeyTable
from rankscope.backends.stores.process_end import (
    ProcessEnd,
    describe_exit_code,
    own_process,
    process_end,
)
from rankscope.backends.stores.tcp import TCPStore

pytestmark = pytest.mark.usefixtures("no_leaks")

KEY = b"the key of this test"
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
keeps_status = pytest.mark.skipif(
    KERNEL < (6, 15), reason="before Linux 6.15 no pidfd keeps the status"
)


@contextmanager
def running(program: str = "input()") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def died_by_signal(process: subprocess.Popen[bytes]) -> str:
    process.send_signal(signal.SIGTERM)
    return "killed by SIGTERM"


def exited(process: subprocess.Popen[bytes]) -> str:
    assert process.stdin is not None
    process.stdin.close()
    return "exit code 3"


def succeeded(process: subprocess.Popen[bytes]) -> str:
    assert process.stdin is not None
    process.stdin.write(b"0\n")
    process.stdin.close()
    return "exit code 0"


@pytest.mark.processes
@pytest.mark.parametrize("ends", [died_by_signal, exited, succeeded])
@pytest.mark.parametrize(
    "reaped", [False, pytest.param(True, marks=keeps_status)], ids=["zombie", "reaped"]
)
def test_how_it_ended(
    ends: Callable[[subprocess.Popen[bytes]], str], reaped: bool
) -> None:
    with running("import os, sys; os._exit(int(sys.stdin.read() or 3))") as process:
        end = ProcessEnd(process.pid)
        assert end.known() is None
        expected = ends(process)
        if reaped:
            process.wait(30)
        assert end.known(timeout=30) == expected
        end.close()


@pytest.mark.processes
def test_what_is_known_stays_known() -> None:
    with running() as process:
        end = ProcessEnd(process.pid)
        process.kill()
        assert end.known(timeout=30) == "killed by SIGKILL"
        process.wait()
        assert end.known() == "killed by SIGKILL"
        end.close()


@pytest.mark.processes
def test_a_process_that_was_reaped_before_is_refused() -> None:
    with running() as process:
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            ProcessEnd(process.pid)


@pytest.mark.processes
def test_only_another_process_of_this_host_is_followed() -> None:
    place, _, _ = own_process().rpartition(b"/")
    elsewhere = b"another-boot/1"
    with running() as process:
        end = process_end(b"%s/%d" % (place, process.pid))
        assert end is not None
        end.close()
        assert process_end(b"%s/%d" % (elsewhere, process.pid)) is None
    for other in (own_process(), b"", b"/", place + b"/x", place + b"/-1"):
        assert process_end(other) is None


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (-9, "killed by SIGKILL"), (-200, "killed by signal 200")],
)
def test_the_words(code: int, text: str) -> None:
    assert describe_exit_code(code) == text


def test_a_will_says_how_its_process_ended_where_that_is_known() -> None:
    table = KeyTable(lambda *answer: None)
    for client in (b"a", b"b"):
        table.handle((client, b"1"), b"will", [client, f"gone: {UNKNOWN_END}".encode()])
    table.execute(b"a", "killed by SIGSEGV")
    table.execute(b"b")
    found = [table.handle((b"c", b"2"), b"get", [key]) for key in (b"a", b"b")]
    assert found[0] == (b"ok", [b"gone: killed by SIGSEGV"])
    assert found[1] == (b"ok", [f"gone: {UNKNOWN_END}".encode()])


def client(port: int) -> str:
    return f"""
import os, sys
from rankscope.backends.stores.base import UNKNOWN_END
from rankscope.backends.stores.tcp import TCPStore
store = TCPStore("127.0.0.1", {port}, key={KEY!r}, reports_deaths=True)
store.last_will("end", UNKNOWN_END)
print(flush=True)
sys.stdin.read()
os._exit(3)
"""


@pytest.mark.processes
@pytest.mark.parametrize("ends", [died_by_signal, exited])
def test_the_store_tells_how_a_client_ended(
    ends: Callable[[subprocess.Popen[bytes]], str],
) -> None:
    master = TCPStore("127.0.0.1", 0, 2, True, 20, False, key=KEY, reports_deaths=True)
    with running(client(master.port)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        expected = ends(process)
        assert master.get("end", 20).decode() == expected
    assert master._server is not None
    assert not master._server._ends
    master.close()


@pytest.mark.processes
def test_the_store_keeps_no_process_that_leaves_in_good_order() -> None:
    master = TCPStore("127.0.0.1", 0, 2, True, 20, False, key=KEY, reports_deaths=True)
    program = client(master.port).replace("os._exit(3)", "store.withdraw()")
    with running(program) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert master._server is not None
        ends = master._server._ends
        assert len(ends) == 1
        exited(process)
        until(lambda: not ends)
    master.close()


SERVER = f"""
import sys
from rankscope.backends.stores.tcp import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, key={KEY!r}, reports_deaths=True)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_client_tells_how_the_server_ended() -> None:
    with running(SERVER) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        store = TCPStore("127.0.0.1", port, key=KEY, reports_deaths=True)
        told: list[str] = []
        store.watch_loss(told.append)
        os.kill(process.pid, signal.SIGABRT)
        until(lambda: told)
        assert "the process of rank 0 ended (killed by SIGABRT); the group" in told[0]
        store.close()


@pytest.mark.processes
def test_a_server_that_lives_on_leaves_the_cause_open() -> None:
    with running(
        SERVER.replace("sys.stdin.read()", "input(); store.close(); input()")
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(process.stdout.readline())
        store = TCPStore("127.0.0.1", port, key=KEY, reports_deaths=True)
        told: list[str] = []
        store.watch_loss(told.append)
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: told)
        assert "the process of rank 0 ended, or the network failed" in told[0]
        store.close()
