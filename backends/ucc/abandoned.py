"""The contexts of aborted groups, which UCC can neither cancel nor free at once.

Nothing advances an abandoned context, so that nothing of it writes to the caller's
arrays. To free it, UCC has to advance it once more, on all its ranks together. So it is
freed by the next group of the same processes, and only if nothing was in flight that
would write to an array of the caller on any of them: where a rank was absent, that was
the comparison before the collective. Others are kept until the process ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Any

from .context import AllGather, Context
from .library import UCCError

__all__ = ["Contexts", "claim", "destroy", "free_later", "keep"]

_log = logging.getLogger(__name__)

#: Contexts by name, each with the memory that UCC may still read or write.
Contexts = dict[str, tuple[Context, Collection[Any]]]

_kept: list[tuple[Context, Collection[Any]]] = []
_freeable: Contexts = {}
_lock = threading.Lock()


def keep(context: Context, memory: Collection[Any], writes: bool) -> None:
    """Keep `context`; with `writes` for good, as it would write to the caller's."""
    with _lock:
        if writes:
            _kept.append((context, memory))
        else:
            _freeable[context.name] = (context, memory)


def claim(size: int) -> Contexts:
    """Return the contexts of `size` ranks that this rank could free, by name.

    They are the caller's until `free_later`: two groups may connect at one time, and
    all ranks have to free a context with the same one.
    """
    with _lock:
        names = [name for name, (one, _) in _freeable.items() if one.size == size]
        return {name: _freeable.pop(name) for name in names}


def free_later(claimed: Contexts, names: Collection[str], gather: AllGather) -> None:
    """Free those of `names` on a thread, as every rank of them does; keep the others.

    The names are the same on all ranks.
    """
    with _lock:
        _freeable.update(
            (name, one) for name, one in claimed.items() if name not in names
        )
    chosen = [claimed[name][0] for name in sorted(names)]
    if chosen:
        threading.Thread(
            target=_free, args=(chosen, gather), name="rankscope-ucc-free", daemon=True
        ).start()


def _free(contexts: Sequence[Context], gather: AllGather) -> None:
    for context in contexts:
        destroy(context, gather)


def destroy(context: Context, gather: AllGather | None = None) -> None:
    """Free `context`; with `gather`, together with the other ranks."""
    try:
        context.destroy(gather)
    except UCCError as error:
        # A member died in the meantime; its memory is all that is lost.
        _log.debug("a context of UCC could not be freed: %s", error)
