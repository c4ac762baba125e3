"""The end of this process with its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["end_with"]

# Of `prctl`: the signal that this process gets at the end of its parent.
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process once `parent`, which started it, has ended.

    What counts is the thread that has started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It has ended before the call.
        os._exit(1)
