"""What command lines refer to: the cluster, its ranks and groups, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankscope.engines import Cluster, ClusterError

from .commands import DIST_INIT
from .failures import CommandError
from .options import Command, Values, closest
from .ranks import parse_ranks
from .session import session

__all__ = ["check_init", "chosen_ranks", "known_group", "parse", "require", "told"]


def parse(command: Command, line: str) -> Values | None:
    """Return what `line` says, or ``None`` after printing the help it asked for."""
    values = command.parse(line)
    if values is None:
        print(command.help())
    return values


def require(command: Command) -> Cluster:
    """Return the cluster there is; without one, say how to get one."""
    cluster = session.cluster
    if cluster is None:
        command.fail("no cluster: run %dist_init -n 4 first")
    return cluster


def check_init(values: Values) -> None:
    """Refuse options of ``%dist_init`` that do not go together."""
    attach = values["cluster_id"] is not None or values["connection_file"] is not None
    if values["n"] is None and not attach and values["profile"] is None:
        DIST_INIT.fail(
            "-n N is missing, the number of ranks to start "
            "(to attach to running ones: --cluster-id or --connection-file)"
        )
    if values["n"] is not None and values["connection_file"] is not None:
        DIST_INIT.fail("-n starts ranks, --connection-file attaches: give one of them")
    if values["n"] is None:
        for name in ("engines", "keep", "devices", "share_gpu"):
            if values[name]:
                flag = name.replace("_", "-")
                DIST_INIT.fail(f"--{flag} is for ranks that are started: -n is missing")


def chosen_ranks(
    command: Command,
    flag: str,
    text: str | None,
    cluster: Cluster,
    group: str | None = None,
) -> list[int]:
    """Return the ranks that `text` names (``None``: all) in the cluster or `group`."""
    present, of = cluster.ranks, "cluster"
    if group is not None:
        present, of = cluster.status().groups[group], f"group {group!r}"
    if text is None:
        return present
    try:
        return parse_ranks(text, present, of)
    except ValueError as error:
        command.fail(f"{flag}{text}: {error}")


def known_group(command: Command, name: str | None, cluster: Cluster) -> str | None:
    """Return the group called `name`, asking the ranks if it is not known yet."""
    if name is None or name in cluster.status().groups:
        return name
    groups = list(cluster.status(fresh=True).groups)
    if name not in groups:
        there = ", ".join(groups) or "none"
        command.fail(
            f"there is no group {name!r}{closest(name, groups)} (groups: {there})"
        )
    return name


@contextmanager
def told(command: Command, *others: type[Exception]) -> Iterator[None]:
    """Turn an error of the cluster, or one of `others`, into one line."""
    expected: tuple[type[Exception], ...] = (ClusterError, TimeoutError, *others)
    try:
        yield
    except expected as error:
        raise CommandError(command.title, str(error)) from None
