"""A new kernel comes back to ranks that its predecessor left in a hang."""

from __future__ import annotations

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.backends.conformance.leaks import lives
from rankscope.backends.conformance.waiting import until
from rankscope.engines.errors import plain
from rankscope.magics import current_cluster
from tests.engines.cluster.faults import WAIT, left_hanging

pytestmark = pytest.mark.processes


def test_everything_works_from_the_new_kernel(ipython: InteractiveShell) -> None:
    processes = left_hanging("left-behind")

    def typed(*lines: str) -> str:
        with capture_output() as seen:
            ran = ipython.run_cell("\n".join(lines), store_history=True)
        assert ran.success, ran
        shown = [str(one.data.get("text/plain", "")) for one in seen.outputs]
        return plain("\n".join([seen.stdout, seen.stderr, *shown]))

    try:
        typed("%dist_init --cluster-id left-behind")
        status = typed("%dist_status")
        assert "all_reduce" in status
        assert "pair" in status
        told = until(lambda: _told(typed("%dist_diagnose")), WAIT, "the verdict")
        assert ": it is at cell 7 line 4; ranks" in " ".join(told.split())
        typed("%dist_abort")
        # Rank 2 is where no abort reaches: it gets a new engine, and only it.
        typed("%dist_restart 2")
        typed("%dist_rebuild")
        said = typed(
            "%%distributed",
            "x = np.ones(3)",
            "dist.all_reduce(x)",
            "print(x[0], globals().get('mine'))",
        )
        assert "4.0 None" in said
        for rank in (0, 1, 3):
            assert f"4.0 {rank * 100}" in said
    finally:
        cluster = current_cluster()
        assert cluster is not None
        # It lets go of ranks that it attached to, and leaves them running.
        typed("%dist_shutdown")
        assert all(lives(psutil.Process(pid)) for pid in cluster.pids.values())
        typed("%dist_attach left-behind")
        typed("%dist_shutdown --all")
        assert current_cluster() is None
    until(lambda: not any(map(lives, processes)), WAIT, "the cluster to end")


def _told(text: str) -> str:
    return text if "rank 2" in text else ""
