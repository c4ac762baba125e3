"""The agent inside each engine: it answers requests also while a cell blocks.

Requests arrive on the engine's control channel and are served on its control
thread, whatever the main thread does. Status is published on the engine's iopub by
a thread of the agent.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Set
from contextlib import ExitStack
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from IPython.core import page

from rankscope import __version__
from rankscope.backends import TCPStore, init_process_group
from rankscope.backends.devices.cuda_device import assign_device
from rankscope.backends.groups.exit_status import fail_on_async_error
from rankscope.backends.groups.inquiry import Place, locate_with
from rankscope.backends.groups.world import world
from rankscope.backends.observe.export import local_dump
from rankscope.backends.observe.stacks import ThreadStacks
from rankscope.backends.torch_watch.errors import explain, settle
from rankscope.backends.torch_watch.rpc_watch import watch_rpc
from rankscope.backends.torch_watch.watch import watch
from rankscope.backends.work.async_errors import take_async_error
from rankscope.backends.work.flight_recorder import recorder

from ..wire import ipyparallel_private as private
from ..wire import message_types, requests
from ..wire.error_details import pack_details
from ..wire.ipykernel_private import allow_top_level_await
from ..wire.line_clock import LineClock
from ..wire.memory import resident_bytes
from ..wire.stack_service import StackService
from ..wire.status_codec import pack
from . import availability
from .cell_source import CellSource
from .gpus import NO_GPU, Gpu, choose_device, load_cupy, may_share
from .names import names_of
from .nccl_report import NcclReports
from .no_input import explain_input
from .post_mortem import PostMortem
from .printing import PrintMarks, print_progress_as_text
from .publisher import StatusPublisher
from .rank_store import RankStore

__all__ = ["Agent", "debug", "install", "installed"]

_agent: Agent | None = None


def install(version: str) -> str:
    """Install the agent in the calling engine; return its `hello` as JSON.

    Runs on the engine's main thread. Later calls change nothing. JSON, since the
    notebook receives the repr of the expression. An engine with another `version` of
    Rankscope returns that and its Python's version, and gets no agent.
    """
    global _agent
    if version != __version__:
        return json.dumps({"version": __version__, "python": platform.python_version()})
    if _agent is None:
        from ipykernel.kernelapp import IPKernelApp

        _agent = Agent(IPKernelApp.instance().kernel)
    return json.dumps(_agent.hello())


def installed() -> Agent:
    """Return the agent of this engine."""
    assert _agent is not None
    return _agent


def debug() -> None:
    """Open the failed frame of this rank; what `Ranks.debug` has the rank do."""
    installed().debug()


class Agent:
    """Serves the cluster's requests and publishes this rank's status."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shell = kernel.shell
        self._assignment: requests.RankAssignment | None = None
        self._store = RankStore(self._offer_store)
        self._main = threading.main_thread()
        self._cell: int | None = None
        # How the last cell of a notebook ended: "left cell 7 with ValueError …".
        self._last_cell_exit = ""
        self._last_cell_failed = False
        self._cell_began: float | None = None
        self._cell_scope = ExitStack()
        self._interruptible = False
        # The names that cells begin with.
        self._given: Set[str] = frozenset()
        self._gpu: Gpu | None = None
        self._new_gpu: Gpu | None = None
        self._source = CellSource(self.shell)
        self._print_marks = PrintMarks()
        # Threads that are here before any cell are those of ipykernel.
        known = sys._current_frames()
        self._stacks = StackService(
            ThreadStacks(
                self._source.name_of, lambda: self._cell_began is not None, known
            ),
            lambda: "",
        )
        self._line = LineClock(lambda: self._place().location)
        self._numbers = itertools.count(1)
        self._publisher = StatusPublisher(kernel, self.summary)
        self._nccl_reports = NcclReports()
        self._post_mortem = PostMortem(
            self._publish_data, self._is_heard, self._source.cell_of
        )
        self._handlers = dict(
            [
                requests.Abort.served_by(self._abort),
                requests.AnswerPrompt.served_by(
                    lambda typed: self._post_mortem.answer(typed.number, typed.line)
                ),
                requests.AssignRank.served_by(self._assign_rank),
                requests.ExportGroups.served_by(lambda _: world.export_groups()),
                requests.GetClock.served_by(lambda _: time.time_ns()),
                requests.GetFlightRecord.served_by(
                    lambda wanted: local_dump(wanted.last)
                ),
                requests.GetHello.served_by(lambda _: self.hello()),
                requests.GetNames.served_by(
                    lambda _: names_of(self.shell, self._given)
                ),
                requests.GetNcclReport.served_by(lambda _: self._nccl_reports.latest()),
                requests.GetStoreAddress.served_by(lambda _: self._store.address()),
                requests.GetSummary.served_by(lambda _: self.summary()),
                requests.HostStore.served_by(self._store.host),
                requests.ImportGroups.served_by(
                    lambda wanted: world.import_groups(wanted.exported)
                ),
                requests.InitGroup.served_by(self._init_group),
                requests.Interrupt.served_by(lambda _: self._interrupt()),
                requests.IsStoreLost.served_by(lambda _: self._store.lost),
                requests.JoinStore.served_by(self._store.join),
                requests.NoteCauses.served_by(
                    lambda wanted: world.note_causes(wanted.found)
                ),
                requests.Rebuild.served_by(self._rebuild),
                requests.SetEnvironment.served_by(
                    lambda wanted: os.environ.update(wanted.env)
                ),
                requests.Subscribe.served_by(self._subscribe),
                requests.Unsubscribe.served_by(
                    lambda wanted: self._publisher.unsubscribe(wanted.msg_id)
                ),
                *self._stacks.handlers(),
            ]
        )
        allow_top_level_await(kernel)
        explain_input(kernel, self._source.describe)
        kernel.control_handlers[message_types.REQUEST] = self._serve
        private.serve_signals(kernel)
        # `dist.all_reduce?` is output of the cell: no front end opens a rank's pager.
        in_output = page.as_hook(page.display_page)  # type: ignore[no-untyped-call]
        self.shell.set_hook("show_in_pager", in_output, 90)
        self.shell.input_transformers_cleanup.append(self._number_cell)
        self.shell.events.register("pre_run_cell", self._before_cell)
        self.shell.events.register("post_run_cell", self._after_cell)
        # In an engine the cells report asynchronous errors, not the exit status.
        atexit.unregister(fail_on_async_error)
        # Torch is watched once a cell, or `torch_ranks`, imports it.
        self._torch = watch()
        watch_rpc()
        print_progress_as_text()
        self._show_traceback = self.shell.showtraceback
        self.shell.showtraceback = self._show_explained
        recorder.set_source_namer(self._source.describe)
        locate_with(self._place)
        world.on_change(self._publisher.note_change)

    # -- requests, on the control thread -----------------------------------

    def _serve(self, stream: Any, ident: Any, request: private.Message) -> None:
        content = request["content"]
        try:
            result = self._handlers[content["op"]](content["args"])
            answer = {"ok": True, "result": result}
        except Exception as error:  # noqa: BLE001 - the error is the answer
            answer = {
                "ok": False,
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": traceback.format_exc(),
            }
        private.reply(self.kernel, stream, ident, request, answer)

    def hello(self) -> requests.Hello:
        """Describe this engine, and the rank it has if it has one."""
        return {
            "version": __version__,
            "python": platform.python_version(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": self._address(),
            "port": _free_port(),
            "job_rank": _job_rank(),
            "assignment": self._assignment,
            "hosts_store": self._store.is_host,
            "groups": [one.group_desc for one in world.groups()],
        }

    def _address(self) -> str:
        """Return this host's address in the network towards the controller."""
        controller = urlsplit(private.controller_address(self.kernel)).hostname
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing: it picks the route.
            probe.connect((controller, 9))
            return probe.getsockname()[0]

    def _assign_rank(self, wanted: requests.AssignRank) -> requests.GpuAnswer:
        """Take a rank: world size, environment, GPU and the cells' namespace."""
        self._assignment = wanted.assignment
        os.environ.update(wanted.env)
        import rankscope

        names: dict[str, Any] = {
            "dist": rankscope,
            "rankscope": rankscope,
            "np": np,
            "rank": wanted.assignment["rank"],
            "world_size": wanted.assignment["world_size"],
        }
        cupy = load_cupy()
        count = 0 if cupy is None else cupy.cuda.runtime.getDeviceCount()
        index = choose_device(os.environ, count)
        if cupy is not None and index is not None:
            names["cp"] = cupy
            self.use_gpu(Gpu.of_cupy(cupy, index))
        self._given = frozenset(names)
        # Hidden, as IPython's own names are: %who lists the user's names only.
        self.shell.push(names, interactive=False)
        return {
            "uuid": "" if self._gpu is None else self._gpu.uuid,
            "may_share": may_share(os.environ),
        }

    def use_gpu(self, gpu: Gpu) -> None:
        """Make `gpu` the rank's GPU, and its current device in the next cell."""
        self._gpu = self._new_gpu = gpu
        assign_device(gpu.index)

    def _offer_store(self, store: TCPStore) -> None:
        assigned = self._assignment
        if assigned is not None and assigned["torch"] is not None:
            # No group of ours is made: a cell may make it.
            world.offered = store, assigned["rank"], assigned["world_size"]

    def _init_group(self, wanted: requests.InitGroup) -> list[requests.Refusal]:
        """Make the default group; its backends are built at their first use.

        Returns the named backends that will not be built, since they cannot be used
        here.
        """
        assert self._assignment is not None
        init_process_group(
            wanted.backend,
            timeout=wanted.timeout,
            rank=self._assignment["rank"],
            world_size=self._assignment["world_size"],
            store=self._store.store,
            # The cluster sees to it that all come; a fresh rank comes alone.
            wait_for_workers=False,
        )
        return availability.refused(wanted.backend)

    def _abort(self, wanted: requests.Abort) -> requests.Aborted:
        names = world.abort(
            wanted.groups,
            wanted.reason,
            by=wanted.by,
            culprits=wanted.culprits,
            by_death=wanted.by_death,
        )
        return {"groups": names, "summary": self.summary()}

    def _rebuild(self, wanted: requests.Rebuild) -> dict[str, Any]:
        """Begin new generations of groups on the present store."""
        for group, generation in wanted.generations.items():
            world.rebuild(group, generation, self._store.store)
        return self.summary()

    def _interrupt(self) -> bool:
        """Interrupt the running cell; return whether there was one."""
        if self._cell_began is None:
            return False
        assert self._main.ident is not None
        # To the main thread itself, so that a system call it waits in returns.
        signal.pthread_kill(self._main.ident, signal.SIGINT)
        return True

    def _place(self) -> Place:
        """Return where the main thread is, for a rank that asks why its op waits."""
        assert self._main.ident is not None
        if self._cell_began is None:
            return Place("", self._last_cell_exit)
        return Place(self._source.innermost(self._main.ident))

    # -- cells, on the main thread -----------------------------------------

    def debug(self) -> None:
        """Open the failed frame of this rank."""
        assert self._assignment is not None
        self._post_mortem.open(self._assignment["rank"])

    def _is_heard(self) -> bool:
        """Whether the notebook that sent the running cell renews its subscription."""
        header = private.message_header(self.kernel.get_parent("shell"))
        return self._publisher.is_watched_by(header["session"])

    def _publish_data(self, data: Mapping[str, Any]) -> None:
        """Send data of the running cell that is no output of it."""
        header = private.message_header(self.kernel.get_parent("shell"))
        private.publish(self.kernel, message_types.DATA, data, header)

    def _before_cell(self, info: Any) -> None:
        request = private.request_metadata(self.kernel).get("rankscope")
        if request is not None:
            self._prepare_cell(request)
        # An error that no cell caused, and that the group has reported.
        take_async_error()
        gpu, self._new_gpu = self._new_gpu, None
        if gpu is not None:
            gpu.use()
        # Last: from now on an interrupt is for the cell.
        self._cell_began = time.monotonic()
        self._publisher.note_change()

    def _number_cell(self, lines: list[str]) -> list[str]:
        """Set IPython's cell number to the notebook's, for tracebacks and source lines.

        An input transformer that returns the code unchanged: newer IPythons read the
        number before ``pre_run_cell``.
        """
        request = private.request_metadata(self.kernel).get("rankscope")
        if request is not None and request["cell"] is not None:
            self.shell.execution_count = request["cell"]
        return lines

    def _prepare_cell(self, request: Mapping[str, Any]) -> None:
        self._cell = request["cell"]
        self._print_marks.begin()
        if request["group"] is not None:
            self._cell_scope.enter_context(world.default_group(request["group"]))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # ipykernel restores its own handler after the cell. Until then an
            # interrupt that arrives after the end of the cell must do nothing.
            self._interruptible = True
            signal.signal(signal.SIGINT, self._on_sigint)

    def _after_cell(self, result: Any) -> None:
        self._interruptible = False
        self._cell_scope.close()
        self._print_marks.end()
        error = None
        late = world.async_error()
        if result is not None:
            if late is not None and result.success:
                # The cell ran to its end on invalid results of an aborted op.
                result.error_in_exec = late
                self.shell.showtraceback((type(late), late, late.__traceback__))
            if result.error_in_exec is not None:
                # What the reply says: the traceback shows it already.
                result.error_in_exec = explain(result.error_in_exec)
            error = result.error_before_exec or result.error_in_exec
            self._post_mortem.note(result.error_in_exec)
        line = None if error is None else self._source.line_of(error)
        if error is not None:
            private.publish(
                self.kernel,
                message_types.ERROR,
                pack_details(error, line),
                private.message_header(self.kernel.get_parent("shell")),
            )
        request = private.request_metadata(self.kernel).get("rankscope")
        if request is not None:
            if request["keep_value"] and result is not None:
                self.shell.push(
                    {message_types.CELL_VALUE: result.result}, interactive=False
                )
            if not self._post_mortem.opened:
                self._last_cell_exit = _describe_cell_exit(self._cell, error, line)
                self._last_cell_failed = error is not None
        self._cell = self._cell_began = None
        self._post_mortem.opened = False
        settle()
        # The last op of the cell may be younger than the last reading of torch.
        self._torch.read()
        self._publisher.note_change()

    def _show_explained(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show the traceback of a cell; of torch's error, that it was aborted."""
        error = (exc_tuple or sys.exc_info())[1]
        if error is not None and (shown := explain(error)) is not error:
            exc_tuple = (type(shown), shown, shown.__traceback__)
        self._show_traceback(exc_tuple, *args, **kwargs)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        # A notebook interrupts again what has not ended. While IPython shows where the
        # first interrupt came, a second one would end that, or be reported as ignored.
        shown = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if self._interruptible and not (shown and not self._source.is_in_cell(frame)):
            raise KeyboardInterrupt

    # -- status ------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the status of this rank as plain data."""
        began = self._cell_began
        return {
            # First: the summary has all that happened before it had its number.
            "number": next(self._numbers),
            **pack(world.summary()),
            "pid": os.getpid(),
            # Whether it waits for the GIL is visible from outside of the process.
            "status_thread": self._publisher.native_id,
            "busy": began is not None,
            "busy_for": None if began is None else time.monotonic() - began,
            **self._line.look(),
            # A cell that is being prepared cannot be interrupted yet.
            "cell": None if began is None else self._cell,
            "last_cell_exit": self._last_cell_exit if began is None else "",
            "last_cell_failed": self._last_cell_failed and began is None,
            "memory": resident_bytes(),
            **(NO_GPU if self._gpu is None else self._gpu.summary()),
        }

    def _subscribe(self, wanted: requests.Subscribe) -> requests.Summary:
        self._publisher.subscribe(wanted.header)
        return self.summary()


def _describe_cell_exit(
    cell: int | None, error: BaseException | None, line: int | None
) -> str:
    """Return ``left cell 7 with ValueError at line 4``, or the known part of it."""
    which = "its cell" if cell is None else f"cell {cell}"
    if error is None:
        return f"left {which} at its end"
    place = "" if line is None else f" at line {line}"
    return f"left {which} with {type(error).__name__}{place}"


def _job_rank() -> int | None:
    """Return the rank that mpiexec gave this process (Open MPI, or with PMI)."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def _free_port() -> int:
    """Return an unused port, for frameworks that open MASTER_PORT themselves."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
