"""A library of UCC for tests: the one that is named, or the one beside the project.

A build of UCC for tests may lie beside the project, in ``shared/ucc``. Its symbolic
links are short text files there, so that it is copied, and the links are made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rankscope.backends.ucc import library
from rankscope.backends.ucx import library as ucx

#: The folder of a build for tests: ``lib`` and ``include``.
BUILD = Path(__file__).resolve().parents[2].parent / "shared" / "ucc"

# Bytes of the longest text that stands for a link.
_LINK = 64


def _copy(target: Path) -> Path:
    for file in sorted((BUILD / "lib").rglob("*.so*")):
        copy = target / file.relative_to(BUILD / "lib")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink() or file.stat().st_size > _LINK:
            shutil.copyfile(file, copy)
        else:
            copy.symlink_to(file.read_text().strip())
    return target


@contextlib.contextmanager
def use_library(folder: Path) -> Iterator[Path | None]:
    """Have `library` find UCC, if there is one; return its file. `folder` is for it."""
    before = os.environ.get(library.VARIABLE)
    if before is None and (BUILD / "lib").is_dir():
        os.environ[library.VARIABLE] = str(_copy(folder))
    try:
        yield library.find() if ucx.unavailable_reason() is None else None
    finally:
        if before is None:
            os.environ.pop(library.VARIABLE, None)
