"""The requests to the agents: every one is served, and survives its message."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.engines.agent import agent
from rankscope.engines.wire import requests, stack_service
from rankscope.engines.wire.requests import Request

KINDS = Request.__subclasses__()

SAMPLES: list[Request[Any]] = [
    requests.Abort(["tp/12345678"], "enough", "the board"),
    requests.AssignRank({"rank": 1, "world_size": 4, "torch": None}, {"RANK": "1"}),
    requests.GetFlightRecord(None),
    requests.JoinStore("127.0.0.1", 1234, "00ff"),
    requests.PublishStatus(30.0, 0.2),
    requests.Rebuild({"default/12345678": 2}),
    requests.StartSampling("ab", 5.0, 100.0, False),
    requests.Unsubscribe("id"),
]


def test_every_request_has_a_name_of_its_own() -> None:
    assert len({kind.op for kind in KINDS}) == len(KINDS)


def test_the_agent_serves_every_request_once() -> None:
    """But the one that only a script's rank serves."""
    files = [Path(str(module.__file__)) for module in (agent, stack_service)]
    served = [
        node.value.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "served_by"
        and isinstance(node.value, ast.Attribute)
    ]
    assert sorted(served) == sorted(
        kind.__name__ for kind in KINDS if kind is not requests.PublishStatus
    )


@pytest.mark.parametrize("request_", SAMPLES, ids=lambda one: one.op)
def test_a_handler_gets_the_request_that_was_sent(request_: Request[Any]) -> None:
    got: list[Request[Any]] = []
    op, serve = type(request_).served_by(got.append)
    content = json.loads(json.dumps(request_.content()))
    assert content["op"] == op
    serve(content["args"])
    assert got == [request_]
