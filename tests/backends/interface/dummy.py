"""Builds notebooks/dummy_backend, once for each state of its sources."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

__all__ = ["build"]

_ROOT = Path(__file__).resolve().parents[3]
_SOURCE = _ROOT / "notebooks" / "dummy_backend"
_CACHE = _ROOT / "build" / "dummy_backend"


def build() -> Path:
    """Return a folder in which the package is installed, compiled if need be."""
    # Not what an earlier `pip install` of it left there: folders, all of it.
    files = sorted(path for path in _SOURCE.iterdir() if path.is_file())
    state = hashlib.sha256()
    for part in (
        sysconfig.get_config_var("EXT_SUFFIX"),
        metadata.version("pybind11"),
        *(file.read_text(encoding="utf-8") for file in files),
    ):
        state.update(part.encode() + b"\0")
    site = _CACHE / state.hexdigest()[:16]
    if not site.exists():
        _install(files, site)
    return site


def _install(files: list[Path], site: Path) -> None:
    _CACHE.mkdir(parents=True, exist_ok=True)
    # A copy, since setuptools leaves its traces beside what it builds; and a
    # name of its own, since two test runs may build at the same time.
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        source, target = Path(folder, "source"), Path(folder, "site")
        source.mkdir()
        for file in files:
            shutil.copy(file, source)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index"),
                *("--no-deps", "--no-build-isolation", "--disable-pip-version-check"),
                *("--target", target, source),
            ],
            check=True,
        )
        try:
            target.rename(site)
        except OSError:
            if not site.exists():
                raise
