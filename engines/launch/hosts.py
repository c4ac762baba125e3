"""The hosts of a cluster: each with a fork server, and compared at the start."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil

from rankscope import __version__
from rankscope.backends.rank_sets import group_by
from rankscope.backends.stores.process_end import describe_exit_code

from ..errors import ClusterStartError
from . import preconditions
from .fork_servers import ForkServer
from .host_names import is_here
from .leashed import LeashedProcess, ProcessEnd
from .slurm import SlurmJob

__all__ = ["FORWARDED", "HOSTS", "LOST_AFTER", "Hosts", "compare"]

T = TypeVar("T")

#: The name of the launcher that starts ranks on them.
HOSTS = "hosts"
#: Seconds without a sign of life after which ranks elsewhere are given up, and end: a
#: cable may be out for minutes, and a laptop asleep. By ssh, and by the heartbeats
#: between controller and engine.
LOST_AFTER = 600.0
#: Connections that an error names at most.
_REFUSED = 10
#: Seconds that hosts get to end their ranks.
_END = 5.0
#: Seconds between two looks at whether hosts can be reached while ranks start, and
#: those that a look may take.
_LOOK, _LOOK_TAKES = 10.0, 30.0
#: What ssh and srun say of a host that no packet reaches.
_UNREACHABLE = re.compile("timed out|No route to host|unreachable|connection failure")

#: What the ranks of other hosts have from the notebook's environment, as local ones do:
#: variables of the libraries, not those of the notebook's own host.
FORWARDED = ("GLOO_", "NCCL_", "OMP_NUM_THREADS", "RANKSCOPE_", "TORCH_", "UCX_")


class Hosts:
    """The hosts of a cluster, each with a fork server once it is connected.

    All ranks are started by one, and end with it: as it ends with its stdin, which this
    process holds, nothing of them is left wherever this process is killed.
    """

    #: Whether this is `LocalHost`.
    is_local = False
    #: Whether each engine is a program of its own, and no fork of the server.
    by_command = False

    def __init__(
        self,
        ranks: Mapping[str, int],
        python: str | None = None,
        interface: str | None = None,
        lost_after: float = LOST_AFTER,
    ) -> None:
        self.ranks = dict(ranks)
        self.python = python or sys.executable
        self.interface = interface
        self.lost_after = lost_after
        self.servers: dict[str, ForkServer] = {}
        #: What each host has said of itself.
        self.descriptions: dict[str, dict[str, Any]] = {}
        #: One sentence for each difference between the hosts.
        self.differences: list[str] = []
        #: Whether no host may have more ranks than its cores and memory allow.
        self.limited = False
        #: The job of Slurm whose nodes they are.
        self.job: SlurmJob | None = None
        #: Whether `close` was called.
        self.closing = False
        #: Whether the ranks may outlive this process.
        self.kept = False
        #: Whether all ranks will import torch.
        self.torch = False
        #: The arguments of the engines, once some were started.
        self.engine_args: list[str] = []

    @property
    def names(self) -> list[str]:
        return [name for name, n in self.ranks.items() for _ in range(n)]

    async def reserve(self) -> None:
        """Wait until the hosts are there for us, as long as a scheduler takes."""

    def command(self, name: str) -> list[str]:
        """Return the command that runs a fork server on the host `name`."""
        raise NotImplementedError

    def probe(self, name: str) -> list[str]:
        """Return a command that ends with 0 where the host `name` can be reached."""
        raise NotImplementedError

    def environment_here(self) -> dict[str, str] | None:
        """Return the environment of that command; ``None``: that of this process."""
        return None

    def silent_hosts(self, names: Sequence[str]) -> str:
        """Return what to do about hosts that have not answered in time."""
        raise NotImplementedError

    def why_refused(self, name: str, server: LeashedProcess) -> str:
        """Return why the program that leads to a host has ended without an answer."""
        raise NotImplementedError

    def try_there(self, name: str) -> str:
        """Return what a person can try where a fork server ends by itself."""
        return f"`{self.python} -m rankscope doctor` has to work there in a terminal"

    def route_to(self, name: str) -> str:
        """Return this host's address on the route to a host."""
        raise NotImplementedError

    def leash(self, name: str) -> str:
        """Return what the process is that holds the ranks of a host."""
        raise NotImplementedError

    async def connect(self, name: str) -> dict[str, Any]:
        """Start the fork server of a host; return what it says of the host."""
        server = self.servers[name] = self._start_server(name)
        try:
            answer = await server.reply()
        except ProcessEnd:
            raise ClusterStartError(f"{name}: {self._why_ended(name)}") from None
        # What else it says may be other things in another version.
        if (version := answer["rankscope"]) != __version__:
            raise ClusterStartError(
                f"{name}: it has Rankscope {version}, this notebook {__version__}: "
                "install one version on all hosts, or name a Python there that has "
                "this one with --remote-python"
            )
        found: dict[str, Any] = answer["host"]
        self.descriptions[name] = found
        return found

    def _start_server(self, name: str) -> ForkServer:
        return ForkServer(
            self.command(name),
            partial(self._server_ended, name),
            env=self.environment_here(),
            kept=self.kept,
        )

    async def connect_again(self, names: Iterable[str]) -> None:
        """Connect to those of the hosts whose connection has ended."""
        there = {name for name, one in self.servers.items() if one.is_open}
        await asyncio.gather(*map(self.connect, {*names} - there))

    def _why_ended(self, name: str) -> str:
        """Return why the process of a host has ended before it said anything."""
        server, python = self.servers[name], self.python
        if server.lost:
            return server.lost
        said = server.last_output
        if lacks := re.search(r"No module named '?([\w.]+)", said):
            return (
                f"its {python} has no {lacks[1]}: install Rankscope {__version__} "
                "there, and what your cells import, or name another Python with "
                "--remote-python"
            )
        if server.exit_code in (126, 127) or "execve(): " in said:
            return (
                f"there is no {python} there: name the Python that has Rankscope with "
                f"--remote-python PATH{server.last_lines()}"
            )
        return self.why_refused(name, server)

    def check(self) -> None:
        # In the order of the ranks, not in that of the answers.
        in_order = {name: self.descriptions[name] for name in self.ranks}
        errors, self.differences = compare(in_order)
        if errors:
            raise ClusterStartError("; ".join(errors))
        if self.limited:
            for name, n in self.ranks.items():
                found = self.descriptions[name]
                preconditions.check_room(n, found["cores"], found["free"], name)

    @property
    def address(self) -> str:
        """The address of this host at which every host reaches the controller."""
        if self.interface is not None:
            return _address_of(self.interface)
        # What a host has said of itself, if it was asked.
        said = {name: self.descriptions.get(name, {}) for name in self.ranks}
        here = socket.gethostname()
        others = [
            one for one in said if not is_here(one) and said[one].get("name") != here
        ]
        for name in others:
            # As the other host has seen this one: the way back is known to work.
            if _is_ours(client := said[name].get("client", "")):
                return client
        # By a jump host, or a router that translates addresses.
        return self.route_to(others[0]) if others else "127.0.0.1"

    async def check_reach(self, address: str, port: int) -> None:
        """Raise `ClusterStartError` if a host cannot connect to others or here."""
        names = [name for name, one in self.servers.items() if one.is_open]
        answers = await self._ask(names, {"listen": address})
        targets = {name: answer["at"] for name, answer in answers.items()}
        asked = {"connect": [[address, port], *targets.values()]}
        errors = []
        for name, answer in (await self._ask(names, asked)).items():
            to_here, *to_hosts = answer["refused"]
            if to_here:
                errors.append(
                    f"{name} cannot connect to the controller at {address}, port {port}"
                    f" of {socket.gethostname()} ({to_here}): name an interface or "
                    "address of this host that it reaches with --interface, or open "
                    "the firewall for it"
                )
            errors += [
                f"{name} cannot connect to {other} at {there}, port {free} ({why}): "
                "their ranks would not reach each other; open the firewall of "
                f"{other} to {name}, for all free ports"
                for (other, (there, free)), why in zip(
                    targets.items(), to_hosts, strict=True
                )
                if why and other != name
            ]
        if errors:
            if more := errors[_REFUSED:]:
                errors[_REFUSED:] = [f"and {len(more)} other connections"]
            raise ClusterStartError("\n".join(errors))

    async def _ask(
        self, names: Sequence[str], message: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        asked = (self.answer_of(one, self.servers[one].ask(message)) for one in names)
        return dict(zip(names, await asyncio.gather(*asked), strict=True))

    async def answer_of(self, name: str, answer: Awaitable[T]) -> T:
        """Return an answer of the fork server of a host; its errors name the host."""
        try:
            return await answer
        except ProcessEnd:
            server = self.servers[name]
            ended = f"its fork server ended with {server.exit_code}"
            why = f"{ended}: {self.try_there(name)}{server.last_lines()}"
            raise ClusterStartError(f"{name}: {server.lost or why}") from None
        except ClusterStartError as error:
            raise ClusterStartError(f"{name}: {error}") from None

    async def give_up_unreachable(self) -> None:
        """End connections to hosts out of reach, at a start: TCP waits longer."""
        while True:
            await asyncio.sleep(_LOOK)
            there = [name for name, one in self.servers.items() if one.is_open]
            await asyncio.gather(*map(self._give_up_unreachable, there))

    async def _give_up_unreachable(self, name: str) -> None:
        look = LeashedProcess(
            self.probe(name), lambda _: None, env=self.environment_here()
        )
        why = ""
        try:
            await asyncio.wait_for(look.reply(), _LOOK_TAKES)
        except ProcessEnd:
            # What refuses another login is there.
            if _UNREACHABLE.search(look.last_output):
                why = self.why_refused(name, look)
        except asyncio.TimeoutError:
            why = f"no answer in {_LOOK_TAKES:g} s: {self.silent_hosts([name])}"
        finally:
            look.close()
        if why:
            self.servers[name].give_up(f"it can be reached no more: {why}")

    def environment(self) -> dict[str, str]:
        """Return what the ranks of other hosts have from this process's environment."""
        return {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}

    def processes(self) -> list[psutil.Process]:
        """The processes of this host: those that hold a job, and the ranks of hosts."""
        return [one.process for one in self._leashed()]

    def _server_ended(self, name: str, server: ForkServer) -> None:
        assert server.exit_code is not None
        said = server.last_output.splitlines()[-1:]
        how = describe_exit_code(server.exit_code)
        why = (
            f"{name}: {server.lost}"
            if server.lost
            else (
                f"{self.leash(name)} has ended ({how}), and with it the ranks there"
                f"{''.join(f'; it said: {line}' for line in said)}"
            )
        )
        for launcher in server.take_engines():
            launcher.ended(None, why=why)

    def keep(self, controller: int | None) -> None:
        """Have the ranks end with the process `controller`; ``None``: with this one."""
        for process in self._leashed():
            process.keep(controller)

    def release(self) -> None:
        """Let go of ranks that are kept, on the thread of the loop."""
        self.closing = True
        for process in self._leashed():
            process.release()
        if self.job is not None:
            self.job.stop_watching()

    def _leashed(self) -> list[LeashedProcess]:
        salloc = None if self.job is None else self.job.salloc
        return [*([] if salloc is None else [salloc]), *self._all_servers()]

    def _all_servers(self) -> list[ForkServer]:
        return [*self.servers.values()]

    def record(self) -> dict[str, Any]:
        """Return what another process needs to start ranks there; see `kept_hosts`."""
        return {
            "job": None if self.job is None else self.job.id,
            "ranks": self.ranks,
            "descriptions": self.descriptions,
            "engine_args": self.engine_args,
            "options": [self.python, self.interface, self.lost_after],
        }

    def close(self) -> None:
        """End the ranks of all hosts, on the thread of the loop."""
        self.closing = True
        if self.kept:
            self.keep(None)
        deadline = time.monotonic() + _END
        servers = self._all_servers()
        for server in servers:
            server.end_input()
        for server in servers:
            server.close(max(0.1, deadline - time.monotonic()))
            for launcher in server.take_engines():
                launcher.ended(None)
        if self.job is not None:
            self.job.close(_END)

    async def why_ended(self) -> str:
        """Return why all ranks end, where it is their job that does; else nothing."""
        if self.job is None or self.closing:
            return ""
        return await self.job.why_ended(
            lambda: [one.output for one in self.servers.values()]
        )


def compare(hosts: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return what keeps hosts from working together, and other differences."""
    errors: list[str] = []
    names: dict[str, str] = {}
    for given, host in hosts.items():
        other = names.setdefault(host["name"], given)
        if other != given:
            errors.append(
                f"{other} and {given} are one host, or both call themselves "
                f"{host['name']}: name each host once, and give each a hostname"
            )
        if no_room := host["no_room"]:
            errors.append(
                f"{given}: {no_room}: make room there, or name a folder "
                "elsewhere by IPYTHONDIR, in the environment of a login there"
            )
    here = ".".join(map(str, sys.version_info[:2]))
    differences = [
        f"{given} has Python {host['python']}, this notebook {here}: a function that "
        "is pickled may not load there"
        for given, host in hosts.items()
        if host["python"].rpartition(".")[0] != here
    ]
    packages = {name for host in hosts.values() for name in host["versions"]}
    for package in sorted(packages):
        found = {
            given: host["versions"].get(package, "not installed")
            for given, host in hosts.items()
        }
        differences += _difference(package, found)
    differences += _difference("GPUs", {k: str(v["gpus"]) for k, v in hosts.items()})
    return errors, differences


def _difference(what: str, found: Mapping[str, str]) -> list[str]:
    """Return a sentence if what was found is not the same everywhere."""
    where = group_by(found, found.__getitem__)
    if len(where) < 2:
        return []
    each = (f"{value} on {', '.join(names)}" for value, names in where.items())
    return [f"hosts differ in {what}: {'; '.join(each)}"]


def _is_ours(address: str) -> bool:
    """Return whether an address is an IPv4 address of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return bool(address)


def _address_of(interface: str) -> str:
    """Return the address of an interface of this host, or the address that it is."""
    if _is_ours(interface):
        return interface
    # Of those that there are, the ones that ranks of other hosts can use.
    usable = {
        name: one.address
        for name, addresses in psutil.net_if_addrs().items()
        for one in reversed(addresses)
        if one.family is socket.AF_INET
    }
    if interface in usable:
        return usable[interface]
    raise ClusterStartError(
        f"--interface {interface}: no interface or IPv4 address of this host, which "
        f"ipyparallel's controller needs; there are {', '.join(sorted(usable))}"
    )
