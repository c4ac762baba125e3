"""What ranks know of the backend under test, and what launches them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .trial import (
    Arrays,
    DeviceArrays,
    HostArrays,
    Options,
    Outcome,
    Rule,
    Unclaimed,
    describe,
)

__all__ = ["GRACE", "LaunchError", "Session", "Setup", "load"]

# What `Arrays` has.
_ARRAY_NAMES = ("empty", "write", "read", "wait_blocks_host")
#: Seconds after their own deadline in which the ranks may still answer.
GRACE = 15.0


class LaunchError(ValueError):
    """The backend or the ranks cannot be made; no rule can be tried."""


@dataclass(frozen=True)
class Setup:
    """Description of the backend under test, passed to every rank."""

    backend: str
    device: str = "cpu"
    #: ``"module"`` or ``"module:function"``: imported, called, on every rank.
    modules: tuple[str, ...] = ()
    #: ``"module:class"`` of an `Arrays`, made with ``rank=``; empty: numpy, cupy.
    arrays: str = ""
    options: Options = field(default_factory=Options)

    def register(self) -> None:
        """Import what registers the backend; raises `LaunchError` if that fails."""
        for name in self.modules:
            target = load(name)
            if ":" in name:
                try:
                    target()
                except Exception as error:
                    raise LaunchError(f"{name} failed: {describe(error)}") from error

    def make_arrays(self, rank: int) -> Arrays:
        """Return the arrays of the device under test, on `rank`."""
        usual = DeviceArrays if self.device == "cuda" else HostArrays
        kind = load(self.arrays) if self.arrays else usual
        try:
            made = kind(rank=rank)
        except Unclaimed as error:
            raise LaunchError(str(error)) from error
        except Exception as error:
            raise LaunchError(
                f"arrays {self.arrays}: the call with rank={rank} failed: "
                f"{describe(error)}"
            ) from error
        lacking = [name for name in _ARRAY_NAMES if not hasattr(made, name)]
        if lacking:
            raise LaunchError(
                f"arrays {self.arrays}: no {', '.join(lacking)}; expected an object "
                "as rankscope.conformance.Arrays describes"
            )
        return made


def load(name: str) -> Any:
    """Import ``"module"``, or take ``function`` of ``"module:function"``."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:
        raise LaunchError(f"{name} cannot be imported: {describe(error)}") from error


class Session(Protocol):
    """Some ranks, which try one rule after the other."""

    size: int

    def run(self, rule: Rule, progress: Callable[[int], None]) -> list[Outcome]:
        """Try `rule` on every rank; return the outcome of each.

        `progress` is called, about once a second, with the number of cases that held
        so far. Raises `RankFailure` if a rank died, and `LaunchError` if the ranks or
        their backend cannot be made.
        """

    def close(self) -> None:
        """End the ranks."""
