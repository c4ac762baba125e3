"""Python stacks of a running process, by py-spy.

py-spy reads the memory of the process and executes nothing in it. It is run with
``--nonblocking``: by default it stops all threads meanwhile, and a process was left
stopped where that went wrong. Without it the stack of a process that runs may be torn:
who calls takes two, and believes neither where they differ.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ..install import pip_install, with_extra

__all__ = ["PySpyError", "dump", "find_py_spy"]

#: Seconds that py-spy gets; it takes a twentieth of one.
TIMEOUT = 20.0
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class PySpyError(RuntimeError):
    """A stack could not be read; the text says why, and what to do."""


def find_py_spy() -> str:
    """Return the path of the program; raises `PySpyError` where it is missing."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise PySpyError(
            "py-spy, which reads the stacks of processes, is missing: "
            f"{pip_install(with_extra('attach'))}"
        )
    return found


def dump(py_spy: str, pid: int, *, variables: bool = False) -> bytes:
    """Return the stacks of all threads of a process, as the JSON of py-spy.

    With `variables` they have the local variables. Raises `PySpyError`: the process has
    ended, is no Python, may not be read, …
    """
    command = [py_spy, "dump", "--json", "--nonblocking", "--full-filenames"]
    command += ["--locals"] if variables else []
    try:
        done = subprocess.run(
            [*command, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=TIMEOUT,
            # Else it appends its own stack to its errors.
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        raise PySpyError(f"py-spy has not read it within {TIMEOUT:g} s") from None
    except OSError as error:
        raise PySpyError(f"{py_spy} cannot be run: {error}") from error
    if done.returncode != 0:
        error_text = done.stderr.decode("utf-8", errors="replace")
        raise PySpyError(_reason(pid, error_text))
    return done.stdout


def _reason(pid: int, error: str) -> str:
    """Return why py-spy failed, from what it said and from the system's settings."""
    folder = Path(f"/proc/{pid}")
    if folder.parent.is_dir() and not folder.exists():
        return "the process has ended"
    lowered = error.lower()
    if "permission denied" in lowered or "not permitted" in lowered:
        return refusal(pid)
    if "find python version" in lowered:
        return "py-spy finds no Python in it, or one that it does not know"
    lines = [one.strip() for one in error.splitlines() if one.strip()]
    said = lines[0].removeprefix("Error: ") if lines else "it said nothing"
    return f"py-spy cannot read it: {said[:300]}"


def refusal(pid: int) -> str:
    """Return why this process may not read the memory of another, and what to set."""
    if os.geteuid() == 0:
        return (
            "the system does not let root read it: a container needs the capability "
            "SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
        )
    try:
        if _owner(pid) != os.geteuid():
            return "the process is another user's: run as that user or as root"
    except OSError:
        return "the process has ended"
    try:
        scope = int(_SCOPE.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope >= 3:
        return (
            "kernel.yama.ptrace_scope is 3: nobody may read another process until the "
            "system is started anew with another value"
        )
    if scope == 2:
        return "kernel.yama.ptrace_scope is 2: run as root"
    if scope == 1:
        return (
            "kernel.yama.ptrace_scope is 1: run as root, or allow it until the next "
            "boot by sudo sysctl kernel.yama.ptrace_scope=0"
        )
    return (
        "the system does not let this user read it: run as root; a container needs the "
        "capability SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
    )


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid
