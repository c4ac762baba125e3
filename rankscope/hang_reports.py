"""When a script's ranks write reports: in no notebook, and not while somebody looks."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from rankscope.backends.groups.unattended import is_attended
from rankscope.backends.hang_report.place import Place
from rankscope.backends.hang_report.reporter import Reporter
from rankscope.backends.hang_report.settings import Settings
from rankscope.backends.hang_report.triggers import hear_torch, install_triggers

if TYPE_CHECKING:
    from rankscope.backends.torch_watch.watch import TorchWatch

__all__ = ["AGENT", "begin"]

#: The module that runs in the engines of a cluster, which begin their own.
AGENT = "rankscope.engines.agent.agent"

_lock = threading.Lock()
_place = Place()
_reporter: Reporter | None = None
_torch: TorchWatch | None = None


def begin(
    rank: int = -1,
    world_size: int = -1,
    init_method: str | None = None,
    *,
    torch: TorchWatch | None = None,
) -> None:
    """Have this process, if it is a script's rank, write reports from now on.

    The settings of the first call count: nothing is done where they have no folder, nor
    for one rank. `rank`, `world_size` and `init_method` are what the program tells of
    the job, as `init_process_group` takes it. The watch of `torch` hears of failed ops.

    Raises `ValueError` if ``RANKSCOPE_REPORT_AFTER`` is no number of seconds.
    """
    global _reporter, _torch
    settings = Settings.of()
    # What runs in a notebook is told there.
    if AGENT in sys.modules or _is_kernel():
        return
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


def _is_kernel() -> bool:
    module = sys.modules.get("ipykernel.kernelapp")
    return module is not None and module.IPKernelApp.initialized()
