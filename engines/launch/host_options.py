"""Which hosts the options of a cluster name; what does not go with them is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ClusterError
from .host_names import HostSpec, parse_hosts
from .hosts import Hosts
from .local_host import LocalHost
from .slurm import SlurmJob
from .slurm_hosts import SlurmHosts
from .ssh_hosts import SshHosts

__all__ = ["hosts_for", "kept_hosts"]


def hosts_for(
    hosts: HostSpec | None,
    slurm: str | bool,
    n: int | None,
    engines: str | None,
    keep: bool,
    remote_python: str | None,
    interface: str | None,
    lost_after: float,
) -> Hosts | None:
    """Return the hosts that the options of a cluster name; ``None``: this one alone."""
    if hosts is None and slurm is False:
        for name, value in (("remote_python", remote_python), ("interface", interface)):
            if value is not None:
                raise ClusterError(f"{name}={value!r} is for hosts, and none are named")
        return None
    if hosts is not None and slurm is not False:
        raise ClusterError("hosts= and slurm= both name the hosts: give one of them")
    if engines == "mpi" and hosts is not None:
        if remote_python is not None:
            raise ClusterError(
                "remote_python: mpiexec runs the Python of this one's path on all hosts"
            )
    elif engines == "mpi":
        nodes = os.environ.get("SLURM_JOB_NODELIST", "a,b")
        raise ClusterError(
            "slurm= does not go with the launcher mpi: in a job name its nodes (for "
            f"{nodes} as --hosts a:2,b:2), and mpiexec starts the ranks there by srun"
        )
    elif engines is not None:
        raise ClusterError(
            f"the launcher {engines}: hosts have one of their own, or mpi by ssh"
        )
    if hosts is None:
        try:
            job = SlurmJob(slurm)
        except ValueError as error:
            raise ValueError(f"slurm={slurm!r}: {error}") from None
        job.kept = keep
        of_job = SlurmHosts(job, n, remote_python, interface, lost_after)
        of_job.kept = keep
        return of_job
    try:
        ranks = parse_hosts(hosts)
    except (OSError, ValueError) as error:
        raise ValueError(f"hosts={hosts!r}: {error}") from None
    named = SshHosts(ranks, remote_python, interface, lost_after)
    named.kept = keep
    if n not in (None, len(named.names)):
        raise ClusterError(
            f"n={n}: hosts={hosts!r} have {len(named.names)} ranks; leave n out"
        )
    return named


def kept_hosts(record: Mapping[str, Any]) -> Hosts:
    """Return the hosts of a cluster that another process has started and kept."""
    found: Hosts
    if "local" in record:
        found = LocalHost(record["local"], record["by_command"])
        found.kept = True
        return found
    if record["job"] is None:
        found = SshHosts(record["ranks"], *record["options"])
    else:
        found = SlurmHosts(SlurmJob(number=record["job"]), None, *record["options"])
        found.ranks = dict(record["ranks"])
    found.descriptions = dict(record["descriptions"])
    found.engine_args = record["engine_args"]
    found.kept = True
    return found
