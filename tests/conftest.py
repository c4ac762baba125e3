"""Fixtures of all rooms: a private IPython folder, and nothing left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator

import pytest
import zmq

from tests import leaks


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment that this run's processes inherit."""
    leaks.mark_this_process()
    # Clusters write profiles, logs and connection files: not into the user's.
    # A short path, since Jupyter puts Unix sockets there.
    folder = tempfile.TemporaryDirectory(
        prefix="rankscope-", ignore_cleanup_errors=True
    )
    config.add_cleanup(folder.cleanup)
    os.environ["IPYTHONDIR"] = os.path.join(folder.name, "ipython")
    os.environ["JUPYTER_RUNTIME_DIR"] = os.path.join(folder.name, "runtime")


_tearing_down = False
_reported = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Note that a failure now is counted as a test's."""
    global _tearing_down
    _tearing_down = True
    try:
        yield
    finally:
        _tearing_down = False


def _check(before: leaks.Snapshot, what: str) -> None:
    global _reported
    left = leaks.wait_until_clean(before)
    if not left:
        return
    _reported = True
    leaks.kill(before)
    # After Ctrl-C or --maxfail fixtures are torn down outside of any test; an
    # error would take the whole report with it there.
    if _tearing_down:
        pytest.fail(f"{what} left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing() -> Iterator[None]:
    # The process-wide ZeroMQ context lives until exit, so it comes first.
    zmq.Context.instance().socket(zmq.PAIR).close()
    before = leaks.Snapshot.take()
    yield
    # What a module has left is there still; once is enough.
    if not _reported:
        _check(before, "the test session")


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(
    request: pytest.FixtureRequest, _session_leaves_nothing: None
) -> Iterator[None]:
    before = leaks.Snapshot.take()
    yield
    _check(before, f"the tests of {request.node.name}")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, thread or descriptor behind.

    Use it with ``@pytest.mark.usefixtures("no_leaks")``; fixtures named after
    it are torn down before it looks. Every module is checked as a whole anyway.
    """
    before = leaks.Snapshot.take()
    yield
    _check(before, "the test")
