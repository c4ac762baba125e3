"""Why a group ends: reasons, lost connections, and ranks that left while others work.

A rank that dies closes its connections, and so does a backend that is aborted. A
backend whose library notices closed connections reports them before the store, or
the launcher, has reported the death, or the reason of the abort. The failure of an
op is therefore final only after `VERDICT_WAIT`: until then its Work is in flight.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from ..errors import ConnectionLostError, DistAbortedError
from ..stores.base import UNKNOWN_END
from ..work.flight_recorder import Batch
from ..work.op_type import OpType
from ..work.work import Work
from .remedies import after_departure
from .spec import GroupSpec

__all__ = [
    "STORE",
    "VERDICT_WAIT",
    "AbortReason",
    "ConnectionLoss",
    "Departure",
    "Departures",
    "FoundCause",
    "describe_death",
]

#: Who says that a rank is dead, where the store does.
STORE = "the store"

#: Seconds that a lost connection waits for its cause: the report of a death, or an
#: abort. A store reports a death after half a second, a launcher earlier.
VERDICT_WAIT = 2.0
# Seconds that it waits if an op is overdue: a peer whose op was overdue at the same
# time has published its reason before it closed the connection.
_OVERDUE_WAIT = 0.5


@dataclass(frozen=True)
class AbortReason:
    """Why a generation of a group ended; the first reason on any rank holds.

    `by` names who ended it, `at` is the time (``time.time()``), `culprits` are the
    global ranks that are the cause, as far as they are known. `diagnosis` is why its
    ops hung, if that was found; `text` does not repeat it. `remedy` is what can be
    done, as the end of an error's message; the default is that of an abort.
    """

    text: str
    by: str
    at: float = field(default_factory=time.time)
    culprits: Sequence[int] = ()
    diagnosis: str = ""
    remedy: str = ""

    @property
    def why(self) -> str:
        """The diagnosis, then why the generation was ended."""
        return "; ".join(filter(None, (self.diagnosis, self.text)))

    @property
    def ended(self) -> str:
        """Why, when and by whom the generation was ended, without the diagnosis."""
        when = time.strftime("%H:%M:%S", time.localtime(self.at))
        if self.text.endswith(self.by):
            return f"{self.text} at {when}"
        return f"{self.text} (at {when}, by {self.by})"

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.diagnosis, self.ended)))

    def to_json(self) -> str:
        """Return the reason as the other ranks read it from the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> AbortReason:
        """Return the reason that `to_json` wrote; without a time, it is now."""
        told = json.loads(text)
        return cls(**told | {"culprits": tuple(told.get("culprits", ()))})


@dataclass(frozen=True)
class FoundCause:
    """Why ops of a group hang, as a diagnosis over all ranks found it.

    `at` is when this rank learned it (``time.monotonic()``), `culprits` are the global
    ranks at fault.
    """

    text: str
    culprits: Sequence[int] = ()
    at: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        told = time.time() - (time.monotonic() - self.at)
        when = time.strftime("%H:%M:%S", time.localtime(told))
        return f"diagnosis at {when}: {self.text}"


class ConnectionLoss:
    """The lost connection of one generation whose cause is not known yet.

    `reason` is why the group is aborted if no cause is found until `deadline`
    (``time.monotonic()``); the ranks agree on the loss that was reported first.
    """

    def __init__(self, error: ConnectionLostError, spec: GroupSpec) -> None:
        self.reason = _reason(error, spec)
        self.deadline = time.monotonic() + VERDICT_WAIT

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def wait(self, overdue: bool) -> float:
        """Return for how many seconds the cause may still come; negative: no more."""
        return self.left - (VERDICT_WAIT - _OVERDUE_WAIT if overdue else 0.0)

    def agree(self, first: AbortReason | None) -> None:
        """Take over the loss that a rank reported first, if the store has said it."""
        self.reason = first or self.reason


def _reason(error: ConnectionLostError, spec: GroupSpec) -> AbortReason:
    culprits = spec.global_ranks(error.culprits)
    me = f"rank {spec.global_rank}"
    if error.reason is not None:
        return AbortReason(error.reason, me, culprits=culprits)
    peer = "a peer"
    if error.peer is not None:
        (rank,) = spec.global_ranks([error.peer])
        peer = f"rank {rank}"
        culprits = culprits or (rank,)
    detail = f": {error}" if str(error) else ""
    return AbortReason(
        f"{me} lost the connection to {peer}{detail}", me, culprits=culprits
    )


#: Seconds that a message of a rank that left may still be on its way.
MESSAGE_WAIT = 0.5
#: Seconds that ops without the rank get to end, before the group is aborted because of
#: ops that wait for it.
OTHERS_WAIT = 0.5


@dataclass(frozen=True)
class Departure:
    """How global rank `rank` left.

    `collectives` is the sequence number of the last collective that it took part in, in
    the generation numbered `generation`, `remedy` what the others can do, and `at` when
    this rank learned of it (``time.monotonic()``). `by_abort`: that generation ends by
    an abort, and its later ones because of this. `by` is who says so; the default is
    the rank. Where it left all groups, `told` are the ids of those that hear of it by
    themselves, with the number of its last collective.
    """

    rank: int
    text: str
    collectives: int
    remedy: str = field(default_factory=after_departure)
    generation: int = 0
    by_abort: bool = False
    by: str = ""
    told: Sequence[str] = ()
    at: float = field(default_factory=time.monotonic)

    def to_json(self) -> str:
        """Return the departure, without `at`, as the other ranks read it."""
        return json.dumps(astuple(self)[:-1])

    @classmethod
    def from_json(cls, text: bytes) -> Departure:
        """Return the departure that `to_json` wrote."""
        return cls(*json.loads(text))

    @property
    def reason(self) -> AbortReason:
        """The reason of an abort that follows from it."""
        by = self.by or f"rank {self.rank}"
        return AbortReason(self.text, by, culprits=(self.rank,), remedy=self.remedy)


def describe_death(rank: int) -> str:
    """Return what the others are told once this process, of global `rank`, is gone."""
    where = f"process {os.getpid()} on {os.uname().nodename}"
    return f"rank {rank} ({where}) is gone: {UNKNOWN_END}"


class Departures:
    """The departures of one generation that this rank knows.

    A rank leaves by `destroy_process_group`, or because its process ends. What the
    others have in flight with it would wait until it times out; what they do without it
    goes on.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        #: By global rank. Each op looks here: a ``__bool__`` would be a call.
        self.by_rank: dict[int, Departure] = {}
        # Since when ops in flight wait for a rank that left; 0: none does.
        self._doomed_at = 0.0

    def add(self, departure: Departure) -> None:
        """Take in that a rank left."""
        self.by_rank.setdefault(departure.rank, departure)

    def refuse(
        self, op_type: OpType, peer: int | None, number: int, *, buffered: bool
    ) -> None:
        """Raise `DistAbortedError` for an op that would wait for a rank that left."""
        if buffered and op_type is OpType.RECV:
            return
        departure = self._needed(op_type, peer, number)
        if departure is not None:
            spec = self._spec
            raise DistAbortedError(
                f"{op_type.value} in {spec.describe()}: {departure.text}; "
                f"{departure.remedy}",
                **spec.identity(),
                op=op_type.value,
                culprits=(departure.rank,),
                reason=departure.text,
            )

    def verdict(self, works: Iterable[Work], *, lost: bool) -> Departure | None:
        """Return the departure for which the group has to be aborted now, if any."""
        doomed: list[Departure] = []
        others = 0
        for work in works:
            departure = self._dooms(work)
            if departure is None:
                others += 1
            else:
                doomed.append(departure)
        if lost and not doomed and others:
            # An op that does without the rank, but not without the connection.
            doomed.append(next(iter(self.by_rank.values())))
        if not doomed:
            self._doomed_at = 0.0
            return None
        now = time.monotonic()
        self._doomed_at = self._doomed_at or now
        over = lost or not others or now - self._doomed_at > OTHERS_WAIT
        return doomed[0] if over else None

    def _dooms(self, work: Work) -> Departure | None:
        """Return the departure because of which `work` cannot end."""
        record: Any = work.record
        if record is None:
            return None
        for one in record.records if isinstance(record, Batch) else (record,):
            departure = self._needed(one.op_type, one.peer, one.collective_seq_id)
            if departure is None:
                continue
            since = time.monotonic() - max(departure.at, work.since)
            if not one.op_type.is_p2p or since > MESSAGE_WAIT:
                return departure
        return None

    def _needed(
        self, op_type: OpType, peer: int | None, number: int
    ) -> Departure | None:
        """Return how a rank left that an op needs; ``None``: it needs none."""
        spec, by_rank = self._spec, self.by_rank
        if not op_type.is_p2p:
            for departure in list(by_rank.values()):
                # It did its part of what it took part in.
                if number > departure.collectives:
                    return departure
            return None
        if peer is not None:
            return by_rank.get(spec.ranks[peer])
        # From any rank: until the last one has left.
        return next(iter(by_rank.values())) if len(by_rank) == spec.size - 1 else None
