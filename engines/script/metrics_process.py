"""The process of ``rankscope metrics`` beside rank 0, until its job ends.

In a process of its own: a scrape takes no time of the script, and no lock of it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from rankscope.backends.install import pip_install, with_extra

__all__ = ["serve_metrics", "why_not"]


def why_not() -> str:
    """Return why no metrics can be served here; empty if they can."""
    if find_spec("prometheus_client") is None:
        install = pip_install(with_extra("metrics"))
        return f"the metrics are written by prometheus_client: {install}"
    return ""


def serve_metrics(address: str, port: int) -> subprocess.Popen[bytes]:
    """Serve the metrics of the job at `address` at `port`, until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "rankscope", "metrics", address, "-p", str(port)],
        stdin=subprocess.DEVNULL,
        # The standard output is the script's.
        stdout=2,
    )
