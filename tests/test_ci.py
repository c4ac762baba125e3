"""What a CI run makes of failures: one flaky test does not lose it, a fault does."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent

#: Fails in its first run, and passes from then on.
FLAKY = """
from pathlib import Path

def test_flaky():
    ran = Path(__file__).with_name("ran")
    before = ran.exists()
    ran.touch()
    assert before
"""
BROKEN = "def test_broken():\n    assert False\n"
SOUND = "def test_sound():\n    pass\n"

#: The second test builds on the first.
STORY = """
import pytest
from pathlib import Path

pytestmark = pytest.mark.in_order
told = []

def test_first():
    told.append(1)

def test_second():
    assert told
    ran = Path(__file__).with_name("ran")
    before = ran.exists()
    ran.touch()
    assert before
"""
CONFTEST = f"""
import sys

def pytest_configure(config):
    sys.path.insert(0, {str(ROOT)!r})
    from tests.in_order import InOrder
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(InOrder(config))
"""

#: Stands in for make: notes its targets, and ends as the test says.
MAKE = """#!/bin/sh
for one; do
    case "$one" in -* | *=*) continue ;; esac
    echo "$one" >>made
    case " $FAILS " in *" $one "*) failed=2 ;; esac
done
exit ${failed:-0}
"""


def _options(*target: str) -> list[str]:
    """Return the options that a target of the Makefile gives pytest."""
    done = subprocess.run(
        ["make", "--dry-run", *target],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (one for one in done.stdout.splitlines() if " -m pytest " in one)
    return shlex.split(line.partition(" -m pytest ")[2])


def _run(target: str, folder: Path) -> tuple[int, str]:
    """Run pytest in `folder` as `target` does; return its status and its output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = [*_options(target), "--rootdir", str(folder)]
    if "--dist" in options:
        # For two or three tests one worker does; each takes half a second to start.
        options += ["-n", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of tests of its own, one of which is sound."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n  in_order\n")
    (tmp_path / "test_sound.py").write_text(SOUND)
    return tmp_path


def test_make_test_leaves_the_tests_of_torch_out() -> None:
    # The collection of the rooms takes long.
    rooms = ("backends", "engines", "magics", "widgets", "notebooks")
    others = [f"--ignore=tests/{room}" for room in rooms]
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *others],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "tests/test_ci.py::" in collected
    assert "tests/with_torch/" not in collected


def test_make_test_cluster_runs_all_tests_on_several_hosts() -> None:
    """But those of torch, which have an environment of their own."""
    named = {one for one in _options("test-cluster") if one.startswith("tests/")}
    tests = [*ROOT.glob("tests/engines/**/*.py"), *ROOT.glob("tests/notebooks/*.py")]
    found = {
        str(one.relative_to(ROOT))
        for one in tests
        if "hosts.steps_of(" in one.read_text()
    }
    assert named == found


def test_make_test_runs_the_long_tests_too_where_it_is_told() -> None:
    assert "not soak" in _options("test")
    assert not {"not soak", "soak", "-m"} & {*_options("test", "SOAK=1")}


def test_what_passes_the_second_time_is_named_and_green(folder: Path) -> None:
    (folder / "test_flaky.py").write_text(FLAKY)
    assert _run("test", folder)[0] == 1
    status, said = _run("retest", folder)
    assert status == 0, said
    assert re.search(r"^test_flaky.py::test_flaky PASSED", said, re.MULTILINE)
    assert "test_sound" not in said
    # No failure is recorded any more, and what failed is not known: red.
    assert _run("retest", folder)[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_test_that_builds_on_others_is_run_with_them(folder: Path) -> None:
    (folder / "test_story.py").write_text(STORY)
    (folder / "conftest.py").write_text(CONFTEST)
    assert _run("test", folder)[0] == 1
    status, said = _run("retest", folder)
    assert status == 0, said
    assert "test_first PASSED" in said
    assert "test_second PASSED" in said
    assert "test_sound" not in said
    assert _run("retest", folder)[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_what_fails_twice_is_red(folder: Path) -> None:
    (folder / "test_flaky.py").write_text(FLAKY)
    (folder / "test_broken.py").write_text(BROKEN)
    assert _run("test", folder)[0] == 1
    status, said = _run("retest", folder)
    assert status == 1, said
    assert "FAILED test_broken.py::test_broken" in said


FIRST = "lint docs collect torch-environment"


@pytest.mark.parametrize(
    ("fails", "made", "green"),
    [
        ("", f"{FIRST} test test-torch test-pythons", True),
        ("lint", FIRST, False),
        ("docs", FIRST, False),
        ("test", f"{FIRST} test retest test-torch test-pythons", True),
        ("test-torch", f"{FIRST} test test-torch retest-torch test-pythons", True),
        ("test retest", f"{FIRST} test retest", False),
        ("test-torch retest-torch", f"{FIRST} test test-torch retest-torch", False),
        ("test-pythons", f"{FIRST} test test-torch test-pythons", False),
    ],
)
def test_the_targets_of_a_ci_run(
    tmp_path: Path, fails: str, made: str, green: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "bin").mkdir()
    for name in ("make", "chromium"):
        (tmp_path / "bin" / name).write_text(MAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "FAILS": fails,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == green, done.stderr
    assert (tmp_path / "made").read_text().split() == made.split()
