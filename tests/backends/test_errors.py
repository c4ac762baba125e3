"""What an error says to code: rank, group, op, sequence number, culprits, reason."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankscope as dist
from rankscope.backends import errors
from rankscope.backends.conformance.ranks import Rank, Ranks, run_ranks
from tests.backends.manual import Manual

CLASSES = [getattr(errors, name) for name in errors.__all__]


def facts(error: BaseException) -> tuple[Any, ...]:
    assert isinstance(error, dist.DistError)
    return (error.rank, error.group, error.op, error.sequence_number, error.culprits)


@pytest.mark.parametrize("kind", CLASSES)
def test_attributes_survive_pickling_and_a_prefix(kind: type[dist.DistError]) -> None:
    error = kind(
        "no",
        rank=1,
        group="tp",
        op="send",
        sequence_number=3,
        culprits=[2],
        reason="so it is",
    )
    for one in (error, pickle.loads(pickle.dumps(error)), error.prefixed("early")):
        assert type(one) is kind
        assert facts(one) == (1, "tp", "send", 3, (2,))
        assert one.reason == "so it is"
    assert str(error.prefixed("early")) == "early: no"
    assert facts(kind("no")) == (None, None, None, None, ())
    assert kind("no").reason is None


def test_what_is_known_is_not_replaced() -> None:
    error = dist.DistError("no", rank=0, culprits=[1])
    error.fill_in(rank=2, culprits=(3,), op="send")
    assert facts(error) == (0, None, "send", None, (1,))


def failed(work: dist.Work | None) -> dist.DistError:
    assert work is not None
    with pytest.raises(dist.DistError) as caught:
        work.wait(10)
    return caught.value


def test_of_an_abort_by_the_user(group: dist.ProcessGroup) -> None:
    dist.barrier(async_op=True)
    work = dist.all_reduce(np.ones(3), async_op=True)
    dist.abort_process_group(reason="enough")
    error = failed(work)
    assert facts(error) == (0, "default", "all_reduce", 2, ())
    assert error.reason == "enough"
    with pytest.raises(dist.DistAbortedError) as caught:
        dist.isend(np.ones(3), dst=1)
    assert facts(caught.value) == (0, "default", "send", None, ())
    assert caught.value.reason == "enough"


def test_an_aborted_work_gets_one_error(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = type(group.current)._error

    def error(current: Any, what: str, identity: Any) -> dist.DistAbortedError:
        made.append(what)
        return make(current, what, identity)

    monkeypatch.setattr(type(group.current), "_error", error)
    works = [dist.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
    group.abort("enough")
    assert all(work is not None and work.is_completed() for work in works)
    assert len(made) == 3


def test_of_a_timeout(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    with pytest.raises(dist.DistTimeoutError) as caught:
        work.wait(0.01)
    assert facts(caught.value) == (0, "default", "all_reduce", 1, ())
    assert caught.value.reason == "wait(timeout=0.01 s) passed"
    with dist.op_timeout(0.05):
        work = dist.isend(np.ones(3), dst=1)
    work.mark_started()
    error = failed(work)
    assert isinstance(error, dist.DistTimeoutError)
    assert facts(error) == (0, "default", "send", 1, (1, 2, 3))
    assert error.reason == "not done 0.05 s after it began"


def test_of_a_backend_that_fails(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.mark_failed(dist.DistBackendError("the cable is gone"))
    error = failed(work)
    assert facts(error) == (0, "default", "all_reduce", 1, ())
    assert error.reason == "the cable is gone"

    work = dist.all_reduce(np.ones(3), async_op=True)
    assert work is not None
    work.mark_failed(OSError("no such link"))
    error = failed(work)
    assert facts(error) == (0, "default", "all_reduce", 2, ())
    assert error.reason == "OSError: no such link"

    def refuse(*_: object) -> dist.Work:
        raise dist.DistBackendError("out of links")

    monkeypatch.setattr(Manual, "all_reduce", refuse)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(np.ones(3))
    assert facts(caught.value) == (0, "default", "all_reduce", 3, ())
    assert caught.value.reason == "out of links"


def test_of_a_backend_that_cannot_be_built(group: dist.ProcessGroup) -> None:
    def create(*_: object) -> dist.Backend:
        raise dist.DistStoreTimeoutError("late", culprits=[1])

    dist.Backend.register_backend("manual", create, devices=("cpu", "cuda"))
    half = dist.new_group([0, 3], group_desc="half")
    with pytest.raises(dist.DistStoreTimeoutError, match="all_reduce in group") as got:
        dist.all_reduce(np.ones(3), group=half)
    # By the number in the group, rank 1 is global rank 3.
    assert facts(got.value) == (0, "half", "all_reduce", None, (3,))
    assert got.value.reason == "late"


def test_of_a_store_that_waits_in_vain(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 4)
    with pytest.raises(dist.DistStoreTimeoutError, match="ranks 1.*3") as caught:
        store.wait(["at/1", "at/3"], timeout=0.05)
    assert caught.value.culprits == (1, 3)
    store.close()


def test_of_a_death_that_the_store_reports(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(np.ones(3), async_op=True)
    notice = {"text": "rank 2 is gone", "by": "the store", "culprits": [2]}
    group.store.set("abort", json.dumps(notice))
    error = failed(work)
    assert facts(error) == (0, "default", "all_reduce", 1, (2,))
    assert error.reason == "rank 2 is gone"


def bereaved(me: Rank) -> None:
    dist.init_process_group("tcp", timeout=60)
    dist.barrier()
    me.report("ready")
    if me.rank == 1:
        me.listen(60)
        return
    with pytest.raises(dist.DistAbortedError) as caught:
        dist.all_reduce(np.ones(3))
    me.report((*facts(caught.value), caught.value.reason))


@pytest.mark.processes
def test_of_the_death_of_a_rank() -> None:
    with Ranks(3, bereaved) as ranks:
        for rank in range(3):
            ranks.next_report(rank)
        ranks.kill(1)
        for rank in (0, 2):
            *known, reason = ranks.next_report(rank, 30)
            assert known == [rank, "default", "all_reduce", 2, (1,)]
            assert reason.endswith("is gone: killed by SIGKILL")


def late(me: Rank) -> tuple[Any, ...] | None:
    dist.init_process_group("tcp", timeout=60)
    if me.rank == 1:
        return None
    with pytest.raises(dist.DistBackendError) as caught:
        dist.monitored_barrier(timeout=0.3)
    # Rank 0, which serves the store, ends last.
    dist.barrier(group=dist.new_group([0, 2]))
    return facts(caught.value)


@pytest.mark.processes
def test_of_a_monitored_barrier() -> None:
    zero, _, two = run_ranks(3, late)
    assert zero == (0, "default", "monitored_barrier", 1, (1,))
    assert two == (2, "default", "monitored_barrier", 1, (1,))
