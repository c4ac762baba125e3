"""The fresh process of a rank that died: what it may do before it joins the others.

They wait for it in `rankscope.torch.rejoin`, and so its first op has to be there. It
makes its model before: the collectives in the constructor of DistributedDataParallel
are left out, since `rejoin` gives the model the values of the others.

It makes its groups before, too, as the others have made theirs. A group of theirs that
it lacks is refused on all of them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import DistBackendError, DistStoreTimeoutError
from ..groups.generation import Generation
from ..groups.key import GroupKey
from ..groups.launched import FRESH, LaunchedStore
from ..groups.process_group import ProcessGroup
from ..groups.world import world
from ..rank_sets import name_ranks
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..work.flight_recorder import Record
from ..work.hooks import add_op_hook

__all__ = [
    "adopt",
    "await_key",
    "begin",
    "joining",
    "require_members",
    "require_rejoined",
]


# Seconds between two looks whether a rank has died.
_LOOK = 0.25


class Joining:
    """Refuses the ops of this process, fresh rank `rank`, until `end`.

    `in_cells`: it refuses none, as a person runs cells on the ranks that they choose.
    """

    def __init__(self, rank: int, *, in_cells: bool) -> None:
        self.in_cells = in_cells
        self._rank = rank
        self._rejoins = False
        self._refusal = None if in_cells else add_op_hook(pre=self._refuse)

    def _refuse(self, record: Record) -> None:
        if not self._rejoins:
            raise DistBackendError(
                f"{record.op_type.value}: rank {self._rank} was started again, and the "
                "others wait for it in rankscope.torch.rejoin(model, optimizer): call "
                "that before any op, once model and optimizer are made "
                "(parallelize_module needs src_data_rank=None); with load=... where "
                "ranks have to load a checkpoint",
                culprits=[self._rank],
            )

    @contextlib.contextmanager
    def rejoining(self) -> Iterator[None]:
        """Let the ops of the block pass; the block ends without an error: `end`."""
        _tell_groups(joins=True)
        self._rejoins = True
        try:
            yield
        except BaseException:
            self._rejoins = False
            raise
        self.end()

    def end(self) -> None:
        """Let all ops pass from now on: this rank is as the others."""
        self.forget()
        _tell_groups(joins=False)

    def forget(self) -> None:
        """Let all ops pass: this process has no groups any more."""
        global _joining
        if self._refusal is not None:
            self._refusal.remove()
        _joining = None


def begin(rank: int, *, in_cells: bool = False) -> None:
    """Begin: this process is the fresh one of global rank `rank`."""
    global _joining, _in_cells
    _joining = Joining(rank, in_cells=in_cells)
    if in_cells:
        _in_cells = True
        _lacking.update(world.wrapped)
        _tell_groups(joins=True)


def joining() -> Joining | None:
    """Return what refuses ops here; ``None``: this rank is as the others."""
    return _joining


_joining: Joining | None = None


# -- its groups ------------------------------------------------------------------

# Whether this process was a fresh rank of a notebook, and the groups of the others that
# torch does not have here.
_in_cells = False
_lacking: set[GroupKey] = set()


def _told(store: Store) -> Store:
    """Return the keys in which fresh ranks tell which groups they have."""
    return PrefixStore("torch", store)


def _tell_groups(*, joins: bool) -> None:
    """Tell the others which groups this fresh rank has, and name groups as they do."""
    store = world.store
    assert store is not None
    if isinstance(store, LaunchedStore):
        for arrival in store.arrivals.values():
            if arrival["groups"] is not None:
                world.import_uses(arrival["groups"])
    told = {"joins": joins, "groups": [one.id for one in world.wrapped - _lacking]}
    _told(store).set(str(world.rank), json.dumps(told).encode())


def _heard(rank: int) -> dict[str, Any] | None:
    """Return what a fresh rank has told; ``None``: nothing."""
    assert world.store is not None
    told = _told(world.store)
    return json.loads(told.get(str(rank))) if told.check([str(rank)]) else None


def adopt(ranks: Sequence[int], description: str) -> ProcessGroup | None:
    """Return the group of the others that a fresh rank of a notebook makes now.

    It has all groups of Rankscope from them. ``None``: none is left that has the ranks
    and the description.
    """
    for group in world.groups():
        named = description in ("", group.group_desc.partition(" (")[0])
        if group.key in _lacking and named and group.ranks == list(ranks):
            _lacking.remove(group.key)
            _tell_groups(joins=True)
            return group
    return None


def note_made(key: GroupKey) -> None:
    world.wrapped.add(key)
    if _in_cells:
        _tell_groups(joins=_joining is not None)


def require_rejoined(ranks: Sequence[int]) -> None:
    """Raise `DistBackendError` where a fresh rank of a notebook has not rejoined.

    A group that is made on all ranks would be another one there: see `adopt`.
    """
    fresh = [
        one
        for one in ranks
        if one != world.rank and (_heard(one) or {"joins": False})["joins"]
    ]
    if fresh:
        listed = ",".join(map(str, fresh))
        raise DistBackendError(
            f"new_group: {name_ranks(fresh)} had to be started again, and first gets "
            "the groups that the others have: run the cells that make groups there "
            f"alone (%%distributed -r {listed}), and then "
            "rankscope.torch.rejoin(model, optimizer), or rankscope.torch.rebuild(), "
            "on all ranks",
            culprits=fresh,
        )


def require_members(group: ProcessGroup, op: str, *, in_cells: bool) -> None:
    """Raise `DistBackendError` where a fresh rank has not made a group of the others.

    `in_cells`: the ranks are those of a notebook. Waits, in a job of ``rankscope.run``,
    until fresh ranks have made their groups.
    """
    store = world.store
    if group.key not in world.wrapped:
        return
    others = [rank for rank in group.ranks if rank != world.rank]
    lacking, remedy = [], ""
    if isinstance(store, LaunchedStore):
        if group.key.id not in _ids(store.arrivals.get(group.global_rank)):
            return  # it was made in this round
        for rank in others:
            arrival = store.arrivals.get(rank)
            if arrival is not None and arrival["way"] == FRESH:
                has = _await_told(rank, group, op)["groups"]
            else:
                has = _ids(arrival)
            if group.key.id not in has:
                lacking.append(rank)
        remedy = "a fresh process makes those that the script makes at its start; "
    elif in_cells:
        for rank in others:
            told = _heard(rank)
            if told is not None and group.key.id not in told["groups"]:
                lacking.append(rank)
        listed = ",".join(map(str, lacking))
        remedy = f"run the cell that makes it there (%%distributed -r {listed}); "
    if lacking:
        one = len(lacking) == 1
        raise DistBackendError(
            f"{op} in {group.describe()}: {name_ranks(lacking)} "
            f"{'was' if one else 'were'} started again, and {'has' if one else 'have'} "
            f"not made this group of {name_ranks(group.ranks)}: {remedy}"
            "or make it anew with new_group on all ranks, after "
            "rankscope.torch.rejoin(model, optimizer)",
            culprits=lacking,
        )


def _ids(arrival: dict[str, Any] | None) -> list[str]:
    if arrival is None or arrival["groups"] is None:
        return []
    return [one["id"] for one in arrival["groups"]["groups"] if one["wrapped"]]


def _await_told(rank: int, group: ProcessGroup, op: str) -> dict[str, Any]:
    """Return what a fresh rank tells once it goes on, as by `rejoin`."""
    assert world.store is not None
    lacks = (
        "was started again, and has not called rankscope.torch.rejoin(model, optimizer)"
    )
    told: dict[str, Any] = json.loads(
        await_key(_told(world.store), rank, group.current, op, lacks)
    )
    return told


def await_key(
    store: Store, rank: int, generation: Generation, op: str, lacks: str
) -> bytes:
    """Return what `rank` sets in `store`, while the generation of a group goes on.

    Raises `DistStoreTimeoutError` after the timeout of the group: what the rank
    `lacks`, for which `op` waits.
    """
    timeout = generation.spec.timeout
    deadline = time.monotonic() + timeout
    while not store.check([str(rank)]):
        # It may have died meanwhile.
        generation.raise_if_aborted(None)
        left = deadline - time.monotonic()
        try:
            store.wait([str(rank)], max(0.0, min(_LOOK, left)))
        except DistStoreTimeoutError as error:
            if left > _LOOK:
                continue
            raise DistStoreTimeoutError(
                f"{op} in {generation.spec.describe()}: rank {rank} {lacks} within "
                f"{timeout:g} s: the ranks call it after rebuild(), before other ops",
                culprits=[rank],
            ) from error
    return store.get(str(rank))
