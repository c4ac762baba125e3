"""Cluster files: which clusters of this user run, and which engine has which rank.

A cluster writes one into Jupyter's runtime folder once its ranks are ready, and deletes
it at its end. The command line finds clusters by them, also while a notebook hangs.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankscope import __version__
from rankscope.backends.stores.process_end import process_start_time

from ..errors import ClusterError
from ..wire.runtime_files import RuntimeFile, runtime_path
from .files import files_of, remove

if TYPE_CHECKING:
    from ..observe.rank_slots import RankSlot
    from ..wire.requests import Hello
    from ..wire.torch_environment import TorchOptions

__all__ = [
    "Announcement",
    "ClusterFile",
    "cluster_files",
    "end_reason",
    "file_of_job",
    "is_elsewhere",
    "job_of",
    "this_client",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterFile(RuntimeFile):
    """How to attach to a cluster of this user, and what a person knows it by."""

    PREFIX: ClassVar[str] = "rankscope-cluster-"

    cluster_id: str
    #: The directory of the IPython profile.
    profile: str
    #: The name of the host where the notebook runs, and its process.
    node: str
    pid: int
    #: The notebook or script.
    notebook: str
    #: When it was ready, ``time.time()``.
    since: float
    #: Pid and start time of the controller; ``None`` where it is not known.
    controller: Sequence[int] | None
    #: What the engines of the living ranks say of themselves, by their identities.
    hellos: Mapping[str, Hello]
    world_size: int
    #: The number of the job of Slurm that the ranks are in, if they are in one.
    job: str = ""
    #: Why the cluster was stopped by another process, once it was.
    stopped: str = ""
    #: The identities of engines that a process ends, to start others in their place.
    restarting: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        cluster_id: str,
        profile: str,
        controller_pid: int | None,
        slots: Sequence[RankSlot],
        torch: TorchOptions | None,
        job: str = "",
    ) -> ClusterFile:
        started = None
        if controller_pid is not None:
            started = process_start_time(controller_pid)
        return cls(
            cluster_id=cluster_id,
            profile=profile,
            node=socket.gethostname(),
            pid=os.getpid(),
            notebook=_notebook(),
            since=time.time(),
            controller=None if started is None else (controller_pid or 0, started),
            hellos={
                slot.uuid: {
                    "version": __version__,
                    "pid": slot.pid,
                    "host": slot.host,
                    "address": slot.address,
                    "port": slot.port,
                    "job_rank": None,
                    "assignment": {
                        "rank": slot.rank,
                        "world_size": len(slots),
                        "torch": None if torch is None else asdict(torch),
                    },
                    # Unknown: a silent rank cannot tell any more.
                    "hosts_store": False,
                }
                for slot in slots
                if slot.alive
            },
            world_size=len(slots),
            job=job,
        )

    @classmethod
    def read(cls, cluster_id: str, profile: str) -> ClusterFile | None:
        return cls.load(cls.path_of(cluster_id, profile))

    @property
    def path(self) -> Path:
        return self.path_of(self.cluster_id, self.profile, self.node)

    @classmethod
    def path_of(cls, cluster_id: str, profile: str, node: str | None = None) -> Path:
        """Return the path of the file of a cluster; `node` is this host by default."""
        node = node or socket.gethostname()
        # The ids of two profiles may be the same.
        known = f"{zlib.crc32(profile.encode()):08x}"
        return runtime_path(
            f"{cls.PREFIX}{node}-{cluster_id or 'cluster'}-{known}.json"
        )

    @property
    def connection_file(self) -> Path:
        """The controller's file for its clients."""
        dashed = f"-{self.cluster_id}" if self.cluster_id else ""
        return Path(self.profile, "security", f"ipcontroller{dashed}-client.json")

    @property
    def runs(self) -> bool:
        """Whether the cluster may still run; of another host it is not known."""
        return self.connection_file.exists() and not self._lacks_controller

    @property
    def _lacks_controller(self) -> bool:
        """Whether the controller, of this host, is known to be gone."""
        if self.controller is None or self.node != socket.gethostname():
            return False
        pid, started = self.controller
        return process_start_time(pid) != started

    @property
    def _closeness(self) -> int:
        """How well the file suits this host, among those of one cluster."""
        if self.node == socket.gethostname():
            return 2
        return 0 if self.controller is None else 1

    @property
    def _was_killed(self) -> bool:
        """Whether controller and notebook, both of this host, are known to be gone."""
        return self._lacks_controller and process_start_time(self.pid) is None

    @property
    def _awaited(self) -> bool:
        """Whether a notebook has still to read why the cluster was stopped."""
        return bool(self.stopped) and process_start_time(self.pid) is not None


class Announcement:
    """The file of the cluster that this process uses."""

    def __init__(self, cluster_id: str, profile: str) -> None:
        self._cluster_id, self._profile = cluster_id, profile
        self._written = False
        #: Why another process stopped the cluster, once `find_end` found that.
        self.ended: str | None = None

    def _read(self) -> ClusterFile | None:
        return ClusterFile.read(self._cluster_id, self._profile)

    def update(self, file: ClusterFile) -> None:
        """Write the file, with the present ranks."""
        try:
            file.write()
            self._written = True
        except OSError as error:
            _log.warning("the command line does not find this cluster: %s", error)

    def find_end(self) -> str | None:
        # What lies there before is of an earlier cluster with the same id.
        if self.ended is None and self._written:
            file = self._read()
            self.ended = None if file is None else file.stopped or None
        return self.ended

    def note_restart(self, engines: Sequence[str]) -> None:
        """Tell the other notebooks who ends these `engines`, for a restart."""
        if (file := self._read()) is not None:
            self.update(replace(file, restarting=engines, notebook=this_client()))

    def find_restart(self, engine: str) -> str:
        """Return who has ended an engine for a restart; empty where none is known."""
        file = self._read() if self._written else None
        if file is None or engine not in file.restarting:
            return ""
        return f"ended by {file.notebook} for a restart"

    def end(self, reason: str) -> None:
        """Delete the file; with a reason leave it, for a notebook that is told."""
        file = self._read()
        if file is None:
            return
        lives = process_start_time(file.pid) is not None
        if not reason and lives and file.pid != os.getpid():
            reason = end_reason(f"shut down by {this_client()}")
        if not reason:
            file.remove()
            return
        try:
            replace(file, stopped=reason).write()
        except OSError as error:
            _log.warning("the notebook will not say why its ranks end: %s", error)


def cluster_files() -> list[ClusterFile]:
    """Return the clusters of this user that run, the newest first.

    Of a cluster that notebooks of several hosts use, the file of this host, or else
    that of the host of its controller. The files of clusters of this host that were
    killed are deleted, those of ipyparallel included.
    """
    found: dict[tuple[str, str], ClusterFile] = {}
    for one in ClusterFile.load_all():
        if one.runs and not one.stopped:
            known = found.setdefault((one.cluster_id, one.profile), one)
            if one._closeness > known._closeness:
                found[one.cluster_id, one.profile] = one
        elif not one.runs and not one._awaited:
            if one._was_killed:
                for path in files_of(one.profile, one.cluster_id):
                    remove(path)
            one.remove()
    return sorted(found.values(), key=lambda one: one.since, reverse=True)


def file_of_job(number: str) -> ClusterFile:
    """Return the file of the cluster whose ranks are in a job of Slurm."""
    jobs = {one.job: one for one in reversed(cluster_files()) if one.job}
    if number not in jobs:
        there = f"; there are ranks in {', '.join(sorted(jobs))}" if jobs else ""
        raise ClusterError(
            f"no ranks of yours are known in Slurm's job {number}{there}. Those that a "
            "notebook of another host has started are found where both have the same "
            "home"
        )
    return jobs[number]


def job_of(cluster_id: str, profile: str) -> str:
    """Return the number of the job of Slurm that a cluster is in, or nothing."""
    noted = (one.job for one in _on_all_hosts(cluster_id, profile))
    return next(filter(None, noted), "")


def is_elsewhere(cluster_id: str, profile: str) -> bool:
    """Return whether the controller of a cluster is known to be on another host."""
    found = _on_all_hosts(cluster_id, profile)
    nodes = {one.node for one in found if one.controller}
    return bool(nodes) and socket.gethostname() not in nodes


def _on_all_hosts(cluster_id: str, profile: str) -> list[ClusterFile]:
    wanted = cluster_id, profile
    return [x for x in ClusterFile.load_all() if (x.cluster_id, x.profile) == wanted]


def end_reason(how: str) -> str:
    """Return what a notebook is told whose cluster was ended now: "stopped by X"."""
    return (
        f"the cluster was {how} at {time.strftime('%H:%M:%S')}: its ranks and their "
        "variables are gone; %dist_init starts others"
    )


def this_client() -> str:
    """Return what this process is to another notebook."""
    name = _notebook()
    # What a kernel without a notebook server has.
    return "another notebook" if name == "ipykernel_launcher.py" else name


def _notebook() -> str:
    """Return the path of the notebook as its server has it, else of the script."""
    return os.environ.get("JPY_SESSION_NAME") or Path(sys.argv[0]).name
