"""The private names of ipyparallel: when one goes, this says which."""

from __future__ import annotations

import ipyparallel
import pytest
import traitlets.log

from rankscope.engines import ClusterError, private


def test_this_ipyparallel_has_all_we_stand_on() -> None:
    assert private.missing() == [], (
        f"ipyparallel {ipyparallel.__version__} changed: adapt engines/private.py"
    )


def test_a_change_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: object, socket: object, msg_type: str) -> None:
        """The client's method without what we pass."""

    monkeypatch.setattr(ipyparallel.Client, "_send", send)
    monkeypatch.delattr(ipyparallel.Client, "create_message_futures")
    with pytest.raises(
        ClusterError,
        match=r"lacks Client.create_message_futures, Client._send\(content=\)",
    ):
        private.check()


def test_an_encrypted_connection_raises_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Client:
        curve_serverkey = b"key"

    def connect() -> Client:
        traitlets.log.get_logger().warning("Message signing is disabled.  Insecure!")
        traitlets.log.get_logger().warning("something else")
        return Client()

    private.connect(connect)
    assert caplog.messages == ["something else"]
    Client.curve_serverkey = b""
    private.connect(connect)
    assert len(caplog.messages) == 3
