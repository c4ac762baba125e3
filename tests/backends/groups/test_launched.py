"""The rounds of a world in the store of a launcher, and fresh processes in them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankscope.backends.errors import DistBackendError, DistStoreTimeoutError
from rankscope.backends.groups import arrival, launched
from rankscope.backends.groups.launched import LaunchedStore
from rankscope.backends.launch_variables import STORE
from rankscope.backends.stores.base import LAUNCHER
from rankscope.backends.stores.hash import HashStore
from rankscope.backends.stores.tcp import TCPStore


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    monkeypatch.setenv("RANKSCOPE_KEY", "of the test")
    with_server = TCPStore(
        "127.0.0.1", 0, is_master=True, reports_deaths=True, server=LAUNCHER
    )
    monkeypatch.setenv(STORE, f"127.0.0.1:{with_server.port}/a job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    yield with_server
    with_server.close()


def joined(rank: int, restarts: int, monkeypatch: pytest.MonkeyPatch) -> LaunchedStore:
    """Return what a process joins that has joined none before."""
    monkeypatch.setattr(launched, "_has_begun", None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    return launched.join(rank, 2, 5)


def test_a_fresh_process_arrives_where_none_of_its_rank_has(
    served: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [joined(rank, 0, monkeypatch) for rank in range(2)]
    # Rank 1 dies before all have come: its fresh process comes to the first round.
    arrival.arrived(stores[1]).set("1", b"1")
    stores.append(joined(1, 1, monkeypatch))
    assert stores[-1].number == 0
    # It dies once all are there, and again after the rebuild.
    arrival.arrived(stores[0]).set("0", b"1")
    stores.append(joined(1, 2, monkeypatch))
    assert (stores[-1].world, stores[-1].number) == (1, 1)
    assert launched.later_round(stores[-1]) is stores[-1]
    arrival.arrived(stores[-1]).set("1", b"1")
    stores.append(joined(1, 3, monkeypatch))
    assert stores[-1].number == 2
    # It makes a second world, as the others do.
    launched.note_begun(stores[-1])
    stores.append(launched.join(1, 2, 5))
    assert (stores[-1].world, stores[-1].number) == (2, 0)
    # That did not begin: it comes again, and so does another process.
    stores += [launched.join(1, 2, 5), joined(1, 4, monkeypatch)]
    assert {(one.world, one.number) for one in stores[-2:]} == {(2, 0)}
    assert {one.server for one in stores} == {LAUNCHER}
    for one in stores:
        one.close()


def test_the_ranks_of_another_launcher_have_inherited_the_variable(
    served: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched.is_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not launched.is_launched()
    monkeypatch.delenv(STORE)
    assert not launched.is_launched()


def test_a_round_begins_once_all_ranks_are_there() -> None:
    base = HashStore()
    stores = [LaunchedStore(base, 1, 1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda rank: launched.await_round(stores[rank], rank, 2, 30), [0, 1]
            )
        )
    assert all(one.complete for one in stores)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = LaunchedStore(HashStore(), 1, 1)
    with pytest.raises(DistStoreTimeoutError, match="rank 1 did not come") as raised:
        launched.await_round(store, 0, 2, 0.1)
    assert raised.value.culprits == (1,)
    assert not store.complete
    assert not store.has_arrived(0)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    base = HashStore()
    base.set(launched.ENDED.format(1), b"1")
    with pytest.raises(DistBackendError, match="rank 1 ended without an error"):
        launched.await_round(LaunchedStore(base, 1, 1), 0, 2, 60)
