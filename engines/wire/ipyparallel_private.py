"""Every private name of ipyparallel, and of its kernel, that Rankscope uses.

ipyparallel has no public call that sends a message of another package over its
sockets, and none that receives what an engine publishes outside a cell. The few
private names that both need are used in this file only. They are listed in
`NAMES`; `check` looks for them when a cluster starts.
"""

from __future__ import annotations

import ast
import dis
import inspect
import logging
import os
import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ipyparallel
import traitlets.log
import zmq
from ipyparallel.cluster.launcher import LocalProcessLauncher

from ..errors import ClusterError
from .message_types import REPLY, SUBSCRIPTION

__all__ = [
    "EvaluationError",
    "Message",
    "call_of",
    "check",
    "connect",
    "controller_address",
    "discard_request",
    "engine_uuids",
    "evaluate",
    "evaluated",
    "finish_output",
    "io_thread",
    "keep_listening",
    "listen",
    "on_notification",
    "probe",
    "process_of",
    "publish",
    "registered_engines",
    "reply",
    "request_metadata",
    "send",
    "serve_signals",
    "shutdown_hub",
    "stop_waiting",
    "unregister",
    "update_engines",
]

#: A Jupyter message: header, parent_header, metadata, content, buffers.
Message = dict[str, Any]

#: Milliseconds for which a closed socket tries to send what it has.
LINGER = 1_000


class EvaluationError(ClusterError):
    """An expression raised an error on an engine."""


# A session numbers its messages without a lock, and many threads send.
_numbering = threading.Lock()


# -- in the notebook -------------------------------------------------------


def connect(connect: Callable[[zmq.Context[Any]], Any]) -> Any:
    """Return the client that ``connect(context)`` makes, without a needless warning.

    The session warns that messages are not signed, also where CurveZMQ encrypts and
    authenticates them. The warning is dropped in that case only.

    The client's sockets are of `context`, which bounds the time that they keep messages
    to a controller that is gone: a socket that is closed lives as long as it has some.
    """
    context = zmq.Context(zmq.Context.instance())
    context.linger = LINGER
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
        client = connect(context)
    finally:
        logger.removeFilter(keep)

    def end(message: Message) -> None:
        # As close() does, which would close the sockets under the thread that calls
        # this, and that still has messages of other sockets to receive.
        client._closed = True
        client._stop_io_thread()

    client._notification_handlers["shutdown_notification"] = end
    fail = client._handle_stranded_msgs

    def fail_stranded(engine_id: int, uuid: str) -> None:
        # An answer may be under way: of one to no `outstanding` request the client
        # would print "got stale result" into whatever cell runs.
        stranded = {*client._outstanding_dict[uuid]}
        fail(engine_id, uuid)
        client.outstanding |= stranded

    client._handle_stranded_msgs = fail_stranded
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
    control thread). A control reply is the message itself; the client converts a
    reply on the shell channel. `on_iopub` gets every
    message published under the request, on the client's I/O thread. The
    Future has ``msg_id``, and, for executions, ``output``: a Future that is
    done when the engine is idle again, after the last output.
    """

    def hook(future: Any) -> None:
        # Before the request leaves, or the first output could be missed.
        if on_iopub is not None:
            future.iopub_callbacks.append(on_iopub)

    # The streams, not their sockets: a write to the socket itself may leave the
    # stream asleep with a reply in its queue.
    stream = client._mux_stream if channel == "shell" else client._control_stream
    with _numbering:
        return client._send(
            stream,
            msg_type,
            content=dict(content),
            ident=uuid.encode(),
            metadata=None if metadata is None else dict(metadata),
            track_outstanding=channel == "shell",
            message_future_hook=hook,
        )


def probe(client: Any, uuid: str) -> Future[Any]:
    """Have the main thread run nothing: it replies after all that was sent before."""
    return _execute(client, uuid, {})


def evaluate(client: Any, uuid: str, expression: str) -> Future[Any]:
    """Evaluate `expression` on the engine's main thread; see `evaluated`."""
    return _execute(client, uuid, {"value": expression})


def _execute(client: Any, uuid: str, expressions: Mapping[str, str]) -> Future[Any]:
    content = {
        "code": "",
        "silent": True,
        "store_history": False,
        "user_expressions": dict(expressions),
        "allow_stdin": False,
        "stop_on_error": False,
    }
    return send(client, "shell", "execute_request", content, uuid)


def listen(
    client: Any, callback: Callable[[Message], None]
) -> tuple[Message, Callable[[], None]]:
    """Return a header to publish under, and a function that ends the calls.

    Whatever an engine publishes with this parent header reaches
    ``callback(message)`` on the client's I/O thread. The header belongs to no
    request, so that no reply ends it.
    """
    with _numbering:
        header = client.session.msg_header(SUBSCRIPTION)
    header["date"] = header["date"].isoformat()
    (future,) = client.create_message_futures(header["msg_id"], header)
    future.iopub_callbacks.append(callback)

    def cancel() -> None:
        discard_request(client, header["msg_id"])

    return header, cancel


def keep_listening(client: Any, future: Any) -> None:
    """Have the `on_iopub` of a request called after its end: a thread may print on."""

    def keep() -> None:
        client._futures[future.msg_id] = future

    # On the thread, and after the calls, that remove what ends.
    client._io_loop.add_callback(keep)


def discard_request(client: Any, msg_id: str) -> None:
    """Drop what the client keeps for a request whose answer nobody awaits any more.

    It stays one of ``client.outstanding``: of an answer that comes late to another
    request the client would print "got stale result" into whatever cell runs.
    """
    client._futures.pop(msg_id, None)
    client._output_futures.pop(msg_id, None)
    client.results.pop(msg_id, None)
    client.metadata.pop(msg_id, None)


def finish_output(future: Any) -> None:
    """Mark the output of an execution complete: its engine is dead."""
    output = future.output
    if not output.done():
        output.set_result(None)


def evaluated(reply: Any) -> Any:
    """Return the value out of what the client makes of a reply to `evaluate`."""
    answer = reply._content["user_expressions"]["value"]
    if answer["status"] != "ok":
        raise EvaluationError(f"{answer['ename']}: {answer['evalue']}")
    return ast.literal_eval(answer["data"]["text/plain"])


def call_of(module: str, function: str, *arguments: Any) -> str:
    """Return the expression to `evaluate` that calls a function in `engines.agent`."""
    given = ", ".join(map(repr, arguments))
    path = f"rankscope.engines.agent.{module}"
    return f"__import__({path!r}, fromlist=[{function!r}]).{function}({given})"


def engine_uuids(client: Any) -> dict[int, str]:
    """Return engine id → the identity that messages to it are routed by."""
    return {number: client._engines[number] for number in client.ids}


def on_notification(
    client: Any, callback: Callable[[Mapping[str, Any]], None]
) -> Callable[[], None]:
    """Call ``callback(event)`` when an engine registers or unregisters.

    The callback runs on the client's I/O thread. ``event["event"]`` is ``register`` or
    ``unregister``, ``event["id"]`` the engine. Returns a function that ends the calls.
    """
    client._registration_callbacks.append(callback)

    def cancel() -> None:
        if callback in client._registration_callbacks:
            client._registration_callbacks.remove(callback)

    return cancel


def io_thread(client: Any) -> threading.Thread | None:
    return client._io_thread


def process_of(launcher: Any) -> Any:
    return getattr(launcher, "process", None)


def registered_engines(client: Any) -> Future[Any]:
    """Request the list of engines from the hub.

    ``["content"]["engines"]`` of the reply: engine id, as a string, → the identity
    that messages to it are routed by.
    """
    return _query(client, "connection_request")


def update_engines(client: Any, on_done: Callable[[], object]) -> None:
    """Request the engines that the client does not know from the hub.

    The hub announces an engine once. An engine that registers while the client
    connects is missing in the hub's first reply, and its announcement comes before
    the subscription to announcements.
    """

    def update(done: Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None:
            client._update_engines(done.result()["content"]["engines"])
            on_done()

    registered_engines(client).add_done_callback(update)


def unregister(client: Any, engine_id: int) -> None:
    """Report to the hub that an engine ended: the hub tells all clients.

    An engine's nanny sends this request, but not every engine has a nanny. The hub
    ignores the second report of one end, and gives the id to no other engine.
    """
    future: Any = _query(client, "unregistration_request", {"id": engine_id})
    # The hub does not reply.
    discard_request(client, future.msg_id)


def shutdown_hub(client: Any) -> Future[Any]:
    """Have the controller end; return the Future of its reply."""
    # The client would end at the hub's notification, before the reply.
    client._notification_handlers["shutdown_notification"] = lambda message: None
    return _query(client, "shutdown_request")


def _query(
    client: Any, msg_type: str, content: Mapping[str, Any] | None = None
) -> Future[Any]:
    """Send the hub a request."""
    with _numbering:
        return client._send(client._query_stream, msg_type, content=content)


def stop_waiting(launchers: Iterable[Any]) -> None:
    """End the threads in which local launchers wait for their processes."""
    threads = []
    for one in launchers:
        if not isinstance(one, LocalProcessLauncher) or one._wait_thread is None:
            continue
        child = one._popen_process
        if child is not None and child.poll() is None:
            # The thread would call child.wait(0) once more and end with
            # TimeoutExpired, since the process of a cluster that is kept goes on.
            one._popen_process = None
        one._stop_waiting.set()
        threads.append(one._wait_thread)
    for thread in threads:
        thread.join()


# -- in the engine ---------------------------------------------------------


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
    kernel.session.send(stream, REPLY, dict(content), parent=request, ident=ident)


def serve_signals(kernel: Any) -> None:
    """Have an engine without a nanny serve the requests that a nanny serves."""

    def serve(stream: Any, ident: Any, request: Message) -> None:
        reply(kernel, stream, ident, request, {"status": "ok"})
        os.kill(os.getpid(), request["content"]["sig"])

    if not kernel.parent.enable_nanny:
        kernel.control_handlers["signal_request"] = serve


def request_metadata(kernel: Any) -> Message:
    """Return the metadata of the request that the main thread handles."""
    return kernel.get_parent("shell").get("metadata", {})


def controller_address(kernel: Any) -> str:
    return kernel.parent.registration_url


# -- compatibility check ---------------------------------------------------

#: Class -> the names of its objects that this module uses: private ones, and some that
#: are public in spelling alone. A test compares them with the names in this file.
NAMES: Mapping[str, tuple[str, ...]] = {
    "ipyparallel.client.client:Client": (
        "_closed",
        "_control_stream",
        "_engines",
        "_futures",
        "_handle_stranded_msgs",
        "_io_loop",
        "_io_thread",
        "_mux_stream",
        "_notification_handlers",
        "_outstanding_dict",
        "_output_futures",
        "_query_stream",
        "_registration_callbacks",
        "_send",
        "_stop_io_thread",
        "_update_engines",
        "create_message_futures",
        "curve_serverkey",
    ),
    "ipyparallel.client.client:ExecuteReply": ("_content",),
    "ipyparallel.client.futures:MessageFuture": ("iopub_callbacks",),
    "ipyparallel.cluster.launcher:LocalEngineSetLauncher": (
        "launcher_class",
        "launchers",
    ),
    "ipyparallel.cluster.launcher:LocalProcessLauncher": (
        "_popen_process",
        "_stop_waiting",
        "_wait_thread",
        "get_env",
        "get_output",
        "identifier",
        "notify_start",
        "notify_stop",
        "on_stop",
        "output_file",
        "process",
        "stop_callbacks",
        "stop_data",
    ),
    "ipyparallel.engine.kernel:IPythonParallelKernel": (
        "_topic",
        "get_parent",
        "iopub_socket",
    ),
}
#: Parameters that `send` passes to ``Client._send``.
SEND_PARAMETERS = (
    "socket",
    "msg_type",
    "content",
    "ident",
    "metadata",
    "track_outstanding",
    "message_future_hook",
)


def missing(table: Mapping[str, Sequence[str]] = NAMES) -> list[str]:
    """Return the names of `table` that the installed packages lack."""
    lacks = []
    for path, names in table.items():
        try:
            cls = pkgutil.resolve_name(path)
        except (AttributeError, ImportError):
            lacks.append(path)
            continue
        lacks += [f"{cls.__name__}.{name}" for name in names if not _has(cls, name)]
    send = getattr(ipyparallel.Client, "_send", None)
    if send is not None:
        known = inspect.signature(send).parameters
        lacks += [
            f"Client._send({name}=)" for name in SEND_PARAMETERS if name not in known
        ]
    return lacks


def _has(cls: type, name: str) -> bool:
    """Return whether `cls` or its bases have an attribute, or a method assigns it.

    An attribute that ``__init__`` makes is not on the class, and the check runs
    before there is an object. The code of few methods is read: of all it takes 0.1 s.
    """
    return hasattr(cls, name) or any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for base in cls.__mro__
        for function in vars(base).values()
        if inspect.isfunction(function) and name in function.__code__.co_names
        for instruction in dis.get_instructions(function)
    )


def check() -> None:
    """Raise `ClusterError` naming what this module uses and ipyparallel lacks."""
    lacks = missing()
    if lacks:
        raise ClusterError(
            f"ipyparallel {ipyparallel.__version__} cannot be used with "
            f"Rankscope: it lacks {', '.join(lacks)}; install ipyparallel>=9,<10"
        )
