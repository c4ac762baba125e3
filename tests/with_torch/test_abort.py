"""Abort and rebuild of torch's own groups, in real processes with torch's gloo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rankscope.backends import TCPStore

PROGRAMS = Path(__file__).with_name("abort_ranks.py")


def run(program: str, size: int) -> list[Any]:
    """Run `program` on `size` ranks; return what each of them printed last."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error::ResourceWarning", str(PROGRAMS)),
                *(program, str(rank), str(size), str(store.port)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as reading:
        try:
            results = [reading.submit(one.stdout.readline) for one in ranks]
            for result in as_completed(results):
                if not result.result():
                    _show_stacks(ranks)
            lines = [result.result() for result in results]
            assert all(lines), "a rank ended without a result: see its traceback"
            return [json.loads(line) for line in lines]
        finally:
            _end(ranks)
            store.close()


def _show_stacks(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """Have the ranks print where they are, and end them: they may wait for ever."""
    for one in ranks:
        one.send_signal(signal.SIGUSR1)
    _end(ranks)


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes, and kill those that go on."""
    for one in ranks:
        one.stdin.close()
    for one in ranks:
        try:
            one.wait(10)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def test_each_op_ends_within_a_second_and_the_group_is_rebuilt() -> None:
    first, second = run("each_op", 2)
    assert first["sums"] == second["sums"] == [2.0] * first["generation"]
    assert len(first["seconds"]) == first["generation"] == 30
    assert max(first["seconds"].values()) < 1.0, first["seconds"]


def test_thirty_faults_leave_the_weights_and_nothing_else() -> None:
    for rank in run("thirty_faults", 2):
        assert all(rank["equal"])
        assert rank["after"] == rank["before"]


def test_a_model_is_wrapped_anew_with_its_options() -> None:
    for rank in run("rewrapped", 2):
        assert rank["another"]
        assert all(rank["parameters"])
        assert rank["options"] == [True, 3]
        assert rank["reduced"]


def test_the_error_of_an_aborted_op_says_why_and_no_other_does() -> None:
    found, _ = run("explained", 2)
    kind, text = found.pop("error")
    assert kind == "DistAbortedError"
    assert "a branch not taken" in text
    assert found == {"once": True, "cause": True, "own": True, "next cell": True}
