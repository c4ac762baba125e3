"""The channel of a script's job: its keys, its file and its queues."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankscope.backends import TCPStore
from rankscope.backends.conformance.waiting import until
from rankscope.backends.errors import DistNetworkError
from rankscope.engines import ClusterError, Job
from rankscope.engines.cluster import job_registry
from rankscope.engines.cluster.job_registry import JobRegistry
from rankscope.engines.script.options import JobOptions
from rankscope.engines.wire import job_channel
from rankscope.engines.wire.job_channel import QueueReader, append
from rankscope.engines.wire.job_file import JobFile, job_files
from rankscope.engines.wire.job_keys import (
    channel_key,
    key_of_environment,
    sign,
    verifies,
)

#: Seconds after which a message that did not arrive fails the test.
DEADLINE = 60.0


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of its own."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    return tmp_path


#: Rank 0 as the server of a job: two ranks have published their status.
SERVER = """
import json, sys, threading
from rankscope.backends import TCPStore
from rankscope.engines.wire.job_channel import status_key
store = TCPStore("127.0.0.1", 0, is_master=True, timeout=60, key=b"k")
for rank in range(2):
    status = {"pid": rank, "host": "node", "busy": False, "groups": []}
    store.set(status_key(rank), json.dumps(status))
print(store.port, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """The channel of a job without ranks."""
    made = TCPStore("127.0.0.1", 0, is_master=True, timeout=DEADLINE, key=b"k")
    yield made
    made.close()


def _file(**changes: object) -> JobFile:
    job = JobFile("127.0.0.1", 29400, "ab", "train.py", os.getpid(), "elsewhere")
    return replace(job, **changes)  # type: ignore[arg-type]


def test_each_job_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_KEY", "secret")
    assert channel_key("a") == channel_key("a") != channel_key("b")
    # A notebook that has the variable needs no file and no typed key.
    assert key_of_environment() == channel_key("")
    assert verifies("a", b"text", sign("a", b"text"))
    assert not verifies("a", b"other", sign("a", b"text"))
    assert not verifies("b", b"text", sign("a", b"text"))
    monkeypatch.setenv("RANKSCOPE_KEY", "another")
    assert key_of_environment() != channel_key("a")


def test_without_the_variable_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    assert key_of_environment() is None


@pytest.mark.processes
def test_a_file_is_for_its_user_alone_and_goes_with_its_process(runtime: Path) -> None:
    job = _file(node=socket.gethostname())
    job.write()
    assert job.path.stat().st_mode & 0o777 == 0o600
    (runtime / "rankscope-job-x.json").write_text("{}")
    assert job_files() == [job]
    job.remove()
    job.remove()
    assert job_files() == []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    killed = replace(job, pid=ended.pid)
    killed.write()
    # A zombie, as one of `rankscope.run`.
    assert job_files() == []
    ended.wait()
    killed.write()
    # Of a process of another host it is not known.
    far = _file(pid=ended.pid, port=29401, host="10.0.0.1")
    far.write()
    # Nobody connects to the loopback of another host.
    _file(port=29402).write()
    assert job_files() == [far]
    assert not killed.path.exists()


def test_a_queue_is_read_in_order_by_one_reader(store: TCPStore) -> None:
    read: queue.Queue[bytes] = queue.Queue()
    QueueReader(store, "q", read.put)
    sent = [b"%d" % one for one in range(3 * job_channel._KEPT)]
    for message in sent:
        append(store, "q", message)
    assert [read.get(timeout=DEADLINE) for _ in sent] == sent
    # What was read is deleted.
    assert store.num_keys() < 2 * job_channel._KEPT


def test_the_first_message_may_come_as_soon_as_there_is_a_queue(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_set = TCPStore.compare_set

    def compare_set_and_append(*arguments: Any) -> bytes:
        monkeypatch.setattr(TCPStore, "compare_set", compare_set)
        found = compare_set(*arguments)
        append(store, "q", b"1")
        return found

    monkeypatch.setattr(TCPStore, "compare_set", compare_set_and_append)
    read: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    QueueReader(store, "q", read.put)
    assert read.get(timeout=DEADLINE) == b"1"


def test_a_queue_of_a_fresh_process_begins_behind_what_is_there(
    store: TCPStore,
) -> None:
    dead: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    QueueReader(store, "q", dead.put)
    append(store, "q", b"1")
    assert dead.get(timeout=DEADLINE) == b"1"
    until(lambda: store.get("q/next") == b"2")
    # Its reader died amid these two.
    store.multi_set(["q/2", "q/3"], [b"2", b"3"])
    fresh: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    QueueReader(store, "q", fresh.put)
    append(store, "q", b"4")
    assert fresh.get(timeout=DEADLINE) == b"4"


def test_a_reader_goes_on_after_a_request_without_an_answer(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its process was stopped for longer than a request may take."""
    read: queue.Queue[bytes] = queue.Queue()
    QueueReader(store, "q", read.put)
    failures = [DistNetworkError("does not answer"), DistNetworkError("nor now")]
    store_set = TCPStore.set

    def fails(self: TCPStore, key: str, value: bytes) -> None:
        if failures:
            raise failures.pop()
        store_set(self, key, value)

    monkeypatch.setattr(TCPStore, "set", fails)
    for message in (b"1", b"2", b"3"):
        append(store, "q", message)
    assert [read.get(timeout=DEADLINE) for _ in range(3)] == [b"1", b"2", b"3"]
    assert failures == []
    assert read.empty()


def test_a_shared_queue_is_read_by_all_from_its_start(store: TCPStore) -> None:
    first: queue.Queue[bytes] = queue.Queue()
    second: queue.Queue[bytes] = queue.Queue()
    QueueReader(store, "q", first.put, shared=True)
    append(store, "q", b"1")
    QueueReader(store, "q", second.put, shared=True)
    append(store, "q", b"2")
    for one in (first, second):
        assert [one.get(timeout=DEADLINE) for _ in range(2)] == [b"1", b"2"]


@pytest.mark.processes
def test_a_notebook_detaches_from_a_job_whose_rank_0_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread waits for the status then, and for seconds."""
    monkeypatch.setattr(job_registry, "READ_WAIT", 3600.0)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        job = JobRegistry(TCPStore("127.0.0.1", port, timeout=DEADLINE, key=b"k"), 2)
        until(lambda: all(slot.summary_at for slot in job.slots), DEADLINE)
        process = psutil.Process(server.pid)
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, DEADLINE)
        waits = threading.Event()
        multi_get = TCPStore.multi_get

        def getting(self: TCPStore, *args: Any) -> list[bytes]:
            waits.set()
            return multi_get(self, *args)

        monkeypatch.setattr(TCPStore, "multi_get", getting)
        assert waits.wait(DEADLINE)
        job.close()
        assert not job._thread.is_alive()
        # It has not ended.
        assert job.ended is None
    finally:
        server.kill()
        server.communicate()


def test_the_options_are_those_given_or_of_the_environment() -> None:
    assert JobOptions.of(env={}) == JobOptions("127.0.0.1", 0, False)
    env = {
        "RANKSCOPE_HOST": "10.0.0.1",
        "RANKSCOPE_PORT": "29400",
        "RANKSCOPE_ALLOW_ABORT": "1",
        "RANKSCOPE_METRICS": "9464",
    }
    assert JobOptions.of(env=env) == JobOptions("10.0.0.1", 29400, True, 9464)
    assert JobOptions.of("::1", 1, False, 0, env) == JobOptions("::1", 1, False, 0)
    for given in (
        {"port": 70000},
        {"metrics": -1},
        {"env": {"RANKSCOPE_PORT": "http"}},
        {"env": {"RANKSCOPE_METRICS": "yes"}},
    ):
        with pytest.raises(ValueError, match="expected a port"):
            JobOptions.of(**given)
    with pytest.raises(ValueError, match="^host=:: stands for all addresses of a host"):
        JobOptions.of("::")
    with pytest.raises(ValueError, match="expected the one of rank 0's host"):
        JobOptions.of(env={"RANKSCOPE_HOST": "0.0.0.0"})


def test_what_cannot_be_attached_to_is_said(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    with pytest.raises(ClusterError, match="no job of this user runs here"):
        Job.attach()
    with pytest.raises(ClusterError, match="is no address: HOST:PORT"):
        Job.attach("29400")
    with pytest.raises(ClusterError, match=r"is not known: give .* --key KEY"):
        Job.attach("127.0.0.1:29400")
    _file().write()
    with pytest.raises(ClusterError, match="no job of this user runs here"):
        Job.attach()
    # Its key is known where a tunnel leads to it.
    with pytest.raises(ClusterError, match="no job listens at 127.0.0.1:29400"):
        Job.attach("127.0.0.1:29400")
    _file(host="10.0.0.1").write()
    _file(host="10.0.0.1", port=29401).write()
    with pytest.raises(ClusterError, match="several jobs run"):
        Job.attach()
