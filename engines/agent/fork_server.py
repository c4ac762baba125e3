"""The process that forks the engines of one machine: it imports once for all of them.

`cluster.fork_launcher` starts ``python -m rankscope.engines.agent.fork_server FD``
with the environment and the working directory of the engines. FD is a socket; on it,
one JSON object per line:

To the server, first, ``{"engines": [...], "environment": {...}}``
    The engines to start, each with the file of its ``output`` and its ``arguments``;
    and variables that are to be added to their environment.
From the server ``{"pids": [...]}``
    The engines' pids, in the order of the request.
From the server ``{"pid": pid, "exit_code": code}``
    The end of an engine; a code below 0 is a signal's number.
To the server ``{"keep": true}``
    At the end of file the engines are to run on. Otherwise the server ends them.

The server is the parent of its engines, and ends when all of them have ended. Nothing
that it imports before the fork may start a thread, open a context of ZeroMQ or an event
loop, or call CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["PRELOADED", "main", "preload_backends"]

#: Seconds between SIGTERM and SIGKILL where the owner has ended.
GRACE = 2.0

#: What an engine imports until it has its rank. An import that fails here fails, or is
#: done without, where the engine does it.
PRELOADED = (
    "rankscope.engines.agent.agent",
    "ipykernel.debugger",
    "numpy.random",
    "sqlite3",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
)


def main() -> None:
    """Serve; in a forked child, run the engine instead."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A parent that ignores it gets no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As the engine's own start does: read when its debugger is imported.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    gc.disable()
    run = importlib.import_module("ipyparallel.engine.app").main
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    preload_backends()
    with connection.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        # The owner gave up, or has ended.
        return
    request: dict[str, Any] = json.loads(line)
    # From here on the end of file ends the server, together with its engines.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(request["environment"])
    # Out of the way of each collection, which would copy the pages that are shared.
    gc.collect()
    gc.freeze()
    forked = _fork(request["engines"], connection)
    gc.enable()
    if forked is None:
        run()
    else:
        _Server(connection, forked).serve()


def preload_backends() -> None:
    """Import the built-in backends of arrays in memory, but no library of theirs."""
    registry = importlib.import_module("rankscope.backends.interface.registry")
    for name, devices in registry.builtin_devices().items():
        if devices == ("cpu",):
            registry.resolve(name)


def _fork(
    engines: Sequence[dict[str, Any]], connection: socket.socket
) -> list[int] | None:
    """Fork a child for each engine; return the pids, and ``None`` in a child."""
    pids: list[int] = []
    sys.stdout.flush()
    sys.stderr.flush()
    for engine in engines:
        try:
            pid = os.fork()
        except OSError:
            for one in pids:
                os.kill(one, signal.SIGKILL)
            raise
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            connection.close()
            _become_engine(engine)
            return None
        pids.append(pid)
    return pids


def _become_engine(engine: dict[str, Any]) -> None:
    """Make this forked process what a process of its own would have been."""
    # No signal of the owner's terminal or process group.
    os.setsid()
    log = os.open(engine["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    package = os.path.dirname(
        importlib.import_module("ipyparallel.engine").__file__ or ""
    )
    sys.argv = [os.path.join(package, "__main__.py"), *engine["arguments"]]
    # The title of the process in ps and top; its command line is the server's.
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as title:
        title.write("ipengine")
    # What a process draws once. Python's own generator is seeded by Python.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


class _Server:
    """Reports the ends of the engines, and ends them with the owner.

    Threads are started here, after the last fork.
    """

    def __init__(self, connection: socket.socket, pids: Sequence[int]) -> None:
        self._connection = connection
        self._living = set(pids)
        # Held while a signal is sent: the pid of an ended child may be given again.
        self._lock = threading.Lock()
        self._send({"pids": list(pids)})

    def serve(self) -> None:
        """Wait for the ends of all engines."""
        threading.Thread(target=self._listen, daemon=True).start()
        while self._living:
            # The zombie holds its pid until the lock is taken.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            with self._lock:
                pid, status = os.waitpid(ended.si_pid, 0)
                self._living.discard(pid)
            self._send({"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)})
        self._exit()

    def _send(self, message: dict[str, Any]) -> None:
        # An owner that has ended needs no report.
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        """Wait for the end of the owner."""
        keep = False
        with contextlib.suppress(OSError), self._connection.makefile("rb") as lines:
            for line in lines:
                keep = json.loads(line)["keep"]
        if keep:
            self._exit()
        for signum, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 0.0)):
            with self._lock:
                for pid in self._living:
                    os.kill(pid, signum)
            time.sleep(patience)

    def _exit(self) -> NoReturn:
        """End without the clean-up of what was imported for the engines."""
        os._exit(0)


if __name__ == "__main__":
    main()
