"""File descriptors of this process: room for more, and what to do without."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

__all__ = ["REMEDY", "allow_descriptors"]

#: What to do, as the end of an error's sentence.
REMEDY = "raise the limit before the ranks start (ulimit -n 4096)"


def allow_descriptors(count: int) -> bool:
    """Raise this process's limit to what it may be, unless `count` more fit in."""
    if _fit_in(count):
        return True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not all that may be: some programs try every descriptor up to the limit.
    wanted = max(soft, 4096)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # the system allows no more
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _fit_in(count) is not False


def _fit_in(count: int) -> bool | None:
    """Return whether `count` more descriptors fit in; ``None``: that is not known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/dev/fd")) + count <= soft
    except OSError as error:
        return False if error.errno == errno.EMFILE else None
