"""Row: what ranks tell the others one after another, in keys of a store."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import DistError
from ..stores.base import Store
from ..thread_start import run_bounded

__all__ = ["PATIENCE", "Row"]

_log = logging.getLogger(__name__)

#: Seconds that a rank that leaves waits for the store to take note of it.
PATIENCE = 0.5


class Row:
    """The keys ``NAME/1``, ``NAME/2``, … of a store; `place` is for messages."""

    def __init__(self, store: Store, name: str, place: str) -> None:
        self._store, self._name, self._place = store, name, place

    def append(self, value: str) -> None:
        """Set the next key; wait half a second for the store."""

        def add() -> None:
            try:
                number = self._store.add(self._name, 1)
                self._store.set(f"{self._name}/{number}", value)
            except DistError as error:
                self._note(error)

        run_bounded(f"row-{self._name}", add, PATIENCE)

    def append_at_end(self, value: str) -> bool:
        """Have the next key set once this process has ended, if the store can."""
        return self._store.last_will(f"{self._name}/+", value)

    def watch(
        self,
        hear: Callable[[int, bytes], None],
        keep: Callable[[Callable[[], None]], None],
        number: int = 1,
    ) -> None:
        """Call ``hear(number, value)`` as keys from `number` on are set."""

        def heard(value: bytes) -> None:
            hear(number, value)
            try:
                self.watch(hear, keep, number + 1)
            except DistError as error:
                self._note(error)

        keep(self._store.watch(f"{self._name}/{number}", heard))

    def _note(self, error: DistError) -> None:
        _log.debug("%s: %s: %s", self._place, self._name, error)
