"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel

from . import private
from .errors import ClusterError
from .roster import Roster

__all__ = ["pull", "push"]

#: Seconds between two looks for an answer that was lost on the way.
PERIOD = 3.0


def push(
    roster: Roster,
    variables: Mapping[str, Any],
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Set `variables` on `ranks`; wait for it at most `timeout` seconds."""
    _get(
        roster,
        _view(roster, ranks).push(dict(variables), block=False),
        f"push of {', '.join(variables)}",
        ranks,
        timeout,
    )


def pull(
    roster: Roster,
    names: str | Sequence[str],
    ranks: Sequence[int],
    timeout: float | None,
) -> dict[int, Any]:
    """Return rank → value, or rank → {name: value} where `names` is a list."""
    wanted = [names] if isinstance(names, str) else list(names)
    values = _get(
        roster,
        _view(roster, ranks).pull(wanted, block=False),
        f"pull of {', '.join(wanted)}",
        ranks,
        timeout,
    )
    found = {
        rank: dict(zip(wanted, got, strict=True))
        for rank, got in zip(ranks, values, strict=True)
    }
    if isinstance(names, str):
        return {rank: one[names] for rank, one in found.items()}
    return dict(found)


def _view(roster: Roster, ranks: Sequence[int]) -> Any:
    _check_alive(roster, ranks)
    return roster.client.direct_view([roster.seats[rank].engine_id for rank in ranks])


def _check_alive(roster: Roster, ranks: Sequence[int]) -> None:
    seats = [roster.seats[rank] for rank in ranks]
    dead = [str(seat.death) for seat in seats if not seat.alive]
    if dead:
        raise ClusterError("; ".join(dead))


def _get(
    roster: Roster, result: Any, what: str, ranks: Sequence[int], timeout: float | None
) -> list[Any]:
    _wait(roster, result, what, ranks, timeout)
    values: list[Any] = result.get(0, return_exceptions=True)
    reasons: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        if isinstance(value, ipyparallel.error.RemoteError):
            reasons.setdefault(f"{value.ename}: {value.evalue}", []).append(rank)
    if reasons:
        raise ClusterError(
            f"{what}: "
            + "; ".join(f"ranks {where}: {why}" for why, where in reasons.items())
        )
    return values


def _wait(
    roster: Roster, result: Any, what: str, ranks: Sequence[int], timeout: float | None
) -> None:
    """Wait for `result`; raise `TimeoutError`, or `ClusterError` if it was lost.

    What was on its way while the connection to the controller was cut never
    comes. A rank that answers something sent later has answered before.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    probes: dict[int, Future[Any]] = {}
    while True:
        left = max(0.0, deadline - time.monotonic())
        if result.wait(min(PERIOD, left)):
            return
        if left <= PERIOD:
            raise TimeoutError(
                f"{what}: not done on ranks {list(ranks)} within {timeout:g} s; a rank "
                "answers when the cell that runs there is done"
            )
        _check_alive(roster, ranks)
        answered = [rank for rank, probe in probes.items() if probe.done()]
        if len(answered) == len(ranks) and not result.wait(1.0):
            raise ClusterError(
                f"{what}: the connection to the controller failed meanwhile, and the "
                f"answer of ranks {list(ranks)} was lost: try again"
            )
        for rank in ranks:
            seat = roster.seats[rank]
            if rank in answered or seat.summary.get("busy"):
                continue
            if rank in probes:
                private.forget(roster.client, probes[rank].msg_id)  # type: ignore[attr-defined]
            probes[rank] = private.probe(roster.client, seat.uuid)
