"""The process that starts the engines of one host: it imports once for all of them.

`launch.fork_servers` starts ``python -m rankscope.engines.agent.fork_server`` with
the environment and the working directory of the engines; on another host, by ssh or
srun. On stdin and stdout, one JSON object per line:

From the server, first, if it was started with ``describe``:
    ``{"rankscope": "0.1.0", "host": {...}}``
    Its version, which each release says there, whatever else it says in another way;
    and what `describe` returns.
To the server ``{"listen": address}``
    Listen, until engines are forked, at this host's address towards the given one; the
    answer is ``{"at": [address, port]}``.
To the server ``{"connect": [[address, port], ...]}``
    Whether the engines can connect there: ``{"refused": [why, ...]}``, empty if so.
To the server ``{"fork": [...], "environment": {...}, "torch": false, "stay": null}``
    The engines to start, each with its ``arguments``, the ``command`` of a program of
    its own (null: a fork of the server), the file of its ``output`` (null: one without
    a name) and its ``job_rank`` (null: none); variables that are to be added to
    their environment; and whether all will import ``torch``. A server that is to
    ``stay`` may get more of these: it ends once it has had no engine and no message for
    that many seconds, as where its owner's host was lost, whose end of stdin never
    comes.
From the server ``{"pids": [...]}``
    The engines' pids, in the order of the request; ``{"failed": why}`` where this host
    has no room for another process. Engines that it has forked before run on.
From the server ``{"pid": pid, "exit_code": code, "output": text}``
    The end of an engine; a code below 0 is a signal's number. The last lines of an
    output without a name.
To the server ``{"signal": [pid, number]}``
    Send a signal to an engine.

At the end of stdin the server ends the engines and all processes that they have
started, also those whose parents have ended; if it is killed, the kernel ends the
engines. It has one thread, so that it can fork at any time. Nothing that it imports
before the fork may start a thread, open a context of ZeroMQ or an event loop, or call
CUDA. With ``plain`` as an argument it imports nothing: all engines have a ``command``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from rankscope import __version__
from rankscope.backends import parent_end
from rankscope.backends.routes import address_towards

__all__ = ["PRELOADED", "describe", "main", "preload_backends"]

#: Seconds between SIGTERM and SIGKILL where the owner has ended.
GRACE = 2.0
#: Of `prctl`: orphans among the descendants become children of this process.
PR_SET_CHILD_SUBREAPER = 36
#: Seconds that a connection to the controller may take.
CONNECT_TIMEOUT = 5.0
#: Bytes of an engine's output that are sent when it has failed.
OUTPUT_BYTES = 8192

#: What an engine imports until it has its rank, and with its first ops. An import that
#: fails here fails, or is done without, where the engine does it.
PRELOADED = (
    "rankscope.engines.agent.agent",
    "rankscope.backends.collectives.coalescing",
    "rankscope.backends.collectives.monitored_barrier",
    "rankscope.backends.collectives.objects",
    "rankscope.backends.groups.subgroups",
    "ipykernel.debugger",
    "numpy.random",
    "sqlite3",
    "tornado.platform.asyncio",
    "IPython.core.completerlib",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
)

#: Variables of Slurm that say of this process what its engines are not: one task.
OF_THE_TASK = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
)

#: Packages whose versions hosts should have in common.
COMPARED = (
    "ipyparallel",
    "ipykernel",
    "numpy",
    "torch",
    "mpi4py",
    "libucx-cu12",
    "libucx-cu13",
    "cupy-cuda12x",
    "cupy-cuda13x",
)


def main() -> None:
    """Serve; in a forked child, run the engine instead."""
    describes = "describe" in sys.argv[1:]
    if describes:
        # What the login has printed, as a terminal's title, may lack the line's end.
        print(flush=True)
    server = _Server()
    if describes:
        server.send({"rankscope": __version__, "host": describe()})
        for name in OF_THE_TASK:
            os.environ.pop(name, None)
    if "plain" in sys.argv[1:]:
        server.serve()
        return
    gc.disable()
    run = preload()
    server.serve()
    run()


def preload() -> Callable[[], object]:
    """Import what engines need, and return what runs one."""
    # As the engine's own start does: read when its debugger is imported.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    run = importlib.import_module("ipyparallel.engine.app").main
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    preload_backends()
    rehearse_error()
    return run


def describe() -> dict[str, Any]:
    """Return what the notebook compares of this host, and how it was reached."""
    from importlib import metadata

    versions = {}
    for name in COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    folder = "/proc/driver/nvidia/gpus"
    gpus = len(os.listdir(folder)) if os.path.isdir(folder) else 0
    if "SLURM_STEP_ID" in os.environ:
        # Those of the job; the folder has the others as well.
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    return {
        "name": socket.gethostname(),
        "executable": sys.executable,
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": versions,
        "gpus": gpus,
        "cores": len(os.sched_getaffinity(0)),
        "free": psutil.virtual_memory().available,
        "client": _client(),
        "no_room": _no_room(),
    }


def _no_room() -> str:
    """Return why the folder in which engines keep files takes none; else nothing."""
    folder = os.path.expanduser(os.environ.get("IPYTHONDIR") or "~/.ipython")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        return f"{folder} takes no files ({error.strerror})"
    return ""


def _client() -> str:
    """Return the address from which this host was reached; empty if it is not known."""
    by_srun = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    # Of sshd: address and port of the client, then of the server.
    by_ssh = (os.environ.get("SSH_CONNECTION") or " ").split(" ")[0]
    return by_srun if "SLURM_STEP_ID" in os.environ else by_ssh


def preload_backends() -> None:
    """Import the built-in backends of arrays in memory, but no library of theirs."""
    registry = importlib.import_module("rankscope.backends.interface.registry")
    for name, devices in registry.builtin_devices().items():
        if devices == ("cpu",):
            registry.resolve(name)


def rehearse_error() -> None:
    """Format a traceback: what IPython imports and looks up for the first one."""
    importlib.import_module("rankscope.engines.agent.printing").make_colours_once()
    formatter = importlib.import_module("IPython.core.ultratb").FormattedTB("Context")
    # The colours of an engine, where IPython has them by this name (from 9 on).
    getattr(formatter, "set_theme_name", str)("neutral")
    try:
        raise RuntimeError
    except RuntimeError as error:
        formatter.structured_traceback(RuntimeError, error, error.__traceback__)


class _Server:
    """Forks the engines, reports their ends, and ends them with the owner."""

    def __init__(self) -> None:
        # What is printed while modules are imported is no message.
        self._in, self._out, self._pid = os.dup(0), os.dup(1), os.getpid()
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._living: set[int] = set()
        self._outputs: dict[int, int] = {}
        self._received = b""
        self._forked = self._owner_ended = False
        # Seconds that it stays without an engine or a message, and since when it does.
        self._stays: float | None = None
        self._alone_since = 0.0
        # Whether there are engines, or orphans of engines.
        self._has_children = False
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # The next signal to the engines of an owner that has ended, and when.
        self._next: tuple[float, int] | None = None
        self._listener: socket.socket | None = None
        # The end of a child, and the parent's own signals, end the wait for a message.
        self._wakeup, writer = os.pipe()
        for fd in (self._wakeup, writer):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._writer = writer

    def send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        # An owner that has ended needs no report.
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._out, line) :]

    def serve(self) -> None:
        """Serve until the end of the process; return in a forked engine."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            ready = dict(poll.poll(self._patience()))
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
            self._reap()
            if self._in in ready and self._listen():
                return
            if self._owner_ended and self._in in ready:
                poll.unregister(self._in)
            if self._next is not None and time.monotonic() >= self._next[0]:
                self._signal_all(self._next[1])
            self._give_up_owner()
            if self._is_done():
                # Without the clean-up of what was imported for the engines.
                os._exit(0)

    def _patience(self) -> float | None:
        """Return for how many milliseconds nothing is to be done but what comes."""
        until = [] if self._next is None else [self._next[0]]
        if (alone_until := self._alone_until) is not None:
            until.append(alone_until)
        return max(0.0, min(until) - time.monotonic()) * 1000 if until else None

    @property
    def _alone_until(self) -> float | None:
        """When an owner that sends nothing is given up; ``None``: it is not."""
        if self._stays is None or self._living or self._owner_ended:
            return None
        return self._alone_since + self._stays

    def _give_up_owner(self) -> None:
        """End, as at the end of stdin, where no engine and no owner is left."""
        alone_until = self._alone_until
        if alone_until is None or time.monotonic() < alone_until:
            return
        self._owner_ended = True
        # What leads to the owner may have ended.
        with contextlib.suppress(OSError):
            print(
                f"rankscope: this fork server ends: for {self._stays:g} s it has had "
                "no rank, and heard nothing of its notebook",
                file=sys.stderr,
                flush=True,
            )

    def _is_done(self) -> bool:
        if self._owner_ended and self._has_children and not self._living:
            for orphan in psutil.Process().children():
                orphan.kill()
        ended = self._owner_ended or (self._forked and self._stays is None)
        return ended and not self._has_children

    def _listen(self) -> bool:
        """Handle what was received; return whether this is a forked engine."""
        try:
            chunk = os.read(self._in, 65536)
        except OSError:
            chunk = b""
        if not chunk:
            self._owner_ended = True
            self._signal_all(signal.SIGTERM)
            return False
        self._alone_since = time.monotonic()
        *lines, self._received = (self._received + chunk).split(b"\n")
        return any(self._handle(json.loads(line)) for line in lines)

    def _handle(self, message: dict[str, Any]) -> bool:
        if "fork" in message:
            return self._fork(message)
        if "listen" in message:
            self._stop_listening()
            self._listener = _listen_towards(message["listen"])
            self.send({"at": self._listener.getsockname()[:2]})
        elif "connect" in message:
            self.send({"refused": _why_refused(message["connect"])})
        else:
            pid, signum = message["signal"]
            # The pid of one that has ended may have been given again.
            if pid in self._living:
                os.kill(pid, signum)
        return False

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _signal_all(self, signum: int) -> None:
        for pid in self._living:
            os.kill(pid, signum)
            # One that is stopped heeds it when it goes on.
            os.kill(pid, signal.SIGCONT)
        self._next = None
        if signum == signal.SIGTERM:
            self._next = time.monotonic() + GRACE, signal.SIGKILL

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                return
            if pid == 0:
                return
            if pid not in self._living:
                continue
            self._living.discard(pid)
            self._alone_since = time.monotonic()
            code = os.waitstatus_to_exitcode(status)
            output = self._outputs.pop(pid)
            text = _last_of(output) if code else ""
            os.close(output)
            self.send({"pid": pid, "exit_code": code, "output": text})

    def _fork(self, request: dict[str, Any]) -> bool:
        """Fork a child for each engine; return whether this is one of them."""
        self._stop_listening()
        # From here on the end of stdin ends the server, together with its engines.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ.update(request["environment"])
        if request["torch"]:
            # A torch that cannot be imported fails in the engines, which tell.
            with contextlib.suppress(ImportError, OSError):
                importlib.import_module("rankscope.engines.agent.torch_ranks").preload()
        self._forked, self._stays = True, request["stay"]
        # Out of the way of each collection, which would copy the pages that are shared.
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        outputs = [_open_output(one["output"]) for one in request["fork"]]
        pids: list[int] = []
        failed = ""
        for engine, output in zip(request["fork"], outputs, strict=True):
            try:
                pid = os.fork()
            except OSError as error:
                failed = f"no other process can be started: {error.strerror}"
                break
            if pid == 0:
                self._close()
                _become_engine(engine, output, [*outputs, *self._outputs.values()])
                gc.enable()
                return True
            pids.append(pid)
        for one in outputs[len(pids) :]:
            os.close(one)
        self._outputs.update(zip(pids, outputs, strict=False))
        self._living.update(pids)
        self._has_children = True
        if failed:
            for one in pids:
                os.kill(one, signal.SIGKILL)
            self.send({"failed": failed})
        else:
            self.send({"pids": pids})
        return False

    def _close(self) -> None:
        """Give up in a child what is the server's."""
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        for fd in (self._in, self._out, self._wakeup, self._writer):
            os.close(fd)
        # Where the server is killed nobody else would end the engine.
        parent_end.end_with(self._pid)


def _listen_towards(address: str) -> socket.socket:
    return socket.create_server((address_towards(address), 0), backlog=1024)


def _why_refused(targets: Sequence[tuple[str, int]]) -> list[str]:
    """Return for each address and port why it cannot be reached; empty if it can.

    All at once: a firewall may swallow each attempt for the whole time.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT
    tried: list[tuple[socket.socket, int]] = []
    for target in targets:
        one = socket.socket()
        one.setblocking(False)
        # Without a route it fails at once, and the socket does not tell afterwards.
        code = one.connect_ex((target[0], target[1]))
        tried.append((one, 0 if code == errno.EINPROGRESS else code))
    found = []
    for one, code in tried:
        poll = select.poll()
        poll.register(one, select.POLLOUT)
        if code or poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            code = code or one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            found.append(os.strerror(code) if code else "")
        else:
            found.append(f"no answer in {CONNECT_TIMEOUT:g} s")
        one.close()
    return found


def _open_output(path: str | None) -> int:
    """Open the log of an engine; without a path one that nobody has to remove."""
    if path is None:
        # The file goes with its last descriptor.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _last_of(output: int) -> str:
    """Return the end of an output that can be read; of a named one nothing."""
    size = os.fstat(output).st_size
    try:
        return os.pread(output, OUTPUT_BYTES, max(0, size - OUTPUT_BYTES)).decode(
            errors="replace"
        )
    except OSError:
        # Open for writing only: the owner reads the file.
        return ""


def _become_engine(engine: dict[str, Any], output: int, outputs: Iterable[int]) -> None:
    """Make this forked process what a process of its own would have been."""
    # No signal of the owner's terminal or process group.
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    for one in outputs:
        os.close(one)
    if engine["command"] is not None:
        # Python ignores them.
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(engine["command"][0], engine["command"])
    package = os.path.dirname(
        importlib.import_module("ipyparallel.engine").__file__ or ""
    )
    sys.argv = [os.path.join(package, "__main__.py"), *engine["arguments"]]
    importlib.import_module("rankscope.engines.agent.agent").launched_as(
        engine["job_rank"]
    )
    # The title of the process in ps and top; its command line is the server's.
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as title:
        title.write("ipengine")
    # What a process draws once. Python's own generator is seeded by Python.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


if __name__ == "__main__":
    main()
