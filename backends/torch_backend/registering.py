"""Registering the backend ``rankscope`` with torch, which may be half imported yet."""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..errors import DistBackendError
from .options import NAME

__all__ = ["register"]

#: The oldest release of torch whose groups work.
_OLDEST = (2, 7)

_log = logging.getLogger(__name__)


def register() -> None:
    """Let ``init_process_group("rankscope")`` make groups; later calls do nothing.

    From torch 2.14 on torch itself calls it, by the entry point of the package, where
    the name is used and nothing has registered it.

    ``torch.distributed.distributed_c10d`` is the only module of torch that is sure to
    be there. ``extended_api`` is what gives the creator the group's ranks and
    ``pg_options``.
    """
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    known = c10d.Backend
    if NAME.upper() not in known._plugins:
        known.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )
    # From torch 2.15 on a recorder of torch is attached to the groups of backends that
    # do not record by themselves, which fails at one that is a ProcessGroup.
    recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)


def _create(options: Any, pg_options: Any) -> Any:
    import torch

    from . import private
    from .shell import create

    if private.release < _OLDEST:
        raise DistBackendError(
            "the backend rankscope needs torch 2.7 or newer; torch "
            f"{torch.__version__} does not tell a backend that its group is "
            "destroyed: pip install --upgrade torch"
        )
    while private.missing:
        _log.warning("the backend rankscope: %s", private.missing.pop())
    return create(options, pg_options)
