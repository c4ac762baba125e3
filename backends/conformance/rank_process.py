"""The program of a rank: what `Ranks` and `MPIRanks` start.

    python -m rankscope.backends.conformance.rank_process DESCRIPTOR-OR-ADDRESS

Under ``mpiexec`` the argument is the address of a socket, else the number of an
inherited descriptor. The caller sends where the function is; the rank sends
reports, and at the end a result or a traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection
from types import ModuleType

import psutil

from ..launch_variables import OPEN_MPI, PMI, first_number, ranks
from .leaks import lives
from .ranks import Rank, loads_a_script


def serve(pipe: Connection) -> None:
    """Call the function that `pipe` names, and send its end."""
    # The caller requests the stacks of all threads with this signal.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    path, (module, file, name), (rank, size, folder), args, caller = pipe.recv()
    threading.Thread(
        target=_end_with, args=[caller], name="end-with-caller", daemon=True
    ).start()
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        function = getattr(_find(module, file), name)
        me = Rank(rank, size, folder, pipe)
        pipe.send(("result", function(me, *args)))
    except BaseException:  # noqa: BLE001 - every end of the rank is reported
        pipe.send(("error", traceback.format_exc()))
        sys.exit(1)


def _end_with(caller: int) -> None:
    """End this process, whatever it hangs in, when the process `caller` is gone."""
    try:
        process = psutil.Process(caller)
    except psutil.NoSuchProcess:
        os._exit(1)
    while lives(process):
        time.sleep(1)
    os._exit(1)


def _find(name: str, file: str) -> ModuleType:
    """Import module `name`, or load it from `file` where that is another one."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("module_of_ranks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with loads_a_script():
        spec.loader.exec_module(module)
    return module


def _connect(argument: str) -> Connection:
    if argument.isdigit():
        return Connection(int(argument))
    rank = first_number(ranks(OPEN_MPI, PMI))
    assert rank is not None
    pipe = Client(argument)
    pipe.send((rank, os.getpid()))
    return pipe


if __name__ == "__main__":
    serve(_connect(sys.argv[1]))
