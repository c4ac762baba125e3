"""The end of this process with its parent's.

As a program, ``parent_end.py PID COMMAND ...``, it becomes a command that gets SIGTERM
at the end of its parent PID.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["end_with"]

# Of `prctl`: the signal that this process gets at the end of its parent.
_PR_SET_PDEATHSIG = 1


def end_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process once `parent`, which started it, has ended.

    By default it kills the process. What counts is the thread that has started it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        # It has ended before the call.
        os._exit(1)


if __name__ == "__main__":
    end_with(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
