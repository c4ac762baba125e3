"""Mending ipykernel 7.0 to 7.3, which can leave a request unread for ever.

They answer with raw sends on the socket whose requests a ZMQStream reads. Such
a send can take the notice that a request came in, and the stream never looks:
the kernel is idle, and every cell from then on waits without end. Fast runs of
small cells meet it within some hundred requests. ipykernel 7.4, which needs
Python 3.11, sends answers through the stream (ipykernel's pull request 1529).
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

__all__ = ["load_ipython_extension", "mend_replies"]


def mend_replies(kernel: Any) -> bool:
    """Have `kernel` send its answers through the stream; say if it had to be done.

    Call it on the main thread; other kernels than ipykernel 7.0 to 7.3 are left
    as they are.
    """
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None or not _loses_requests():
        return False
    manager, send = thread.manager, kernel.shell_stream.send_multipart
    if manager.__dict__.get("_send_on_shell_channel") is not None:
        return False

    def mend() -> None:
        # For the subshells that are still to come, then for those that are.
        manager._send_on_shell_channel = send
        pairs = [manager._main_to_shell_channel]
        pairs += [one.subshell_to_shell_channel for one in manager._cache.values()]
        for pair in pairs:
            pair.on_recv(thread.io_loop, send)

    # On the thread that these streams, and the list of subshells, belong to.
    thread.io_loop.add_callback(mend)
    return True


def load_ipython_extension(shell: Any) -> None:
    """For kernels that load this at their start: see ``tools/kernelspec.py``."""
    mend_replies(shell.kernel)


def _loses_requests() -> bool:
    major, minor = importlib.metadata.version("ipykernel").split(".")[:2]
    return (int(major), int(minor)) < (7, 4)
