"""How the ranks of a script find the channel of their job, and a fresh rank 0's."""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.backends.groups.launched import LaunchedStore
from rankscope.backends.launch_variables import STORE
from rankscope.backends.stores.hash import HashStore
from rankscope.engines.script import meeting
from rankscope.engines.script.meeting import Channel
from rankscope.engines.script.options import JobOptions


class TorchStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Watch:
    """The watch of torch on a rank of two."""

    world_size = 2

    def __init__(self, rank: int, store: TorchStore) -> None:
        self.rank, self._store = rank, store

    def store(self) -> TorchStore:
        return self._store


class NoTorch:
    """The watch on a rank whose torch has no group."""

    rank = world_size = None

    def store(self) -> None:
        return None


def meet(rank: int, store: TorchStore, lost: Collection[str] = ()) -> Channel:
    watch: Any = Watch(rank, store)
    found = meeting.meet(watch, JobOptions(), threading.Event(), lost)
    assert found is not None
    return found


def test_the_others_find_the_channel_of_a_fresh_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    monkeypatch.setenv(STORE, "127.0.0.1:1/a job/2")
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(meeting, "TIMEOUT", 0.5)
    torchs = TorchStore()
    first = meet(0, torchs)
    joined = meet(1, torchs)
    assert joined.address == first.address
    joined.store.close()
    first.store.close()
    # Rank 1 does not take the old address, also where it has never known it, and waits
    # for as long as a fresh rank 0 needs.
    monkeypatch.setattr(meeting, "_ADDRESS_WAIT", 0.0)
    timer = threading.Timer(0.2, lambda: opened.append(meet(0, torchs)))
    opened: list[Channel] = []
    timer.start()
    again = meet(1, torchs, {first.address})
    timer.join()
    assert again.address == opened[0].address != first.address
    again.store.close()
    opened[0].store.close()
    timer = threading.Timer(1.0, lambda: opened.append(meet(0, torchs)))
    timer.start()
    fresh = meet(1, torchs)
    timer.join()
    assert fresh.address == opened[1].address
    fresh.store.close()
    opened[1].store.close()


def own_group(monkeypatch: pytest.MonkeyPatch, rank: int, store: Any) -> None:
    """Have this process be a rank of a default group of ours."""
    group = SimpleNamespace(store=store, rank=rank, size=2)
    monkeypatch.setattr(meeting, "world", group)


def test_ranks_without_torch_meet_in_the_store_of_our_own_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a fresh process, which comes to a later round of its launcher's store."""
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    no_torch: Any = NoTorch()
    served = HashStore()
    for stores in (
        (served, served),
        (LaunchedStore(served, 0), LaunchedStore(served, 3)),
    ):
        own_group(monkeypatch, 0, stores[0])
        first = meeting.meet(no_torch, JobOptions(), threading.Event())
        own_group(monkeypatch, 1, stores[1])
        second = meeting.meet(no_torch, JobOptions(), threading.Event())
        assert first is not None
        assert second is not None
        assert (first.rank, second.rank, second.world_size) == (0, 1, 2)
        assert second.address == first.address
        assert second.file is None
        second.store.close()
        first.store.close()
        served.delete_key("rankscope/job")


def test_ranks_meet_that_see_the_two_default_groups_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    ours, torchs = HashStore(), TorchStore()
    no_torch: Any = NoTorch()
    own_group(monkeypatch, 0, ours)
    first = meeting.meet(no_torch, JobOptions(), threading.Event())
    assert first is not None
    own_group(monkeypatch, 1, ours)
    # By now torch has its group, too.
    second = meet(1, torchs)
    assert second.address == first.address
    second.store.close()
    first.store.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_gone_again_is_none(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a script destroys its group just when the thread looks at it."""
    opened: list[Channel] = []
    real = meeting._open

    def noted(*arguments: Any) -> Channel:
        opened.append(real(*arguments))
        return opened[-1]

    monkeypatch.setattr(meeting, "_open", noted)
    store = HashStore()
    store.close()
    own_group(monkeypatch, rank, store)
    stopped = threading.Event()
    stopped.set()
    no_torch: Any = NoTorch()
    assert meeting.meet(no_torch, JobOptions(), stopped) is None
    assert len(opened) == 1 - rank
    assert all(one.store.lost for one in opened)
