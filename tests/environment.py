"""The environment of a Python that a test starts: the one in which the tests run."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["environment"]

_ROOT = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    """Return that of this process with `variables`; it imports `tests` anywhere."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
