"""Every work-around for ipykernel, and every private name of it that one needs.

Each work-around looks its names up before it changes anything. Where a version of
ipykernel lacks one, the work-around does nothing and logs that once, at level
``DEBUG``: the kernel then behaves as it does without Rankscope.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import threading
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
import zmq.eventloop.zmqstream

__all__ = [
    "allow_top_level_await",
    "is_affected",
    "keep_output_in_its_cell",
    "load_ipython_extension",
    "say_in_cell",
    "send_replies_through_stream",
    "serve_messages",
    "serve_requests",
    "show_output_of_children",
]

_log = logging.getLogger(__name__)
_skipped: set[str] = set()

#: The comms by which a page that opens asks for the state of all widgets.
_CONTROL = "jupyter.widget.control"


def _skip(workaround: str, error: AttributeError) -> None:
    """Log, once per work-around, that ipykernel lacks a name it needs."""
    if workaround not in _skipped:
        _skipped.add(workaround)
        version = importlib.metadata.version("ipykernel")
        _log.debug("no %s: ipykernel %s: %s", workaround, version, error)


# -- requests that are never read --------------------------------------------


def send_replies_through_stream(kernel: Any) -> bool:
    """Have ipykernel 7.0 to 7.3 send its replies through the stream of its socket.

    These versions send replies on the raw socket whose requests a ZMQStream reads.
    Such a send can consume the notification of a request that has arrived, and the
    stream does not read it: the kernel is idle, and every later cell waits for ever.
    Fast runs of small cells cause this within some hundred requests. ipykernel 7.4,
    which needs Python 3.11, sends replies through the stream (ipykernel's pull
    request 1529).

    To be called on the main thread of the notebook's kernel. Returns whether the kernel
    was changed: other versions are not, nor is one that was changed before, or that
    lacks a name used here.
    """
    if getattr(kernel, "shell_channel_thread", None) is None or not is_affected():
        return False
    try:
        thread = kernel.shell_channel_thread
        manager, loop = thread.manager, thread.io_loop
        send = kernel.shell_stream.send_multipart
        on_recv = manager._main_to_shell_channel.on_recv
        subshells = manager._cache
        _ = manager._send_on_shell_channel
    except AttributeError as error:
        _skip("replies through the stream", error)
        return False
    if "_send_on_shell_channel" in vars(manager):
        return False

    def change() -> None:
        # For subshells that are created later, for the main shell, and for the
        # subshells that exist.
        manager._send_on_shell_channel = send
        on_recv(loop, send)
        for subshell in subshells.values():
            subshell.subshell_to_shell_channel.on_recv(loop, send)

    # On the thread that owns these streams and the list of subshells.
    loop.add_callback(change)
    return True


def load_ipython_extension(shell: Any) -> None:
    """For kernels that load this module at their start: see ``tools/kernelspec.py``."""
    send_replies_through_stream(shell.kernel)


def is_affected() -> bool:
    """Return whether replies of this ipykernel make it lose requests."""
    major, minor = importlib.metadata.version("ipykernel").split(".")[:2]
    return (int(major), int(minor)) < (7, 4)


# -- messages of widgets during a cell ---------------------------------------


def serve_messages(kernel: Any, comm_ids: Container[str]) -> int:
    """Handle messages of comms while a cell blocks the kernel's main thread.

    A front end that opens subshells (JupyterLab from 4.4 and Notebook from 7.4 on,
    with ipykernel 7) has the messages of widgets handled on a thread of their own.
    With ipykernel 6, or in a front end without subshells, they wait in the queue of
    the main thread, behind the cell that blocks it.

    Handled are also the requests of a page that opens meanwhile (it was reloaded, or
    is a second window): what the kernel is, and the state of its widgets. Without a
    reply to the first, a page sends nothing else, opens no subshell and shows no
    widget. Any other message is handled after the cell, in the order of arrival.

    To be called on the main thread of the notebook's kernel, by the cell that runs
    there. Returns the number of messages handled.
    """
    try:
        stream, outbox, postpone = _channel(kernel)
        handlers = kernel.shell_handlers
        _ = kernel._publish_status, kernel.comm_manager
        call_later = kernel.io_loop.add_callback
    except AttributeError as error:
        _skip("clicks during a cell", error)
        return 0
    served = 0
    socket = stream.socket
    try:
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            parts = socket.recv_multipart(copy=False)
            found = _for_page(kernel, parts, comm_ids)
            if found is None:
                postpone(parts)
                continue
            idents, message = found
            kind = message["header"]["msg_type"]
            if kind == "kernel_info_request":
                _reply_kernel_info(kernel, outbox, idents, message)
            else:
                # By the handler alone: the dispatcher would make this message the
                # parent of what the cell prints from now on.
                handlers[kind](stream, idents, message)
            served += 1
    except BaseException:
        # The socket signals new messages only, and one may be there already.
        call_later(stream.flush, zmq.POLLIN)
        raise
    return served


def _channel(kernel: Any) -> tuple[Any, Any, Callable[[Any], None]]:
    """Return the main thread's inbox, where it sends replies, and what postpones."""
    call_later = kernel.io_loop.add_callback
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None and not hasattr(kernel, "shell_main"):
        # ipykernel 6.
        schedule, dispatch = kernel.schedule_dispatch, kernel.dispatch_shell
        stream = kernel.shell_stream
        return stream, stream, lambda parts: schedule(dispatch, parts)
    shell_main = kernel.shell_main
    if thread is None:
        stream = outbox = kernel.shell_stream
    else:
        stream = thread.manager.get_shell_channel_to_subshell_pair(None).to_stream
        outbox = thread.manager.get_subshell_to_shell_channel_socket(None)
    return stream, outbox, lambda parts: call_later(shell_main, None, parts)


def _for_page(
    kernel: Any, parts: list[Any], comm_ids: Container[str]
) -> tuple[list[bytes], dict[str, Any]] | None:
    """Return a message that is to be handled now; else leave it intact."""
    session = kernel.session
    try:
        idents, rest = session.feed_identities(parts, copy=False)
        # A message that is unpacked twice is taken for a replay.
        peeked = session.deserialize(rest, content=False, copy=False)
        kind = peeked["header"]["msg_type"]
        content = session.unpack(peeked["content"])
        if kind == "comm_open":
            wanted = content["target_name"] == _CONTROL
        elif kind in ("comm_msg", "comm_close"):
            comm_id = content["comm_id"]
            wanted = comm_id in comm_ids or _is_control(kernel, comm_id)
        else:
            wanted = kind == "kernel_info_request"
        if not wanted:
            return None
        return idents, session.deserialize(rest, content=True, copy=False)
    except (KeyError, TypeError, ValueError):
        # Not signed, or not a message: for the kernel to refuse.
        return None


def _is_control(kernel: Any, comm_id: str) -> bool:
    comm = kernel.comm_manager.comms.get(comm_id)
    return comm is not None and comm.target_name == _CONTROL


def _reply_kernel_info(
    kernel: Any, outbox: Any, idents: list[bytes], request: dict[str, Any]
) -> None:
    """Reply to a request for what the kernel is, and report the kernel as busy."""
    publish, session = kernel._publish_status, kernel.session
    publish("busy", "shell", parent=request)
    content = {"status": "ok", **kernel.kernel_info}
    session.send(outbox, "kernel_info_reply", content, parent=request, ident=idents)
    if isinstance(outbox, zmq.eventloop.zmqstream.ZMQStream):
        outbox.flush(zmq.POLLOUT)
    # A page counts a request as done at its idle. The cell still runs.
    publish("idle", "shell", parent=request)
    publish("busy", "shell")


# -- requests on the control channel ------------------------------------------


def serve_requests(
    kernel: Any, kind: str, serve: Callable[[Any, Any, dict[str, Any]], None]
) -> None:
    """Have ``serve(stream, ident, request)`` answer the control requests of a `kind`.

    They are answered with no more than the answer. Of others ipykernel publishes that
    the kernel is busy, and then idle, of which nobody here takes notice, and waits for
    another thread to have sent all output.
    """
    kernel.control_handlers[kind] = serve
    try:
        session, stream, process = (
            kernel.session,
            kernel.control_stream,
            kernel.process_control,
        )
        split, unpack = session.feed_identities, session.unpack
    except AttributeError as error:
        _skip("control requests without busy and idle", error)
        return

    async def process_control(message: Any) -> None:
        try:
            ident, parts = split(message, copy=False)
            ours = unpack(parts[1].bytes)["msg_type"] == kind
        except (IndexError, KeyError, TypeError, ValueError):
            ours = False  # ipykernel says what is wrong with it
        if not ours:
            await process(message)
            return
        try:
            serve(stream, ident, session.deserialize(parts, copy=False))
        except Exception:
            # Without the session's key; or the answer is no JSON.
            kernel.log.exception("a control request has no answer")

    kernel.process_control = process_control


# -- top-level await on an engine --------------------------------------------


def allow_top_level_await(kernel: Any) -> None:
    """Let cells with a top-level ``await`` run on an engine of ipyparallel.

    ipykernel 7 reads from its shell channel thread on which thread the cells run; an
    ipyparallel engine has no such thread, and the cell fails with AttributeError.
    The replacement has that thread as an attribute and is false, as the missing
    thread is: ipykernel reads nothing else of it.
    """
    if getattr(kernel, "shell_channel_thread", False) is not None:
        return
    cls = type(kernel)
    try:
        _ = cls._supports_kernel_subshells
    except AttributeError as error:
        _skip("top-level await", error)
        return
    cls._supports_kernel_subshells = property(lambda self: False)
    kernel.shell_channel_thread = _NoShellChannelThread()


class _NoShellChannelThread:
    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


# -- output of forked children -------------------------------------------------


def show_output_of_children() -> None:
    """Have this engine publish what its forked children print, as a kernel does.

    ipyparallel makes the thread that publishes without the socket for that. A child
    then writes to its parent's own socket, which is of no use to it.
    """
    try:
        stream: Any = sys.stdout
        thread = stream.pub_thread
        loop, set_up = thread.io_loop, thread._setup_pipe_in
        if thread._pipe_flag:
            return
    except AttributeError as error:
        _skip("output of forked children", error)
        return

    def change() -> None:
        thread._pipe_flag = True
        set_up()

    # On the thread of the stream that it makes.
    loop.add_callback(change)


# -- output of threads ---------------------------------------------------------


def keep_output_in_its_cell(kernel: Any) -> None:
    """Have what a thread prints belong to the cell that started the thread.

    ipykernel 7 has it belong to the request that is handled last, which may be a later
    cell's, or none of a cell. What an executor's thread prints belongs to the cell that
    submitted the call. ipykernel 6 has the first, and none of the names used here.
    """
    shell = kernel.shell
    outlets: list[Any] = [sys.stdout, sys.stderr, shell.display_pub, shell.displayhook]
    try:
        for one in outlets:
            _ = one._parent_header.set, one.parent_header
    except AttributeError as error:
        _skip("output of threads in their own cell", error)
        return

    def parent_of_thread() -> Callable[[], None]:
        """Return what gives another thread the cell of the calling one."""
        parent = dict(outlets[0].parent_header)

        def adopt() -> None:
            for one in outlets if parent else ():
                # What set_thread_parent does, which comes with ipykernel 7.4.
                one._parent_header.set(parent)

        return adopt

    plain_start, plain_submit = threading.Thread.start, ThreadPoolExecutor.submit

    def start(self: threading.Thread) -> None:
        adopt, run = parent_of_thread(), self.run

        def run_in_cell() -> None:
            del vars(self)["run"]
            adopt()
            run()

        # Of the thread itself: `run` may be that of a class of the user's.
        vars(self)["run"] = run_in_cell
        plain_start(self)

    def submit(executor: Any, call: Any, /, *args: Any, **options: Any) -> Any:
        adopt = parent_of_thread()

        def call_in_cell() -> Any:
            adopt()
            return call(*args, **options)

        return plain_submit(executor, call_in_cell)

    threading.Thread.start = start  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def say_in_cell(kernel: Any, text: str) -> None:
    """Print a text in the output of the cell that runs, from any thread."""
    # ipykernel 6 has it there anyway.
    set_parent = getattr(sys.stdout, "set_thread_parent", None)
    if set_parent is not None:
        set_parent(kernel.get_parent("shell"))
    print(text, flush=True)
