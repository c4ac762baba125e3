"""Registering the backend ``rankscope`` with torch, which may be half imported yet."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from .options import NAME

__all__ = ["register"]

_log = logging.getLogger(__name__)


def register(c10d: ModuleType) -> None:
    """Let ``init_process_group("rankscope")`` make groups; later calls do nothing.

    `c10d` is ``torch.distributed.distributed_c10d``, the only module of torch that is
    sure to be there. ``extended_api`` is what gives the creator the group's ranks and
    ``pg_options``.
    """
    known = c10d.Backend
    if NAME.upper() not in known._plugins:
        known.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, pg_options: Any) -> Any:
    from . import private
    from .shell import create

    while private.missing:
        _log.warning("the backend rankscope: %s", private.missing.pop())
    return create(options, pg_options)
