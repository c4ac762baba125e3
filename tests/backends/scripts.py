"""A plain script as a rank: nothing but the environment connects it to the others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from rankscope.backends.conformance.ranks import Rank
from tests.environment import environment


def run_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in a process of its own, which is the only rank."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def script(me: Rank, program: str, *, meet: str = "") -> tuple[int, str]:
    """Run `program` in a process of its own; return its exit code and its output.

    With `meet`, a name, how a process has ended is known to the others until all have:
    an older kernel forgets it when the parent asks.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=me.folder,
            env=environment(),
        )
        try:
            if meet:
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
                me.meet(meet)
            code = process.wait(60)
        finally:
            process.kill()
        output.seek(0)
        return code, output.read().decode()
