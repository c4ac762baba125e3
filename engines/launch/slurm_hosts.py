"""The nodes of a job of Slurm as hosts: one srun leads to each."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from rankscope.backends.routes import address_towards

from ..errors import ClusterStartError
from . import fork_servers
from .hosts import LOST_AFTER, Hosts
from .leashed import LeashedProcess
from .slurm import SlurmJob, slurm_environment

__all__ = ["SlurmHosts", "place"]


def place(
    gpus: Mapping[str, int], n: int | None = None, tasks: int | None = None
) -> dict[str, int]:
    """Return the number of ranks on each node of a job.

    `n` ranks in blocks, as Slurm places tasks; without it as many as the job has
    `tasks`, if a person asked for more than one on each node; else one for each of the
    `gpus` of a node, and one where it has none.
    """
    if n is None and tasks is not None and tasks > len(gpus):
        n = tasks
    if n is None:
        return {name: max(1, number) for name, number in gpus.items()}
    each, more = divmod(n, len(gpus))
    if not each:
        raise ClusterStartError(
            f"-n {n}: the job has {len(gpus)} nodes, and each has a rank at least"
        )
    return {name: each + (at < more) for at, name in enumerate(gpus)}


class SlurmHosts(Hosts):
    """The nodes of a `job`, each with an srun; known once it is allocated."""

    def __init__(
        self,
        job: SlurmJob,
        n: int | None = None,
        python: str | None = None,
        interface: str | None = None,
        lost_after: float = LOST_AFTER,
    ) -> None:
        python = os.path.expanduser(python or sys.executable)
        super().__init__({}, python, interface, lost_after)
        self.job = self._slurm = job
        self._n = n

    async def reserve(self) -> None:
        self.ranks = dict.fromkeys(await self._slurm.allocate(), 0)

    def leash(self, name: str) -> str:
        return f"the srun on {name}"

    def command(self, name: str) -> list[str]:
        return self._srun(name, self.python, "-m", fork_servers.MODULE, "describe")

    def probe(self, name: str) -> list[str]:
        return self._srun(name, "true")

    def _srun(self, name: str, *command: str) -> list[str]:
        """Return what runs a command on a node.

        The step has all that the job has of the node, beside other steps.
        """
        options = {
            "jobid": self._slurm.id,
            "nodelist": name,
            "nodes": 1,
            "ntasks": 1,
            "cpu-bind": "none",
            "mpi": "none",
            "export": "ALL",
            "job-name": "rankscope",
        }
        chosen = [f"--{key}={value}" for key, value in options.items()]
        return ["srun", "--quiet", "--overlap", *chosen, *command]

    def environment_here(self) -> dict[str, str]:
        return slurm_environment()

    def silent_hosts(self, names: Sequence[str]) -> str:
        ours = f"srun --jobid={self._slurm.id} --overlap -w {names[0]} hostname"
        return f"does `{ours}` end in a terminal? --start-timeout gives a node longer"

    def why_refused(self, name: str, server: LeashedProcess) -> str:
        return f"srun {server.why}"

    def route_to(self, name: str) -> str:
        try:
            return address_towards(name)
        except OSError as error:
            raise ClusterStartError(
                f"{name}: no route of IPv4 leads there ({error.strerror}), and "
                "ipyparallel's controller, which all ranks connect to, has no IPv6: "
                "name the IPv4 address at which it reaches this host with --interface"
            ) from None

    def check(self) -> None:
        """Place the ranks; raise `ClusterStartError` where they cannot work."""
        gpus = {name: self.descriptions[name]["gpus"] for name in self.ranks}
        self.ranks = place(gpus, self._n, self._slurm.info.tasks)
        super().check()
