"""Runs mpiexec, and ends with it what the ranks of this host have started.

`launch` starts this file by its path with the options ``-I -S``. The first argument is
the pid of the notebook's process, with which mpiexec ends, or 0 where the cluster is
kept; the command follows. Orphans, as daemons that a rank has started, become children
of this process, as those of other ranks are their fork server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

#: Of `prctl`: the signal that a process gets at the end of its parent; orphans among
#: the descendants become children of this process.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_prctl = ctypes.CDLL(None).prctl


def main() -> None:
    owner, *command = sys.argv[1:]
    mine = os.getpid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mpiexec = subprocess.Popen(command, preexec_fn=lambda: _end_with(mine))
    for signum in _FORWARDED:
        signal.signal(signum, lambda signum, frame: mpiexec.send_signal(signum))
    if int(owner):
        _end_with(int(owner))
    pid = 0
    while pid != mpiexec.pid:
        pid, status = os.wait()
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_DFL)
    _end_orphans(mine)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(mine, -code)
    sys.exit(code)


def _end_with(parent: int) -> None:
    """Have the kernel send SIGTERM once the thread that has started this one ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        # It has ended before the call.
        os.kill(os.getpid(), signal.SIGTERM)


def _end_orphans(mine: int) -> None:
    """Kill all children, and theirs, which come here with the ends of their parents."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/self/task/{mine}/children", encoding="ascii") as children:
                for pid in map(int, children.read().split()):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    main()
