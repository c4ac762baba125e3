"""The rounds of the ranks in the store of a launcher, and fresh processes in them."""

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
    monkeypatch.setenv(STORE, f"127.0.0.1:{with_server.port}/a job/2")
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    yield with_server
    with_server.close()


def joined(rank: int, restarts: int, monkeypatch: pytest.MonkeyPatch) -> LaunchedStore:
    """Return what a process joins that has joined none before."""
    for name, value in ("_number", None), ("_began", False), ("_has_begun", False):
        monkeypatch.setattr(launched, name, value)
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
    assert (stores[-1].number, stores[-1].way) == (1, launched.FRESH)
    assert launched.later_round(stores[-1]) is stores[-1]
    arrival.arrived(stores[-1]).set("1", b"1")
    stores.append(joined(1, 3, monkeypatch))
    assert stores[-1].number == 2
    # It makes its groups once more, as the others do.
    arrival.arrived(stores[-1]).set("1", b"1")
    launched.note_begun(stores[-1])
    stores.append(launched.join(1, 2, 5))
    assert (stores[-1].number, stores[-1].way) == (3, launched.INIT)
    # That round did not begin: it comes again, and so does another process.
    stores += [launched.join(1, 2, 5), joined(1, 4, monkeypatch)]
    assert [one.number for one in stores[-2:]] == [3, 3]
    assert {one.server for one in stores} == {LAUNCHER}
    for one in stores:
        one.close()


def test_the_ranks_of_another_launcher_have_inherited_the_variable(
    served: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched.is_launched()
    # A child of a rank, whose own ranks meet elsewhere.
    monkeypatch.setenv("MASTER_PORT", "3")
    assert not launched.is_launched()
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not launched.is_launched()
    monkeypatch.delenv(STORE)
    assert not launched.is_launched()


def come(
    ways: dict[int, str], size: int, **options: bool
) -> tuple[dict[int, LaunchedStore], dict[int, list[int] | Exception]]:
    """Have ranks come to a round at once; return their stores, and what each got."""
    base = HashStore()
    stores = {rank: LaunchedStore(base, 1, way) for rank, way in ways.items()}

    def wait(rank: int) -> list[int] | Exception:
        try:
            return launched.await_round(
                stores[rank], rank, range(size), 30, {"groups": []}, **options
            )
        except DistBackendError as error:
            return error

    base.set(launched.LOST.format(2), b"1")
    with ThreadPoolExecutor(len(ways)) as pool:
        return stores, dict(zip(ways, pool.map(wait, ways), strict=True))


def test_a_round_begins_once_all_ranks_are_there() -> None:
    stores, got = come({0: launched.REBUILD, 1: launched.FRESH}, 2)
    assert got == {0: [], 1: []}
    assert all(one.complete for one in stores.values())
    assert {rank: one.joins_groups for rank, one in stores.items()} == {
        0: False,
        1: True,
    }


def test_a_fresh_process_is_as_the_others_where_they_make_their_groups_anew() -> None:
    stores, got = come({0: launched.INIT, 1: launched.FRESH}, 2)
    assert got == {0: [], 1: []}
    assert not any(one.joins_groups for one in stores.values())


def test_ranks_that_go_on_in_different_ways_are_named_on_all() -> None:
    _, got = come({0: launched.REBUILD, 1: launched.INIT}, 2)
    for error in got.values():
        assert isinstance(error, DistBackendError)
        assert (
            "rank 0 called rankscope.torch.rebuild(), and rank 1 init_process_group() "
            "once more" in str(error)
        )
        assert error.culprits == (1,)


def test_a_lost_rank_is_an_error_where_nobody_goes_on_without_it() -> None:
    _, got = come({0: launched.REBUILD, 1: launched.FRESH}, 3)
    for error in got.values():
        assert isinstance(error, DistBackendError)
        assert "rank 2 failed and will not be started again" in str(error)
        assert error.culprits == (2,)


def test_the_others_can_go_on_without_a_lost_rank() -> None:
    stores, got = come({0: launched.REBUILD, 1: launched.REBUILD}, 3, goes_on=True)
    assert got == {0: [2], 1: [2]}
    assert all(set(one.arrivals) == {0, 1} for one in stores.values())


def test_a_rank_that_does_not_come_is_named() -> None:
    store = LaunchedStore(HashStore(), 1)
    with pytest.raises(DistStoreTimeoutError, match="rank 1 did not come") as raised:
        launched.await_round(store, 0, [0, 1], 0.1)
    assert raised.value.culprits == (1,)
    assert not store.complete
    assert not store.has_arrived(0)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    base = HashStore()
    base.set(launched.ENDED.format(1), b"1")
    with pytest.raises(DistBackendError, match="rank 1 ended without an error"):
        launched.await_round(LaunchedStore(base, 1), 0, [0, 1], 60)
