"""The status of a group on this rank, as plain data for the status channel."""

from __future__ import annotations

import time
from typing import Any

from ..interface.base import Backend
from ..work.flight_recorder import Record
from ..work.work import Work
from .generation import Generation
from .spec import GroupSpec

__all__ = ["summarize"]


def summarize(spec: GroupSpec, current: Generation) -> dict[str, Any]:
    """Return state, progress and oldest op in flight of `current`."""
    current.refresh()
    status = current.status
    oldest = next(iter(list(status.in_flight.values())), None)
    reason = current.aborted
    return {
        "name": spec.name,
        "ranks": spec.ranks,
        "backend": str(spec.config),
        "generation": current.number,
        "state": "ready" if reason is None else "aborted",
        "reason": None if reason is None else str(reason),
        "timeout": spec.timeout,
        "devices": {
            device: _with_state(name, current.backends.get(device))
            for device, name in spec.config.device_backend_map.items()
        },
        "transports": {} if reason is not None else _transports(spec, current),
        "enqueued": status.enqueued.brief() if status.enqueued else None,
        "started": status.started.brief() if status.started else None,
        "completed": _completed(status.completed),
        "issued": status.collective_seq,
        "in_flight": len(status.in_flight),
        "oldest": _in_flight(oldest),
    }


def _with_state(name: str, backend: Backend | None) -> str:
    state = "not built" if backend is None else backend.state()
    return f"{name} ({state})" if state else name


def _transports(spec: GroupSpec, current: Generation) -> dict[str, list[int]]:
    """Return the global ranks by the names of the transports to them: ``"shm,cma"``."""
    names: dict[int, tuple[str, ...]] = {}
    for backend in list(current.backends.values()):
        for peer, found in backend.transports().items():
            names[peer] = tuple(dict.fromkeys((*names.get(peer, ()), *found)))
    peers: dict[str, list[int]] = {}
    for peer, found in names.items():
        peers.setdefault(",".join(found), []).append(spec.ranks[peer])
    return {found: sorted(ranks) for found, ranks in peers.items()}


def _in_flight(work: Work | None) -> dict[str, Any] | None:
    if work is None or work.record is None:
        return None
    record = work.record
    begun = work.started_ns or work.scheduled_ns
    return {
        **record.brief(),
        "state": work.state.value,
        "elapsed": (time.time_ns() - begun) / 1e9,
        "timeout": record.timeout,
        **record.traffic(),
        "peer": record.peer,
    }


def _completed(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {**record.brief(), **record.traffic(), "duration": record.duration}
