"""``make test-pythons``: install the wheel for every other Python found, and try it.

The wheel is built once and installed, with what it needs, into an empty environment of
each Python. There the demo runs, and the tests of tcp, deaths, aborts and the magics,
in a folder that has no source of the package. Tests that fail run once more,
alone, as in ``make retest``; all of them do where a run ended without saying which.
Two Pythons are tried at a time: an installation and the demo leave one core idle.
The oldest is among the first two: it has the most tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tools.interpreters import SUPPORTED, find

__all__ = ["TESTS", "main"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "test-pythons"
#: What the wheel is made of.
SOURCES = ("rankscope", "magics", "widgets", "engines", "backends")
#: What the tests and the demo read.
NEEDED = ("tests", "tools", "notebooks", "pyproject.toml", "README.md")
#: What the tests and the demo import besides the wheel.
PACKAGES = (
    *("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7", "hypothesis>=6"),
    *("nbclient>=0.10", "nbconvert>=7", "matplotlib>=3.8", "scipy>=1.13"),
    "ml_dtypes>=0.5",
)
TESTS = (
    *("tests/backends/tcp", "tests/backends/groups/test_deaths.py"),
    *("tests/backends/groups/test_aborts.py", "tests/magics"),
)
#: Of them those for the oldest Python alone, which take as long as the rest: it has an
#: IPython and an ipykernel of its own, the others have those of `make test`.
_OF_KERNELS = ("kernel", "reattach", "the_end")
OLDEST = tuple(f"tests/magics/test_{name}.py" for name in _OF_KERNELS)
#: Seconds for one command on one Python.
LIMIT = 600
#: Seconds that each process of a command gets to write its stacks.
STACKS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the versions that `arguments` name, by default all but this one."""
    here = "{}.{}".format(*sys.version_info)
    parser = argparse.ArgumentParser(prog="python -m tools.other_pythons")
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="3.X",
        default=[one for one in SUPPORTED if one != here],
        help="the Pythons to try (default: all that are supported, but this one)",
    )
    chosen = parser.parse_args(arguments).versions
    found = {version: find(version) for version in chosen}
    for version in [one for one, python in found.items() if python is None]:
        print(f"Python {version}: not found on PATH, with pyenv or with uv: not tested")
    there = {version: python for version, python in found.items() if python}
    if not there:
        return 0
    oldest, *others = sorted(there, key=lambda version: int(version.split(".")[1]))
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    wheel = _build()
    _copy(NEEDED, FOLDER / "tree")
    with ThreadPoolExecutor(2) as two:
        runs = [
            two.submit(_try, one, there[one], wheel, one == oldest)
            for one in (oldest, *others)
        ]
    return 0 if all([run.result() for run in runs]) else 1


def _copy(names: Sequence[str], target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "build")
    target.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, target)


def _build() -> Path:
    """Build the wheel from a copy: setuptools leaves its traces where it builds."""
    source = FOLDER / "source"
    _copy((*SOURCES, "pyproject.toml", "README.md", "LICENSE"), source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(FOLDER), str(source)]
    subprocess.run([*command, *options], check=True)
    (wheel,) = FOLDER.glob("rankscope-*.whl")
    return wheel


def _try(version: str, python: str, wheel: Path, is_oldest: bool) -> bool:
    """Install the wheel for one Python and run demo and tests; return whether all pass.

    The output goes to a file, and its last lines to the terminal if a step fails.
    """
    environment = FOLDER / version
    own = environment / "bin" / "python"
    uv = [sys.executable, "-m", "uv", "--quiet"]
    cache = f"cache_dir={environment}/.pytest_cache"
    left_out = () if is_oldest else [f"--ignore={file}" for file in OLDEST]
    pytest = (own, "-m", "pytest", "-o", cache, "-m", "not soak", *TESTS, *left_out)
    steps: dict[str, Sequence[str | Path]] = {
        "install": [
            *(sys.executable, "-m", "tools.install", "--python", own),
            *(wheel, *PACKAGES),
        ],
        "doctor": [own, "-m", "rankscope", "doctor"],
        "demo": [own, "-m", "tools.demo"],
        "tests": [
            *(*pytest, "-q", "-n", "2", "--dist", "loadfile"),
            "--no-loadscope-reorder",
        ],
    }
    retest = (*pytest, "--last-failed", "-n", "0", "-v")
    subprocess.run([*uv, "venv", "--python", python, environment], check=True)
    print(f"Python {version} ({python}):", flush=True)
    for name, command in steps.items():
        passed = _step(version, name, command)
        if name == "tests" and not passed:
            passed = _step(version, "retest", retest)
        if not passed:
            return False
    return True


def _step(version: str, name: str, command: Sequence[str | Path]) -> bool:
    """Run one command and say how it ended, with its last lines if it failed."""
    began = time.monotonic()
    log = FOLDER / f"{version}-{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=FOLDER / "tree",
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ended: int | str
        try:
            ended = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            ended = f"ended after {LIMIT} s"
        finally:
            if process.poll() is None:
                _end(process)
    seconds = time.monotonic() - began
    last = log.read_text(errors="replace").splitlines()
    said = last[-1] if "test" in name and last else ""
    how = "ok" if ended == 0 else ended
    lines = [f"  {version} {name:8} {how}, {seconds:.0f} s  {said}"]
    if ended != 0:
        lines += [f"    {line}" for line in last[-60:]]
        lines.append(f"  the rest: {log.relative_to(ROOT)}")
    # At once: another Python's may come between.
    print("\n".join(lines) + "\n", end="", flush=True)
    return ended == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its workers; pytest writes the stacks of each to the log.

    One after the other, as their lines would be mixed.
    """
    leader = psutil.Process(process.pid)
    for one in [leader, *leader.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            one.send_signal(signal.SIGABRT)
            one.wait(STACKS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
