"""Begins the reports of this process, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..torch_watch.watch import TorchWatch
from .reporter import Reporter
from .settings import WORLD_SIZE, Settings, number_of
from .triggers import install_triggers

if TYPE_CHECKING:
    from ..post_mortem.report import Report

__all__ = ["report_hangs"]

_lock = threading.Lock()
_reporter: Reporter | None = None


def report_hangs(
    settings: Settings,
    watch: TorchWatch,
    write_page: Callable[[Report, Path], None],
    is_attended: Callable[[], bool],
) -> None:
    """Have this rank write reports from now on; later calls change nothing.

    Parameters
    ----------
    settings
        Where and when; nothing is done where they have no folder, nor for one rank.
    watch
        The watch of torch, which hears of failed ops.
    write_page
        Writes the page of a report into its folder.
    is_attended
        Whether somebody looks at the job: then no report is written.
    """
    global _reporter
    with _lock:
        alone = number_of(WORLD_SIZE) == 1
        if _reporter is not None or settings.folder is None or alone:
            return
        _reporter = Reporter(settings.folder, settings, write_page, is_attended)
    install_triggers(_reporter, watch)
    _reporter.start()
