"""The requests to the agents: every one is served, and survives its message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rankscope.engines.agent.agent import Agent
from rankscope.engines.agent.cells import Cells
from rankscope.engines.agent.nccl_report import NcclReports
from rankscope.engines.agent.publisher import StatusPublisher
from rankscope.engines.agent.rank_store import RankStore
from rankscope.engines.agent.reservations import Reservations
from rankscope.engines.wire import requests
from rankscope.engines.wire.rank_service import RankService, answer
from rankscope.engines.wire.requests import Request

KINDS = Request.__subclasses__()

SAMPLES: list[Request[Any]] = [
    requests.Abort(["tp/12345678"], "enough", "the board", diagnosis="who waits"),
    requests.AssignRank(
        {"rank": 1, "world_size": 4, "torch": None},
        {"RANK": "1"},
        {"session": "abc", "who": "notebook.ipynb"},
    ),
    requests.GetFlightRecord(None),
    requests.JoinStore("127.0.0.1", 1234, "00ff"),
    requests.PublishStatus(30.0, 0.2),
    requests.Rebuild({"default/12345678": 2}),
    requests.StartSampling("ab", 5.0, 100.0, False),
    requests.Unsubscribe("id"),
]


def test_the_agent_serves_every_request_once() -> None:
    """But the one that only a script's rank serves."""
    servers = (
        Agent,
        Cells,
        StatusPublisher,
        NcclReports,
        RankStore,
        RankService,
        Reservations,
    )
    served = [
        member.serves
        for server in servers
        for member in vars(server).values()
        if hasattr(member, "serves")
    ]
    assert len(set(served)) == len(served)
    assert set(KINDS) - set(served) == {requests.PublishStatus}


class Server:
    """Serves two requests."""

    def __init__(self) -> None:
        self.got: list[Request[Any]] = []

    @requests.Abort.handler
    def _abort(self, wanted: requests.Abort) -> Any:
        self.got.append(wanted)

    @requests.JoinStore.handler
    def _join(self, wanted: requests.JoinStore) -> None:
        raise ValueError(f"no store at {wanted.host}")


@pytest.mark.parametrize("request_", SAMPLES, ids=lambda one: type(one).__name__)
def test_a_handler_gets_the_request_that_was_sent(request_: Request[Any]) -> None:
    got: list[Request[Any]] = []

    class Only:
        @type(request_).handler
        def serve(self, wanted: Request[Any]) -> None:
            got.append(wanted)

    content = json.loads(json.dumps(request_.content()))
    assert answer(requests.handlers_of(Only()), content) == {"ok": True, "result": None}
    assert got == [request_]


def test_the_error_of_a_handler_is_the_answer() -> None:
    content = requests.JoinStore("host", 1, "00").content()
    said = answer(requests.handlers_of(Server()), content)
    assert (said["ok"], said["ename"], said["evalue"]) == (
        False,
        "ValueError",
        "no store at host",
    )


def test_a_request_with_an_argument_of_another_type_is_refused() -> None:
    server = Server()
    content = requests.Abort(["tp"], "enough", "the board").content()
    content["args"] = {**content["args"], "reason": 3}
    said = answer(requests.handlers_of(server), content)
    assert not said["ok"]
    assert said["evalue"] == "Expected `str`, got `int` - at `$.reason`"
    assert not server.got


def test_a_request_that_is_not_served_is_refused() -> None:
    said = answer({}, requests.GetClock().content())
    assert said["evalue"] == "this rank does not serve 'GetClock'"
