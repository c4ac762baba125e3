"""direct_members: enum members that are found without a call, on every Python."""

from __future__ import annotations

import enum
from typing import TypeVar

__all__ = ["direct_members"]

E = TypeVar("E", bound=type[enum.Enum])


def direct_members(cls: E) -> E:
    """Make the members attributes of their class, hashed by identity.

    Before Python 3.12, a look-up such as ``OpType.SEND`` runs Python code, and so does
    the hash of a member on every Python. Each op needs several of both.
    """
    for name, member in cls.__members__.items():
        type.__setattr__(cls, name, member)
    type.__setattr__(cls, "__hash__", object.__hash__)
    return cls
