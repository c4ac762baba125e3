"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ipyparallel

from .errors import ClusterError
from .roster import Roster

__all__ = ["pull", "push"]


def push(
    roster: Roster,
    variables: Mapping[str, Any],
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Set `variables` on `ranks`; wait for it at most `timeout` seconds."""
    _get(
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
    seats = [roster.seats[rank] for rank in ranks]
    dead = [str(seat.death) for seat in seats if not seat.alive]
    if dead:
        raise ClusterError("; ".join(dead))
    return roster.client.direct_view([seat.engine_id for seat in seats])


def _get(
    result: Any, what: str, ranks: Sequence[int], timeout: float | None
) -> list[Any]:
    try:
        values: list[Any] = result.get(timeout, return_exceptions=True)
    except TimeoutError as error:
        raise TimeoutError(
            f"{what}: not done on ranks {list(ranks)} within {timeout:g} s; a rank "
            "answers when the cell that runs there is done"
        ) from error
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
