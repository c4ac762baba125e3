"""A rank of a script that goes from the channel of a rank 0 to that of the next one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.launch_variables import STORE
from rankscope.backends.stores.tcp import TCPStore
from rankscope.backends.torch_watch import aborting
from rankscope.engines.script import publication
from rankscope.engines.script.meeting import Channel
from rankscope.engines.script.options import JobOptions
from rankscope.engines.script.publication import Publication

DEADLINE = 30.0


def test_a_loss_amid_a_publication_that_is_told_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKSCOPE_KEY", "of the test")
    monkeypatch.setenv(STORE, "127.0.0.1:1/a job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(aborting, "set_hint", lambda hint: None)
    monkeypatch.setattr(publication, "_TOLD", DEADLINE)
    told: list[Any] = []
    monkeypatch.setattr(TCPStore, "watch_loss", lambda _, tell: told.append(tell))
    servers = [TCPStore("127.0.0.1", 0, is_master=True) for _ in range(2)]
    channels = [
        Channel(TCPStore("127.0.0.1", one.port), "", 1, 2, f"at {place}", None)
        for place, one in enumerate(servers)
    ]
    met: list[str] = []

    def meet(torch: Any, options: Any, stopped: Any, lost: str = "") -> Channel:
        met.append(lost)
        return channels[len(met) - 1]

    monkeypatch.setattr(publication, "meet", meet)
    torch: Any = None
    published = Publication(torch, JobOptions())
    until(published.joined.is_set, DEADLINE, "the first channel")
    summary = published._summary

    def loses() -> str:
        published._summary = summary
        servers[0].close()
        until(lambda: channels[0].store.lost, DEADLINE, "the loss")
        return "{}"

    published._summary = loses
    published._until = math.inf
    published._wake.set()
    until(lambda: channels[0].store.lost, DEADLINE, "the loss")
    told[0]("rank 0 has died")
    until(lambda: servers[1].check(["status/1"]), DEADLINE, "the second channel")
    assert met == ["", "at 0"]
    published.end()
    until(lambda: servers[1].check(["ended/1"]), DEADLINE, "the goodbye")
    servers[1].close()
