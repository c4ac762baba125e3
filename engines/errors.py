"""The errors of the cluster: what a person has to hear about, in one line."""

from __future__ import annotations

__all__ = ["ClusterError", "ClusterStartError"]


class ClusterError(RuntimeError):
    """Something about the engines: a rank is dead, does not answer, is unknown.

    The message names the ranks and says what to do next.
    """


class ClusterStartError(ClusterError):
    """The cluster did not come up; the message ends with the last log lines."""
