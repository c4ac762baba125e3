"""The errors of the cluster, and the errors that cells end with on the ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.backends.errors import DistError
from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import group_by, name_ranks

__all__ = [
    "ClusterError",
    "ClusterStartError",
    "ExecutionError",
    "PullError",
    "RankError",
    "group_by_message",
    "impersonal",
    "pack_details",
    "plain",
    "unpack_details",
]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ClusterError(RuntimeError):
    """A rank is dead, does not answer or does not exist, or a request makes no sense.

    The message is one line that names the ranks and what to do next.

    Examples
    --------
    >>> try:
    ...     dist.Cluster(0)
    ... except dist.ClusterError as error:
    ...     print(error)
    n=0: the number of ranks, a whole number from 1
    """


class PullError(ClusterError):
    """Some values of the ranks cannot be had; `values` has those that can.

    Parameters
    ----------
    message : str
        Which ranks' values cannot be had, why, and what to do.
    values : dict of int to dict
        Rank → {name: value}, of those that were pulled.
    """

    def __init__(self, message: str, values: dict[int, dict[str, Any]]) -> None:
        super().__init__(message)
        self.values = values

    def of(self, name: str, ranks: Sequence[int]) -> list[Any]:
        """Return the value of `name` on each of `ranks`; empty if none has it.

        This error is in the place of a value that cannot be had.

        Parameters
        ----------
        name : str
            One of the names that were pulled.
        ranks : sequence of int
            Of the ranks that they were pulled from.

        Returns
        -------
        list
            One entry for each of `ranks`, or none.
        """
        found = [self.values[rank].get(name, self) for rank in ranks]
        return found if any(one is not self for one in found) else []


class ClusterStartError(ClusterError):
    """The cluster did not come up; the message ends with the last log lines."""


class RankError(RuntimeError):
    """The error that a cell ended with on one rank.

    The exception itself stays on the rank; this is its description, and the parameters
    are its attributes.

    Parameters
    ----------
    rank : int
        The rank.
    ename : str
        Name of the exception's class; ``EngineDied`` if the engine is dead,
        ``ConnectionLost`` and ``ClusterShutDown`` where no answer can arrive.
    evalue : str
        Message of the exception.
    traceback : sequence of str
        The lines that IPython formatted, with ANSI colours; the attribute is a tuple.
    cell : int, optional
        Number of the cell.
    line : int, optional
        Line of the cell that raised the exception.
    group, op, sequence_number, culprits, reason : optional
        Attributes of the exception if it is a `rankscope.DistError`; otherwise
        ``None``, and ``()`` for `culprits`. The culprit of ``EngineDied`` is the
        rank; where a library ended it because ranks issued an op unlike, those are.

    Examples
    --------
    >>> print(dist.RankError(2, "ValueError", "no", line=3))
    rank 2, line 3: ValueError: no
    """

    def __init__(
        self,
        rank: int,
        ename: str,
        evalue: str,
        traceback: Sequence[str] = (),
        cell: int | None = None,
        line: int | None = None,
        *,
        group: str | None = None,
        op: str | None = None,
        sequence_number: int | None = None,
        culprits: Sequence[int] = (),
        reason: str | None = None,
    ) -> None:
        super().__init__(rank, ename, evalue, tuple(traceback), cell, line)
        self.rank = rank
        self.ename = ename
        self.evalue = evalue
        self.traceback = tuple(traceback)
        self.cell = cell
        self.line = line
        self.group = group
        self.op = op
        self.sequence_number = sequence_number
        self.culprits = tuple(culprits)
        self.reason = reason

    @property
    def plain_traceback(self) -> str:
        """The traceback as one text without colours."""
        return printable(plain("\n".join(self.traceback)))

    @property
    def is_abort_echo(self) -> bool:
        """Whether the error only reports that the rank's op was aborted."""
        return self.ename == "DistAbortedError"

    def replaced(self, **attributes: Any) -> RankError:
        """Return a copy with other values of `attributes`.

        Parameters
        ----------
        **attributes : object
            The values, by the names of the attributes.
        """
        made = copy.copy(self)
        vars(made).update(attributes)
        return made

    def __str__(self) -> str:
        place = "" if self.line is None else f", line {self.line}"
        # Whoever prints it, prints what a rank has named.
        return printable(f"rank {self.rank}{place}: {self.ename}: {self.evalue}")


class ExecutionError(RankError):
    """A cell failed on some ranks.

    The attributes are those of the first rank whose error is more than the abort of
    its op; if there is no such rank, those of the first rank. `culprits` are the
    culprits of all errors.

    Parameters
    ----------
    errors : dict of int to RankError
        The error of each rank that failed; the attribute of that name has them.

    Examples
    --------
    >>> error = dist.ExecutionError({2: dist.RankError(2, "ValueError", "no")})
    >>> error.rank, sorted(error.errors)
    (2, [2])
    """

    def __init__(self, errors: Mapping[int, RankError]) -> None:
        found = list(errors.values())
        causes = [error for error in found if not error.is_abort_echo]
        cause = (causes or found)[0]
        super().__init__(cause.rank, cause.ename, cause.evalue)
        vars(self).update(vars(cause))
        self.culprits = tuple(
            sorted({one for error in found for one in error.culprits})
        )
        self.errors = dict(errors)
        # For pickling: the arguments of this class.
        self.args = (self.errors,)

    def __str__(self) -> str:
        return "; ".join(map(str, self.errors.values()))


def plain(text: str) -> str:
    """Return `text` without ANSI colours."""
    return _ANSI.sub("", text)


def impersonal(rank: int, message: str) -> str:
    """Return the message of `rank` without this rank, which many errors mention."""
    others = set(re.findall(r" on rank (\d+)", message)) - {str(rank)}
    # The rank that follows the name of the group is never one of those.
    place = r"(?<=['\"])" if others else ""
    return re.sub(rf"{place} on rank {rank}\b", "", message)


def group_by_message(messages: Mapping[int, str]) -> str:
    """Return messages of ranks in one line, each message once with all its ranks."""
    ranks = group_by(sorted(messages), lambda rank: impersonal(rank, messages[rank]))
    return "; ".join(
        f"{name_ranks(members)}: {message}" for message, members in ranks.items()
    )


#: The attributes of a `DistError` that a `RankError` has too. A rank sends them, with
#: the line of the cell, beside Jupyter's ``error`` output.
_DETAILS = ("group", "op", "sequence_number", "culprits", "reason")


def pack_details(error: BaseException, line: int | None) -> dict[str, Any]:
    """Return the details of `error`, raised at `line` of the cell, for the wire."""
    details: dict[str, Any] = {"line": line}
    if isinstance(error, DistError):
        attributes = error.attributes()
        details.update({name: attributes[name] for name in _DETAILS})
    return details


def unpack_details(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details in `content` as attributes of a `RankError`."""
    details = {name: content[name] for name in ("line", *_DETAILS) if name in content}
    if "culprits" in details:
        # JSON has no tuples.
        details["culprits"] = tuple(details["culprits"])
    return details
