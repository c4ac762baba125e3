"""JobOptions: where a script's job listens, and what a notebook may do.

And the arguments of commands that name a script.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["JobOptions", "add_script"]

#: Values of a variable that mean no.
_NO = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class JobOptions:
    """How a job is published."""

    #: The address of rank 0's host that notebooks, and the other ranks, connect to.
    host: str = "127.0.0.1"
    #: The port; 0: a free one.
    port: int = 0
    #: Whether a notebook may abort groups.
    allow_abort: bool = False

    @classmethod
    def of(
        cls,
        host: str | None = None,
        port: int | None = None,
        allow_abort: bool | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> JobOptions:
        """Return the options given, or else those of the environment.

        ``RANKSCOPE_HOST``, ``RANKSCOPE_PORT`` and ``RANKSCOPE_ALLOW_ABORT``. Raises
        `ValueError` for a port that is none, and for an address that is no host's.
        """
        if port is None:
            text = env.get("RANKSCOPE_PORT") or "0"
            if not text.isdecimal():
                raise ValueError(f"RANKSCOPE_PORT={text}: expected a port, 0-65535")
            port = int(text)
        if not 0 <= port <= 65535:
            raise ValueError(f"port={port}: expected a port, 0-65535")
        if allow_abort is None:
            allow_abort = env.get("RANKSCOPE_ALLOW_ABORT", "").lower() not in _NO
        name = "RANKSCOPE_HOST" if host is None else "host"
        host = host or env.get("RANKSCOPE_HOST") or cls.host
        if _is_unspecified(host):
            raise ValueError(
                f"{name}={host} stands for all addresses of a host; expected the one "
                "of rank 0's host at which the other ranks and notebooks reach it"
            )
        return cls(host, port, allow_abort)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script, ``-m`` for a module, and the arguments that are its own."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, e.g. train.py")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the script"
    )
