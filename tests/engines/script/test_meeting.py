"""How the ranks of a script find the channel of their job, and a fresh rank 0's."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rankscope.backends.launch_variables import STORE
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


def meet(rank: int, store: TorchStore, lost: str = "") -> Channel:
    watch: Any = Watch(rank, store)
    found = meeting.meet(watch, JobOptions(), threading.Event(), lost)
    assert found is not None
    return found


def test_the_others_find_the_channel_of_a_fresh_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    monkeypatch.setenv(STORE, "127.0.0.1:1/a job")
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
    again = meet(1, torchs, first.address)
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
