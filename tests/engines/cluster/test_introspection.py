"""Introspection where ranks answer late, or not at all."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rankscope.engines.agent.agent import names_of
from rankscope.engines.cluster.introspection import Introspection
from rankscope.engines.observe.rank_slots import RankSlot
from rankscope.engines.status import Summary
from rankscope.engines.wire.requests import GetNames


class Ranks:
    """Stands in for the registry of engines: two ranks, of which `answers` answer."""

    def __init__(self) -> None:
        self.answers: dict[int, dict[str, str]] = {}
        self.slots = [
            RankSlot(rank, rank, str(rank), 1, "node1", "10.0.0.1", 29500)
            for rank in range(2)
        ]

    @property
    def client(self) -> Any:
        """What a question for the main thread would go through."""
        raise AssertionError("the main thread of a rank was asked")

    def post(self, request: object, ranks: list[int]) -> dict[int, Future[Any]]:
        """Answer for those who do."""
        assert isinstance(request, GetNames)
        futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        for rank in self.answers.keys() & futures.keys():
            content = {"ok": True, "result": self.answers[rank]}
            futures[rank].set_result({"content": content})
        return futures


@pytest.fixture
def ranks() -> Ranks:
    """Ranks of which none answers."""
    return Ranks()


def test_the_last_known_names_hold_where_a_rank_is_silent(ranks: Ranks) -> None:
    asked = Introspection(ranks)  # type: ignore[arg-type]
    assert asked.names([0, 1]) == {}
    ranks.answers = {0: {"x": "ndarray"}, 1: {"y": "int"}}
    assert asked.names([0, 1]) == {"x": "ndarray", "y": "int"}
    ranks.answers = {0: {"z": "int"}}
    assert asked.names([0, 1]) == {"z": "int", "y": "int"}
    assert asked.names([0]) == {"z": "int"}


@pytest.mark.parametrize("state", ["busy", "silent", "dead", "unknown"])
def test_only_a_rank_that_is_idle_is_asked_on_its_main_thread(
    ranks: Ranks, state: str
) -> None:
    for slot in ranks.slots:
        if state != "unknown":
            slot.summary_at = time.monotonic() - (3600 if state == "silent" else 0)
        slot.summary = Summary(busy=state == "busy")
        slot.death = "rank is dead" if state == "dead" else None
    asked = Introspection(ranks)  # type: ignore[arg-type]
    assert asked.ask("complete", [0, 1], "x", 1) is None
    assert asked.ask("inspect", [0, 1], "x", 1, 0, []) is None
    ranks.slots[1].death = None
    ranks.slots[1].summary_at = time.monotonic()
    ranks.slots[1].summary = Summary()
    with pytest.raises(AssertionError, match="main thread"):
        asked.ask("complete", [0, 1], "x", 1)


def test_names_are_read_without_running_code_of_theirs() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise AssertionError(name)

    class Trap(metaclass=Meta):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class LazyModule(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    shell = SimpleNamespace(
        user_ns={
            "trap": Trap(),
            "lazy": LazyModule("lazy_name"),
            "x": 1,
            "_hidden": 1,
            "exit": print,
            "dist": time,
        },
        user_ns_hidden={"exit": print, "dist": time},
    )
    assert names_of(shell, {"dist"}) == {
        "trap": "Trap",
        "lazy": "module:lazy_name",
        "x": "int",
        "dist": "module:time",
    }
