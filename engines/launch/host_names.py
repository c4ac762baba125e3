"""How a person names hosts, with the number of ranks on each; errors of hosts."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import psutil

from rankscope.backends.rank_sets import group_by

__all__ = ["HostSpec", "is_here", "joined_errors", "joined_names", "parse_hosts"]

#: What ``hosts=`` takes: text, ranks by host, or a hostfile.
HostSpec = str | os.PathLike[str] | Mapping[str, int]
#: Hosts that an error names at most.
_NAMED = 10


def parse_hosts(given: HostSpec) -> dict[str, int]:
    """Return the number of ranks by host, in the order of the ranks.

    `given` is as ``a:4,b:4``; a host without a number has one rank. Of a hostfile each
    line names a host: ``a:4``, ``a slots=4`` or ``a 4``, with ``#`` before a comment.
    """
    if isinstance(given, Mapping):
        return _checked(given.items())
    if isinstance(given, os.PathLike) or (
        "," not in given and Path(given).expanduser().is_file()
    ):
        lines = Path(given).expanduser().read_text(encoding="utf-8").splitlines()
        entries = [line.partition("#")[0].split() for line in lines]
        return _checked(_entry(words) for words in entries if words)
    return _checked(_entry([one.strip()]) for one in given.split(","))


def _entry(words: list[str]) -> tuple[str, int | str]:
    name, *rest = words
    for word in rest:
        key, equals, value = word.rpartition("=")
        if not equals or key == "slots":
            return name, value
    # An address of IPv6 has its own colons.
    host, colon, number = name.rpartition(":")
    if colon and ":" not in host.rpartition("]")[2]:
        return re.sub(r"[][]", "", host), number
    return re.sub(r"[][]", "", name), 1


def _checked(entries: Iterable[tuple[str, int | str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number in entries:
        # One that begins with a dash would be an option of ssh.
        if not (isinstance(name, str) and re.fullmatch(r"[^-\s;,][^\s;,]*", name)):
            raise ValueError(f"{name!r} is no host: expected a:4,b:4, or a hostfile")
        if "/" in name:
            raise ValueError(f"there is no hostfile {name}")
        if ":" in name and not _is_ipv6(name.rpartition("@")[2]):
            raise ValueError(
                f"{name!r} is no host, nor an address of IPv6: expected a:4,b:4; a "
                "port for ssh is named in ~/.ssh/config"
            )
        if isinstance(number, bool) or not str(number).isdecimal() or int(number) < 1:
            raise ValueError(f"{name}:{number}: expected a number of ranks from 1")
        if name in found:
            raise ValueError(f"{name} is named twice: give its ranks in one number")
        found[name] = int(number)
    if not found:
        raise ValueError("it names no host: expected a:4,b:4")
    return found


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def joined_errors(errors: Mapping[str, str]) -> str:
    """Return the errors of hosts, a line each; what several have in common once."""

    def without_name(name: str) -> str:
        return re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", "", errors[name])

    lines = []
    for names in group_by(errors, without_name).values():
        lines.append(f"{joined_names(names)}: {errors[names[0]]}")
    return "\n".join(lines)


def joined_names(names: Sequence[str]) -> str:
    """Return ``a, b``; of many the first ones, and how many others there are."""
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


@lru_cache
def is_here(name: str) -> bool:
    """Return whether a name or address is that of this host, which needs no ssh."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        # One that ssh's configuration alone has, or none.
        return False
    ours = {
        one.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
    }
    # A name may stand for several hosts.
    return all(ipaddress.ip_address(one).is_loopback or one in ours for one in found)
