"""The client of NCCL's RAS service, over a server that speaks its protocol."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankscope.backends.errors import LibraryFailure
from rankscope.backends.nccl import ras
from tests.backends.nccl.ras_service import Server, missing, rank, report, service


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Any, Any], None]], Server]]:
    servers: list[Server] = []

    def start(talk: Callable[[Any, Any], None]) -> Server:
        servers.append(Server(talk))
        return servers[-1]

    yield start
    for one in servers:
        one.close()


def expected(hash_: str, host: str = "") -> ras.RasCommunicator:
    """Return what the report of the service tells; of text, not on which host."""

    def place(rank: int) -> tuple[str, int]:
        return (host, rank) if host else ("", -1)

    return ras.RasCommunicator(
        hash_,
        3,
        (
            ras.RasRank(0, 100, "running", {"AllReduce": 15}, *place(0)),
            ras.RasRank(1, 101, "running", {"AllReduce": 14}, *place(1)),
            ras.RasRank(2, 102, "unresponsive", {}, *place(2)),
        ),
    )


def test_a_report_of_json(serve: Any) -> None:
    server = serve(service(knows_json=True))
    assert ras.query(server.address, 5) == [expected("0xab", "10.0.0.1")]
    assert server.lines[0] == "CLIENT PROTOCOL 2"
    # The service gives up before the client does.
    assert server.lines[1] in ("TIMEOUT 3", "TIMEOUT 4")


def test_an_older_service_reports_text(serve: Any) -> None:
    server = serve(service(knows_json=False))
    assert ras.query(server.address, 5) == [expected("00000000000000ab")]


def test_a_silent_process_is_passed_over(serve: Any) -> None:
    """The kernel chooses among the processes that listen, stopped ones included."""
    speak = service(knows_json=True)

    def talk(server: Server, lines: Any) -> None:
        if server.connections == 1:
            # Until the client closes the connection.
            while server.ask(lines):
                pass
        else:
            speak(server, lines)

    server = serve(talk)
    assert ras.query(server.address, 10) == [expected("0xab", "10.0.0.1")]
    assert server.connections == 2


def test_a_service_that_never_answers(serve: Any) -> None:
    def talk(server: Server, lines: Any) -> None:
        while server.ask(lines):
            pass

    server = serve(talk)
    began = time.monotonic()
    with pytest.raises(LibraryFailure, match=r"has not answered within 1\.2 s"):
        ras.query(server.address, 1.2)
    assert time.monotonic() - began < 10


def test_a_report_that_does_not_end(serve: Any) -> None:
    speak = service(knows_json=True)

    def talk(server: Server, lines: Any) -> None:
        speak(server, lines)
        while server.ask(lines):
            pass

    server = serve(talk)
    with pytest.raises(LibraryFailure, match="has not answered within 2 s"):
        ras.query(server.address, 2)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = unused.getsockname()
    with pytest.raises(LibraryFailure, match=r"cannot be reached .*NCCL_RAS_ENABLE"):
        ras.query(address, 5)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff\n", b"x" * 300, b""]
)
def test_what_is_no_ras_service(serve: Any, said: bytes) -> None:
    def talk(server: Server, lines: Any) -> None:
        server.ask(lines)
        lines.write(said)
        lines.flush()

    server = serve(talk)
    with pytest.raises(LibraryFailure, match="no RAS service of NCCL"):
        ras.query(server.address, 5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "{",
        "{}",
        '{"communicators": 3}',
        '{"communicators": [{"hash": 1}]}',
        '{"communicators": [null]}',
    ],
)
def test_a_report_that_makes_no_sense(text: str) -> None:
    with pytest.raises(LibraryFailure, match="cannot be read"):
        ras.parse_report(text)


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "running"),
        ({"init_state": 7}, "init"),
        ({"abort_flag": True, "destroy_flag": True}, "abort"),
        ({"finalize_called": True}, "finalize"),
        ({"async_error": 6}, "error: Remote process error"),
        ({"async_error": 99}, "error: 99"),
    ],
)
def test_the_states_of_a_rank(status: dict[str, Any], state: str) -> None:
    found = ras.parse_report(json.dumps(report([rank(0, 1, 0, **status)], [])))
    assert found[0].ranks[0].state == state


def test_a_dead_process_and_one_that_left() -> None:
    lost = [
        missing(1, 1, unresponsive=False, dead=False),
        missing(2, 2, unresponsive=True, dead=True),
    ]
    found = ras.parse_report(json.dumps(report([rank(0, 0, 1)], lost)))
    assert [one.state for one in found[0].ranks] == ["running", "gone", "dead"]


def test_a_text_that_names_the_outliers_of_many() -> None:
    text = """\
Job summary
===========
    0         1         1         8         8         8   RUNNING  MISMATCH
#0-0 (00000000000000cd) MISMATCH
  Communicator ranks have different status
  7 ranks have status RUNNING
  Rank 5 has status ABORT -- GPU 5 managed by process 105 on node n
  Communicator ranks have different AllGather operation counts
  5 ranks have launched up to operation 9
  2 ranks have not launched any operations
  Rank 3 -- GPU 3 managed by process 103 on node n
  Rank 4 -- [process information not found]
  Rank 5 has not launched any operations -- GPU 5 managed by process 105 on node n
#0-0 (00000000000000cd) ERROR
  Asynchronous error on 1 rank
  Rank 6 reported System error -- GPU 6 managed by process 106 on node n
"""
    (found,) = ras.parse_report(text)
    assert (found.size, found.others) == (8, {"AllGather": 9})
    assert found.ranks == (
        ras.RasRank(3, 103, "running", {"AllGather": 0}),
        ras.RasRank(4, -1, "running", {"AllGather": 0}),
        ras.RasRank(5, 105, "abort", {"AllGather": 0}),
        ras.RasRank(6, 106, "error: System error"),
    )


def test_the_address_is_that_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ras.ADDRESS, raising=False)
    assert ras.address() == ("localhost", 28028)
    monkeypatch.setenv(ras.ADDRESS, "[::1]:5000")
    assert ras.address() == ("::1", 5000)
    monkeypatch.setenv(ras.ADDRESS, "nowhere")
    with pytest.raises(LibraryFailure, match="NCCL_RAS_ADDR=nowhere: expected host:po"):
        ras.address()
