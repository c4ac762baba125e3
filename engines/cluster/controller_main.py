"""Runs ipyparallel's controller, which ends with the process that started it.

`launch` starts this file by its path, with the pid of the notebook before the
controller's own arguments. A notebook's orphan reaper ends a controller, too, but may
be killed together with the notebook.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

#: Of `prctl`: the signal that this process gets at the end of its parent.
PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv.pop(1))
    # At SIGTERM the controller ends its schedulers, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # It has ended before the call.
        return
    # As with `python -m`, modules of this folder are not found by their names.
    sys.path[0] = os.getcwd()
    runpy.run_module("ipyparallel.controller", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
