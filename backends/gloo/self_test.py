"""The self-test of a gloo library, in a process of its own, and its stored result.

An unknown build may crash the process that calls it. So two processes that end
afterwards call every function of the library (`side/self_test.py`), before the side
process of any rank does. The result is stored under the hash of the library's file, of
the test and of the Python; one process of this user tests, and the others wait for the
result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .child import side_command

__all__ = ["SelfTest", "self_test"]

# A test takes some 0.2 s. On a machine so busy that it takes 2 s it gets a second
# chance; only a library that hangs takes them both.
_LIMITS = (2, 10)

_SIDE = Path(__file__).parent / "side"

_results: dict[tuple[str, int, int], SelfTest] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class SelfTest:
    """How the self-test of a library ended; `reason` says what failed."""

    passed: bool
    reason: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"passed in {self.seconds:.2g} s"
            if self.passed
            else (f"failed: {self.reason}")
        )


def self_test(name: str, path: str) -> SelfTest:
    """Return the result of testing the file `path` as library `name`; test if need be.

    A result is stored in ``$XDG_CACHE_HOME/rankscope/gloo`` (``~/.cache``); where that
    cannot be written every process tests for itself.
    """
    status = os.stat(path)
    key = (path, status.st_mtime_ns, status.st_size)
    with _lock:
        if key not in _results:
            _results[key] = _stored(name, path)
        return _results[key]


def _stored(name: str, path: str) -> SelfTest:
    file = _folder() / f"{_fingerprint(name, path)}.json"
    known = _read(file)
    if known is not None:
        return known
    with _exclusive(file.with_suffix(".lock")) as writable:
        known = _read(file)  # another process may have tested meanwhile
        if known is not None:
            return known
        result = _run(name, path)
        # A test that came to no end may have met a busy machine.
        if writable and result.seconds < sum(_LIMITS):
            _write(file, result)
        return result


def _folder() -> Path:
    # The specification has relative paths ignored.
    root = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(os.environ.get("HOME") or "/nonexistent")
    return Path(root if os.path.isabs(root) else home / ".cache") / "rankscope" / "gloo"


def _fingerprint(name: str, path: str) -> str:
    """Return a hash of all that the result depends on."""
    digest = hashlib.sha256(f"{name} {sys.version}".encode())
    for file in [Path(path), *sorted(_SIDE.glob("*.py"))]:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _read(file: Path) -> SelfTest | None:
    try:
        return SelfTest(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None  # not there, or not of this version


def _write(file: Path, result: SelfTest) -> None:
    # In one step: another process may read it at any time.
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_text(json.dumps(asdict(result)))
        part.replace(file)
    except OSError:
        return  # a full disk: the next process tests again


@contextlib.contextmanager
def _exclusive(file: Path) -> Iterator[bool]:
    """Hold the lock `file`; yields whether it could be made, else there is no lock."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = open(file, "w")  # noqa: SIM115 - closed below
    except OSError:
        yield False
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            yield False  # a file system without locks
            return
        yield True


def _run(name: str, path: str) -> SelfTest:
    for limit in _LIMITS:
        began = time.monotonic()
        process = subprocess.Popen(
            side_command("self_test", name, path, limit + 1),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            continue
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        return _judge(process.returncode, output.decode(errors="replace"), seconds)
    return SelfTest(False, f"no result within {_LIMITS[-1]} s", float(sum(_LIMITS)))


def _judge(code: int, output: str, seconds: float) -> SelfTest:
    if code == 0:
        return SelfTest(True, "", seconds)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = " | ".join(lines[-3:])
    return SelfTest(False, f"{said} ({how})" if said else how, seconds)
