"""Registering the backend ``rankscope`` with torch."""

from __future__ import annotations

import logging

from . import private
from .shell import NAME, create

__all__ = ["register"]

_log = logging.getLogger(__name__)


def register() -> None:
    """Let ``init_process_group("rankscope")`` make groups; later calls do nothing."""
    for sentence in private.missing:
        _log.warning("the backend rankscope: %s", sentence)
    private.register_backend(NAME, create)
