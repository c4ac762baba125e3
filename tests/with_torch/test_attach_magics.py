"""The magics on the job of a script: what they show, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.engines import Job
from rankscope.magics import current_cluster
from rankscope.magics.complete import candidates, kinds_of_values
from tests.with_torch.scripts import Torchrun, until, waiting

HANG = """
x = torch.ones(4)
dist.all_reduce(x)
if rank == 1:
    wait("go")
dist.all_reduce(x)
"""

#: What takes cells, or changes the ranks.
REFUSED = (
    "%%distributed\nprint(rank)",
    "%dist_rebuild",
    "%dist_restart 1",
    "%dist_push x",
    "%dist_pull x",
    "%dist_bench",
)


def _run(shell: InteractiveShell, code: str) -> str:
    with capture_output() as seen:
        result = shell.run_cell(code)
    assert result.error_in_exec is None, seen.stdout + seen.stderr
    shown = [one.data.get("text/plain", "") for one in seen.outputs]
    return "\n".join([seen.stdout, *shown])


def _refused(shell: InteractiveShell, code: str) -> str:
    with capture_output() as seen:
        result = shell.run_cell(code)
    assert result.error_in_exec is not None, code
    return str(seen.stdout + seen.stderr)


def test_a_script_is_shown_and_takes_no_cells(
    ipython: InteractiveShell, tmp_path: Path
) -> None:
    with Torchrun(3, HANG, tmp_path) as script:
        address, key = script.printed()
        kinds = kinds_of_values(ipython)
        assert candidates("%dist_attach 127", 0, kinds) == ("127", [address])
        assert "refused this notebook" in _refused(
            ipython, f"%dist_attach {address} --key 00"
        )
        attach = f"%dist_attach {address} --key {key}"
        assert "3 ranks of train.py attached · read-only" in _run(ipython, attach)
        assert "already attached" in _run(ipython, attach)
        job = current_cluster()
        assert isinstance(job, Job)
        until(lambda: waiting(job, 0, 2), script)
        status = _run(ipython, "%dist_status")
        assert "default_pg" in status
        assert "train.py" in status
        board = _run(ipython, "%dist_board")
        assert "all_reduce" in board
        # An op that has just begun does not hang yet.
        found = "rank 1 has not entered"
        until(lambda: found in _run(ipython, "%dist_diagnose"), script)
        for code in REFUSED:
            assert "the ranks are those of a script" in _refused(ipython, code)
        assert "does not allow notebooks to abort" in _refused(ipython, "%dist_abort")
        _run(ipython, f"%dist_trace {tmp_path / 'trace.json'}")
        assert (tmp_path / "trace.json").stat().st_size > 1000
        assert "detached from 3 ranks" in _run(ipython, "%dist_shutdown")
        assert script.process.poll() is None
        _run(ipython, "%dist_attach")
        script.let("go")
        assert script.finish() == 0, script.output
        until(lambda: current_cluster() is None)
        assert "its script has ended" in _refused(ipython, "%dist_status")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(ipython: InteractiveShell, flag: str) -> None:
    assert "usage: %dist_attach [HOST:PORT]" in _run(ipython, f"%dist_attach {flag}")
