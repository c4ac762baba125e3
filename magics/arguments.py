"""The cluster, ranks and groups that command lines refer to, and their errors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from IPython.core.error import UsageError

from rankscope.backends.did_you_mean import did_you_mean
from rankscope.engines import Cluster, ClusterError, Job
from rankscope.engines.script.metrics_process import why_not
from rankscope.engines.wire.torch_environment import TorchOptions

from .language.commands import DIST_INIT
from .language.options import Command, Values
from .language.values import parse_ranks
from .output.failures import CommandError, Interrupted
from .session import session

__all__ = [
    "check_init",
    "chosen_ranks",
    "known_group",
    "parse",
    "reported",
    "require",
    "require_cluster",
    "starts",
]

#: Options of ``%dist_init`` for ranks that it starts.
ONLY_AT_A_START = (
    *("engines", "keep", "devices", "share_gpu", "force", "start_timeout"),
    "lost_after",
)


def parse(command: Command, line: str) -> Values | None:
    """Return the values in `line`, or ``None`` after printing the help for --help."""
    values = command.parse(line)
    if values is None:
        print(command.help())
    return values


def require(command: Command) -> Cluster | Job:
    """Return the present cluster or job; raise `UsageError` if there is none."""
    cluster = session.cluster
    if cluster is None:
        if session.ended is not None:
            raise UsageError(f"{command.title}: {session.ended}")
        raise UsageError(f"{command.title}: no cluster: run %dist_init -n 4 first")
    return cluster


def require_cluster(command: Command) -> Cluster:
    """Return the present cluster; refuse a script's job, which takes no cells."""
    cluster = require(command)
    if isinstance(cluster, Job):
        command.fail(
            f"the ranks are those of a script ({cluster.launcher}): they take no "
            "cells, and the script alone makes and ends its groups and ranks; "
            "%dist_shutdown detaches from it"
        )
    return cluster


def check_init(values: Values) -> None:
    """Refuse options of ``%dist_init`` that exclude each other."""
    _check_hosts(values)
    if values["metrics"] is not None and (why := why_not()):
        DIST_INIT.fail(f"--metrics {values['metrics']}: {why}")
    attach = values["cluster_id"] is not None or values["connection_file"] is not None
    started = starts(values)
    if not started and not attach and values["profile"] is None:
        DIST_INIT.fail(
            "-n N is missing, the number of ranks to start "
            "(to attach to running ones: --cluster-id or --connection-file)"
        )
    if started and values["connection_file"] is not None:
        DIST_INIT.fail("-n starts ranks, --connection-file attaches: give one of them")
    torch = TorchOptions.parse(values["torch"] or False)
    if torch is not None and values["backend"] and not torch.over_rankscope:
        DIST_INIT.fail(
            "--backend is for Rankscope's default group, which --torch leaves out; for "
            f"torch's group: --torch {values['backend']}, or --torch rankscope for "
            "torch's ops over Rankscope's group"
        )
    if not started:
        _refuse(values, ONLY_AT_A_START, "ranks that are started: -n is missing")


def _refuse(values: Values, names: Iterable[str], why: str) -> None:
    for name in names:
        if values[name]:
            DIST_INIT.fail(f"--{name.replace('_', '-')} is for {why}")


def starts(values: Values) -> bool:
    """Return whether a ``%dist_init`` starts ranks, and does not attach to some."""
    return values["n"] is not None or values["slurm"] is not None


def _check_hosts(values: Values) -> None:
    """Take the number of ranks from the hosts; refuse what does not go with them."""
    hosts, slurm = values["hosts"], values["slurm"]
    if slurm is None and values["dry_run"]:
        DIST_INIT.fail("--dry-run shows what --slurm would submit: --slurm is missing")
    if hosts is None and slurm is None:
        _refuse(values, ("remote_python", "interface"), "hosts: --hosts is missing")
        return
    if hosts is not None and slurm is not None:
        DIST_INIT.fail("--hosts and --slurm both name the hosts: give one of them")
    if values["engines"] and (hosts is None or values["engines"] != "mpi"):
        given = "--slurm" if hosts is None else "--hosts"
        DIST_INIT.fail(
            f"--engines does not go with {given}, which has a launcher of its own"
            f"{'' if hosts is None else '; mpi alone does'}"
        )
    if hosts is None:
        return
    n = sum(hosts.values())
    if values["n"] not in (None, n):
        DIST_INIT.fail(
            f"-n {values['n']}: the hosts have {n} ranks; leave -n out, and name those "
            "of each host as a:4,b:4"
        )
    values["n"] = n


def chosen_ranks(
    command: Command,
    flag: str,
    text: str | None,
    cluster: Cluster | Job,
    group: str | None = None,
) -> list[int]:
    """Return the ranks that `text` names (``None``: all) in the cluster or `group`."""
    present, of = cluster.ranks, "cluster"
    if group is not None:
        of = f"group {group!r}"
        with reported(command):
            found = cluster.status().find_groups(group)
        present = sorted(rank for one in found for rank in one.ranks)
    if text is None:
        return present
    try:
        return parse_ranks(text, present, of)
    except ValueError as error:
        command.fail(f"{flag}{text}: {error}")


def known_group(
    command: Command, name: str | None, cluster: Cluster | Job
) -> str | None:
    """Return `name` if it is that of a group, or an id, maybe of a new one."""
    if name is None:
        return None
    for fresh in (False, True):
        status = cluster.status(fresh=fresh)
        if any(name in (key.name, key.id) for key in status.group_keys):
            return name
    groups = list(status.groups)
    there = ", ".join(groups) or "none"
    command.fail(
        f"there is no group {name!r}{did_you_mean(name, groups)} (groups: {there})"
    )


@contextmanager
def reported(
    command: Command, *others: type[Exception], undone: bool = False
) -> Iterator[None]:
    """Report an interrupt, and errors of the cluster or `others`, in one line."""
    expected: tuple[type[Exception], ...] = (ClusterError, TimeoutError, *others)
    began = time.monotonic()
    try:
        yield
    except expected as error:
        raise CommandError(command.title, str(error)) from None
    except Interrupted:
        raise
    except KeyboardInterrupt:
        after = f"{command.title} after {time.monotonic() - began:.1f} s"
        end = "; what it had started is ended" if undone else ""
        raise Interrupted(f"{after}{end}") from None
