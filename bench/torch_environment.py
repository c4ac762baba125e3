"""An environment with PyTorch, apart from ours: its Python need not be ours.

Rankscope is there too, for those who hand it tensors.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["TORCH", "torch_python"]

TORCH = "2.13.0"
FOLDER = Path(__file__).resolve().parent.parent / ".venv-torch"
VERSIONS = ("3.11", "3.12", "3.13", "3.10")
#: What ``import rankscope``, its stores and the tests of them need.
NEEDED = ("numpy>=2.1", "psutil>=5.9", "pyzmq>=26", "pytest>=8")

_TORCH_CHECK = (
    "import torch, torch.distributed as d;"
    f"assert torch.__version__.startswith('{TORCH}') and d.is_gloo_available()"
)


def torch_python(
    say: Callable[[str], None], left_out: Callable[[str], None]
) -> str | None:
    """Return the Python of ``.venv-torch``, made if need be; ``None`` if it cannot be.

    `left_out` is told why it cannot. PyTorch is a large download, so the
    environment of ``make test`` does without it.
    """
    python = FOLDER / "bin" / "python"
    commands: list[list[str | Path]] = []
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    if not _succeeds(python, _TORCH_CHECK):
        base = next(_pythons(), None)
        if base is None:
            left_out(f"torch.distributed: no Python of {', '.join(VERSIONS)} found")
            return None
        say(f"  making {FOLDER.name} with PyTorch {TORCH} (once; a large download)")
        shutil.rmtree(FOLDER, ignore_errors=True)
        commands.append([base, "-m", "venv", FOLDER])
        commands.append([*install, f"torch=={TORCH}"])
    if commands or not _succeeds(python, "import rankscope, pytest"):
        # What is not needed there would take as long as PyTorch.
        commands.append([*install, *NEEDED])
        commands.append([*install, "--no-deps", "--editable", FOLDER.parent])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            left_out(f"torch.distributed: {' '.join(map(str, command))}: {last}")
            return None
    if not _succeeds(python, _TORCH_CHECK):
        left_out(f"torch.distributed: PyTorch {TORCH} does not load in {FOLDER.name}")
        return None
    return str(python)


def _pythons() -> Iterator[str]:
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    for version in VERSIONS:
        check = (
            "import sys, ensurepip;"
            f"assert sys.version_info[:2] == {tuple(map(int, version.split('.')))}"
        )
        for python in (
            shutil.which(f"python{version}"),
            *sorted(glob.glob(f"{pyenv}/versions/{version}*/bin/python")),
            getattr(sys, "_base_executable", None),
        ):
            # A pyenv shim is there for versions that are not active, too.
            if python and _succeeds(python, check):
                yield python


def _succeeds(python: str | Path, script: str) -> bool:
    if not os.path.exists(python):
        return False
    done = subprocess.run([python, "-c", script], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    if torch_python(print, print) is None:
        sys.exit(1)
