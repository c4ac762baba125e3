"""Which hosts the options of a cluster name; what does not go with them is refused."""

from __future__ import annotations

from ..errors import ClusterError
from .hosts import Hosts, HostSpec, parse_hosts
from .slurm import SlurmJob
from .slurm_hosts import SlurmHosts
from .ssh_hosts import SshHosts

__all__ = ["hosts_for"]


def hosts_for(
    hosts: HostSpec | None,
    slurm: str | bool,
    n: int | None,
    engines: str | None,
    keep: bool,
    remote_python: str | None,
    interface: str | None,
) -> Hosts | None:
    """Return the hosts that the options of a cluster name; ``None``: this one alone.

    Raises `ValueError` for `hosts` and `slurm` that cannot be, and `ClusterError` for
    what does not go with them.
    """
    if hosts is None and slurm is False:
        for name, value in (
            ("remote_python", remote_python),
            ("interface", interface),
        ):
            if value is not None:
                raise ClusterError(f"{name}={value!r} is for hosts, and none are named")
        return None
    if hosts is not None and slurm is not False:
        raise ClusterError("hosts= and slurm= both name the hosts: give one of them")
    if engines is not None:
        raise ClusterError(f"engines={engines!r}: hosts have a launcher of their own")
    if keep:
        raise ClusterError(
            "keep=True: the ranks of hosts end with the process that started them"
        )
    if hosts is None:
        try:
            job = SlurmJob(slurm)
        except ValueError as error:
            raise ValueError(f"slurm={slurm!r}: {error}") from None
        return SlurmHosts(job, n, remote_python, interface)
    try:
        ranks = parse_hosts(hosts)
    except (OSError, ValueError) as error:
        raise ValueError(f"hosts={hosts!r}: {error}") from None
    named = SshHosts(ranks, remote_python, interface)
    if n not in (None, len(named.names)):
        raise ClusterError(
            f"n={n}: hosts={hosts!r} have {len(named.names)} ranks; leave n out"
        )
    return named
