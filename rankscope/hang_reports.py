"""When a script's ranks write reports: in no notebook, and not while somebody looks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rankscope.backends.groups.unattended import is_attended
from rankscope.backends.hang_report.settings import Settings
from rankscope.backends.hang_report.start import report_hangs

if TYPE_CHECKING:
    from rankscope.backends.torch_watch.watch import TorchWatch

__all__ = ["AGENT", "begin"]

#: The module that runs in the engines of a cluster, which begin their own.
AGENT = "rankscope.engines.agent.agent"


def begin(
    rank: int = -1,
    world_size: int = -1,
    init_method: str | None = None,
    *,
    torch: TorchWatch | None = None,
) -> None:
    """Have this process, if it is a script, write reports; see `report_hangs`.

    Raises `ValueError` if ``RANKSCOPE_REPORT_AFTER`` is no number of seconds.
    """
    settings = Settings.of()
    # What runs in a notebook is told there.
    if AGENT not in sys.modules and not _is_kernel():
        report_hangs(
            settings,
            is_attended,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            torch=torch,
        )


def _is_kernel() -> bool:
    module = sys.modules.get("ipykernel.kernelapp")
    return module is not None and module.IPKernelApp.initialized()
