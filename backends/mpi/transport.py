"""MPITransport: the messages of a group over its MPI communicators."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DistBackendError, DistError
from ..messaging.algorithms import Flat
from ..messaging.connecting import Namer
from ..messaging.signature import BITS, FIRST, KINDS, SHIFT
from ..messaging.transport import ANY_SOURCE, Received
from ..rank_sets import name_ranks
from . import job

__all__ = ["MPITransport"]

_log = logging.getLogger(__name__)

# Of aborted groups: requests that MPI has not completed yet, and the
# memory that they may still read or write. One thread at a time may test them.
_abandoned: list[tuple[Any, Flat]] = []
_sweeping = threading.Lock()

# The messages of collectives have a communicator of their own, on which a receive
# takes the next one of its source, whatever its tag: the tag holds the kind of the
# collective, and as many bits of its signature as MPI's tags have room for.
_LOW = (1 << SHIFT) - 1
_KIND_BITS = (len(KINDS) - 1).bit_length()
_COLLECTIVE = range(FIRST, FIRST + len(KINDS))

# Naps of a waiter grow with the time for which nothing has come, between these.
_NAP, _NAP_MAX = 2e-5, 4e-3


@dataclass(slots=True, eq=False)
class _Receive:
    """A receive: it waits for its message, then it reads it."""

    array: Flat
    comm: Any
    source: int
    #: MPI's tag that it waits for, and the one that the message should have.
    wanted: int
    expected: int
    #: The queue's tag.
    tag: int
    #: Of the message, once there is one.
    status: Any
    #: The message and MPI's request to read it, once there are. What MPI returns is
    #: put here by C code: an interrupt would lose it on its way to an attribute.
    messages: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    #: The message is another one than was expected: it is not read.
    unfit: bool = False
    #: What looks for the message: the arguments of `map`.
    probe: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        look, source, wanted = self.comm.Improbe, (self.source,), (self.wanted,)
        self.probe = look, source, wanted, (self.status,)


class MPITransport:
    """Messages over the communicators of a group; see `Transport`.

    `comm` carries sends and receives, `collectives` the messages of collectives. A
    receive looks for its message first and reads it where it fits: of a message that is
    longer than the array, Open MPI would write the rest behind the array.

    MPI reports no arrival of a message: it has to be asked, and waiters take naps.
    """

    #: MPI counts with 32 bits.
    max_message = 1 << 30
    spin = 0.002

    def __init__(
        self, mpi: Any, comm: Any, collectives: Any, name: Namer = name_ranks
    ) -> None:
        self._mpi, self._comm, self._name = mpi, comm, name
        self._collectives = collectives
        self._byte, self._any = mpi.BYTE, mpi.ANY_SOURCE
        self._any_tag = mpi.ANY_TAG
        self._new_status = mpi.Status
        bits = collectives.Get_attr(mpi.TAG_UB).bit_length()
        # The bits of a signature that MPI's tags have room for.
        self._signed = (1 << min(bits - _KIND_BITS, BITS)) - 1
        # The tag of the latest collective, and what MPI gets for it.
        self._tag = self._mpi_tag = -1
        # The receives whose messages have not come, in the order of issue.
        self._pending: list[_Receive] = []

    def send(self, array: Flat, peer: int, tag: int) -> Any:
        if tag & _LOW not in _COLLECTIVE:
            return self._comm.Isend([array, self._byte], peer, tag)
        if tag != self._tag:
            self._sign(tag)
        return self._collectives.Isend([array, self._byte], peer, self._mpi_tag)

    def receive(self, array: Flat, source: int, tag: int) -> _Receive:
        """Wait for the message for `array`, from now on."""
        if tag & _LOW in _COLLECTIVE:
            if tag != self._tag:
                self._sign(tag)
            comm, wanted, expected = self._collectives, self._any_tag, self._mpi_tag
        else:
            if source == ANY_SOURCE:
                source = self._any
            comm, wanted, expected = self._comm, tag, tag
        one = _Receive(array, comm, source, wanted, expected, tag, self._new_status())
        self._pending.append(one)
        return one

    def _sign(self, tag: int) -> None:
        kind, signature = (tag & _LOW) - FIRST, tag >> SHIFT & self._signed
        self._tag, self._mpi_tag = tag, kind | signature << _KIND_BITS

    def _whole(self, mpi_tag: int, tag: int) -> int:
        """Return the tag of a message for which MPI has `mpi_tag`.

        What MPI's tag lacks is as in `tag`, that of the receive. It may lack the high
        bits of the number of calls, which is the nearest one then.
        """
        kind = (mpi_tag & (1 << _KIND_BITS) - 1) + FIRST
        signed, ours = self._signed, tag >> SHIFT
        theirs = ours & ~signed | mpi_tag >> _KIND_BITS
        half = signed + 1 >> 1
        if theirs - ours > half:
            theirs -= signed + 1
        elif ours - theirs > half:
            theirs += signed + 1
        return (theirs & (1 << BITS) - 1) << SHIFT | kind

    def test(self, request: Any, looks: int = 1) -> bool:
        for _ in range(looks):
            if self._pending:
                # For a send, too: its receiver may wait for a send to this rank.
                self._look()
            if type(request) is not _Receive:
                if request.Test():
                    return True
            elif request.unfit or (request.requests and request.requests[0].Test()):
                return True
        return False

    def _look(self) -> None:
        """Look for the messages of the receives; the first issued has its first."""
        pending = self._pending
        if len(pending) == 1:
            self._match(pending[0])
            return
        blocked = set[tuple[int, ...]]()
        for one in list(pending):
            channel = id(one.comm), one.wanted
            if one.source == self._any:
                free = channel not in blocked
            else:
                free = blocked.isdisjoint(
                    ((*channel, one.source), (*channel, self._any))
                )
            if not free or not self._match(one):
                blocked.update((channel, (*channel, one.source)))

    def _match(self, one: _Receive) -> bool:
        """Begin to read the message of `one`, if it is there and fits."""
        found = one.messages
        if not found or found[0] is None:
            found.clear()
            found.extend(map(*one.probe))
            if found[0] is None:
                return False
        status = one.status
        fits = status.Get_count(self._byte) == one.array.nbytes
        if not fits or status.Get_tag() != one.expected:
            one.unfit = True
        elif not one.requests:
            one.requests.extend(map(found[0].Irecv, ([one.array, self._byte],)))
        self._pending.remove(one)
        return True

    def fits(self, request: _Receive, nbytes: int, tag: int) -> bool:
        return not request.unfit

    def received(self, request: _Receive) -> Received:
        status, tag = request.status, request.tag
        if tag & _LOW in _COLLECTIVE:
            tag = self._whole(status.Get_tag(), tag)
        return Received(status.Get_source(), status.Get_count(self._byte), tag)

    def unread(self, tag: int) -> None:
        """Return ``None``: the next receive from its rank takes it, and tells."""

    def too_long(self, error: BaseException) -> None:
        """Return ``None``: a message that is too long is not read."""

    def explain(self, error: BaseException) -> str | DistError | None:
        mpi = self._mpi
        if not isinstance(error, mpi.Exception):
            return None
        kind = error.Get_error_class()
        if kind == getattr(mpi, "ERR_PROC_FAILED", None):
            # The dead ranks of the group, as far as MPI knows by now.
            failed, members = self._comm.Get_failed(), self._comm.Get_group()
            dead = list(failed.Translate_ranks(None, members))
            who = self._name(dead) if dead else "a rank"
            return DistBackendError(f"the process of {who} died", culprits=dead)
        return f"MPI reports {error.Get_error_string()}"

    def abandon(self, requests: Sequence[tuple[Any, Flat, bool]]) -> None:
        """Forget the receives whose messages have not come.

        A request that MPI does not complete at once (a message half received, a
        send that was never received) is kept, with its memory, until it does.
        """
        self._pending.clear()
        for request, array, is_receive in requests:
            begun = request.requests if is_receive else [request]
            _abandoned.extend((one, array) for one in begun)
        # The others are swept by the next abort.
        if _sweeping.acquire(blocking=False):
            try:
                for entry in [one for one in _abandoned if _is_over(one[0])]:
                    _abandoned.remove(entry)
            finally:
                _sweeping.release()

    def arm(self) -> bool:
        return True

    def sleep(self, timeout: float, idle: float) -> None:
        time.sleep(min(max(idle / 16, _NAP), _NAP_MAX, timeout))

    def wake(self) -> None:
        """Do nothing: naps are short."""

    def fileno(self) -> None:
        """Return ``None``: there is no descriptor to wait on."""

    def close(self) -> None:
        for comm in (self._comm, self._collectives):
            try:
                comm.Free()
            except self._mpi.Exception as error:
                # A member died in the meantime; its memory is all that is lost.
                _log.debug("a communicator could not be freed: %s", error)


def _is_over(request: Any) -> bool:
    try:
        return not request or bool(request.Test())
    except job.mpi_error():
        # Its peer died: the request ended with that error.
        return True
