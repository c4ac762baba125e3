"""The agent inside each engine: it answers requests also while a cell blocks.

Requests arrive on the engine's control channel and are served on its control
thread, whatever the main thread does. Status is published on the engine's iopub by
a thread of the agent.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Sequence, Set
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from IPython.core import page

from rankscope import __version__
from rankscope.backends import TCPStore, init_process_group
from rankscope.backends.devices.cuda_device import assign_device
from rankscope.backends.groups.api import fail_on_async_error
from rankscope.backends.groups.inquiry import locate_with
from rankscope.backends.groups.remedies import note_notebook
from rankscope.backends.groups.thread_exceptions import note_exceptions_of_threads
from rankscope.backends.groups.unattended import attendance
from rankscope.backends.groups.world import world
from rankscope.backends.launch_variables import (
    OPEN_MPI,
    PMI,
    SLURM,
    first_number,
    ranks,
)
from rankscope.backends.observe.stacks import ThreadStacks
from rankscope.backends.routes import address_towards
from rankscope.backends.torch_watch.watch import watch
from rankscope.backends.work.flight_recorder import recorder

from ..wire import ipyparallel_private as private
from ..wire import message_types, requests
from ..wire.ipykernel_private import (
    allow_top_level_await,
    keep_output_in_its_cell,
    serve_requests,
    show_output_of_children,
)
from ..wire.launchers import needs_launcher
from ..wire.rank_service import RankService, answer
from ..wire.summaries import SummaryWriter
from . import availability
from .cells import Cells
from .gpus import NO_GPU, Gpu, choose_device, load_cupy, may_share
from .hang_reports import HangReports
from .nccl_report import NcclReports
from .no_input import end_cell_at_exit, explain_input
from .printing import (
    make_colours_once,
    name_cells_in_warnings,
    print_progress_as_text,
)
from .process import end_by_sigterm, give_children_their_signals
from .publisher import StatusPublisher
from .rank_store import RankStore

__all__ = [
    "Agent",
    "complete",
    "debug",
    "inspect",
    "install",
    "installed",
    "launched_as",
    "names_of",
]

#: What an op says on a rank that has not got its groups yet.
_NOT_READY = (
    "this rank is being started, and has no group yet: run the cell again once "
    "%dist_init or %dist_restart has ended"
)

_agent: Agent | None = None
#: The place among the engines of our own launcher; ``None``: of another one.
_launched_rank: int | None = None


def install(version: str) -> str:
    """Install the agent in the calling engine; return its `hello` as JSON.

    Runs on the engine's main thread. Later calls change nothing. JSON, since the
    notebook receives the repr of the expression. An engine with another `version` of
    Rankscope returns that, and gets no agent.
    """
    global _agent
    if version != __version__:
        return json.dumps({"version": __version__})
    if _agent is None:
        from ipykernel.kernelapp import IPKernelApp

        _agent = Agent(IPKernelApp.instance().kernel)
    return json.dumps(_agent.hello(requests.GetHello()))


def installed() -> Agent:
    assert _agent is not None
    return _agent


def debug() -> None:
    """Open the failed frame of this rank; what `Ranks.debug` has the rank do."""
    agent = installed()
    assert agent.assignment is not None
    agent.cells.post_mortem.open(agent.assignment["rank"])


# What a front end asks while a person types a cell. Both may run code of the objects
# that they are about: the notebook asks on the main thread, while no cell runs.


def complete(code: str, cursor: int) -> str:
    """Return the reply of IPython's completer as JSON; on the main thread."""
    kernel = installed().kernel
    completer = kernel.shell.Completer
    before = completer.use_jedi
    # Jedi takes up to seconds, and the next cell would wait for it. Without it, what
    # follows a name comes from the object itself.
    completer.use_jedi = False
    try:
        return json.dumps(kernel.do_complete(code, cursor))
    finally:
        completer.use_jedi = before


def inspect(code: str, cursor: int, detail: int, omitted: Sequence[str]) -> str:
    """Return the reply of IPython's help as JSON; on the main thread."""
    return json.dumps(installed().kernel.do_inspect(code, cursor, detail, omitted))


class Agent:
    """Serves the cluster's requests and publishes this rank's status."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shell = kernel.shell
        self.assignment: requests.RankAssignment | None = None
        # The names that cells begin with.
        self._given: Set[str] = frozenset()
        self._gpu: Gpu | None = None
        self._new_gpu: Gpu | None = None
        # Torch is watched once a cell, or `torch_ranks`, imports it.
        self._torch = watch()
        self._store = RankStore(self._offer_store)
        self._summary = SummaryWriter(
            lambda: self.cells.place().location, self._status
        ).write
        controller = urlsplit(private.controller_address(kernel)).netloc
        self._publisher = StatusPublisher(kernel, self._summary)
        # Threads that are here before any cell are those of ipykernel.
        known = [*sys._current_frames()]
        # The last op of a cell may be younger than the last reading of torch.
        self.cells = Cells(kernel, self._publisher, self._apply_gpu, self._torch.read)
        self._hang_reports = HangReports(
            kernel, controller, self._publisher.publish_last, self.cells.exit_while_idle
        )
        source = self.cells.source
        stacks = ThreadStacks(
            source.name_of, lambda: self.cells.running, known, self.cells.suspended
        )
        self._handlers = requests.handlers_of(
            self,
            self.cells,
            self.cells.reservations,
            self._publisher,
            self._store,
            NcclReports(),
            RankService(self._summary, stacks),
        )
        serve_requests(kernel, message_types.REQUEST, self._serve)
        private.serve_signals(kernel)
        end_by_sigterm(kernel.parent)
        self._adapt_shell()
        recorder.set_source_namer(source.describe)
        locate_with(self.cells.place)
        note_exceptions_of_threads()
        attendance.append(lambda: True)
        recorder.on_change(self._publisher.note_change)

    def _adapt_shell(self) -> None:
        """Adapt IPython to an engine, at which nobody types."""
        allow_top_level_await(self.kernel)
        explain_input(self.kernel, self.cells.source.describe)
        end_cell_at_exit(self.shell)
        print_progress_as_text()
        make_colours_once()
        name_cells_in_warnings(self.cells.source)
        # `dist.all_reduce?` is output of the cell: no front end opens a rank's pager.
        in_output = page.as_hook(page.display_page)  # type: ignore[no-untyped-call]
        self.shell.set_hook("show_in_pager", in_output, 90)
        # In an engine the cells report asynchronous errors, not the exit status.
        atexit.unregister(fail_on_async_error)
        show_output_of_children()
        keep_output_in_its_cell(self.kernel)
        give_children_their_signals()

    def _serve(self, stream: Any, ident: Any, request: private.Message) -> None:
        content = answer(self._handlers, request["content"])
        private.reply(self.kernel, stream, ident, request, content)

    # -- cells, on the main thread -------------------------------------------

    def _apply_gpu(self) -> None:
        gpu, self._new_gpu = self._new_gpu, None
        if gpu is not None:
            gpu.use()

    # -- the rank --------------------------------------------------------------

    @requests.GetHello.handler
    def hello(self, wanted: requests.GetHello) -> requests.Hello:
        """Describe this engine, and the rank it has if it has one."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": self._address(),
            "port": _free_port(),
            "job_rank": _job_rank(),
            "assignment": self.assignment,
            "hosts_store": self._store.is_host,
        }

    def _address(self) -> str:
        controller = urlsplit(private.controller_address(self.kernel)).hostname
        assert controller is not None
        return address_towards(controller)

    @requests.SetEnvironment.handler
    def _set_environment(self, wanted: requests.SetEnvironment) -> None:
        os.environ.update(wanted.env)

    @requests.AssignRank.handler
    def _assign_rank(self, wanted: requests.AssignRank) -> requests.GpuAnswer:
        self.assignment = wanted.assignment
        note_notebook(_restart_together)
        self.cells.reservations.assign(wanted.owner)
        os.environ.update(wanted.env)
        if wanted.assignment["torch"] is None:
            world.no_groups = _NOT_READY
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
        self._hang_reports.assign(names["rank"], names["world_size"])
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

    @requests.GetNames.handler
    def _names(self, wanted: requests.GetNames) -> dict[str, str]:
        return names_of(self.shell, self._given)

    # -- groups ----------------------------------------------------------------

    def _offer_store(self, store: TCPStore) -> None:
        assigned = self.assignment
        if assigned is not None and assigned["torch"] is not None:
            # No group of ours is made: a cell may make it.
            world.offered = store, assigned["rank"], assigned["world_size"]

    @requests.InitGroup.handler
    def _init_group(self, wanted: requests.InitGroup) -> list[requests.Refusal]:
        """Make the default group; its backends are built at their first use."""
        assert self.assignment is not None
        init_process_group(
            wanted.backend,
            timeout=wanted.timeout,
            rank=self.assignment["rank"],
            world_size=self.assignment["world_size"],
            store=self._store.store,
            # The cluster sees to it that all ranks join; a fresh rank joins alone.
            wait_for_workers=False,
        )
        return availability.refused(wanted.backend)

    @requests.ExportGroups.handler
    def _export_groups(self, wanted: requests.ExportGroups) -> requests.ExportedGroups:
        return world.export_groups()

    @requests.ImportGroups.handler
    def _import_groups(self, wanted: requests.ImportGroups) -> list[str]:
        return world.import_groups(wanted.exported)

    @requests.NoteCauses.handler
    def _note_causes(self, wanted: requests.NoteCauses) -> None:
        world.note_causes(wanted.found)

    @requests.Rebuild.handler
    def _rebuild(self, wanted: requests.Rebuild) -> requests.EncodedSummary:
        for group, generation in wanted.generations.items():
            world.rebuild(group, generation, self._store.store)
        return self._summary()

    # -- status ------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        began, joining = self.cells.began, world.joining_since
        gpu, gpu_memory = NO_GPU if self._gpu is None else self._gpu.summary()
        return {
            "status_thread": self._publisher.thread.native_id,
            "busy": began is not None,
            "busy_for": None if began is None else time.monotonic() - began,
            # A cell that is being prepared cannot be interrupted yet.
            "cell": None if began is None else self.cells.number,
            "joining_for": None if joining is None else time.monotonic() - joining,
            "senders": self.cells.source.senders,
            "last_cell_exit": self.cells.last_exit if began is None else "",
            "last_cell_op": self.cells.last_op if began is None else None,
            "last_cell_failed": self.cells.last_failed and began is None,
            "gpu": gpu,
            "gpu_memory": gpu_memory,
            "wanted": self.cells.reservations.wanted,
        }


def launched_as(rank: int | None) -> None:
    """Note, before the engine runs, the rank that its launcher means it for."""
    global _launched_rank
    _launched_rank = rank


def _job_rank() -> int | None:
    """Return the rank that the launcher gave this process: ours, mpiexec or srun."""
    if _launched_rank is not None:
        return _launched_rank
    return first_number(ranks(OPEN_MPI, PMI, SLURM))


def _restart_together() -> bool:
    return any(needs_launcher(str(one.config)) for one in world.groups())


def _free_port() -> int:
    """Return an unused port, for frameworks that open MASTER_PORT themselves."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def names_of(shell: Any, given: Collection[str]) -> dict[str, str]:
    """Return the cells' names, each with its type, or ``module:`` and its name."""
    # A copy is made in one step; the main thread may run a cell meanwhile.
    namespace, hidden = dict(shell.user_ns), shell.user_ns_hidden
    return {
        name: _kind(value)
        for name, value in namespace.items()
        if not name.startswith("_") and (name in given or name not in hidden)
    }


def _kind(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, ModuleType):
        return f"module:{ModuleType.__getattribute__(value, '__name__')}"
    # Not kind.__name__: a metaclass can have that run code.
    return type.__dict__["__name__"].__get__(kind)
