"""The status of a group on one rank, and groups that another library made."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..rank_sets import read_members, write_members
from .key import GroupKey

if TYPE_CHECKING:
    # Those who read a status, such as `rankscope top`, start without numpy.
    from ..interface.base import Backend
    from ..stores.base import Store
    from ..work.flight_recorder import OpEntry
    from ..work.state import OpRecord
    from .abort_reason import AbortReason, FoundCause
    from .generation import Generation
    from .spec import GroupSpec

__all__ = [
    "GroupSource",
    "GroupStatus",
    "OpStatus",
    "WatchedGroup",
    "check_bytes",
    "since",
    "summarize",
]


def check_bytes(count: int | None) -> None:
    """Raise `ValueError` for a number of bytes that no memory has.

    A status from another process may have any integer; not each fits into a float.
    """
    if count is not None and count >= 1 << 63:
        raise ValueError("a number of bytes is out of range")


@dataclass(frozen=True)
class OpStatus:
    """One op of a rank on one group."""

    #: The name of the op.
    op: str
    #: The group's sequence number of the op, ``None`` where it has none.
    seq: int | None = None
    #: ``scheduled``, ``started``, ...; empty where it is not known.
    state: str = ""
    #: Seconds since the op started (since it was queued, if it has not started).
    elapsed: float | None = None
    #: Seconds after which the op fails, ``None`` where there is no limit.
    timeout: float | None = None
    #: The shapes of its arrays, inputs first; of a long list the first ones.
    sizes: tuple[tuple[int, ...], ...] = ()
    #: Their dtypes.
    dtypes: tuple[str, ...] = ()
    #: Bytes moved, as nccl-tests counts them.
    nbytes: int | None = None
    #: Seconds from start to end, once the op is completed.
    duration: float | None = None
    #: The root, or the other side, as its rank in the group.
    peer: int | None = None
    #: The tag of a send or receive, ``None`` where there is none.
    tag: int | None = None
    #: The user's line, e.g. ``cell 7 line 3``.
    source: str = ""

    def __post_init__(self) -> None:
        check_bytes(self.nbytes)

    def __str__(self) -> str:
        """``all_reduce #3 (train.py:7)``; without what is not known."""
        number = "" if self.seq is None else f" #{self.seq}"
        return f"{self.op}{number}{f' ({self.source})' if self.source else ''}"

    @classmethod
    def issued(
        cls, record: OpEntry | OpRecord | None, failed: bool = False
    ) -> OpStatus | None:
        """Return the op, its number and line; of one that has `failed`, its arrays."""
        if record is None:
            return None
        return cls(**record.brief(), **(record.traffic() if failed else {}))

    @classmethod
    def in_flight(
        cls, record: OpEntry | OpRecord, state: str, since: float
    ) -> OpStatus:
        """Return the status of an op that began at `since` (``time.monotonic``)."""
        return cls(
            **record.brief(),
            **record.traffic(),
            state=state,
            elapsed=time.monotonic() - since,
            timeout=record.timeout,
        )

    @classmethod
    def done(cls, record: OpEntry | None) -> OpStatus | None:
        """Return the status of an op that has completed."""
        if record is None:
            return None
        return cls(**record.brief(), **record.traffic(), duration=record.duration)


@dataclass(frozen=True)
class GroupStatus:
    """One group as one of its ranks reports it."""

    #: The name that messages and the board show.
    name: str
    #: The global ranks of the group, as `write_members` has them: each of 1,024 ranks
    #: sends them with each status.
    members: str
    #: The backend string.
    backend: str
    #: How often the group was rebuilt.
    generation: int
    #: ``ready`` or ``aborted``.
    state: str
    #: Why, when and by whom it was aborted.
    reason: str | None
    #: Seconds after which an op fails, ``None`` where there is no limit.
    timeout: float | None
    #: Device type → backend, with ``(not built)`` behind one not used yet.
    devices: Mapping[str, str] = field(default_factory=dict)
    #: The last op that was issued.
    enqueued: OpStatus | None = None
    #: The last op that has started.
    started: OpStatus | None = None
    #: The last op that has completed.
    completed: OpStatus | None = None
    #: The number of ops in flight.
    in_flight: int = 0
    #: The oldest op in flight.
    oldest: OpStatus | None = None
    #: How many of its generations were aborted on this rank; a rebuild alone is none.
    aborts: int = 0
    #: How many collectives were issued on it in this generation.
    issued: int | None = None
    #: Seconds from start to end of all its ops that are over, and for which threads
    #: waited for them, in this generation; ``None`` where it is not known.
    op_seconds: float | None = None
    blocked_seconds: float | None = None
    #: Op → how many of it have completed in this generation, and the bytes that they
    #: have moved, as nccl-tests counts them.
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: The library that made the group, e.g. ``torch``; empty for our own groups.
    library: str = ""
    #: The names of transports, e.g. ``shm,cma`` → the global ranks that this one has
    #: connected to with them; empty where the backend does not report transports.
    transports: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: Whether it is not made yet: its op is the wait for the other ranks.
    unfinished: bool = False
    #: What of the user's objects holds a former generation, in sentences.
    stale: tuple[str, ...] = ()
    #: Why its ops hung before the abort, if that was found.
    diagnosis: str = ""

    def __post_init__(self) -> None:
        for _, nbytes in self.moved.values():
            check_bytes(nbytes)
        read_members(self.members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, in its order."""
        return read_members(self.members)

    @property
    def key(self) -> GroupKey:
        """What identifies the group on every rank."""
        return GroupKey(self.name, self.ranks)

    @property
    def why(self) -> str:
        """The diagnosis, then why it was aborted."""
        told = self.diagnosis, self.reason or "no reason given"
        return "; ".join(filter(None, told))


def since(before: int, now: int) -> int:
    """Return by how much a count grew; a group that was made again begins with 0."""
    return now - before if now >= before else now


def summarize(spec: GroupSpec, current: Generation, aborts: int) -> GroupStatus:
    """Return state, progress and oldest op in flight of `current`."""
    current.refresh()
    status = current.status
    oldest = next(iter(list(status.in_flight.values())), None)
    record = None if oldest is None else oldest.record
    reason = current.aborted
    return GroupStatus(
        name=spec.name,
        members=write_members(tuple(spec.ranks)),
        backend=str(spec.config),
        generation=current.number,
        state="ready" if reason is None else "aborted",
        reason=None if reason is None else reason.ended,
        diagnosis="" if reason is None else reason.diagnosis,
        timeout=spec.timeout,
        devices={
            device: _with_state(name, current.backends.get(device))
            for device, name in spec.config.device_backend_map.items()
        },
        transports={} if reason is not None else _transports(spec, current),
        enqueued=OpStatus.issued(status.enqueued),
        started=OpStatus.issued(status.started, failed=reason is not None),
        completed=OpStatus.done(status.completed),
        aborts=aborts + (reason is not None),
        issued=status.collective_seq,
        op_seconds=status.busy_ns / 1e9,
        blocked_seconds=status.blocked_ns / 1e9,
        moved=status.counts.totals(),
        in_flight=len(status.in_flight),
        oldest=None
        if oldest is None or record is None
        else OpStatus.in_flight(record, oldest.state.value, oldest.since),
    )


def _with_state(name: str, backend: Backend | None) -> str:
    state = "not built" if backend is None else backend.state()
    return f"{name} ({state})" if state else name


def _transports(spec: GroupSpec, current: Generation) -> dict[str, tuple[int, ...]]:
    """Return the global ranks by the names of the transports to them: ``"shm,cma"``."""
    names: dict[int, tuple[str, ...]] = {}
    for backend in list(current.backends.values()):
        for peer, found in backend.transports().items():
            names[peer] = tuple(dict.fromkeys((*names.get(peer, ()), *found)))
    peers: dict[str, list[int]] = {}
    for peer, found in names.items():
        peers.setdefault(",".join(found), []).append(spec.ranks[peer])
    return {found: tuple(sorted(ranks)) for found, ranks in peers.items()}


class WatchedGroup(Protocol):
    """A process group that another library made and runs.

    Its ops are not dispatched here. What is known of them has the form that our own
    groups have, so that board, diagnosis and traces need no second code path.
    """

    #: Its name and global ranks: the same on every rank of the group.
    key: GroupKey

    def summary(self) -> GroupStatus:
        """Return its status on this rank; never block."""

    def unused_generation(self) -> int | None:
        """Return the generation if this rank is known to have issued no op in it."""
        return None

    def abort(self, reason: AbortReason) -> None:
        """Fail the ops in flight, here and on the other ranks; return at once.

        A `reason` that does not tell by whom is this rank's. Does nothing where the
        group is aborted already.
        """

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        """Return whether these global ranks may die without harm to the group."""
        return False

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Make the library's group anew; its ranks meet in `store`."""

    def export(self) -> dict[str, Any]:
        """Return what a fresh process needs to join the group, as plain data.

        With the entries ``library``, ``name`` and ``ranks``; empty where there is
        nothing to join.
        """
        return {}


class GroupSource(Protocol):
    """The groups that a library has on this rank, and their flight records."""

    #: The library's name, as the board shows it.
    library: str

    @property
    def advice(self) -> Sequence[str]:
        """What a person should change so that all is shown, in sentences."""

    @property
    def rank(self) -> int | None:
        """The global rank that the library gave this process, if it did."""

    def groups(self) -> Sequence[WatchedGroup]:
        """Return the groups of this rank, the default one first."""

    def records(self) -> Sequence[dict[str, Any]]:
        """Return the records of the ops as `Record.as_dict` has them, oldest first.

        Any thread may call this while the main thread is blocked in an op.
        """

    @property
    def past(self) -> Mapping[str, Any]:
        """``groups`` and the last ``records`` of groups that were destroyed together.

        As `local_dump` has them, or as `joint_ops.slim` does; empty: there are none.
        """

    def note_causes(self, found: Mapping[str, FoundCause]) -> None:
        """Keep why ops hang, by the id of the group, for the errors of these."""

    def import_group(self, exported: Mapping[str, Any]) -> None:
        """Have a group that another rank exported among `groups`, until its rebuild."""
