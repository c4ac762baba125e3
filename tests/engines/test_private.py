"""The private names of ipyparallel: when one goes, this says which."""

from __future__ import annotations

import ipyparallel
import pytest

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
