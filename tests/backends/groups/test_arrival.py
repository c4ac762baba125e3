"""init_process_group waits for all ranks, and names those that do not come."""

from __future__ import annotations

import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import arrival
from rankscope.backends.groups.rendezvous import rendezvous
from rankscope.backends.groups.world import world
from rankscope.backends.stores.base import OTHER_KEY, OTHER_KEY_HINT
from rankscope.backends.stores.hash import HashStore
from rankscope.backends.stores.tcp import TCPStore
from tests.backends.scripts import script
from tests.backends.store_backend import register


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_of_the_user_keeps_his_keys_alone(wait: bool) -> None:
    register()
    store = HashStore()
    store.set("his", "key")
    for _ in range(2):
        dist.init_process_group(
            "cpu:store", store=store, rank=0, world_size=1, wait_for_workers=wait
        )
        dist.all_reduce(np.ones(2), group=dist.new_group([0]))
        dist.destroy_process_group()
    left = {*store.list_keys()}
    assert "his" in left
    if wait:
        assert left == {"his", "init_process_group/0"}


def test_a_rank_that_does_not_come_is_named() -> None:
    register()
    store = HashStore()

    def start(rank: int) -> threading.Thread:
        place = arrival.enter(store, rank)
        thread = threading.Thread(
            target=arrival.await_ranks, args=(place, rank, 4, 30), daemon=True
        )
        thread.start()
        return thread

    others = [start(1)]
    until(lambda: store.check(["init_process_group/1/arrived/1"]))
    with pytest.raises(dist.DistStoreTimeoutError) as caught:
        dist.init_process_group(
            "cpu:store", store=store, rank=0, world_size=4, timeout=0.3
        )
    text = str(caught.value)
    assert "rank 0: ranks 2–3 of 4 did not come within 0.3 s" in text
    assert "wait_for_workers=False" in text
    assert caught.value.culprits == (2, 3)
    assert not dist.is_initialized()
    # Who comes later does not take this rank for one that waits.
    assert not store.check(["init_process_group/1/arrived/0"])
    others += [start(2), start(3)]
    # It may try again.
    try:
        dist.init_process_group(
            "cpu:store", store=store, rank=0, world_size=4, timeout=30
        )
        for other in others:
            other.join(30)
            assert not other.is_alive()
    finally:
        world.destroy()
        store.close()


def test_world_sizes_that_differ_are_named() -> None:
    store = HashStore()
    # Rank 1 of 2 has come, and rank 0 waits for a third one.
    arrival.arrived(store).set("1", "2 b:7")
    with pytest.raises(dist.DistStoreTimeoutError) as missing:
        arrival.await_ranks(store, 0, 3, 0.1)
    text = str(missing.value)
    assert "did not come within 0.1 s: rank 1 came with world_size 2; did" in text
    arrival.arrived(store).set("0", "3 a:7")
    arrival.arrived(store).delete_key("1")
    with pytest.raises(
        ValueError, match=r"rank 1: its world_size is 2, that of rank 0"
    ):
        arrival.await_ranks(store, 1, 2, 30)
    store.close()


@pytest.mark.parametrize("in_step", [True, False])
def test_a_process_with_another_key_is_told_and_ends_the_wait_of_a_step(
    in_step: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere it may be anybody, and the wait goes on."""
    monkeypatch.setattr(arrival, "meeting_step", lambda: "21.3" * in_step)
    monkeypatch.setattr(arrival, "_LOOK", 0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, key=b"one")
    try:
        for _ in range(2):
            with pytest.raises(dist.DistNetworkError, match="its key is another one"):
                TCPStore("127.0.0.1", store.port, key=b"other", timeout=30)
        until(lambda: store.check([OTHER_KEY]))
        (warning,) = caplog.messages
        assert warning == f"the store at port {store.port} has {OTHER_KEY_HINT}"
        with pytest.raises(dist.DistStoreTimeoutError) as missing:
            arrival.await_ranks(arrival.enter(store, 0), 0, 2, 60 if in_step else 0.2)
    finally:
        store.close()
    assert f": the store has {OTHER_KEY_HINT}; did every" in str(missing.value)
    assert ("did not come within 0.2 s" in str(missing.value)) is not in_step


def test_two_processes_with_one_rank_are_named() -> None:
    store = HashStore()
    arrival.arrived(store).set("1", "3 b:7")
    with pytest.raises(dist.DistStoreTimeoutError, match="ranks 0, 2 of 3") as caught:
        arrival.await_ranks(store, 1, 3, 0.1)
    assert "two processes came as rank 1, b:7 and " in str(caught.value)
    # One that tries again is no second one.
    with pytest.raises(dist.DistStoreTimeoutError) as again:
        arrival.await_ranks(store, 2, 3, 0.1)
    assert "as rank 2" not in str(again.value)
    store.close()


def test_a_rank_that_gave_up_is_not_called_missing() -> None:
    store = HashStore()
    with pytest.raises(dist.DistStoreTimeoutError, match="rank 0: ranks 1–2 of 3"):
        arrival.await_ranks(store, 0, 3, 0.1)
    with pytest.raises(dist.DistStoreTimeoutError, match="rank 1: rank 2 of 3") as told:
        arrival.await_ranks(store, 1, 3, 0.1)
    assert told.value.culprits == (2,)
    # Nor by an error of the store above it, which misses the key of rank 0, too.
    assert "misses" not in "".join(traceback.format_exception(told.value))
    store.close()


def test_an_option_waits_for_nobody() -> None:
    register()
    store = HashStore()
    dist.init_process_group(
        "cpu:store",
        store=store,
        rank=1,
        world_size=3,
        timeout=30,
        wait_for_workers=False,
    )
    assert dist.get_world_size() == 3
    world.destroy()
    store.close()


def comes_late(me: Rank) -> bool:
    register()
    with me.store("came") as came:
        if me.rank == 2:
            # The others are in init_process_group, or about to be.
            came.wait(["0", "1"], 30)
        came.set(str(me.rank), b"1")
        dist.init_process_group("cpu:store", timeout=30)
        everybody = came.check(["0", "1", "2"])
        x = np.ones(2)
        dist.all_reduce(x)
        assert x[0] == 3
        dist.destroy_process_group()
    return everybody


AGAIN = """
import os, sys
import numpy as np
import rankscope as dist

for number in range(int(sys.argv[1]) if sys.argv[1:] else 0, 6):
    dist.init_process_group(timeout=60)
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == 3
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == number % 3:
        # A fresh program in its place, which takes longer than the others.
        program = open("again.py").read()
        os.execv(sys.executable, [sys.executable, "-c", program, str(number + 1)])
"""


def again(me: Rank) -> tuple[int, str]:
    if me.rank == 0:
        (Path(me.folder) / "again.py").write_text(AGAIN)
    me.meet("written")
    return script(me, AGAIN)


@pytest.mark.processes
def test_it_begins_again_though_rank_0_still_serves_the_groups_of_before() -> None:
    assert run_ranks(3, again) == [(0, "")] * 3


@pytest.mark.processes
def test_it_returns_when_all_have_come() -> None:
    assert run_ranks(3, comes_late) == [True] * 3


def test_a_rank_comes_to_groups_that_rank_0_has_left_where_none_waits() -> None:
    served = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    url = f"tcp://127.0.0.1:{served.port}"
    arrival.say_goodbye(served, 0, 2, wait=False)
    # Where all meet, these are groups of before: it waits for their end, for 0.2 s.
    began = time.monotonic()
    rendezvous(url, 1, 2, 0.2)[0].close()
    assert time.monotonic() - began >= 0.2
    # They need not be. With no end of theirs it would wait for an hour.
    store, rank, size = rendezvous(url, 1, 2, 3600, all_meet=False)
    assert (rank, size) == (1, 2)
    store.close()
    served.close()


def twice(me: Rank) -> list[float]:
    """Over one store, what the first default group left does not concern the second."""
    register()
    sums = []
    with me.store("all") as store:
        for _ in range(3):
            dist.init_process_group(
                "cpu:store", store=store, rank=me.rank, world_size=me.size, timeout=30
            )
            x = np.ones(2)
            dist.all_reduce(x)
            sums.append(float(x[0]))
            dist.destroy_process_group()
        me.meet("end")
    return sums


@pytest.mark.processes
def test_default_groups_one_after_another_over_one_store() -> None:
    assert run_ranks(2, twice) == [[2.0] * 3] * 2


def test_rank_0_does_not_wait_for_ranks_whose_program_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their processes may write a report for seconds."""
    monkeypatch.setattr(arrival, "_GOODBYE", 60.0)
    store = HashStore()
    arrival.announce_end(store, 2)
    waits = threading.Thread(
        target=arrival.say_goodbye, args=(store, 0, 3), daemon=True
    )
    waits.start()
    assert waits.is_alive()
    arrival.say_goodbye(store, 1, 3)
    waits.join(30)
    assert not waits.is_alive()


def test_a_rank_that_leaves_waits_for_the_store_no_longer_than_for_a_goodbye() -> None:
    """That of a rank that is stopped would not answer for the timeout of the store."""
    store = HashStore(timeout=3600)
    arrival.say_goodbye(store, 1, 2)
    assert store.timeout == timedelta(seconds=arrival._GOODBYE)


def test_a_process_that_a_rank_has_started_is_not_that_rank() -> None:
    store = HashStore()
    arrival.await_ranks(store, 0, 1, 30)
    arrival.await_ranks(store, 0, 1, 30)  # the rank itself, once more
    arrival.arrived(store).set("0", "1 b:7")
    with pytest.raises(dist.DistError, match="rank 0 is process b:7: .* cannot be it"):
        arrival.await_ranks(store, 0, 1, 30)
    arrival.announce_end(store, 0)
    with pytest.raises(dist.DistError, match="rank 0 was process b:7, which has left"):
        arrival.await_ranks(store, 0, 1, 30)
    store.close()
