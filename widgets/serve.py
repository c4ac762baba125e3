"""Serving clicks while a cell blocks the kernel's main thread.

A front end that opens subshells (JupyterLab 4.4 and Notebook 7.4 on, with
ipykernel 7) has the messages of widgets handled on a thread of their own. With
ipykernel 6, or in a front end without subshells, they wait in the queue of the
main thread, behind the cell that blocks it. Whoever waits there can have them
handled in between. All names of ipykernel that this takes are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import zmq

__all__ = ["serve_messages"]


def serve_messages(kernel: Any, comm_ids: Container[str]) -> int:
    """Handle what came in for the comms `comm_ids`; return how many messages.

    To be called on the main thread, by the cell that runs there. Everything
    else that came in is handled after the cell, in the order it came.
    """
    served = 0
    stream, postpone = _inbox(kernel)
    socket = stream.socket
    try:
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            parts = socket.recv_multipart(copy=False)
            message = _for_comms(kernel.session, parts, comm_ids)
            if message is None:
                postpone(parts)
                continue
            # By the handler alone: the dispatcher would make this message the
            # parent of what the cell prints from now on.
            kernel.shell_handlers["comm_msg"](stream, [], message)
            served += 1
    except BaseException:
        # The socket tells of new messages only, and one may be there already.
        kernel.io_loop.add_callback(stream.flush, zmq.POLLIN)
        raise
    return served


def _inbox(kernel: Any) -> tuple[Any, Callable[[Any], None]]:
    """Where the main thread's messages come in, and how to have one wait."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is not None:
        pair = thread.manager.get_shell_channel_to_subshell_pair(None)
        return pair.to_stream, lambda parts: _later(kernel, parts)
    if hasattr(kernel, "shell_main"):
        return kernel.shell_stream, lambda parts: _later(kernel, parts)
    # ipykernel 6.
    return kernel.shell_stream, lambda parts: kernel.schedule_dispatch(
        kernel.dispatch_shell, parts
    )


def _later(kernel: Any, parts: Any) -> None:
    kernel.io_loop.add_callback(kernel.shell_main, None, parts)


def _for_comms(
    session: Any, parts: list[Any], comm_ids: Container[str]
) -> dict[str, Any] | None:
    """The message, if it is one for these comms; it is only looked into if not."""
    try:
        _, rest = session.feed_identities(parts, copy=False)
        # What was unpacked once is taken for a replay when it comes again.
        peeked = session.deserialize(rest, content=False, copy=False)
        if peeked["header"]["msg_type"] != "comm_msg":
            return None
        if session.unpack(peeked["content"])["comm_id"] not in comm_ids:
            return None
        return session.deserialize(rest, content=True, copy=False)
    except (KeyError, TypeError, ValueError):
        # Not signed, or not a message: the kernel's own to refuse.
        return None
