"""The notebook's end of a fork server: what it takes from the pipe, in which order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import IO, Any

import pytest

from rankscope.engines import ClusterStartError
from rankscope.engines.launch import leashed
from rankscope.engines.launch.fork_servers import ForkServer


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return open(read, "rb", 0), open(write, "wb", 0)


class Process:
    """In the place of a process: its pipes."""

    pid = os.getpid()

    def __init__(self, *_: object, **options: object) -> None:
        self._read, self.stdin = _pipe()
        self.stdout, self._write = _pipe()

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float) -> int:
        self._read.close()
        self._write.close()
        return 0


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leashed, "Popen", Process)


class Engine:
    """A launcher that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def forked(self, pid: int) -> None:
        self.told.append(pid)

    def ended(
        self, exit_code: int | None, output: str = "", why: str | None = None
    ) -> None:
        self.told.append((exit_code, output))


def asked(handle: Callable[[ForkServer], Any], engines: list[Engine]) -> ForkServer:
    """Ask a server for `engines`; `handle` is what it answers."""

    async def ask() -> ForkServer:
        server = ForkServer(["a command"], lambda one: None)
        try:
            forking = asyncio.ensure_future(
                server.fork({one: {} for one in engines}, {})
            )
            await asyncio.sleep(0)
            assert server.owes_answer
            handle(server)
            assert not server.owes_answer
            await forking
        finally:
            server.close()
        return server

    return asyncio.run(ask())


def test_an_engine_that_ends_at_once_is_reported() -> None:
    """Its end may be read with the answer, before who waits for that goes on."""

    def handle(server: ForkServer) -> None:
        server._handle({"pids": [11, 12]})
        server._handle({"pid": 12, "exit_code": 3, "output": "why"})

    engines = [Engine(), Engine()]
    server = asked(handle, engines)
    assert [one.told for one in engines] == [[11], [12, (3, "why")]]
    assert server.take_engines() == engines[:1]


def test_a_fork_that_fails_is_an_error() -> None:
    with pytest.raises(ClusterStartError, match="^no process: none left$"):
        asked(lambda server: server._handle({"failed": "no process: none left"}), [])


def test_what_the_login_prints_is_no_message() -> None:
    """Also without the end of a line, as a terminal's title, and as of JSON."""
    said = [b"{}", b'{"a": 1', b'Welcome\n{"pids', b"\x1b]0;b\x07"]
    engine = Engine()

    def answer(server: ForkServer) -> None:
        process: Any = server._popen
        process._write.write(b"\n".join(said) + b'\n{"pids": [7]}\n')
        server._receive()

    asked(answer, [engine])
    assert engine.told == [7]
