"""Asynchronous ops that nobody has waited for, and nobody can any more.

Such a program may use an array before its result is there: in torch it then has a
wrong value, here mostly a late one. A message of torch whose Work was dropped may
never be sent. A Work that is still referred to may be waited for
later, and is no fault.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

__all__ = ["Unwaited", "unwaited"]

#: Ops that are kept in mind: the last ones.
MOST = 1000


class Unwaited:
    """The asynchronous ops since `begin`, in the notebook's cells alone."""

    def __init__(self) -> None:
        #: Whether ops are noted.
        self.active = False
        self._ops: deque[tuple[weakref.ref[Any], Any]] = deque(maxlen=MOST)

    def begin(self) -> None:
        """Note the ops that are issued from now on."""
        self._ops.clear()
        self.active = True

    def note(self, work: Any, record: Any) -> None:
        """Note the Work that a caller gets; `record`: ``waited``, frames, op type."""
        self._ops.append((weakref.ref(work), record))

    def end(self) -> list[Any]:
        """Note no more; return the records of the ops that were not waited for."""
        self.active = False
        dropped = [
            record for work, record in self._ops if work() is None and not record.waited
        ]
        self._ops.clear()
        return dropped


#: Those of this process.
unwaited = Unwaited()
