"""Who is named when a rank dies: NCCL, the store and the launcher report it.

NCCL reports a closed connection on the surviving ranks, and does not say whose; the
store reports the end of the process; the launcher, in a notebook, knows how it ended.
Over a simulated GPU, as in `test_nccl`; no process dies here.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import rankscope as dist
from rankscope.backends.conformance.waiting import until
from rankscope.backends.groups import abort_reason
from tests.backends.gpu_ranks import Rank, Ranks
from tests.backends.gpu_simulation import Simulation

#: The rank that dies, and what is known of its end.
DEAD, END = 2, "rank 2 (process 4711 on node1) is gone: killed by SIGKILL"
SURVIVORS = (0, 1)


def by_nccl(ranks: Ranks, *survivors: int) -> None:
    """Do what NCCL does on the other ranks: first on some, in any order."""
    for rank in survivors:
        ranks.simulation.fails[rank] = dist.ConnectionLostError(
            "NCCL reports: remote process exited or there was a network error"
        )
        until(lambda: ranks.ranks[rank].pg.current.loss is not None)  # noqa: B023


def by_the_store(ranks: Ranks) -> None:
    """Do what the store does where a process is gone."""
    notice = {"text": END, "by": "the store", "culprits": [DEAD]}
    ranks.ranks[0].pg.store.compare_set("abort", b"", json.dumps(notice))


def by_the_launcher(ranks: Ranks) -> None:
    """Do what the agents of the other ranks do when the launcher reports the end."""
    for rank in SURVIVORS:
        ranks.ranks[rank].pg.abort(END, by="the notebook", culprits=(DEAD,))


def errors_of_the_survivors(ranks: Ranks, reports: Callable[[], None]) -> list[str]:
    """Return their errors of the op during which `reports` come."""

    def body(r: Rank) -> str:
        if r.rank == DEAD:
            others = [ranks.ranks[rank].pg for rank in SURVIVORS]
            until(lambda: all(pg.status.in_flight for pg in others))
            reports()
            return ""
        with pytest.raises(dist.DistAbortedError) as caught:
            dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True).synchronize()
        assert caught.value.culprits == (DEAD,)
        assert caught.value.reason == END
        return str(caught.value)

    return [text for text in ranks(body) if text]


@pytest.mark.parametrize("told", [by_the_store, by_the_launcher])
@pytest.mark.parametrize("before", [(), (0,), (1,), (0, 1), (1, 0)])
def test_whoever_reports_first_the_dead_rank_is_named(
    ranks: Ranks, told: Callable[[Ranks], None], before: tuple[int, ...]
) -> None:
    """NCCL reports on the ranks `before` ahead of the others' reports."""
    ranks.start(3)
    ranks(lambda r: dist.barrier(group=r.pg))

    def reports() -> None:
        by_nccl(ranks, *before)
        told(ranks)
        late = set(SURVIVORS) - set(before)
        ranks.simulation.fails |= {r: dist.ConnectionLostError("late") for r in late}

    for text in errors_of_the_survivors(ranks, reports):
        assert "all_reduce #2 of group 'g'" in text
        assert END in text
        assert "NCCL reports" not in text
    ranks.simulation.fails.clear()


@pytest.mark.parametrize("reason", [None, "NCCL reports: no file descriptor is left"])
def test_what_nccl_reports_is_the_error_where_no_rank_died(
    ranks: Ranks,
    simulation: Simulation,
    monkeypatch: pytest.MonkeyPatch,
    reason: str | None,
) -> None:
    monkeypatch.setattr(abort_reason, "VERDICT_WAIT", 0.2)
    ranks.start(2)
    ranks(lambda r: dist.barrier(group=r.pg))
    lost = dist.ConnectionLostError("NCCL reports: a network error", reason=reason)

    def body(r: Rank) -> str | None:
        if r.rank == 1:
            until(lambda: bool(ranks.ranks[0].pg.status.in_flight))
            simulation.fails[0] = lost
            until(lambda: r.pg.aborted is not None)
            assert r.pg.aborted is not None
            return r.pg.aborted.text
        with pytest.raises(dist.DistAbortedError) as caught:
            dist.all_reduce(r.array([1.0]), group=r.pg, async_op=True).synchronize()
        return caught.value.reason

    expected = reason or (
        "rank 0 lost the connection to a peer: NCCL reports: a network error"
    )
    assert ranks(body) == [expected, expected]
    simulation.fails.clear()


def test_a_rank_alone_has_no_peer_to_wait_for(
    ranks: Ranks, simulation: Simulation
) -> None:
    ranks.start(1)
    (r,) = ranks.ranks
    dist.barrier(group=r.pg)
    simulation.hangs.add(0)
    work = r.all_reduce()
    simulation.fails[0] = dist.ConnectionLostError("NCCL reports: a network error")
    until(work.is_completed)
    assert r.pg.current.loss is None
    assert r.pg.aborted is not None
    assert r.pg.aborted.text == "NCCL reports: a network error"
    simulation.fails.clear()
