"""Groups that another library made: the world shows, aborts and rebuilds them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import rankscope as dist
from rankscope.backends.errors import DistError
from rankscope.backends.groups import remedies, unattended
from rankscope.backends.groups.abort_reason import AbortReason, FoundCause
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.groups.summary import GroupStatus
from rankscope.backends.groups.world import World, world
from rankscope.backends.observe.export import local_dump
from rankscope.backends.rank_sets import write_members
from rankscope.backends.stores.base import Store


@dataclass
class Group:
    """A group of a library that does nothing but note what is requested."""

    name: str
    ranks: tuple[int, ...]
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    remedy: str = ""

    def __post_init__(self) -> None:
        self.key = GroupKey(self.name, self.ranks)

    def summary(self) -> GroupStatus:
        return GroupStatus(
            self.name,
            write_members(self.ranks),
            "",
            0,
            "ready",
            None,
            None,
            library="lib",
        )

    def abort(self, reason: AbortReason) -> None:
        self.requests.append(("abort", reason.text, reason.by, tuple(reason.culprits)))
        self.remedy = reason.remedy

    def unused_generation(self) -> int | None:
        return None

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        return set(ranks).isdisjoint(self.ranks)

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        self.requests.append(("rebuild", generation))

    def export(self) -> dict[str, Any]:
        return {"library": "lib", "name": self.name, "ranks": list(self.ranks)}


@dataclass
class Source:
    """A library with two groups and two records."""

    library: str = "lib"
    rank: int | None = 1
    world_size: int | None = 3
    advice: Sequence[str] = ()
    past: Mapping[str, Any] = field(default_factory=dict)
    causes: Mapping[str, FoundCause] = field(default_factory=dict)
    made: list[Group] = field(
        default_factory=lambda: [Group("main", (0, 1, 2)), Group("tp", (1, 2))]
    )

    def groups(self) -> Sequence[Group]:
        return self.made

    def note_causes(self, found: Mapping[str, FoundCause]) -> None:
        self.causes = dict(found)

    def import_group(self, exported: Mapping[str, Any]) -> None:
        self.made.append(Group(exported["name"], tuple(exported["ranks"])))

    def records(self) -> Sequence[dict[str, Any]]:
        return [
            {
                **{"group_id": one.key.id, "generation": 0},
                **{"is_p2p": False, "state": "completed"},
            }
            for one in self.made
        ]


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    world.sources.append(made)
    yield made
    world.sources.remove(made)


def test_a_library_gives_advice(source: Source) -> None:
    source.advice = ["its recorder is off"]
    assert world.advice() == ("its recorder is off",)


def test_the_summary_has_the_groups_of_a_library(source: Source) -> None:
    assert world.advice() == ()
    assert [(one.name, one.library) for one in world.summary()] == [
        ("main", "lib"),
        ("tp", "lib"),
    ]


def test_a_watched_group_is_aborted_by_its_id_or_its_name(source: Source) -> None:
    main, tp = source.made
    assert world.abort([tp.key.id], "stuck", by="rank 0", culprits=[2]) == ["tp"]
    assert world.abort(["main"], "stuck") == ["main"]
    assert tp.requests == [("abort", "stuck", "rank 0", (2,))]
    assert main.requests == [("abort", "stuck", "", ())]


def test_a_library_hears_why_ops_hang(source: Source) -> None:
    (_, tp) = source.made
    world.note_causes({tp.key.id: ("rank 2 is late", (2,))})
    assert source.causes[tp.key.id].text == "rank 2 is late"
    world.note_causes({})
    assert source.causes == {}


def test_a_death_ends_the_groups_of_the_rank_a_person_ends_all(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "_in_notebook", True)
    main, tp = source.made
    (stranger,) = set(main.ranks) - set(tp.ranks)
    assert world.abort(None, "killed", culprits=[stranger], dead=[stranger]) == ["main"]
    assert main.remedy == "start it again with %dist_restart, then %dist_rebuild"
    # A group may wait because another one does.
    assert world.abort(None, "stuck", culprits=[stranger]) == ["main", "tp"]
    assert tp.remedy == "make it usable again with %dist_rebuild"


def test_all_groups_are_aborted_and_rebuilt(source: Source) -> None:
    assert world.abort(None, "stuck") == ["main", "tp"]
    assert world.rebuild(None, 2) == ["main", "tp"]
    assert [one.requests[-1] for one in source.made] == [("rebuild", 2)] * 2


def test_two_watched_groups_of_one_name_need_the_id(source: Source) -> None:
    source.made.append(Group("tp", (0, 1)))
    with pytest.raises(ValueError, match="tp"):
        world.abort(["tp"], "stuck")
    assert not any(one.requests for one in source.made)


def test_the_dump_has_the_groups_and_records_of_a_library(source: Source) -> None:
    dump = local_dump(last=1)
    main, tp = source.made
    assert dump["rank"] == 1
    assert dump["groups"][main.key.id] == {"name": "main", "ranks": [0, 1, 2]}
    assert dump["records"][-1]["group_id"] == tp.key.id


def test_a_world_without_a_group() -> None:
    assert World().summary() == ()


def test_a_fresh_process_imports_the_groups_of_the_library(source: Source) -> None:
    exported = world.export_groups()
    source.made.clear()
    assert world.import_groups(exported) == ["main", "tp"]
    assert [one.key.ranks for one in source.made] == [(0, 1, 2), (1, 2)]


def test_a_rank_that_has_not_got_its_groups_says_why() -> None:
    made = World()
    with pytest.raises(ValueError, match="there is no process group yet"):
        made.get_group()
    made.no_groups = "this rank is being started"
    with pytest.raises(DistError, match="this rank is being started"):
        made.get_group()


@pytest.mark.parametrize(
    ("watched", "waits", "told"),
    [
        (True, False, None),
        (True, True, "tcp://127.0.0.1:1"),
        (False, False, "tcp://127.0.0.1:1"),
    ],
)
def test_ranks_in_torch_stay_the_job_that_the_others_know(
    monkeypatch: pytest.MonkeyPatch, watched: bool, waits: bool, told: str | None
) -> None:
    """A rank that has not come to torch's group is of the job of the environment."""
    heard: list[tuple[int, int, str | None]] = []

    def hear(*given: Any) -> None:
        heard.append(given)
        raise InterruptedError

    monkeypatch.setattr(unattended, "before_init", [hear])
    monkeypatch.setattr(world, "sources", [Source()] if watched else [])
    with pytest.raises(InterruptedError):
        dist.init_process_group(
            "tcp", "tcp://127.0.0.1:1", 5, 2, 0, wait_for_workers=waits
        )
    assert heard == [(0, 2, told)]
