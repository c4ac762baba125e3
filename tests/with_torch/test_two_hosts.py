"""A job whose ranks are on two hosts, as `two_hosts_job` sees it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.cluster.two_hosts import command_of, why_not
from tests.environment import environment
from tests.with_torch import two_hosts_job


@pytest.mark.timeout(300)
def test_a_notebook_sees_the_ranks_of_both_hosts(tmp_path: Path) -> None:
    if why := why_not():
        pytest.skip(why)
    ran = subprocess.run(
        command_of(two_hosts_job.__file__, tmp_path),
        # Rank 0 is killed, and what its file says cannot be checked on another host.
        env=environment(JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime")),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen = {one["step"]: one for one in map(json.loads, ran.stdout.splitlines())}
    assert seen["seen"]["hosts"] == ["host-a", "host-a", "host-b", "host-b"]
    assert seen["hang"]["culprits"] == [3]
    assert "on host-b) has not answered" in seen["stopped"]["text"]
    assert "other ranks of host-b answer" in seen["stopped"]["text"]
    assert seen["aborted"]["ranks"] == [0, 1, 2, 3]
    assert "on host-b): killed by SIGKILL" in seen["killed"]["why"]
