"""A rank of a script that goes from the channel of a rank 0 to that of the next one."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.backends.conformance.waiting import until
from rankscope.backends.launch_variables import STORE
from rankscope.backends.stores.tcp import TCPStore
from rankscope.engines import Job
from rankscope.engines.script import meeting, metrics_process, publication
from rankscope.engines.script.meeting import Channel
from rankscope.engines.script.options import JobOptions
from rankscope.engines.script.publication import Publication

DEADLINE = 30.0


def test_a_loss_amid_a_publication_that_is_told_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKSCOPE_KEY", "of the test")
    monkeypatch.setenv(STORE, "127.0.0.1:1/a job/2")
    monkeypatch.setenv("MASTER_PORT", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setattr(publication, "_TOLD", DEADLINE)
    told: list[Any] = []
    monkeypatch.setattr(TCPStore, "watch_loss", lambda _, tell: told.append(tell))
    servers = [TCPStore("127.0.0.1", 0, is_master=True) for _ in range(2)]
    channels = [
        Channel(TCPStore("127.0.0.1", one.port), "", 1, 2, f"at {place}", None)
        for place, one in enumerate(servers)
    ]
    met: list[set[str]] = []

    def meet(torch: Any, options: Any, stopped: Any, lost: Any = ()) -> Channel:
        met.append(set(lost))
        return channels[len(met) - 1]

    monkeypatch.setattr(publication, "meet", meet)
    torch: Any = None
    published = Publication(torch, JobOptions())
    until(published.joined.is_set, DEADLINE, "the first channel")
    summary = published._summary

    def loses() -> str:
        published._summary = summary
        servers[0].close()
        until(lambda: channels[0].store.lost, DEADLINE, "the loss")
        return "{}"

    published._summary = loses
    published._until = math.inf
    published._wake.set()
    until(lambda: channels[0].store.lost, DEADLINE, "the loss")
    told[0]("rank 0 has died")
    until(lambda: servers[1].check(["status/1"]), DEADLINE, "the second channel")
    assert met == [set(), {"at 0"}]
    published.end()
    until(lambda: servers[1].check(["ended/1"]), DEADLINE, "the goodbye")
    servers[1].close()


def test_what_fails_because_the_script_ends_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python starts no thread at its end, which is before `end` is called."""
    monkeypatch.setattr(publication, "_TOLD", DEADLINE)
    failed = threading.Event()

    def meet(*_: Any) -> Channel:
        failed.set()
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(publication, "meet", meet)
    torch: Any = None
    published = Publication(torch, JobOptions())
    assert failed.wait(DEADLINE)
    published.end()
    published._thread.join(DEADLINE)
    assert not published._thread.is_alive()
    assert caplog.messages == []
    monkeypatch.setattr(publication, "_TOLD", 0.0)
    published = Publication(torch, JobOptions())
    published._thread.join(DEADLINE)
    published.end()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("this rank is not shown to notebooks: can't")


def scraped(address: str) -> dict[str, float]:
    """The ranks by state, as the library's parser reads them."""
    with urllib.request.urlopen(address, timeout=DEADLINE) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    (states,) = (one for one in families if one.name == "rankscope_ranks")
    return {one.labels["state"]: one.value for one in states.samples}


@pytest.mark.processes
def test_rank_0_has_its_metrics_served_until_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RANKSCOPE_KEY", raising=False)
    opened: list[Channel] = []

    def meet(torch: Any, options: JobOptions, *_: Any) -> Channel:
        opened.append(meeting._open(options, "", 1))
        return opened[0]

    monkeypatch.setattr(publication, "meet", meet)
    torch: Any = None
    published = Publication(torch, JobOptions(metrics=0))
    said = ""

    def served() -> re.Match[str] | None:
        nonlocal said
        out, err = capfd.readouterr()
        # The script's own output stays as it is.
        assert out == ""
        said += err
        return re.search(r"the metrics of \S+ are at (\S+) until it ends", said)

    try:
        found = until(served, DEADLINE, "the address")
        assert found is not None
        assert scraped(found[1]) == {"idle": 0, "busy": 1, "unreachable": 0, "dead": 0}
        # A scraper reads no verdict: the ranks are to write a report of a hang.
        assert not published.is_attended
        with Job.attach():
            assert published.is_attended
    finally:
        published.end()
    process = published._metrics
    assert process is not None
    assert process.returncode is not None


@pytest.mark.processes
def test_the_metrics_end_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    code = """
    import os, signal, sys, time
    from rankscope.engines.script import meeting, publication
    from rankscope.engines.script.options import JobOptions
    from rankscope.engines.script.publication import Publication
    publication.meet = lambda torch, options, *_: meeting._open(options, "", 1)
    published = Publication(None, JobOptions(metrics=0))
    published.joined.wait()
    while published._metrics is None: time.sleep(0.01)
    print(published._metrics.pid, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen(
        [sys.executable, "-c", "if True:" + code],
        env={**os.environ, "JUPYTER_RUNTIME_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stderr is not None
        server = psutil.Process(int(rank.stdout.readline()))
        while "the metrics of" not in rank.stderr.readline():
            assert server.is_running()
        rank.stdin.write("go\n")
        rank.stdin.flush()
        # It ends with the last process that has it.
        rank.stderr.read()
    until(lambda: not server.is_running(), DEADLINE, "the end of the process")


def test_metrics_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_process, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^metrics=0: .* pip install .*\[metrics\]"):
        JobOptions.of(metrics=0)
