"""Settings of UCX for the contexts that UCC makes: it reads the environment."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

__all__ = ["in_environment"]

# Before UCX's names: of these variables UCC takes notice, and no other context of UCX.
_PREFIX = "UCC_UCX_"

# Held while a context reads the variables: those of another group must not be there.
_reading = threading.Lock()


@contextlib.contextmanager
def in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Have the context that UCC makes meanwhile use `settings`, without ``UCX_``.

    What the user has set for UCC alone holds. Threads that make contexts take turns:
    nothing in the block may wait for another rank.
    """
    named = {f"{_PREFIX}{name}": value for name, value in settings.items()}
    with _reading:
        added = {name: named[name] for name in named if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
