"""How Rankscope starts its threads: named, and none keeps its process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["start_thread"]


def start_thread(
    name: str, target: Callable[..., object], *arguments: object
) -> threading.Thread:
    """Start ``target(*arguments)`` on a thread called ``rankscope-NAME``.

    It may run before the caller has the thread.
    """
    thread = threading.Thread(
        target=target, args=arguments, name=f"rankscope-{name}", daemon=True
    )
    thread.start()
    return thread
