"""The tests that start processes are found, and one that was missed fails."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.backends.conformance import waiting
from rankscope.backends.conformance.ranks import run_ranks
from rankscope.conformance import Processes, Setup, check_backend
from rankscope.engines import Cluster
from tests import processes
from tests.processes import reaches_a_starter

ROOT = Path(__file__).resolve().parent.parent


def direct() -> None:
    subprocess.run(["true"], check=True)


def through_a_function() -> None:
    direct()


def in_an_inner_function() -> Callable[[], None]:
    return lambda: through_a_function()


def through_another_module() -> None:
    run_ranks(1, direct)


def with_an_import_inside() -> None:
    from rankscope.backends.conformance.ranks import Ranks

    with Ranks(1, direct):
        pass


def with_a_cluster() -> None:
    Cluster.start(1)


def with_ranks_of_the_conformance_suite() -> None:
    check_backend(Setup("mine"), session=Processes)


class Starter:
    def __init__(self) -> None:
        direct()


def through_a_class() -> None:
    Starter()


@functools.cache
def decorated() -> None:
    direct()


@pytest.mark.parametrize(
    "function",
    [
        direct,
        through_a_function,
        in_an_inner_function,
        through_another_module,
        with_an_import_inside,
        with_a_cluster,
        with_ranks_of_the_conformance_suite,
        through_a_class,
        decorated,
        functools.partial(direct),
    ],
)
def test_what_starts_a_process_is_found(function: object) -> None:
    assert reaches_a_starter(function)


def only_annotated(cluster: Cluster) -> None:
    waiting.until(lambda: cluster)


def test_what_starts_none_is_not() -> None:
    assert not reaches_a_starter(only_annotated, os.path.join, "a parameter", None)


MISSED = """
import multiprocessing, os, subprocess
import pytest

def test_swallows_the_refusal():
    try:
        getattr(subprocess, "run")(["true"])
    except PermissionError:
        pass

def test_forks():
    if os.fork() == 0:
        os._exit(0)

def test_says_so():
    subprocess.run(["true"], check=True)

@pytest.mark.processes
def test_is_marked():
    assert False, "is not run"

def test_starts_none():
    pass
"""


def test_a_test_that_was_missed_fails_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "test_missed.py").write_text(MISSED, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--no-processes", "-p", "tests.conftest"),
            *("-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"),
            *("--rootdir", tmp_path, tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed, 1 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
    for name, event in (
        ("test_swallows_the_refusal", "subprocess.Popen"),
        ("test_forks", "os.fork"),
    ):
        assert f"{name} starts a process ({event}" in done.stdout
    assert "mark it with @pytest.mark.processes" in done.stdout


def test_a_package_that_is_not_installed_does_not_end_the_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "playwright", None)
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    monkeypatch.delitem(sys.modules, "tests.widgets.bare_page", raising=False)
    assert processes._module("tests.widgets.bare_page") is None
