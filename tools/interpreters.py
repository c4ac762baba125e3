"""The Pythons of this machine that Rankscope can run on."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SUPPORTED", "find", "succeeds"]

#: Newest first.
SUPPORTED = ("3.14", "3.13", "3.12", "3.11", "3.10")


def find(version: str) -> str | None:
    """Return a Python of `version` (``"3.12"``) that can make environments, if any.

    One on PATH, one of pyenv, one of uv, or the one that this process runs on.
    """
    numbers = tuple(map(int, version.split(".")))
    # The free-threaded build has not been tested.
    check = (
        "import sys, sysconfig, ensurepip\n"
        f"assert sys.version_info[:2] == {numbers}\n"
        "assert not sysconfig.get_config_var('Py_GIL_DISABLED')"
    )
    # A pyenv shim is there for versions that are not active, too.
    return next((one for one in _candidates(version) if succeeds(one, check)), None)


def _candidates(version: str) -> Iterator[str]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for pattern in (version, f"{version}.*"):
        yield from sorted(glob.glob(f"{pyenv}/versions/{pattern}/bin/python"))
    uv = shutil.which("uv")
    if uv is not None:
        found = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", "--no-project", version],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode == 0:
            yield found.stdout.strip()
    yield getattr(sys, "_base_executable", sys.executable)


def succeeds(python: str | Path, script: str) -> bool:
    """Return whether `script` runs in `python` without an error."""
    if not os.path.exists(python):
        return False
    done = subprocess.run([python, "-c", script], capture_output=True, check=False)
    return done.returncode == 0
