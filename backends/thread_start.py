"""How Rankscope starts its threads: named, and none keeps its process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["run_bounded", "start_or_run", "start_thread"]


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


def start_or_run(name: str, task: Callable[[], object]) -> threading.Thread | None:
    """Start a thread for `task` and return it.

    Where Python starts none any more (3.12 and later, at its end), `task` is run on
    the calling thread, and ``None`` is returned.
    """
    try:
        return start_thread(name, task)
    except RuntimeError:
        task()
        return None


def run_bounded(name: str, task: Callable[[], object], seconds: float) -> bool:
    """Run `task` on a thread; return whether it ended within `seconds`."""
    thread = start_or_run(name, task)
    if thread is None:
        return True
    thread.join(seconds)
    return not thread.is_alive()
