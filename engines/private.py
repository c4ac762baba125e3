"""Every private name of ipyparallel and ipykernel that Rankscope stands on.

ipyparallel has no public way to send a message of one's own over its sockets,
nor to hear what an engine publishes outside a cell. The few names that this
takes are used here and nowhere else, `check` finds out at start whether they
are still there, and ``tests/engines/test_private.py`` asserts it.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel
import traitlets.log
from ipyparallel.cluster import launcher as launchers

from .errors import ClusterError

__all__ = [
    "Message",
    "allow_top_level_await",
    "check",
    "connect",
    "controller_address",
    "engine_uuids",
    "finish_output",
    "forget",
    "io_thread",
    "listen",
    "message_header",
    "on_notification",
    "probe",
    "process_of",
    "publish",
    "registered_engines",
    "reply",
    "request_metadata",
    "send",
    "shutdown_hub",
    "stop_waiting",
    "user_expressions",
]

#: A Jupyter message: header, parent_header, metadata, content, buffers.
Message = dict[str, Any]

# Session numbers its messages without a lock, and we send from many threads.
_numbering = threading.Lock()

# Streams, not sockets: a socket that is written to behind its stream may leave
# the stream asleep with an answer in its queue.
_STREAMS = {"shell": "_mux_stream", "control": "_control_stream"}


# -- in the notebook -------------------------------------------------------


def connect(connect: Callable[[], Any]) -> Any:
    """Return the client that ``connect()`` makes, without an alarm about its security.

    The session says that messages are not signed; where they are encrypted and
    authenticated by CurveZMQ, which it knows nothing of, that is as it should be.
    """
    kept: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        if "signing is disabled" not in record.getMessage():
            return True
        kept.append(record)
        return False

    logger = traitlets.log.get_logger()
    if isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    logger.addFilter(keep)
    try:
        client = connect()
    finally:
        logger.removeFilter(keep)
    if not client.curve_serverkey:
        for record in kept:
            logger.handle(record)
    return client


def send(
    client: Any,
    channel: str,
    msg_type: str,
    content: Mapping[str, Any],
    uuid: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    on_iopub: Callable[[Message], None] | None = None,
) -> Future[Any]:
    """Send a request to the engine `uuid`; return the Future of its reply.

    `channel` is ``shell`` (the engine's main thread) or ``control`` (its
    control thread). A control reply is the message itself; what a reply on
    the shell channel becomes is the client's business. `on_iopub` gets every
    message published under the request, on the client's I/O thread. The
    Future has ``msg_id``, and, for executions, ``output``: a Future that is
    done when the engine is idle again, after the last output.
    """

    def hook(future: Any) -> None:
        # Before the request leaves, or the first output could be missed.
        if on_iopub is not None:
            future.iopub_callbacks.append(on_iopub)

    with _numbering:
        return client._send(
            getattr(client, _STREAMS[channel]),
            msg_type,
            content=dict(content),
            ident=uuid.encode(),
            metadata=None if metadata is None else dict(metadata),
            track_outstanding=channel == "shell",
            message_future_hook=hook,
        )


def probe(client: Any, uuid: str) -> Future[Any]:
    """Have the engine's main thread run nothing; return the Future of its reply.

    Nothing overtakes on the shell channel: the reply comes after those to
    everything that was sent before, or not at all.
    """
    nothing = {
        "code": "",
        "silent": True,
        "store_history": False,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }
    return send(client, "shell", "execute_request", nothing, uuid)


def listen(
    client: Any, callback: Callable[[Message], None]
) -> tuple[Message, Callable[[], None]]:
    """Return a header to publish under, and a function that ends the listening.

    Whatever an engine publishes with this parent header reaches
    ``callback(message)`` on the client's I/O thread. The header belongs to no
    request, so that no reply ends it.
    """
    with _numbering:
        header = client.session.msg_header("rankscope_subscription")
    header["date"] = header["date"].isoformat()
    (future,) = client.create_message_futures(header["msg_id"], header)
    future.iopub_callbacks.append(callback)

    def cancel() -> None:
        forget(client, header["msg_id"])

    return header, cancel


def forget(client: Any, msg_id: str) -> None:
    """Drop what the client keeps for a request that nobody will answer."""
    client._futures.pop(msg_id, None)
    client._output_futures.pop(msg_id, None)
    client.results.pop(msg_id, None)
    client.metadata.pop(msg_id, None)
    client.outstanding.discard(msg_id)


def finish_output(future: Any) -> None:
    """Say that no output will come for an execution: its engine is dead."""
    output = future.output
    if not output.done():
        output.set_result(None)


def user_expressions(reply: Any) -> dict[str, Any]:
    """Return the ``user_expressions`` out of what the client makes of a reply."""
    return reply._content["user_expressions"]


def engine_uuids(client: Any) -> dict[int, str]:
    """Return engine id → the identity that messages to it are routed by."""
    return {number: client._engines[number] for number in client.ids}


def on_notification(
    client: Any, callback: Callable[[Mapping[str, Any]], None]
) -> Callable[[], None]:
    """Call ``callback(event)`` when an engine comes or goes; return the cancel.

    It runs on the client's I/O thread. ``event["event"]`` is ``register`` or
    ``unregister``, ``event["id"]`` the engine.
    """
    client._registration_callbacks.append(callback)

    def cancel() -> None:
        if callback in client._registration_callbacks:
            client._registration_callbacks.remove(callback)

    return cancel


def io_thread(client: Any) -> threading.Thread | None:
    """Return the thread that the client's callbacks run on."""
    return client._io_thread


def process_of(launcher: Any) -> Any:
    """Return the psutil process of a local launcher, if it has one."""
    return getattr(launcher, "process", None)


def registered_engines(client: Any) -> Future[Any]:
    """Ask the hub which engines there are: ``["content"]["engines"]`` of the reply.

    Engine id, as a string, → the identity that messages to it are routed by.
    """
    with _numbering:
        return client._send(client._query_stream, "connection_request")


def shutdown_hub(client: Any) -> Future[Any]:
    """Have the controller end; return the Future of its reply."""
    # The client would close itself at the hub's good-bye, before the reply.
    client._notification_handlers["shutdown_notification"] = lambda message: None
    with _numbering:
        return client._send(client._query_stream, "shutdown_request")


def stop_waiting(launcher: Any) -> None:
    """End the thread in which a local launcher waits for its process."""
    thread = getattr(launcher, "_wait_thread", None)
    if thread is None:
        return
    child = getattr(launcher, "_popen_process", None)
    if child is not None and child.poll() is None:
        # Its thread would wait for it once more, for no time at all, and end
        # with TimeoutExpired: a kept engine lives on.
        launcher._popen_process = None
    launcher._stop_waiting.set()
    thread.join()


# -- in the engine ---------------------------------------------------------


def message_header(message: Message) -> Message:
    """Return the header of `message`, as a parent to publish under."""
    return message["header"]


def publish(
    kernel: Any, msg_type: str, content: Mapping[str, Any], parent_header: Message
) -> None:
    """Publish on the engine's iopub under `parent_header`, from any thread."""
    kernel.session.send(
        kernel.iopub_socket,
        msg_type,
        dict(content),
        parent={"header": parent_header},
        ident=kernel._topic("rankscope"),
    )


def reply(
    kernel: Any, stream: Any, ident: Any, request: Message, content: Mapping[str, Any]
) -> None:
    """Answer a control request, on the control thread."""
    kernel.session.send(
        stream, "rankscope_reply", dict(content), parent=request, ident=ident
    )


def request_metadata(kernel: Any) -> Message:
    """Return the metadata of the request that the main thread works on."""
    return kernel.get_parent("shell").get("metadata", {})


def controller_address(kernel: Any) -> str:
    """Return the address by which this engine reaches its controller."""
    return kernel.parent.registration_url


def allow_top_level_await(kernel: Any) -> None:
    """Let cells with a top-level ``await`` run on the engine.

    ipykernel 7 asks its shell channel thread which thread the cells run on;
    an ipyparallel engine has none, and the cell fails with AttributeError.
    What stands in knows that thread and is false, as the absence of the
    thread is: the kernel asks for no more.
    """
    if getattr(kernel, "shell_channel_thread", False) is not None:
        return
    cls = type(kernel)
    cls._supports_kernel_subshells = property(lambda self: False)
    kernel.shell_channel_thread = _NoShellChannelThread()


class _NoShellChannelThread:
    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


# -- does all this still exist? --------------------------------------------

_CLIENT = (
    "_send",
    "_dispatch_iopub",
    "_setup_streams",
    "_unregister_engine",
    "create_message_futures",
)
_CLIENT_TRAITS = (
    "_engines",
    "_futures",
    "_output_futures",
    "_registration_callbacks",
)
_SEND = (
    "socket",
    "msg_type",
    "content",
    "ident",
    "metadata",
    "track_outstanding",
    "message_future_hook",
)
_KERNEL = ("_topic", "get_parent", "do_execute")
_LAUNCHER = ("on_stop", "signal", "get_output", "stop")


def missing() -> list[str]:
    """Return the names that this version of ipyparallel and ipykernel lacks."""
    from ipyparallel.client.futures import MessageFuture
    from ipyparallel.engine.kernel import IPythonParallelKernel

    client = ipyparallel.Client
    lacks = [f"Client.{name}" for name in _CLIENT if not hasattr(client, name)]
    traits = client.class_traits()
    lacks += [f"Client.{name}" for name in _CLIENT_TRAITS if name not in traits]
    if not hasattr(MessageFuture("check"), "iopub_callbacks"):
        lacks.append("MessageFuture.iopub_callbacks")
    if hasattr(client, "_send"):
        known = inspect.signature(client._send).parameters
        lacks += [f"Client._send({name}=)" for name in _SEND if name not in known]
    lacks += _without(IPythonParallelKernel, "IPythonParallelKernel", _KERNEL)
    lacks += _without(
        launchers.LocalEngineSetLauncher, "LocalEngineSetLauncher", _LAUNCHER
    )
    return lacks


def _without(cls: type, shown: str, names: Sequence[str]) -> list[str]:
    return [f"{shown}.{name}" for name in names if not hasattr(cls, name)]


def check() -> None:
    """Raise `ClusterError` if a name that this module stands on is gone."""
    lacks = missing()
    if lacks:
        raise ClusterError(
            f"ipyparallel {ipyparallel.__version__} is not one that Rankscope knows: "
            f"it lacks {', '.join(lacks)}; install ipyparallel>=9,<10"
        )
