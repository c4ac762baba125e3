"""The orphan reaper ends what a killed owner leaves, even if it was killed once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.engines import Cluster
from rankscope.engines.cluster.orphan_reaper import OrphanReaper
from rankscope.engines.cluster.orphan_reaper_main import process_start_time

pytestmark = pytest.mark.processes

WAIT = 30

#: Names one process and one file, loses its reaper, names another process.
OWNER = """
import json, os, signal, subprocess, sys
from rankscope.engines.cluster.orphan_reaper import OrphanReaper
before = subprocess.Popen(["sleep", "60"])
reaper = OrphanReaper()
reaper.watch([before.pid], [sys.argv[1]])
first = reaper.pid
os.kill(first, signal.SIGKILL)
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
after = subprocess.Popen(["sleep", "60"])
reaper.watch([after.pid], [])
pids = {"reapers": [first, reaper.pid], "watched": [before.pid, after.pid]}
print(json.dumps(pids), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("no_leaks")
class TestKilledReaper:
    def test_another_reaper_gets_everything_that_was_named(
        self, tmp_path: Path
    ) -> None:
        named = tmp_path / "named"
        named.touch()
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, str(named)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner:
            assert owner.stdout is not None
            pids = json.loads(owner.stdout.readline())
            first, second = pids["reapers"]
            assert first != second
            started = {one: process_start_time(one) for one in pids["watched"]}
            assert None not in started.values()
            owner.communicate("\n", timeout=WAIT)
        until(
            lambda: all(process_start_time(p) != when for p, when in started.items()),
            WAIT,
            "both processes to end",
        )
        until(lambda: not named.exists(), WAIT, "the file to be removed")
        until(lambda: process_start_time(second) is None, WAIT, "the reaper to end")

    def test_release_needs_no_living_process(self) -> None:
        reaper = OrphanReaper()
        os.kill(reaper.pid, signal.SIGKILL)
        reaper.release()
        assert process_start_time(reaper.pid) is None
        # The owner of a released reaper needs no other one.
        released = reaper.pid
        reaper.watch([os.getpid()], [])
        assert reaper.pid == released

    def test_an_engine_restarts(self) -> None:
        with Cluster.start(1) as cluster:
            assert cluster._launched is not None
            reaper = cluster._launched.orphan_reaper
            assert reaper is not None
            killed = reaper.pid
            os.kill(killed, signal.SIGKILL)
            until(lambda: process_start_time(killed) is None, WAIT, "its end")
            cluster.restart([0])
            cluster.execute("x = rank + 7").result(WAIT)
            assert cluster.pull("x") == {0: 7}
            assert reaper.pid != killed
            assert process_start_time(reaper.pid) is not None
