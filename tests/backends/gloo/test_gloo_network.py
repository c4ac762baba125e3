"""Where the side processes listen: loopback, a chosen interface, IPv4 or IPv6."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rankscope.backends.conformance.ranks import Rank, run_ranks
from rankscope.backends.errors import DistBackendError
from rankscope.backends.gloo.backend import GlooBackend, Reduction
from rankscope.backends.gloo.library import gloo_options, installed, unavailable
from rankscope.backends.gloo.side_process import choose_address
from rankscope.backends.messaging import connecting

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason="no gloo library for this Python"
)

each_library = pytest.mark.parametrize("library", list(installed()))

LOOPBACK = "lo"


def addresses(family: int, interface: str | None = None) -> list[tuple[str, str]]:
    """The addresses of this machine, each with its interface; none that is local."""
    return [
        (name, found.address)
        for name, all_found in psutil.net_if_addrs().items()
        for found in all_found
        if found.family == family
        and "%" not in found.address
        and interface in (None, name)
    ]


OTHERS = [
    found for found in addresses(socket.AF_INET) if not found[1].startswith("127.")
]
SIX = addresses(socket.AF_INET6, LOOPBACK)
needs_ipv6 = pytest.mark.skipif(not SIX, reason="this machine has no IPv6")


def found_as(there: list[str]) -> list[SimpleNamespace]:
    """Addresses of an interface as psutil finds them."""
    six, four = socket.AF_INET6, socket.AF_INET
    return [SimpleNamespace(address=x, family=six if ":" in x else four) for x in there]


def test_loopback_only_if_all_ranks_share_a_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here = {"machine": "a/1", "address": "10.0.0.1"}
    there = {"machine": "b/1", "address": "10.0.0.2"}
    assert choose_address([here, here], 1) == "127.0.0.1"
    assert choose_address([here, there], 0) == "10.0.0.1"
    assert choose_address([here, there], 1) == "10.0.0.2"


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["fd00::2", "10.0.0.2"], "10.0.0.2"),
        (["fe80::1%eth0", "fd00::2"], "fd00::2"),
    ],
)
def test_the_address_of_an_interface(
    monkeypatch: pytest.MonkeyPatch, there: list[str], chosen: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found_as(there)})
    assert connecting.own_address() == chosen


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["127.0.0.1", "fd00::2", "10.0.0.2", "10.0.0.3"], "10.0.0.2"),
        (["127.0.0.1", "::1", "fe80::1%eth0", "fd00::2"], "fd00::2"),
        (["127.0.0.1", "::1", "fe80::1%eth0"], "127.0.0.1"),
    ],
)
def test_the_address_of_a_host_whose_own_name_is_loopback(
    monkeypatch: pytest.MonkeyPatch, there: list[str], chosen: str
) -> None:
    """And that has no route to the rest of the world: it was loopback, as on Debian."""

    def no_route(*_: object) -> str:
        raise OSError("network is unreachable")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(connecting, "address_towards", no_route)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": found_as(there)})
    assert connecting.own_address() == chosen


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(DistBackendError, match=f"'nowhere0'.*there are .*{LOOPBACK}"):
        connecting.own_address()
    # Which is no address to other hosts.
    only = found_as(["fe80::1%eth0"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": only})
    with pytest.raises(DistBackendError, match="'eth0', which has no address here"):
        connecting.own_address()


def use(interface: str, family: int) -> None:
    """Choose `interface`; of its addresses only those of `family` are seen."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    real = psutil.net_if_addrs

    def seen() -> dict[str, list[object]]:
        return {
            name: [one for one in found if one.family == family]
            for name, found in real().items()
        }

    psutil.net_if_addrs = seen  # type: ignore[assignment]


def ops(me: Rank, library: str, interface: str, family: int) -> set[str]:
    """Some ops; returns the addresses of the side process's ends of connections."""
    use(interface, family)
    with (
        me.store("gloo") as store,
        gloo_options(library=library),
        contextlib.ExitStack() as end,
    ):
        made = GlooBackend(store, me.rank, me.size)
        end.callback(made.shutdown)
        total = Reduction(np.add, "float64", "SUM")
        for size in (3, 1 << 20):
            x = np.full(size, me.rank + 1.0)
            made.all_reduce(x, total).wait()
            assert x[0] == x[-1] == 6.0
        if me.rank == 0:
            made.send(x, 1, 5).wait()
        elif me.rank == 1:
            made.recv(x, 0, 5).wait()
        assert made._side is not None
        side = psutil.Process(made._side.pid)
        used = {one.laddr.ip for one in side.net_connections("inet") if one.raddr}
        made.barrier().wait()
        return used


@pytest.mark.processes
@each_library
def test_the_interface_can_be_chosen(library: str) -> None:
    used = run_ranks(3, ops, library, LOOPBACK, socket.AF_INET)
    assert used == [{"127.0.0.1"}] * 3


@pytest.mark.processes
@pytest.mark.skipif(not OTHERS, reason="this machine has a loopback interface alone")
@each_library
def test_another_interface_than_loopback(library: str) -> None:
    interface, address = OTHERS[0]
    used = run_ranks(3, ops, library, interface, socket.AF_INET)
    assert used == [{address}] * 3


@pytest.mark.processes
@needs_ipv6
@each_library
def test_ranks_connect_over_ipv6(library: str) -> None:
    used = run_ranks(3, ops, library, LOOPBACK, socket.AF_INET6)
    assert used == [{"::1"}] * 3
