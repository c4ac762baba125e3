"""Fixtures of all tests: a private IPython folder, and leak checks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from tests import leaks
from tests.backends.forked_ranks import forked_ranks
from tests.in_order import InOrder
from tests.processes import Watch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Before nbformat is imported: each worker would spend a second on what it goes without.
import_module("tools")

#: They run in an environment of their own: ``make test-torch``.
collect_ignore = [] if find_spec("torch") else ["with_torch"]

_TESTS = Path(__file__).parent
_WATCH = pytest.StashKey[Watch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that ``make check`` gives."""
    parser.addoption(
        "--no-processes",
        action="store_true",
        help="run the tests that start no process, and fail one that does",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment that this run's processes inherit."""
    leaks.mark_this_process()
    # A shell without job control starts what runs in the background with SIGINT
    # ignored, and processes inherit that: no interrupt would reach any rank.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Clusters write profiles, logs and connection files: not into the user's.
    # A short path, since Jupyter puts Unix sockets there.
    folder = tempfile.TemporaryDirectory(
        prefix="rankscope-", ignore_cleanup_errors=True
    )
    config.add_cleanup(folder.cleanup)
    os.environ["IPYTHONDIR"] = os.path.join(folder.name, "ipython")
    os.environ["JUPYTER_RUNTIME_DIR"] = os.path.join(folder.name, "runtime")
    # Scripts that hang on purpose write no reports, but in the tests of those.
    os.environ["RANKSCOPE_REPORT"] = "0"
    if config.getoption("--no-processes"):
        config.stash[_WATCH] = Watch()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(InOrder(config), "in-order")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m soak``, import no file that does not name the marker.

    Each worker would import 250 files for the tests of 30.
    """
    if config.option.markexpr != "soak" or not collection_path.match("test_*.py"):
        return None
    return True if b"soak" not in collection_path.read_bytes() else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what starts processes, where none may start.

    The files that may take longest come first, so that the workers end together: those
    with a test that may, then those with many.
    """
    if hasattr(config, "workerinput"):
        patience: dict[Path, tuple[float, float]] = {}
        for item in items:
            own = _patience(item)
            longest, all_of_it = patience.get(item.path, (0.0, 0.0))
            patience[item.path] = (max(own, longest), all_of_it + own)
        items.sort(key=lambda item: patience[item.path], reverse=True)
    if _WATCH in config.stash:
        left = [item for item in items if item.get_closest_marker("processes")]
        items[:] = [i for i in items if not i.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=left)


def _patience(item: pytest.Item) -> float:
    """Seconds that a test may take; without a process it takes next to none."""
    if (limit := item.get_closest_marker("timeout")) is not None and limit.args:
        return float(limit.args[0])
    return 180.0 if item.get_closest_marker("processes") is not None else 0.0


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what the imports and the collection made out of each garbage collection.

    It lives as long as the run does, and the leak checks collect often. The
    processes that fork others are none of a test, so they start here.
    """
    gc.collect()
    gc.freeze()
    if session.config.option.collectonly:
        return
    folders = {
        item.path.relative_to(_TESTS).parts[0]
        for item in session.items
        if item.get_closest_marker("processes") or "with_torch" in item.path.parts
    }
    forks = ExitStack()
    session.config.add_cleanup(forks.close)
    if "backends" in folders:
        forks.enter_context(forked_ranks())
    if folders & {"engines", "magics", "widgets", "with_torch"}:
        from tests.forked_programs import forked_programs

        torch = "with_torch" in folders
        own = [import_module("tests.with_torch.ranks")] if torch else []
        forks.enter_context(forked_programs(*own))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With ``--no-processes``, refuse new processes while a test runs."""
    with item.config.stash.get(_WATCH, nullcontext()):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a phase of a test in which a process was to start."""
    report = yield
    watch = item.config.stash.get(_WATCH, None)
    if watch is not None and (refused := watch.refused()):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} starts a process ({'; '.join(refused)}), which no test of "
            "make check may: mark it with @pytest.mark.processes"
        )
    return report


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
    before = leaks.take()
    yield
    # Leaks of a module persist: one report is enough.
    if not _reported:
        _check(before, "the test session")


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(
    request: pytest.FixtureRequest, _session_leaves_nothing: None
) -> Iterator[None]:
    before = leaks.take()
    yield
    _check(before, f"the tests of {request.node.name}")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, thread or descriptor behind.

    Use it with ``@pytest.mark.usefixtures("no_leaks")``; fixtures named after
    it are torn down before it looks. Every module is checked as a whole anyway.
    """
    before = leaks.take()
    yield
    _check(before, "the test")


@pytest.fixture(scope="module")
def browser(_module_leaves_nothing: None) -> Iterator[Browser]:
    """The system's Chromium, for the tests of a module."""
    pytest.importorskip("playwright", reason="needs playwright: pip install .[dev]")
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from tests.widgets.bare_page import chromium

    with chromium() as found:
        yield found
