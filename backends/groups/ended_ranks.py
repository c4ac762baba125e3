"""EndedRanks: the ranks of a job that died, or left all groups, in a row of the store.

A rank tells the members of each group that it has made. From here the others learn that
it will not come to make a group that they make later, such as that of a shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..stores.base import Store
from ..stores.prefix import PrefixStore
from .abort_reason import STORE, Departure, describe_death
from .remedies import after_death
from .row import Row

__all__ = ["EndedRanks"]


class EndedRanks:
    """The ranks that ended, as the store tells, and what it is to tell of `rank`.

    ``on_end(departure)`` is called on a thread of the store and must not use the store
    itself.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        made: Iterable[str],
        on_end: Callable[[Departure], None],
    ) -> None:
        self._row = Row(PrefixStore("ended", store), "rank", f"rank {rank}")
        self._rank, self._on_end = rank, on_end
        self._closed = False
        #: The ids of the groups that this rank has made.
        self.made = list(made)
        self._row.watch(self._heard, self._keep)
        self.will_die(describe_death(rank))

    def will_die(self, text: str) -> None:
        """Have the others told `text` once this process has ended."""
        died = Departure(self._rank, text, 0, after_death(), by=STORE)
        self._row.append_at_end(died.to_json())

    def will_leave(self, how: str, remedy: str) -> None:
        """Have the others told that this rank left, and `how`, once it has ended.

        `remedy` is what they can do.
        """
        if not self._row.append_at_end(self._left(how, remedy)):
            self.leave(how, remedy)

    def leave(self, how: str, remedy: str) -> None:
        """Tell the others that this rank leaves all groups, as `will_leave` does."""
        self.close()
        self._row.append(self._left(how, remedy))

    def close(self) -> None:
        """Hear no more, as of what concerns processes that others have replaced."""
        self._closed = True
        self._cancel()

    def _keep(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        if self._closed:
            cancel()

    def _left(self, how: str, remedy: str) -> str:
        text = f"rank {self._rank} left{how}"
        return Departure(self._rank, text, 0, remedy, told=self.made).to_json()

    def _heard(self, _number: int, value: bytes) -> None:
        departure = Departure.from_json(value)
        if departure.by == STORE:
            # What helps is known here, and was not yet as the rank began.
            departure = replace(departure, remedy=after_death())
        if departure.rank != self._rank and not self._closed:
            self._on_end(departure)
