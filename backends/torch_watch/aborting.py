"""Abort of one group of torch: its ops end with an error, nothing else is touched."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import DistAbortedError
from ..groups.abort_reason import AbortReason
from ..groups.remedies import in_torch
from ..thread_start import start_thread
from ..work.flight_recorder import recorder
from . import gloo_sockets
from .creation import Made, made_of
from .frames import calling_frames
from .private.groups import names

__all__ = ["abort", "aborted_error", "before_abort", "describe", "identity", "refusal"]

_log = logging.getLogger(__name__)

#: Seconds that torch's abort of NCCL may take before the log says that it hangs.
NCCL_WAIT = 5.0

# Seconds for which connections that gloo opens after the abort are ended as well, and
# how often: a lazily connected group connects at its first op to each rank.
_LAZY_WAIT = 2.0
_LAZY_STEP = 0.02


_lock = threading.Lock()

#: Called with a group that is about to be aborted, before its ops end: to tell the
#: other ranks why, whose ops then end too.
before_abort: list[Callable[[Any], None]] = []


def abort(
    group: Any,
    reason: AbortReason,
    *,
    op: str | None = None,
    sequence_number: int | None = None,
    source: str = "",
) -> bool:
    """End the ops in flight of `group` with torch's own errors; return at once.

    Any thread may call this while the main thread is blocked in an op. The other ranks'
    ops end as well where they exchange data with this rank, but the others know the
    reason only if the abort is called there too. `reason` is what errors say; the first
    one of a generation holds. `op`, `sequence_number` and `source` are of the op in
    flight on this rank, for the error that the user sees.

    Returns ``False`` where the group was aborted already: then nothing is done.
    """
    made = made_of(group)
    with _lock:
        if made.aborted is not None:
            return False
        made.aborted = reason
        made.op, made.sequence_number, made.source = op, sequence_number, source
        made.used |= op is not None
    for tell in list(before_abort):
        tell(group)
    unable = made.unabortable
    for device, backend in names().backends(group).items():
        kind = backend.name()
        if kind == "gloo":
            _abort_gloo(made)
        # Since torch 2.15 "nccl" is another library by default, "nccl2".
        elif kind.startswith("nccl"):
            _abort_in_thread(group, backend)
        else:
            backend.abort()
            unable = (
                f"torch's abort of the backend {kind!r} (device {device}) may do "
                "nothing: interrupt the cell if its ops go on"
            )
    if unable:
        # Part of the reason, so that the board shows it and errors say it.
        made.aborted = replace(reason, text=f"{reason.text}; {unable}")
        _log.warning("abort of group %r: %s", group.group_name, unable)
    return True


def refusal(group: Any, made: Made, op: str) -> DistAbortedError:
    """Return the error of a call that would issue `op` in the aborted `group`."""
    frames = calling_frames()
    line = recorder.name_source(frames[0]) if frames else ""
    return aborted_error(group, made, op, source=line)


def aborted_error(
    group: Any,
    made: Made,
    op: str | None = None,
    sequence_number: int | None = None,
    source: str = "",
) -> DistAbortedError:
    assert made.aborted is not None
    about = identity(group, made, op, sequence_number)
    remedy = made.aborted.remedy or in_torch(dead=False)
    return DistAbortedError(
        f"{describe(about, source)}: the group was aborted: {made.aborted}; {remedy}",
        **about,
        culprits=tuple(made.aborted.culprits),
        reason=made.aborted.why,
    )


def identity(
    group: Any, made: Made, op: str | None, sequence_number: int | None
) -> dict[str, Any]:
    from torch.distributed import distributed_c10d

    return {
        "rank": distributed_c10d.get_rank(),
        "group": made.name or group.group_desc,
        "op": op,
        "sequence_number": sequence_number,
    }


def describe(about: Mapping[str, Any], source: str) -> str:
    """Return ``all_reduce #3 of torch's group 'tp' on rank 0 (train.py:31)``."""
    number = about["sequence_number"]
    what = "an op" if about["op"] is None else about["op"]
    # Torch does not count its monitored barriers.
    what += f" #{number}" if number else ""
    where = f" ({source})" if source else ""
    return f"{what} of torch's group {about['group']!r} on rank {about['rank']}{where}"


def _abort_gloo(made: Made) -> None:
    def abort_late_connections() -> None:
        deadline = time.monotonic() + _LAZY_WAIT
        while time.monotonic() < deadline:
            gloo_sockets.shut_down(made.listeners)
            time.sleep(_LAZY_STEP)

    ended = gloo_sockets.shut_down(made.listeners)
    _log.debug("%d connections of gloo were shut down", ended)
    if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        start_thread("torch-abort", abort_late_connections)


def _abort_in_thread(group: Any, backend: Any) -> None:
    """Call torch's abort of NCCL, which may block, on a thread of its own."""

    def run() -> None:
        try:
            backend.abort()
        except RuntimeError:
            _log.exception("torch's abort of group %r failed", group.group_name)
        finally:
            late.cancel()

    def warn() -> None:
        _log.warning(
            "torch's abort of NCCL's group %r has not returned after %g s: restart the "
            "rank if its op goes on",
            group.group_name,
            NCCL_WAIT,
        )

    late = threading.Timer(NCCL_WAIT, warn)
    late.daemon = True
    late.start()
    start_thread("nccl-abort", run)
