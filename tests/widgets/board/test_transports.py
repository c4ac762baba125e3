"""The sentence about transports, and where the board has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from rankscope.engines import ClusterStatus
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.transports import Connections, transports_text
from rankscope.widgets.status_table import StatusTable
from tests.widgets import statuses

SHM, TCP = "shm,cma", "tcp"

Choose = Callable[[int, int], "str | None"]


def connections(size: int, choose: Choose) -> dict[int, dict[str, tuple[int, ...]]]:
    """Each pair as its lower rank reports it."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for one, other in combinations(range(size), 2):
        names = choose(one, other)
        if names is not None:
            known = found.setdefault(one, {})
            known[names] = (*known.get(names, ()), other)
    return found


def by_host(per_host: int) -> Choose:
    return lambda one, other: SHM if one // per_host == other // per_host else TCP


def next_to(choose: Choose) -> Choose:
    return lambda one, other: choose(one, other) if other - one == 1 else None


@pytest.mark.parametrize(
    ("size", "per_host", "choose", "said"),
    [
        (4, 4, lambda one, other: None, ""),
        (2, 2, lambda one, other: SHM, "shm+cma between all ranks"),
        (64, 64, lambda one, other: SHM, "shm+cma between all ranks"),
        (4, 2, lambda one, other: TCP, "tcp between all ranks"),
        (4, 4, next_to(by_host(4)), "shm+cma between connected ranks"),
        (
            4,
            2,
            by_host(2),
            "shm+cma within each host, tcp between ranks 0–1 and 2–3",
        ),
        (
            4,
            2,
            next_to(by_host(2)),
            "shm+cma within each host, tcp between ranks 0–1 and 2–3",
        ),
        (64, 8, by_host(8), "shm+cma within each host, tcp between hosts"),
        (
            4,
            4,
            lambda one, other: TCP if other == 3 else SHM,
            "shm+cma between ranks 0–2, tcp between ranks 0–2 and 3",
        ),
        (
            4,
            4,
            lambda one, other: TCP if (one, other) in ((0, 1), (1, 2)) else SHM,
            "tcp between ranks 0,2 and 1, shm+cma between 4 pairs among ranks 0–3",
        ),
    ],
)
def test_the_sentence(size: int, per_host: int, choose: Choose, said: str) -> None:
    hosts = {rank: f"node-{rank // per_host}" for rank in range(size)}
    assert transports_text(connections(size, choose), hosts, size) == said


def test_what_two_ranks_report_of_one_pair_is_joined() -> None:
    hosts = dict.fromkeys(range(2), "node")
    reported: Connections = {0: {"shm": (1,)}, 1: {SHM: (0,)}}
    assert transports_text(reported, hosts, 2) == "shm+cma between all ranks"


def test_a_rank_that_is_not_known_yet_is_left_out() -> None:
    reported = {0: {SHM: (1, 2)}}
    hosts = dict.fromkeys(range(2), "node")
    assert transports_text(reported, hosts, 3) == "shm+cma between connected ranks"


def facts(devices: dict[str, str]) -> str:
    model = BoardModel.of(
        statuses.cluster(
            *(
                statuses.rank(one, statuses.group(ranks=(0, 1), devices=devices))
                for one in (0, 1)
            )
        )
    )
    (tab,) = model.tabs()
    return " · ".join(tab["facts"])


def test_a_group_that_has_not_connected_says_so() -> None:
    assert facts({"cpu": "ucx (not built)"}).endswith("connects at the first op")
    assert "connects" not in facts({"cpu": "ucx", "cuda": "nccl (not built)"})
    assert "connects" not in facts({})


def status(generation: int = 0) -> ClusterStatus:
    ranks = []
    for one in range(2):
        group = statuses.group(
            ranks=(0, 1),
            backend="cpu:ucx",
            generation=generation,
            transports={SHM: (1 - one,)},
        )
        ranks.append(statuses.rank(one, group))
    return statuses.cluster(*ranks)


def test_the_board_and_the_table_show_the_transports() -> None:
    model = BoardModel.of(status())
    assert "shm+cma between all ranks" in model.tabs()[0]["facts"]
    assert "cpu:ucx · timeout 30 min · shm+cma between all ranks" in str(
        StatusTable(status())
    )


def test_the_transports_are_those_of_the_newest_generation() -> None:
    model = BoardModel.of(status())
    first, second = status(generation=1).ranks
    group = first.groups[0]
    built = statuses.rank(0, replace(group, transports={}))
    model.update(statuses.cluster(built), 1.0, size=2)
    assert not any("shm" in one for one in model.tabs()[0]["facts"])
    model.update(statuses.cluster(first, second), 2.0)
    assert "shm+cma between all ranks" in model.tabs()[0]["facts"]
