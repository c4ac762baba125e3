"""The suite as tests for pytest: one test for each rule.

from rankscope.conformance import BackendConformance

class TestMine(BackendConformance):
    backend = "mine"
    modules = ("my_package",)
    ranks = (1, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from .session import LaunchError, Session, Setup
from .suite import LAUNCHERS, LEVELS, problem_with, select, try_on
from .trial import Options, Rule

__all__ = ["BackendConformance"]


class BackendConformance:
    """A subclass, called ``Test...``, names the backend; every rule is a test."""

    #: The name that the backend is registered by.
    backend: ClassVar[str]
    #: ``"module"`` or ``"module:function"``: imported, called, on every rank. Not
    #: needed for a backend with an entry point.
    modules: ClassVar[Sequence[str]] = ()
    #: Numbers of ranks.
    ranks: ClassVar[Sequence[int]] = (2,)
    #: Types of devices that arrays are on.
    devices: ClassVar[Sequence[str]] = ("cpu",)
    #: ``"module:class"`` of `Arrays`; empty: numpy, or cupy for ``cuda``.
    arrays: ClassVar[str] = ""
    levels: ClassVar[Sequence[str]] = LEVELS
    #: ``"processes"``, ``"mpi"`` or ``"threads"``.
    launcher: ClassVar[str] = "processes"
    options: ClassVar[Options] = Options()
    #: Rule → the reason why it is not to be tried.
    skip: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each device, number of ranks and rule."""
        metafunc.parametrize(
            ("device", "size", "rule"),
            [
                pytest.param(
                    *(device, size, rule),
                    id=f"{device}-{size}-{rule.level}-{rule.name.replace(' ', '_')}",
                )
                for device in self.devices
                for size in self.ranks
                for rule in select(self.levels, options=self.options)
                if size >= rule.ranks
            ],
        )

    #: The sessions that are open, by device and number of ranks; one at most.
    _sessions: ClassVar[dict[tuple[str, int], Session]]

    @classmethod
    def setup_class(cls) -> None:
        """Begin without ranks: the first test starts them."""
        cls._sessions = {}

    @classmethod
    def teardown_class(cls) -> None:
        """End the ranks."""
        for session in cls._sessions.values():
            session.close()
        cls._sessions.clear()

    def test_rule(self, device: str, size: int, rule: Rule) -> None:
        """The rule holds, or is skipped by name."""
        sessions = self._sessions
        setup = Setup(
            self.backend, device, tuple(self.modules), self.arrays, self.options
        )
        if (device, size) not in sessions:
            problem = problem_with(setup)
            if problem is not None:
                pytest.fail(problem, pytrace=False)
            for key in list(sessions):
                sessions.pop(key).close()
            sessions[device, size] = self.start(setup, size)
        try:
            reason = self.skip.get(rule.name)
            result = try_on(sessions[device, size], setup, rule, reason)
        except LaunchError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        text = "\n".join(result.lines())
        if result.status == "failed":
            pytest.fail(text, pytrace=False)
        if result.status == "skipped":
            pytest.skip(result.text)
        print(text)

    def start(self, setup: Setup, size: int) -> Session:
        """Launch the ranks; a subclass may do it in a way of its own."""
        return LAUNCHERS[self.launcher](setup, size)
