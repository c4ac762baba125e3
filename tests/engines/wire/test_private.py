"""The check of ipyparallel's private names: exactly the names that are used."""

from __future__ import annotations

import ast
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipyparallel
import pytest
import traitlets.log
import zmq
from ipyparallel.cluster.launcher import LocalProcessLauncher

from rankscope.engines import ClusterError
from rankscope.engines.wire import ipyparallel_private as private


def test_the_installed_ipyparallel_has_every_name() -> None:
    assert private.missing() == [], (
        f"ipyparallel {ipyparallel.__version__} changed: adapt "
        "engines/wire/ipyparallel_private.py"
    )


def test_the_table_lists_the_private_names_that_the_file_uses() -> None:
    """Also the names that ``getattr`` would read, and none that nothing uses."""
    tree = ast.parse(Path(private.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {
        str(argument.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("getattr", "hasattr", "setattr")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    private_names = {
        name for name in used if name.startswith("_") and not name.startswith("__")
    }
    names = [name for names in private.NAMES.values() for name in names]
    listed = [name for name in names if name.startswith("_")]
    assert private_names == set(listed)
    assert len(listed) == len(set(listed))


def test_a_change_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: object, socket: object, msg_type: str) -> None:
        """The client's method without the parameters that are passed."""

    monkeypatch.setattr(ipyparallel.Client, "_send", send)
    monkeypatch.delattr(ipyparallel.Client, "create_message_futures")
    monkeypatch.delattr(ipyparallel.Client, "_engines")
    with pytest.raises(
        ClusterError,
        match=r"lacks Client._engines, Client.create_message_futures, "
        r"Client._send\(content=\)",
    ):
        private.check()


class Streams:
    """What the check has to find: on the class, or assigned by a method."""

    on_class = None

    def setup(self) -> None:
        """As ``Client._setup_streams``, which the constructor calls."""
        self.assigned = 1
        self.assigned.real  # noqa: B018 - read, not assigned


@pytest.mark.parametrize(
    ("name", "found"),
    [("on_class", True), ("assigned", True), ("real", False), ("absent", False)],
)
def test_a_name_is_found_on_the_class_or_in_its_methods(name: str, found: bool) -> None:
    lacks = private.missing({f"{__name__}:Streams": (name,)})
    assert lacks == ([] if found else [f"Streams.{name}"])


def test_a_class_that_is_gone_is_reported() -> None:
    gone = "ipyparallel.client.client:Gone"
    assert private.missing({gone: ("_name",), "no.such:Class": ()}) == [
        gone,
        "no.such:Class",
    ]


class Kept(logging.Handler):
    """The messages of traitlets' logger.

    It is the logger of an application where another test has made one, and passes
    nothing on to the root.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), traitlets.log.get_logger()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_an_encrypted_connection_raises_no_alarm(kept: Kept) -> None:
    class Client:
        curve_serverkey = b"key"

        def __init__(self) -> None:
            self._notification_handlers: dict[str, Any] = {}

        def _handle_stranded_msgs(self, engine_id: int, uuid: str) -> None: ...

    def connect(context: zmq.Context[Any]) -> Client:
        traitlets.log.get_logger().warning("Message signing is disabled.  Insecure!")
        traitlets.log.get_logger().warning("something else")
        return Client()

    private.connect(connect)
    assert kept.messages == ["something else"]
    Client.curve_serverkey = b""
    private.connect(connect)
    assert len(kept.messages) == 3


def test_launchers_are_told_to_end_before_one_is_waited_for() -> None:
    """Each looks once a second whether it is to end: together they take a second."""
    launchers = [LocalProcessLauncher() for _ in range(3)]
    ends = [threading.Event() for _ in launchers]

    def wait_for_all() -> None:
        for end in ends:
            end.wait()

    for launcher, end in zip(launchers, ends, strict=True):
        launcher._stop_waiting = end
        launcher._wait_thread = threading.Thread(target=wait_for_all, daemon=True)
        launcher._wait_thread.start()
    private.stop_waiting(launchers)
    assert not any(launcher._wait_thread.is_alive() for launcher in launchers)
