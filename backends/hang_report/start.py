"""Begins the reports of this process, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .place import Place
from .reporter import Reporter
from .settings import Settings
from .triggers import hear_torch, install_triggers

if TYPE_CHECKING:
    from ..torch_watch.watch import TorchWatch

__all__ = ["report_hangs"]

_lock = threading.Lock()
_place = Place()
_reporter: Reporter | None = None
_torch: TorchWatch | None = None


def report_hangs(
    settings: Settings,
    is_attended: Callable[[], bool],
    *,
    rank: int = -1,
    world_size: int = -1,
    init_method: str | None = None,
    torch: TorchWatch | None = None,
) -> None:
    """Have this rank write reports from now on; the settings of the first call count.

    Nothing is done where they have no folder, nor for one rank. `is_attended` is as for
    `Reporter`; `rank`, `world_size` and `init_method` are what the program tells of the
    job, as `init_process_group` takes it. The watch of `torch` hears of failed ops.
    """
    global _reporter, _torch
    with _lock:
        if torch is None:
            _place.tell(rank, world_size, init_method)
        begins = _reporter is None
        if begins:
            if settings.folder is None or _place.world_size == 1:
                return
            _reporter = Reporter(settings, _place, is_attended)
        assert _reporter is not None
        if torch is not None and _torch is None:
            _torch = torch
            hear_torch(_reporter, torch)
    if begins:
        install_triggers(_reporter)
        _reporter.start()
