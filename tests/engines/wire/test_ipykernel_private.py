"""The work-arounds for ipykernel do nothing where its private names are gone."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from jupyter_client.session import Session

from rankscope.engines.wire import ipykernel_private as private

ROOT = Path(private.__file__).parents[2]


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An affected version, whichever is installed; nothing was logged before."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7.3.0")
    monkeypatch.setattr(private, "_skipped", set())


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger=private.__name__)
    return caplog


class Manager:
    """The names of ``ipykernel.subshell_manager.SubshellManager``."""

    def __init__(self) -> None:
        self.receivers: list[Any] = []
        self._main_to_shell_channel = SimpleNamespace(on_recv=self.note)
        subshell = SimpleNamespace(on_recv=self.note)
        self._cache = {"one": SimpleNamespace(subshell_to_shell_channel=subshell)}
        self.pair = SimpleNamespace(to_stream=SimpleNamespace(socket=Socket()))

    def note(self, loop: Any, callback: Any) -> None:
        self.receivers.append(callback)

    def get_shell_channel_to_subshell_pair(self, subshell: None) -> Any:
        return self.pair

    def get_subshell_to_shell_channel_socket(self, subshell: None) -> Any:
        return self.pair

    def _send_on_shell_channel(self, parts: Any) -> None:
        raise AssertionError("replaced")


class Socket:
    """One with no message."""

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return 0


class Kernel:
    """The names of ``ipykernel.ipkernel.IPythonKernel`` 7 that are used."""

    def __init__(self) -> None:
        self.io_loop = SimpleNamespace(add_callback=lambda call, *args: call(*args))
        self.manager = Manager()
        self.shell_channel_thread: Any = SimpleNamespace(
            manager=self.manager, io_loop=self.io_loop
        )
        self.shell_stream = SimpleNamespace(send_multipart=print)
        self.shell_handlers = {"comm_msg": print}
        self.comm_manager = SimpleNamespace(comms={})

    def _publish_status(self, status: str, channel: str) -> None:
        raise AssertionError("no message came")

    def shell_main(self, subshell: None, parts: Any) -> None:
        raise AssertionError("no message came")


def without(kernel: Kernel, path: str) -> Kernel:
    """Return `kernel` with the attribute at `path` gone."""
    *owners, name = path.split(".")
    owner: Any = kernel
    for one in owners:
        owner = getattr(owner, one)
    gone = dict(vars(owner))
    gone.pop(name, None)
    kept = {
        key: getattr(owner, key)
        for key in vars(type(owner))
        if not key.startswith("__") and key != name
    }
    replacement = SimpleNamespace(**kept, **gone)
    if not owners:
        return replacement  # type: ignore[return-value]
    parent: Any = kernel
    for one in owners[:-1]:
        parent = getattr(parent, one)
    setattr(parent, owners[-1], replacement)
    return kernel


def test_replies_are_sent_through_the_stream_once(
    log: pytest.LogCaptureFixture,
) -> None:
    kernel = Kernel()
    assert private.send_replies_through_stream(kernel)
    assert kernel.manager.receivers == [print, print]
    assert kernel.manager._send_on_shell_channel is print
    assert not private.send_replies_through_stream(kernel)
    assert log.messages == []


@pytest.mark.parametrize(
    "path",
    [
        "shell_stream",
        "shell_stream.send_multipart",
        "shell_channel_thread.manager",
        "shell_channel_thread.io_loop",
        "shell_channel_thread.manager._main_to_shell_channel",
        "shell_channel_thread.manager._main_to_shell_channel.on_recv",
        "shell_channel_thread.manager._cache",
        "shell_channel_thread.manager._send_on_shell_channel",
    ],
)
def test_no_reply_is_redirected_without_the_names(
    path: str, log: pytest.LogCaptureFixture
) -> None:
    kernel = without(Kernel(), path)
    assert not private.send_replies_through_stream(kernel)
    assert not private.send_replies_through_stream(kernel)
    assert [one.levelno for one in log.records] == [logging.DEBUG]
    assert "ipykernel 7.3.0" in log.messages[0]
    assert path.rpartition(".")[2] in log.messages[0]


@pytest.mark.parametrize("kernel", [object(), SimpleNamespace(shell_stream=None)])
def test_a_kernel_without_a_shell_channel_thread_is_left_alone(kernel: object) -> None:
    assert not private.send_replies_through_stream(kernel)


def test_a_kernel_without_the_error_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7.4.1")
    kernel = Kernel()
    assert not private.send_replies_through_stream(kernel)
    assert kernel.manager.receivers == []


@pytest.fixture(params=["ipykernel 6", "no subshells", "subshells"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    kernel = Kernel()
    if request.param != "subshells":
        kernel.shell_channel_thread = None
        kernel.shell_stream = SimpleNamespace(socket=Socket())
    if request.param == "ipykernel 6":
        kernel = without(kernel, "shell_main")
        kernel.schedule_dispatch = kernel.dispatch_shell = print  # type: ignore[attr-defined]
    return kernel


def test_the_inbox_of_each_ipykernel_is_found(
    kernel: Kernel, log: pytest.LogCaptureFixture
) -> None:
    assert private.serve_messages(kernel, {"board"}) == 0
    assert log.messages == []


@pytest.mark.parametrize(
    "path",
    [
        "shell_handlers",
        "comm_manager",
        "_publish_status",
        "io_loop",
        "shell_main",
        "shell_channel_thread.manager",
        "shell_channel_thread.manager.get_shell_channel_to_subshell_pair",
        "shell_channel_thread.manager.get_subshell_to_shell_channel_socket",
        "shell_channel_thread.manager.pair.to_stream",
    ],
)
def test_no_message_is_served_without_the_names(
    path: str, log: pytest.LogCaptureFixture
) -> None:
    kernel = without(Kernel(), path)
    assert private.serve_messages(kernel, {"board"}) == 0
    assert private.serve_messages(kernel, {"board"}) == 0
    assert [one.levelno for one in log.records] == [logging.DEBUG]
    assert path.rpartition(".")[2] in log.messages[0]


class ControlKernel:
    """A kernel with a control channel; `handled` is what ipykernel handles itself."""

    def __init__(self) -> None:
        self.session = Session(key=b"a key")
        self.control_stream = "the stream"
        self.control_handlers: dict[str, Any] = {}
        self.log = logging.getLogger(private.__name__)
        self.handled: list[Any] = []

    async def process_control(self, message: Any) -> None:
        self.handled.append(message)

    def receive(self, kind: str, session: Session | None = None) -> list[zmq.Frame]:
        """Handle a message; return it."""
        sender = session or self.session
        message = sender.msg(kind, {"op": "look"})
        parts = [b"client", *sender.serialize(message)]
        frames = [zmq.Frame(part) for part in parts]
        asyncio.run(self.process_control(frames))
        return frames


def test_a_control_request_of_ours_gets_the_answer_alone(
    log: pytest.LogCaptureFixture,
) -> None:
    kernel, served = ControlKernel(), list[tuple[Any, ...]]()

    def serve(stream: Any, ident: Any, request: dict[str, Any]) -> None:
        served.append((stream, ident, request["content"]))
        if len(served) > 1:
            raise ValueError("no JSON")

    private.serve_requests(kernel, "ours", serve)
    kernel.receive("ours")
    assert served == [("the stream", [b"client"], {"op": "look"})]
    assert kernel.handled == [kernel.receive("shutdown_request")]
    garbage = [zmq.Frame(b"<IDS|MSG>"), zmq.Frame(b"?")]
    asyncio.run(kernel.process_control(garbage))
    assert kernel.handled[1:] == [garbage]
    assert log.messages == []
    # From who does not have the key; and with an answer that cannot be sent.
    kernel.receive("ours", Session(key=b"another"))
    assert len(served) == 1
    kernel.receive("ours")
    assert log.messages == ["a control request has no answer"] * 2


def test_a_control_request_is_an_ordinary_one_without_the_names(
    log: pytest.LogCaptureFixture,
) -> None:
    kernel = SimpleNamespace(control_handlers={})
    private.serve_requests(kernel, "ours", print)
    assert kernel.control_handlers == {"ours": print}
    assert len(log.messages) == 1


def test_top_level_await_is_left_alone_without_the_name(
    log: pytest.LogCaptureFixture,
) -> None:
    kernel = SimpleNamespace(shell_channel_thread=None)
    private.allow_top_level_await(kernel)
    private.allow_top_level_await(kernel)
    assert kernel.shell_channel_thread is None
    assert len(log.messages) == 1
    private.allow_top_level_await(SimpleNamespace())
    assert len(log.messages) == 1


def test_the_names_are_used_in_one_file() -> None:
    """The names of ipykernel's shell channel and its subshells."""
    names = re.compile(
        r"shell_channel_thread|_send_on_shell_channel|_main_to_shell_channel"
        r"|_supports_kernel_subshells|get_shell_channel_to_subshell_pair"
        r"|get_subshell_to_shell_channel_socket"
        r"|shell_main|schedule_dispatch|dispatch_shell|shell_handlers"
    )
    using = {
        path.relative_to(ROOT).as_posix()
        for room in ("backends", "engines", "widgets", "magics")
        for path in (ROOT / room).rglob("*.py")
        if names.search(path.read_text(encoding="utf-8"))
    }
    assert using == {"engines/wire/ipykernel_private.py"}
