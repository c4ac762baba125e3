"""Origin: the group that another group is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..interface.base import Backend

__all__ = ["Origin"]


class _Parent(Protocol):
    def built_backend(self, device: str) -> Backend | None: ...


@dataclass(frozen=True)
class Origin:
    """The group that another one is made from, which leaves out `excluded` ranks.

    `release`: see `Backend.split_from`.
    """

    group: _Parent
    excluded: tuple[int, ...] = ()
    release: Callable[[], None] | None = None

    def split(self, backend: Backend, device: str) -> None:
        """Split the new group's `backend` from the parent group's for `device`."""
        parent = self.group.built_backend(device)
        backend.split_from(parent, self.excluded, self.release)
