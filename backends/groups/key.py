"""What identifies a group: names are for people, and several groups may share one."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GroupKey"]


class GroupKey(NamedTuple):
    """A group's name and its global ranks, in the order of the group.

    No two groups of a job have the same key. Two groups may have the same name:
    disjoint ones, of which each rank knows its own only, as well as groups that have
    ranks in common.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def id(self) -> str:
        """The key as text: the name and a hash of the ranks, ``tp/8dd1a2e0``."""
        import hashlib  # OpenSSL takes 2 ms

        members = hashlib.sha1(repr(list(self.ranks)).encode()).hexdigest()[:8]
        return f"{self.name}/{members}"
