"""Runs ipyparallel's controller, which ends with its notebook, or with its holders.

`launch` starts this file by its path. Before the controller's own arguments stand:

- the kernel's folder of the notebook's thread that starts it, with which it ends;
- ``kept`` of a cluster that outlives the notebook, or nothing. A line on its stdin ends
  the bond with the notebook: ``held`` of one whose holders, see `keeper_main`, write to
  its stdin, and which ends when none of them is left; ``kept`` of another one;
- the profile and the id of the cluster, whose files it removes after the notebook's
  end;
- ipyparallel's file of a cluster whose engines run elsewhere, or nothing: it stops
  them, too;
- the command that a configuration has for the controller, if it has one. It gets the
  signal at the notebook's end, and nothing else of this file.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
import time

#: Of `prctl`: the signal that this thread's process gets at the end of its parent.
PR_SET_PDEATHSIG = 1
#: Seconds between two looks for the first holder.
_POLL = 0.02
#: Seconds until a new holder has to be there when the last one has ended.
_NEXT_HOLDER = 2.0

_prctl = ctypes.CDLL(None).prctl


def main() -> None:
    owner, kept, profile, cluster_id, elsewhere = sys.argv[1:6]
    del sys.argv[1:6]
    parent, mine = int(owner.split("/")[2]), os.getpid()
    command = sys.argv[1:]
    if command and not command[0].startswith("-"):
        if not kept:
            _end_with(parent, signal.SIGTERM)
        os.execvp(command[0], command)
    # Its schedulers end with it, whatever it is ended by.
    multiprocessing.set_start_method("fork")
    os.register_at_fork(after_in_child=lambda: _end_with(mine, signal.SIGKILL))
    held = threading.Event()
    if kept:
        reading, writing = os.pipe()
        os.dup2(reading, 0)
        # No end for writing is open here: each holder opens one for itself.
        os.close(reading)
        os.close(writing)
        threading.Thread(target=_be_held, args=(parent, held), daemon=True).start()
    else:
        # At SIGTERM the controller ends its schedulers, too.
        _end_with(parent, signal.SIGTERM)
    # As with `python -m`, modules of this folder are not found by their names.
    sys.path[0] = os.getcwd()
    try:
        runpy.run_module("ipyparallel.controller", run_name="__main__", alter_sys=True)
    finally:
        # Else it is the notebook that has ended it.
        if not (held.is_set() or os.path.exists(owner)):
            _clean(profile, cluster_id, elsewhere)


def _end_with(parent: int, signum: int) -> None:
    """Get a signal at the end of the thread of `parent` that has started this process.

    As long as this thread lives.
    """
    _prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        # It has ended before the call.
        os.kill(os.getpid(), signum)


def _be_held(owner: int, held: threading.Event) -> None:
    _end_with(owner, signal.SIGTERM)
    stdin = select.poll()
    stdin.register(0, select.POLLIN)
    while not _events(stdin) & select.POLLIN:
        time.sleep(_POLL)
    _prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    held.set()
    # Who has written waits until it is read.
    if os.read(0, 64).startswith(b"kept"):
        return
    while True:
        while os.read(0, 64):
            pass
        # The keepers take over from the notebook, which may have just ended.
        time.sleep(_NEXT_HOLDER)
        if _events(stdin) & select.POLLHUP:
            break
    os.kill(os.getpid(), signal.SIGTERM)


def _events(poll: select.poll) -> int:
    return sum(events for _, events in poll.poll(0))


def _clean(profile: str, cluster_id: str, elsewhere: str) -> None:
    """Stop the engines of an owner that was killed, and remove the cluster's files."""
    import ipyparallel

    from rankscope.engines.launch.cluster_file import ClusterFile
    from rankscope.engines.launch.files import files_of, remove

    try:
        if elsewhere:
            ipyparallel.Cluster.from_file(elsewhere).stop_engines_sync()
    finally:
        announced = ClusterFile.path_of(cluster_id, profile)
        for path in [*files_of(profile, cluster_id), str(announced)]:
            remove(path)


if __name__ == "__main__":
    main()
