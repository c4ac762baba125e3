"""The agent inside each engine: it answers and reports while a cell blocks.

Requests come over the engine's control channel and are served on its control
thread, so they are answered whatever the main thread does. Status goes out on
the engine's iopub from a thread of the agent's own.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rankscope import __version__
from rankscope.backends import TCPStore, init_process_group
from rankscope.backends.export import ring
from rankscope.backends.late_errors import take_late_error
from rankscope.backends.own_device import set_own_device
from rankscope.backends.recorder import recorder
from rankscope.backends.world import world

from . import availability, private
from .gpus import Gpu, choose_device, load_cupy, must_share
from .summary import pack

__all__ = ["Agent", "install"]

#: Seconds between two status messages at least, and at most.
MIN_INTERVAL = 0.1
HEARTBEAT = 1.0
#: After this many ops since the last message: a rank that gets on tells enough,
#: and each message wakes several processes, which its collectives then miss.
STEADY_OPS = 50
STEADY_INTERVAL = 0.25
#: Seconds after which a subscriber that did not renew is forgotten.
LEASE = 30.0
#: Seconds that connecting to the ranks' store may take.
STORE_TIMEOUT = 10.0

_agent: Agent | None = None


def install(version: str) -> str:
    """Make the engine that calls this one of Rankscope's; return its `hello`.

    Runs on the engine's main thread. Doing it again changes nothing. The
    answer is JSON, since it comes back as the repr of an expression.
    """
    global _agent
    if version != __version__:
        return json.dumps({"version": __version__, "python": platform.python_version()})
    if _agent is None:
        from ipykernel.kernelapp import IPKernelApp

        _agent = Agent(IPKernelApp.instance().kernel)
    return json.dumps(_agent.hello())


class Agent:
    """Serves the cluster's requests and publishes this rank's status."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shell = kernel.shell
        self.seat: dict[str, Any] = {}
        self._store: TCPStore | None = None
        self._key = b""
        self._main = threading.main_thread()
        self._cell: int | None = None
        # How the last cell of a notebook was left: "left cell 7 with ValueError …".
        self._left = ""
        self._cell_began: float | None = None
        self._cell_scope = ExitStack()
        self._interruptible = False
        self._gpu: Gpu | None = None
        self._gpu_to_use: Gpu | None = None
        self._subscribers: dict[str, tuple[dict[str, Any], float]] = {}
        self._changed = threading.Event()
        self._ops: dict[str, Callable[..., Any]] = {
            "abort": self._abort,
            "clock": time.time_ns,
            "export_groups": world.export_groups,
            "hello": self.hello,
            "host_store": self._host_store,
            "import_groups": world.import_groups,
            "init_group": self._init_group,
            "interrupt": self._interrupt,
            "join_store": self._join_store,
            "rebuild": self._rebuild,
            "ring": ring,
            "sit": self._sit,
            "store_address": self._store_address,
            "store_lost": self._store_lost,
            "subscribe": self._subscribe,
            "set_environment": _set_environment,
            "summary": self.summary,
            "unsubscribe": self._unsubscribe,
            "where": self._where,
        }
        private.allow_top_level_await(kernel)
        kernel.control_handlers["rankscope_request"] = self._serve
        self.shell.input_transformers_cleanup.append(self._number_cell)
        self.shell.events.register("pre_run_cell", self._before_cell)
        self.shell.events.register("post_run_cell", self._after_cell)
        # Here it is the cells that tell of late errors.
        atexit.unregister(world.at_exit)
        recorder.set_source_namer(self._name_source)
        world.on_change(self._note_change)
        threading.Thread(
            target=self._publish_forever, name="rankscope-status", daemon=True
        ).start()

    # -- requests, on the control thread -----------------------------------

    def _serve(self, stream: Any, ident: Any, request: private.Message) -> None:
        content = request["content"]
        try:
            result = self._ops[content["op"]](**content["args"])
            answer = {"ok": True, "result": result}
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = {
                "ok": False,
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": traceback.format_exc(),
            }
        private.reply(self.kernel, stream, ident, request, answer)

    def hello(self) -> dict[str, Any]:
        """Who this engine is, and the seat it has if it has one."""
        return {
            "version": __version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": self._address(),
            "port": _free_port(),
            "job_rank": _job_rank(),
            "seat": self.seat,
            "hosts_store": self._store is not None and self._store.is_master,
            "groups": [one.name for one in world.groups()],
        }

    def _address(self) -> str:
        """The address of this host as the network towards the controller has it."""
        controller = urlsplit(private.controller_address(self.kernel)).hostname
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing: it picks the route.
            probe.connect((controller, 9))
            return probe.getsockname()[0]

    def _sit(self, seat: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
        """Take a seat: rank, world size, environment and namespace."""
        self.seat = seat
        os.environ.update(env)
        import rankscope

        names: dict[str, Any] = {
            "dist": rankscope,
            "np": np,
            "rank": seat["rank"],
            "world_size": seat["world_size"],
        }
        cupy = load_cupy()
        count = 0 if cupy is None else cupy.cuda.runtime.getDeviceCount()
        index = choose_device(os.environ, count)
        if cupy is not None and index is not None:
            names["cp"] = cupy
            self._gpu = Gpu(cupy, index)
            set_own_device(index, seat=True)
            # It becomes the main thread's device before its next cell.
            self._gpu_to_use = self._gpu
        # Hidden, as IPython's own names are: %who shows what the user made.
        self.shell.push(names, interactive=False)
        return {
            "gpu": "" if self._gpu is None else self._gpu.describe(),
            "must_share": must_share(os.environ, count),
        }

    def _host_store(self, host: str) -> dict[str, Any]:
        """Open the store of all ranks here; return how to reach it."""
        self._key = secrets.token_bytes(32)
        self._replace_store(
            TCPStore(host, 0, is_master=True, timeout=STORE_TIMEOUT, key=self._key)
        )
        return self._store_address()

    def _store_address(self) -> dict[str, Any]:
        """How to reach the store that is hosted here."""
        assert self._store is not None
        return {
            "host": self._store.host,
            "port": self._store.port,
            "key": self._key.hex(),
        }

    def _join_store(self, host: str, port: int, key: str) -> None:
        """Connect to the store that another rank hosts."""
        self._replace_store(
            TCPStore(host, port, timeout=STORE_TIMEOUT, key=bytes.fromhex(key))
        )

    def _store_lost(self) -> bool:
        """Whether this rank has no connection to the store any more."""
        return self._store is None or self._store.lost

    def _replace_store(self, store: TCPStore) -> None:
        if self._store is not None:
            self._store.close()
        self._store = store

    def _init_group(
        self, backend: str | None, timeout: float | None
    ) -> list[availability.Refusal]:
        """Make the default group; its backends are built at their first use.

        Returns those named that will not be, since they cannot be used here.
        """
        init_process_group(
            backend,
            timeout=timeout,
            rank=self.seat["rank"],
            world_size=self.seat["world_size"],
            store=self._store,
        )
        return availability.refused(backend)

    def _abort(self, group: str | None, reason: str) -> list[str]:
        return world.abort(group, reason, by="the notebook")

    def _rebuild(self, generations: Mapping[str, int]) -> None:
        """Begin a new generation of each group named, on the present store."""
        for name, generation in generations.items():
            world.rebuild(name, generation, self._store)

    def _interrupt(self) -> bool:
        """Interrupt the cell that runs; say whether there was one."""
        if self._cell_began is None:
            return False
        assert self._main.ident is not None
        # To the main thread itself, so that it wakes from whatever it waits in.
        signal.pthread_kill(self._main.ident, signal.SIGINT)
        return True

    def _where(self) -> str:
        """What the main thread is doing: its stack from the cell's frame on."""
        assert self._main.ident is not None
        stack = traceback.extract_stack(sys._current_frames()[self._main.ident])
        inside = [self._is_cell(entry.filename) for entry in stack]
        if True in inside:
            del stack[: inside.index(True)]
        elif self._cell_began is None:
            return "idle"
        lines = []
        for entry in stack:
            place = self._cell_name(entry.filename) or f'File "{entry.filename}"'
            lines.append(f"{place}, line {entry.lineno}, in {entry.name}")
            if entry.line:
                lines.append(f"    {entry.line}")
        return "\n".join(lines)

    # -- cells, on the main thread -----------------------------------------

    def _before_cell(self, info: Any) -> None:
        asked = private.request_metadata(self.kernel).get("rankscope")
        if asked is not None:
            self._prepare_cell(asked)
        take_late_error()  # of no cell, and told by the group
        gpu, self._gpu_to_use = self._gpu_to_use, None
        if gpu is not None:
            gpu.use()
        # Last: from now on an interrupt is for the cell.
        self._cell_began = time.monotonic()
        self._changed.set()

    def _number_cell(self, lines: list[str]) -> list[str]:
        """Count as the notebook does: tracebacks and source lines carry the number.

        An input transformer that leaves the code as it is: newer IPythons have
        read the number by the time of ``pre_run_cell``.
        """
        asked = private.request_metadata(self.kernel).get("rankscope")
        if asked is not None and asked["cell"] is not None:
            self.shell.execution_count = asked["cell"]
        return lines

    def _prepare_cell(self, asked: Mapping[str, Any]) -> None:
        self._cell = asked["cell"]
        if asked["group"] is not None:
            self._cell_scope.enter_context(world.default_group(asked["group"]))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # ipykernel restores its own handler after the cell. Until then an
            # interrupt that comes when the cell is over must hit nothing.
            self._interruptible = True
            signal.signal(signal.SIGINT, self._on_sigint)

    def _after_cell(self, result: Any) -> None:
        self._interruptible = False
        self._cell_scope.close()
        error = None
        late = world.late_error()
        if result is not None:
            if late is not None and result.success:
                # The cell went to its end on what an aborted op left behind.
                result.error_in_exec = late
                self.shell.showtraceback((type(late), late, late.__traceback__))
            error = result.error_before_exec or result.error_in_exec
        line = None if error is None else self._line_of(error)
        if error is not None:
            private.publish(
                self.kernel,
                "rankscope_error",
                {"line": line, "cell": self._cell},
                private.message_header(self.kernel.get_parent("shell")),
            )
        if private.request_metadata(self.kernel).get("rankscope") is not None:
            self._left = _leaving(self._cell, error, line)
        self._cell = self._cell_began = None
        self._changed.set()

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._interruptible:
            raise KeyboardInterrupt

    def _line_of(self, error: BaseException) -> int | None:
        """The line of the cell that runs at which an error came up."""
        if isinstance(error, SyntaxError) and self._is_cell(error.filename):
            return error.lineno
        # Not of an earlier cell, whose function this one called.
        this = f"Cell In[{self.shell.execution_count}]"
        lines = [
            number
            for frame, number in traceback.walk_tb(error.__traceback__)
            if self._cell_name(frame.f_code.co_filename) == this
        ]
        return lines[-1] if lines else None

    def _is_cell(self, filename: str | None) -> bool:
        return filename is not None and self._cell_name(filename) is not None

    def _cell_name(self, filename: str) -> str | None:
        """``Cell In[7]`` for the file that IPython compiled cell 7 as."""
        named = self.shell.compile.format_code_name(filename)
        return None if named is None else " ".join(named)

    def _name_source(self, filename: str, line: int) -> str:
        named = self.shell.compile.format_code_name(filename)
        if named is None:
            return f"{os.path.basename(filename)} line {line}"
        number = named[1].removeprefix("In[").removesuffix("]")
        return f"cell {number} line {line}"

    # -- status, on a thread of its own ------------------------------------

    def summary(self) -> dict[str, Any]:
        """What this rank is doing, as plain data."""
        began = self._cell_began
        return {
            **pack(world.summary()),
            "pid": os.getpid(),
            "busy": began is not None,
            "busy_for": None if began is None else time.monotonic() - began,
            # A cell that is being prepared cannot be interrupted yet.
            "cell": None if began is None else self._cell,
            "left": self._left if began is None else "",
            "gpu": "" if self._gpu is None else self._gpu.describe(),
        }

    def _subscribe(self, header: dict[str, Any]) -> dict[str, Any]:
        """Publish status under `header` for the next `LEASE` seconds."""
        self._subscribers[header["msg_id"]] = (header, time.monotonic() + LEASE)
        return self.summary()

    def _unsubscribe(self, msg_id: str) -> None:
        self._subscribers.pop(msg_id, None)

    def _publish_forever(self) -> None:
        issued = recorder.count
        while True:
            self._changed.wait(HEARTBEAT)
            self._changed.clear()
            try:
                self._publish(time.monotonic())
            except Exception:
                # One message less; the thread must not end over it.
                self.kernel.log.exception("the rank's status was not published")
            before, issued = issued, recorder.count
            steady = issued - before >= STEADY_OPS
            time.sleep(STEADY_INTERVAL if steady else MIN_INTERVAL)

    def _note_change(self) -> None:
        # At every transition of every op: mostly it is set already.
        if not self._changed.is_set():
            self._changed.set()

    def _publish(self, now: float) -> None:
        for msg_id, (header, until) in list(self._subscribers.items()):
            if now > until:
                self._subscribers.pop(msg_id, None)
            else:
                private.publish(self.kernel, "rankscope_status", self.summary(), header)


def _leaving(cell: int | None, error: BaseException | None, line: int | None) -> str:
    """``left cell 7 with ValueError at line 4``, or what of it is known."""
    which = "its cell" if cell is None else f"cell {cell}"
    if error is None:
        return f"left {which} at its end"
    place = "" if line is None else f" at line {line}"
    return f"left {which} with {type(error).__name__}{place}"


def _job_rank() -> int | None:
    """The rank that mpiexec gave this process (Open MPI; those with PMI)."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def _set_environment(env: dict[str, str]) -> None:
    os.environ.update(env)


def _free_port() -> int:
    """A port nobody listens on: for frameworks that open MASTER_PORT themselves."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
