"""EndedRanks: the ranks of a job that died, or left all groups, in a row of the store.

A rank tells the members of each group that it has made. From here the others learn that
it will not come to make a group that they make later, such as that of a shrink.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from ..errors import DistError
from ..stores.base import Store
from ..stores.prefix import PrefixStore
from ..thread_start import start_thread
from .abort_reason import STORE, Departure, describe_death
from .peer_watch import DEPARTURE_WAIT
from .remedies import after_death

__all__ = ["EndedRanks"]

_log = logging.getLogger(__name__)

#: The key of the will of this process, which takes its place in the row.
_WILL = "rank/+"


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
        self._store, self._rank, self._on_end = (
            PrefixStore("ended", store),
            rank,
            on_end,
        )
        self._closed = False
        #: The ids of the groups that this rank has made.
        self.made = list(made)
        self._watch(1)
        self.will_die(describe_death(rank))

    def will_die(self, text: str) -> None:
        """Have the others told `text` once this process has ended."""
        died = Departure(self._rank, text, 0, after_death(), by=STORE)
        self._store.last_will(_WILL, died.to_json())

    def will_leave(self, how: str, remedy: str) -> None:
        """Have the others told that this rank left, and `how`, once it has ended.

        `remedy` is what they can do.
        """
        if not self._store.last_will(_WILL, self._left(how, remedy)):
            self.leave(how, remedy)

    def leave(self, how: str, remedy: str) -> None:
        """Tell the others that this rank leaves all groups, as `will_leave` does."""
        self.close()

        def tell() -> None:
            try:
                number = self._store.add("rank", 1)
                self._store.set(f"rank/{number}", self._left(how, remedy))
            except DistError as error:
                _log.debug("rank %d: no departure: %s", self._rank, error)

        try:
            # The store may be that of a rank that is stopped.
            start_thread("departure", tell).join(DEPARTURE_WAIT)
        except RuntimeError:
            tell()  # at the end of Python

    def close(self) -> None:
        """Hear no more, as of what concerns processes that others have replaced."""
        self._closed = True

    def _left(self, how: str, remedy: str) -> str:
        text = f"rank {self._rank} left{how}"
        return Departure(self._rank, text, 0, remedy, told=self.made).to_json()

    def _watch(self, number: int) -> None:
        def heard(value: bytes) -> None:
            if self._closed:
                return
            departure = Departure.from_json(value)
            if departure.rank != self._rank:
                self._on_end(departure)
            try:
                self._watch(number + 1)
            except DistError as error:
                _log.debug("rank %d: no more ended ranks: %s", self._rank, error)

        self._store.watch(f"rank/{number}", heard)
