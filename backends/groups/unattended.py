"""Whether somebody looks at the job, and what is done about a hang where nobody does.

Packages above this one, such as `hang_report`, fill these hooks. None is called while
an op is issued, or ends well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..stores.base import Store

__all__ = [
    "attendance",
    "before_init",
    "before_leave",
    "explainers",
    "is_attended",
    "on_overdue",
    "page_writers",
]

#: Each returns whether somebody looks at the job, who ends what hangs.
attendance: list[Callable[[], bool]] = []

#: Called by `init_process_group`, before it meets the others, with its arguments
#: `rank` and `world_size` (-1: the environment tells) and `init_method`.
before_init: list[Callable[[int, int, str | None], None]] = []

#: Called with the store, the rank and the number of ranks before this rank leaves the
#: default group. It must not raise.
before_leave: list[Callable[[Store, int, int], None]] = []

#: Each returns why an op of a group did not end: an `inquiry.Explanation`, or ``None``.
#: It gets the spec of the group, its generation and the `inquiry.Answers` of its ranks.
explainers: list[Callable[[Any, int, Any], Any]] = []

#: Called on the thread of the watchdog when an op is overdue. Its group is aborted, and
#: what all ranks know of the hang lost, after the event is set, or some seconds later.
on_overdue: list[Callable[[], threading.Event]] = []

#: Called with a `post_mortem.report.Report` and its folder, for a page in it.
page_writers: list[Callable[[Any, Path], None]] = []


def is_attended() -> bool:
    """Return whether somebody looks at the job."""
    return any(looks() for looks in attendance)
