"""Groups of other libraries, as the world, the agent and the board treat them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ..stores.base import Store
from .key import GroupKey
from .summary import GroupStatus

__all__ = ["GroupSource", "WatchedGroup"]


class WatchedGroup(Protocol):
    """A process group that another library made and runs.

    Its ops are not dispatched here. What is known of them has the form that our own
    groups have, so that board, diagnosis and traces need no second code path.
    """

    @property
    def key(self) -> GroupKey:
        """Its name and global ranks: the same on every rank of the group."""

    def summary(self) -> GroupStatus:
        """Return its status on this rank; never block."""

    def abort(self, reason: str, *, by: str = "", culprits: Sequence[int] = ()) -> None:
        """Fail the ops in flight, here and on the other ranks; return at once.

        Does nothing where the group is aborted already.
        """

    def goes_on_without(self, ranks: Collection[int]) -> bool:
        """Return whether these global ranks may die without harm to the group."""

    def rebuild(self, generation: int | None, store: Store | None) -> None:
        """Make the library's group anew; its ranks meet in `store`."""

    def export(self) -> dict[str, Any]:
        """Return what a fresh process needs to join the group, as plain data.

        With the entries ``library``, ``name`` and ``ranks``; empty where there is
        nothing to join.
        """


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

    def import_group(self, exported: Mapping[str, Any]) -> None:
        """Have a group that another rank exported among `groups`, until its rebuild.

        Does nothing where this rank has it.
        """
