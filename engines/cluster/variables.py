"""Variables to and from the ranks, through ipyparallel's own views."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel

from rankscope.backends.rank_sets import name_ranks

from ..errors import ClusterError, group_by_message
from ..wire import ipyparallel_private as private
from .rank_slots import deaths
from .registry import EngineRegistry

__all__ = ["pull", "push"]

#: Seconds between two checks for an answer that was lost.
PERIOD = 3.0


def push(
    registry: EngineRegistry,
    variables: Mapping[str, Any],
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Set `variables` on `ranks`; wait at most `timeout` seconds for the answers."""
    _get(
        registry,
        _view(registry, ranks).push(dict(variables), block=False),
        f"push of {', '.join(variables)}",
        ranks,
        timeout,
    )


def pull(
    registry: EngineRegistry,
    names: str | Sequence[str],
    ranks: Sequence[int],
    timeout: float | None,
) -> dict[int, Any]:
    """Return rank → value, or rank → {name: value} where `names` is a list."""
    wanted = [names] if isinstance(names, str) else list(names)
    values = _get(
        registry,
        _view(registry, ranks).pull(wanted, block=False),
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


def _view(registry: EngineRegistry, ranks: Sequence[int]) -> Any:
    _check_alive(registry, ranks)
    return registry.client.direct_view(
        [registry.slots[rank].engine_id for rank in ranks]
    )


def _check_alive(registry: EngineRegistry, ranks: Sequence[int]) -> None:
    dead = deaths(registry.slots, ranks)
    if dead:
        raise ClusterError("; ".join(dead.values()))


def _get(
    registry: EngineRegistry,
    result: Any,
    what: str,
    ranks: Sequence[int],
    timeout: float | None,
) -> list[Any]:
    _wait(registry, result, what, ranks, timeout)
    values: list[Any] = result.get(0, return_exceptions=True)
    errors = {
        rank: f"{value.ename}: {value.evalue}"
        for rank, value in zip(ranks, values, strict=True)
        if isinstance(value, ipyparallel.error.RemoteError)
    }
    if errors:
        raise ClusterError(f"{what}: {group_by_message(errors)}")
    return values


def _wait(
    registry: EngineRegistry,
    result: Any,
    what: str,
    ranks: Sequence[int],
    timeout: float | None,
) -> None:
    """Wait for `result`; raise `TimeoutError`, or `ClusterError` if it was lost.

    A message that is sent while the connection to the controller is down is lost. A
    rank that answers a later probe has handled the request: its answer was lost.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    probes: dict[int, Future[Any]] = {}
    while True:
        left = max(0.0, deadline - time.monotonic())
        if result.wait(min(PERIOD, left)):
            return
        if left <= PERIOD:
            raise TimeoutError(
                f"{what}: not done on {name_ranks(ranks)} within {timeout:g} s; a rank "
                "answers when the cell that runs there is done"
            )
        _check_alive(registry, ranks)
        answered = [rank for rank, probe in probes.items() if probe.done()]
        if len(answered) == len(ranks) and not result.wait(1.0):
            raise ClusterError(
                f"{what}: the connection to the controller failed meanwhile, and the "
                f"answer of {name_ranks(ranks)} was lost: try again"
            )
        for rank in ranks:
            slot = registry.slots[rank]
            if rank in answered or slot.summary.busy:
                continue
            if rank in probes:
                private.discard_request(registry.client, probes[rank].msg_id)  # type: ignore[attr-defined]
            probes[rank] = private.probe(registry.client, slot.uuid)
