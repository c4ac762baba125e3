"""A plain script as a rank: nothing but the environment connects it to the others."""

from __future__ import annotations

import subprocess
import sys

from rankscope.backends.conformance.ranks import Rank
from tests.environment import environment


def script(me: Rank, program: str) -> tuple[int, str]:
    """Run `program` in a process of its own; return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=me.folder,
        env=environment(),
    )
    return done.returncode, done.stdout + done.stderr
