"""Settings of UCX for the contexts that UCC makes: it reads the environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["in_environment"]

# Before UCX's names: of these variables UCC takes notice, and no other context of UCX.
_PREFIX = "UCC_UCX_"


@contextlib.contextmanager
def in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have the contexts that UCC makes meanwhile use `settings`, without ``UCX_``.

    What the user has set for UCC alone holds.
    """
    added = {f"{_PREFIX}{name}": value for name, value in settings.items()}
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
