"""The errors of the cluster; each message is one line for a person to read."""

from __future__ import annotations

__all__ = ["ClusterError", "ClusterStartError"]


class ClusterError(RuntimeError):
    """A rank is dead, does not answer or does not exist, or a request makes no sense.

    The message names the ranks and what to do next.
    """


class ClusterStartError(ClusterError):
    """The cluster did not come up; the message ends with the last log lines."""
