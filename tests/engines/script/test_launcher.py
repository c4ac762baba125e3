"""``python -m rankscope.run``: the ranks of a script, their ends, and fresh ones."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import psutil
import pytest

from rankscope.backends.conformance.waiting import until
from rankscope.backends.observe.verdicts import Fault
from rankscope.engines import Job
from rankscope.engines.script import launcher
from rankscope.engines.script.launcher import Launcher, Script
from rankscope.engines.script.rank_process import RankProcess
from rankscope.engines.wire.job_file import job_files
from rankscope.run import main

#: Seconds after which what is waited for fails the test.
DEADLINE = 60.0

BEGIN = """
import os, psutil, signal, subprocess, sys, time
import numpy as np
import rankscope as dist
rank = int(os.environ["RANK"])
"""


class Run:
    """A launcher with the ranks of a script."""

    def __init__(self, folder: Path, code: str, *options: str) -> None:
        script = folder / "train.py"
        script.write_text(BEGIN + dedent(code))
        self.process = subprocess.Popen(
            [*(sys.executable, "-m", "rankscope.run"), *options, str(script), "--lr=1"],
            env={**os.environ, "RANKSCOPE_REPORT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        out, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, out, err

    def wait_for(self, lines: int) -> list[psutil.Process]:
        """Return the ranks once so many lines are on stdout."""
        assert self.process.stdout is not None
        for _ in range(lines):
            assert self.process.stdout.readline()
        return psutil.Process(self.process.pid).children()


@pytest.fixture
def ended() -> Iterator[list[psutil.Process]]:
    """Take processes that have to be gone at the end of the test."""
    found: list[psutil.Process] = []
    yield found
    _, living = psutil.wait_procs(found, timeout=10)
    for one in living:
        one.kill()
    assert not living


def waits(job: Job, rank: int) -> bool:
    """Whether a rank has an op in flight."""
    return any(one.oldest for one in job.status(fresh=True).ranks[rank].groups)


@pytest.mark.processes
def test_the_ranks_are_seen_and_their_output_has_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a notebook, which may abort our own groups; nothing of the job is left."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RANKSCOPE_ALLOW_ABORT", "1")
    code = """
    import rankscope.torch
    rankscope.torch.watch()  # changes nothing
    dist.init_process_group(timeout=30)
    x = np.ones(1)
    dist.all_reduce(x)
    names = "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"
    print(x.item(), *(os.environ[name] for name in names), sys.argv[1:])
    while rank == 1 and not os.path.exists(sys.argv[0] + ".go"):
        time.sleep(0.01)
    try:
        dist.all_reduce(x)
    except dist.DistAbortedError as error:
        print(*error.culprits, error.reason)
    print("no end of line", end="", file=sys.stderr)
    dist.destroy_process_group()
    """
    logs = tmp_path / "logs"
    run = Run(tmp_path, code, "-n", "2", "--log-dir", str(logs))
    until(job_files, DEADLINE, "the file of the job")
    with Job.attach(attach_timeout=DEADLINE) as job:
        until(lambda: waits(job, 0), DEADLINE, "rank 0 in its op")
        assert all(one.group("default") for one in job.status().ranks)
        (verdict,) = until(job.diagnose, DEADLINE, "the verdict")
        assert (verdict.fault, verdict.culprits) == (Fault.RANK_BUSY_ELSEWHERE, (1,))
        assert set(job.abort(reason="enough")) == {0, 1}
        (tmp_path / "train.py.go").touch()
        status, out, err = run.finish()
        until(lambda: job.closed, DEADLINE, "the end of the job")
    assert job_files() == []
    assert status == 0, err
    told = out.splitlines()
    for rank in (0, 1):
        assert f"[rank {rank}] 2.0 {rank} 2 2 0 ['--lr=1']" in told
        (why,) = (one for one in told if one.startswith(f"[rank {rank}] 1 rank 1 has "))
        assert "has not entered all_reduce #2 (train.py:" in why
        assert why.endswith("; enough")
    assert len(told) == 4
    attach, *others = sorted(
        err.splitlines(), key=lambda one: "to see this job" not in one
    )
    assert attach.startswith("[rank 0] rankscope: to see this job in a notebook: ")
    assert sorted(others) == ["[rank 0] no end of line", "[rank 1] no end of line"]
    assert "2.0 1 2 2 0" in (logs / "rank-1.log").read_text()


@pytest.mark.processes
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path: Path) -> None:
    code = """
    if rank == 1:
        print("no such file: data.npz\\n", file=sys.stderr, flush=True)
        os._exit(3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    time.sleep(600)
    """
    status, _, err = Run(tmp_path, code, "-n", "2").finish()
    assert status == 3
    last = err.splitlines()[-1]
    assert last.startswith("rankscope.run: failed: rank 1 (pid ")
    assert "): exit code 3 after " in last
    assert last.endswith("; its last line on stderr: no such file: data.npz")
    assert "SIGTERM to rank 0" in err


@pytest.mark.processes
def test_only_the_rank_that_died_is_started_again(tmp_path: Path) -> None:
    code = """
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("started", count)
    done = sys.argv[0] + ".done"
    if rank == 1 and count == "0":
        child = subprocess.Popen(["sleep", "600"])
        with open(done + ".child", "w") as file:
            file.write(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with open(done + ".child") as file:
            pid = int(file.read())
        try:
            while psutil.Process(pid).status() != "zombie":
                time.sleep(0.01)
        except psutil.NoSuchProcess:
            pass
        open(done, "w").close()
    while not os.path.exists(done):
        time.sleep(0.01)
    """
    run = Run(tmp_path, code, "-n", "2", "--max-restarts", "1")
    status, out, err = run.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] started 0",
        "[rank 1] started 0",
        "[rank 1] started 1",
    ]
    assert "killed by SIGKILL after" in err
    assert "started again (1 of 1)" in err


@pytest.mark.processes
def test_a_rank_that_always_fails_ends_the_job(tmp_path: Path) -> None:
    status, _, err = Run(
        tmp_path, "sys.exit(4)", "-n", "1", "--max-restarts", "1"
    ).finish()
    assert status == 4
    assert "started again (1 of 1)" in err
    assert "failed: rank 0" in err.splitlines()[-1]


@pytest.mark.processes
def test_ctrl_c_ends_the_ranks_and_a_second_one_kills_them(
    tmp_path: Path, ended: list[psutil.Process]
) -> None:
    code = """
    signal.signal(signal.SIGINT, lambda *_: print("not yet"))
    print("here")
    while True:
        time.sleep(0.1)
    """
    run = Run(tmp_path, code, "-n", "2")
    ended += run.wait_for(2)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(2)
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.finish()
    assert status == 128 + signal.SIGINT
    assert time.monotonic() - began < 4
    assert "ranks 0–1 did not end: SIGKILL" in err
    assert "Traceback" not in err


@pytest.mark.processes
def test_no_rank_outlives_a_launcher_that_is_killed(
    tmp_path: Path, ended: list[psutil.Process]
) -> None:
    run = Run(tmp_path, 'print("here")\ntime.sleep(600)', "-n", "2")
    ended += run.wait_for(2)
    assert len(ended) == 2
    run.process.kill()
    run.finish()


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_are_ranks_ends_it_as_a_later_one(signum: int) -> None:
    code = f"""
    import os, runpy, sys

    class Interrupting:
        def find_spec(self, name, *_):
            if name == "rankscope.engines.script.launcher":
                os.kill(os.getpid(), {signum:d})

    sys.meta_path.insert(0, Interrupting())
    sys.argv[1:] = ["-m", "this"]
    runpy.run_module("rankscope.run", run_name="__main__", alter_sys=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + signum, "")


def test_a_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    monkeypatch.setenv("RANKSCOPE_KEY", "of the test")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    one = Launcher(1, Script("train.py"))
    try:
        with one._signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
        assert one._events.get_nowait() == signal.SIGTERM
    finally:
        one._close()
        signal.signal(signal.SIGHUP, before)


def test_a_rank_does_not_block_where_its_output_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rank = object.__new__(RankProcess)
    rank.rank = 2
    read, write = os.pipe()
    with open("/dev/full", "wb", 0) as rank._log, open(read, "rb") as source:
        with open(write, "wb") as rank_writes:
            rank_writes.write(b"one\ntwo")
        out = io.TextIOWrapper(io.BytesIO())
        rank._forward(source, out)
    assert out.buffer.getvalue() == b"[rank 2] one\n[rank 2] two\n"
    told = capsys.readouterr().err
    assert told.startswith("rankscope.run: the log of rank 2 is not written on: ")
    assert told.count("\n") == 1


def test_the_last_words_of_a_rank_are_not_how_to_attach(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rank = object.__new__(RankProcess)
    rank.rank, rank.last_words, rank._log = 0, "", None
    read, write = os.pipe()
    with open(read, "rb") as source:
        with open(write, "wb") as rank_writes:
            rank_writes.write(
                b"no such file\n"
                b"rankscope: to see this job in a notebook: %dist_attach h:1 --key 5f\n"
                b"rankscope: the metrics of h:1 are at http://h:2/metrics\n"
            )
        rank._forward(source, sys.stderr)
    assert rank.last_words == "no such file"
    assert "[rank 0] rankscope: to see this job" in capfd.readouterr().err


def test_a_stopped_rank_is_told_again_and_again_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher waited for it without a word, as for one that computes."""
    now, stopped, one = [0.0], {41}, object.__new__(Launcher)
    one._ranks = {0: _of_pid(41), 1: _of_pid(42)}
    one._stopped, one._events = {}, queue.SimpleQueue()
    monkeypatch.setattr(launcher, "is_stopped", stopped.__contains__)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(launcher, "LOOK", 5.0)
    for _ in range(10):
        one._tell_stopped()
        now[0] += launcher.LOOK
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "rankscope.run: rank 0 (pid 41) has been stopped for 5 s (SIGSTOP, or a "
        "debugger): kill -CONT 41 continues it, Ctrl-C ends all ranks"
    )
    assert [line.split(" for ")[1].split()[0] for line in told] == [
        *("5", "10", "20", "40")
    ]
    stopped.clear()
    one._tell_stopped()
    assert one._stopped == {}


@pytest.mark.processes
def test_the_end_of_torchs_store_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks that come to `init_process_group` later would wait in silence."""
    one = object.__new__(Launcher)
    one._torch_store = None
    one._tell_store_ended()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one._torch_store:
        one._tell_store_ended()
        assert capsys.readouterr().err == ""
        one._torch_store.kill()
        os.waitid(os.P_PID, one._torch_store.pid, os.WEXITED | os.WNOWAIT)
        one._tell_store_ended()
        one._tell_store_ended()
    told = capsys.readouterr().err
    assert told.startswith(
        "rankscope.run: the process with torch's store has ended (-9)"
    )
    assert told.count("\n") == 1


def _of_pid(pid: int) -> RankProcess:
    process = object.__new__(RankProcess)
    process.pid = pid
    return process


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-n", "0", __file__], "-n 0: expected the number of ranks, from 1"),
        (["--max-restarts", "-1", __file__], "--max-restarts -1: expected 0 or more"),
        (["--master-port", "70000", __file__], "expected a port, 0-65535"),
        (["nosuch.py"], "nosuch.py: no such file"),
        (["-m", "nosuch.module"], "-m nosuch.module: no such module"),
        (["--log-dir", __file__, __file__], "File exists"),
    ],
)
def test_a_wrong_argument_is_told(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert says in capsys.readouterr().err
