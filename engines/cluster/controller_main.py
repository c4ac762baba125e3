"""Runs ipyparallel's controller, which ends with those who hold it.

`launch` starts this file by its path. Before the controller's own arguments stands the
pid of the notebook, with which it ends: a notebook's orphan reaper ends a controller,
too, but may be killed together with the notebook. Or ``kept``, of a cluster on hosts
that outlives the notebook: its holders, see `keeper_main`, write to its stdin, and it
ends when none of them is left.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

#: Of `prctl`: the signal that this process gets at the end of its parent.
PR_SET_PDEATHSIG = 1
#: Seconds between two looks for the first holder.
_POLL = 0.2


def main() -> None:
    owner = sys.argv.pop(1)
    if owner == "kept":
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        # No end for writing is open here: each holder opens one for itself.
        os.close(reading)
        os.close(writing)
        threading.Thread(target=_end_with_holders, daemon=True).start()
    else:
        # At SIGTERM the controller ends its schedulers, too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(owner):
            # It has ended before the call.
            return
    # As with `python -m`, modules of this folder are not found by their names.
    sys.path[0] = os.getcwd()
    runpy.run_module("ipyparallel.controller", run_name="__main__", alter_sys=True)


def _end_with_holders() -> None:
    while not os.read(0, 64):
        time.sleep(_POLL)
    while os.read(0, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
