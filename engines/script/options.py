"""JobOptions: where a script's job listens, what a notebook may do, and its metrics."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from .metrics_process import why_not

__all__ = ["JobOptions", "add_metrics", "add_script"]

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
    #: The port of 127.0.0.1 on rank 0's host at which its metrics are served.
    metrics: int | None = None

    @classmethod
    def of(
        cls,
        host: str | None = None,
        port: int | None = None,
        allow_abort: bool | None = None,
        metrics: int | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> JobOptions:
        """Return the options given, or else those of the environment."""
        port = _port("port", port, env) or 0
        metrics = _port("metrics", metrics, env)
        if metrics is not None and (why := why_not()):
            raise ValueError(f"metrics={metrics}: {why}")
        if allow_abort is None:
            allow_abort = env.get("RANKSCOPE_ALLOW_ABORT", "").lower() not in _NO
        name = "RANKSCOPE_HOST" if host is None else "host"
        host = host or env.get("RANKSCOPE_HOST") or cls.host
        if _is_unspecified(host):
            raise ValueError(
                f"{name}={host} stands for all addresses of a host; expected the one "
                "of rank 0's host at which the other ranks and notebooks reach it"
            )
        return cls(host, port, allow_abort, metrics)


def _port(name: str, given: int | None, env: Mapping[str, str]) -> int | None:
    """Return the port given, or that of the variable ``RANKSCOPE_…`` if it is set."""
    said, text = f"{name}={given}", str(given)
    if given is None:
        variable = f"RANKSCOPE_{name.upper()}"
        text = env.get(variable, "")
        said = f"{variable}={text}"
    if not text:
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{said}: expected a port, 0-65535")
    return int(text)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        type=int,
        metavar="PORT",
        help="serve what the ranks do to Prometheus, at 127.0.0.1:PORT on rank 0's "
        "host (0: a free port, which is printed); needs prometheus_client",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the script, ``-m`` for a module, and the arguments that are its own."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script, e.g. train.py")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the arguments of the script"
    )
