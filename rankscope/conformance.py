"""The conformance suite for authors of backends.

``python -m rankscope.conformance mine -n 2`` tries the backend called ``mine``;
`BackendConformance` makes tests for pytest of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rankscope.backends.conformance.command_line import main
from rankscope.backends.conformance.processes import MPI, Processes
from rankscope.backends.conformance.report import Printer, Report, Result
from rankscope.backends.conformance.session import Setup
from rankscope.backends.conformance.suite import check_backend
from rankscope.backends.conformance.threads import Threads
from rankscope.backends.conformance.trial import Arrays, HostArrays, Options

if TYPE_CHECKING:
    from rankscope.backends.conformance.pytest_mixin import BackendConformance

__all__ = [
    "MPI",
    "Arrays",
    "BackendConformance",
    "HostArrays",
    "Options",
    "Printer",
    "Processes",
    "Report",
    "Result",
    "Setup",
    "Threads",
    "check_backend",
]


def __getattr__(name: str) -> Any:
    # The command line needs no pytest.
    if name == "BackendConformance":
        from rankscope.backends.conformance.pytest_mixin import BackendConformance

        return BackendConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    sys.exit(main())
