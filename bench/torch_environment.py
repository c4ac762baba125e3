"""An environment with PyTorch, apart from ours: its Python need not be ours."""

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


def torch_python(
    say: Callable[[str], None], left_out: Callable[[str], None]
) -> str | None:
    """Return the Python of ``.venv-torch``, made if need be; ``None`` if it cannot be.

    `left_out` is told why it cannot. PyTorch is a large download, so the
    environment of ``make test`` does without it.
    """
    python = FOLDER / "bin" / "python"
    if _has_torch(python):
        return str(python)
    base = next(_pythons(), None)
    if base is None:
        left_out(f"torch.distributed: no Python of {', '.join(VERSIONS)} found")
        return None
    say(f"  making {FOLDER.name} with PyTorch {TORCH} (once; a large download)")
    shutil.rmtree(FOLDER, ignore_errors=True)
    commands: tuple[list[str | Path], ...] = (
        [base, "-m", "venv", FOLDER],
        [python, "-m", "pip", "install", "--quiet", f"torch=={TORCH}"],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            left_out(f"torch.distributed: {' '.join(map(str, command))}: {last}")
            return None
    if not _has_torch(python):
        left_out(f"torch.distributed: PyTorch {TORCH} does not load in {FOLDER.name}")
        return None
    return str(python)


def _has_torch(python: Path) -> bool:
    check = (
        "import torch, torch.distributed as d;"
        f"assert torch.__version__.startswith('{TORCH}') and d.is_gloo_available()"
    )
    return python.exists() and _succeeds(python, check)


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
    done = subprocess.run([python, "-c", script], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    if torch_python(print, print) is None:
        sys.exit(1)
