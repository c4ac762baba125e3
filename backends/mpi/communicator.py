"""Making the communicators of a group, once all its members are there."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from typing import Any

from ..errors import DistBackendError, DistError
from ..messaging.connecting import FOREVER, MeetingConnector
from .job import check_job, initialise, making_communicator
from .transport import MPITransport

__all__ = ["GroupRendezvous"]

_log = logging.getLogger(__name__)

# The decision not to make a communicator; that to make one has the members.
_CANCELLED = b"cancelled"

# Calls that have MPI take in a death that its runtime knows of: about 0.3 ms.
# Open MPI 5.0.11 needed two to eight.
_LOOKS = 1000

_from_group_lock = threading.Lock()


def _saw_death(mpi: Any) -> bool:
    """Whether a process of the job is known to have died (``--with-ft ulfm``)."""
    try:
        for _ in range(_LOOKS):
            # Lets MPI work; to ask COMM_WORLD would be an error after a death.
            mpi.COMM_SELF.Iprobe()
        return mpi.COMM_WORLD.Get_failed().Get_size() > 0
    except (AttributeError, NotImplementedError, mpi.Exception):
        # An MPI without fault tolerance, or one that was started without it.
        return False


def _make_communicator(mpi: Any, members: list[dict[str, Any]], place: int) -> Any:
    """Make a communicator of `members`, which are in the order of group ranks.

    In Open MPI 5.0, Create_group refuses once any process of the job has died,
    members or not, and Create_from_group does not; but Create_from_group hangs
    when two threads of a process are in it, and Create_group does not. So the
    latter is used as long as no member has seen a death.
    """
    world_ranks = [member["world_rank"] for member in members]
    group = mpi.COMM_WORLD.Get_group().Incl(world_ranks)
    tag = 2 * members[0]["tag"] + place
    if not any(member["saw_death"] for member in members):
        return mpi.COMM_WORLD.Create_group(group, tag)
    with _from_group_lock:
        return mpi.Intracomm.Create_from_group(group, f"rankscope {tag}")


class GroupRendezvous(MeetingConnector):
    """Makes the communicators of a group, once all its members are there.

    Making a communicator blocks until all members do it, and cannot be
    interrupted. So they first agree, through the store, that all of them are
    there, or that the group was aborted before: the first decision counts. A
    member that is missing leaves no other one blocked inside MPI.
    """

    def connect(self) -> MPITransport | None:
        """Return the transport of the group, or ``None`` after `cancel`."""
        mpi = initialise()
        check_job(mpi, self._size)
        world = mpi.COMM_WORLD
        member = {
            "world_rank": world.Get_rank(),
            "job": os.environ.get("PMIX_NAMESPACE", ""),
            # Rank 0's counts: sets apart groups of the same ranks made at once.
            "tag": secrets.randbelow(1 << 20),
            "saw_death": _saw_death(mpi),
        }
        store = self._store
        try:
            store.set(f"rank/{self._rank}", json.dumps(member))
            if store.add("present", 1) == self._size:
                keys = [f"rank/{rank}" for rank in range(self._size)]
                found = [json.loads(one) for one in store.multi_get(keys)]
                store.compare_set("decision", b"", json.dumps(found))
            # With the members in it: who has read it needs the store no more.
            decision = store.get("decision", FOREVER)
            if decision == _CANCELLED:
                return None
            members = json.loads(decision)
        except DistError:
            if self._cancelled:
                return None
            raise
        self._check(members)
        with making_communicator():
            try:
                comm, collectives = (
                    _make_communicator(mpi, members, place) for place in (0, 1)
                )
                comm.Set_errhandler(mpi.ERRORS_RETURN)
                collectives.Set_errhandler(mpi.ERRORS_RETURN)
            except mpi.Exception as error:
                raise DistBackendError(
                    f"MPI could not make a communicator: {error}"
                ) from error
            return MPITransport(mpi, comm, collectives, self._name)

    def _check(self, members: list[dict[str, Any]]) -> None:
        jobs = {member["job"] for member in members}
        world_ranks = {member["world_rank"] for member in members}
        if len(jobs) > 1 or len(world_ranks) < self._size:
            mine = members[self._rank]
            others = [
                rank
                for rank, member in enumerate(members)
                if member["job"] != mine["job"]
            ]
            who = self._name(others) if others else "some of its ranks"
            belong = "belongs" if len(others) == 1 else "belong"
            raise DistBackendError(
                f"the mpi backend cannot connect the group: {who} {belong} to another "
                "MPI job. A process started later cannot join a running MPI job: "
                "restart all ranks together"
            )

    def _end(self) -> None:
        try:
            decision = self._store.compare_set("decision", b"", _CANCELLED)
        except DistError as error:
            _log.debug("the cancellation of a group could not be published: %s", error)
            decision = _CANCELLED
        # Ends connect(), even if the store does not answer. Where all members had come
        # before, it takes part in making the communicator: the others are inside MPI.
        if decision == _CANCELLED:
            self._store.close()
