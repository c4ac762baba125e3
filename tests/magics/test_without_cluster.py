"""The magics before there is a cluster, and after."""

from __future__ import annotations

import html
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from rankscope.backends.interface.base import Backend
from rankscope.backends.interface.registry import resolve
from rankscope.engines import Cluster, ClusterError, Job
from rankscope.engines.errors import plain
from rankscope.engines.launch import clusters, preconditions
from rankscope.engines.status import ClusterStatus
from rankscope.magics import arguments, extension, load_ipython_extension
from rankscope.magics.extension import RankscopeMagics
from rankscope.magics.output.failures import Interrupted
from tests.test_post_mortem_command import job


def test_dead_ranks_that_cannot_be_restarted_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    magics: Any = RankscopeMagics.__new__(RankscopeMagics)
    magics._show_board = lambda: None
    cluster: Any = SimpleNamespace(
        n=2,
        launcher="hosts",
        status=lambda: SimpleNamespace(ranks=[], dead=[1]),
        refused={"restart": "Slurm's job 21 ended: time limit"},
    )
    monkeypatch.setattr("rankscope.magics.extension.session.request", {})
    magics._report_running(cluster, {})
    assert capsys.readouterr().out == (
        "2 ranks · hosts · no group; rank 1 dead: Slurm's job 21 ended: time limit\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "%%distributed\n1",
        "%dist_status",
        "%dist_abort",
        "%dist_rebuild",
        "%dist_push x",
        "%dist_pull x",
        "%dist_restart",
    ],
)
def test_a_cluster_is_asked_for(ipython: InteractiveShell, code: str) -> None:
    with capture_output() as seen:
        result = ipython.run_cell(code)
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert "no cluster: run %dist_init -n 4 first" in seen.stderr
    assert "usage:" not in seen.stderr
    assert "Traceback" not in seen.stdout + seen.stderr


def test_the_files_of_a_dead_job_are_shown(
    ipython: InteractiveShell, tmp_path: Path
) -> None:
    folder = job(tmp_path, missing=1)
    with capture_output() as seen:
        frame = ipython.run_cell(f"%dist_open {folder}").result
        missing = ipython.run_cell(f"%dist_open {folder} nowhere")
    said = str(frame)
    assert said.startswith(
        f"files of {folder}, no running ranks:\nmissing ranks: rank 1"
    )
    shown = frame._repr_html_()
    assert shown.startswith(
        '<iframe sandbox="allow-scripts" title="report on the files'
    )
    assert "has not entered" in html.unescape(shown)
    assert type(missing.error_in_exec).__name__ == "UsageError"
    assert "no such file or folder: 'nowhere'" in seen.stderr


def test_a_board_is_not_pinned_and_unpinned(ipython: InteractiveShell) -> None:
    with capture_output() as seen:
        ipython.run_cell("%dist_board --pin --unpin")
    assert "--pin and --unpin exclude each other" in seen.stderr


def test_there_is_nothing_to_shut_down(ipython: InteractiveShell) -> None:
    with capture_output() as seen:
        result = ipython.run_cell("%dist_shutdown")
    assert result.error_in_exec is None
    assert "nothing to shut down" in seen.stdout


def test_a_launcher_that_fails_is_one_line(ipython: InteractiveShell) -> None:
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init --cluster-id not-running-anywhere")
    assert result.error_in_exec is not None
    assert plain(seen.stdout).startswith("%dist_init: no cluster with id")
    assert seen.stdout.count("\n") == 1
    assert "Traceback" not in seen.stdout + seen.stderr


def test_no_rank_is_started_where_gloo_is_missing(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "xoscar 0.12.2 is not installed: pip install xoscar==0.12.2."
    missing = replace(resolve("gloo"), unavailable=lambda: reason)
    monkeypatch.setitem(Backend.registry, "gloo", missing)
    monkeypatch.setattr(clusters, "prepare", None)
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init -n 3 --backend gloo")
    assert result.error_in_exec is not None
    said = plain(seen.stdout)
    assert said.startswith(f"%dist_init: --backend gloo: {reason} ")
    assert "The default, tcp, needs no further package: %dist_init -n 3" in said
    assert ".." not in said


def test_no_rank_is_started_for_gpus_alone_where_there_is_none(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "has_driver", lambda: False)
    monkeypatch.setattr(clusters, "prepare", None)
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init -n 3 --backend nccl")
    assert result.error_in_exec is not None
    said = plain(seen.stdout)
    assert said.startswith("%dist_init: --backend nccl: there is no GPU here")
    assert "--backend cpu:tcp,cuda:nccl takes those of the CPU, too" in said


def test_no_rank_is_started_where_torch_is_missing(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: None)
    monkeypatch.setattr(clusters, "prepare", None)
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init -n 3 --torch")
    assert result.error_in_exec is not None
    assert plain(seen.stdout).startswith("%dist_init: torch is not installed in ")
    assert "pip install torch" in plain(seen.stdout)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-n 2 --dry-run", "--slurm is missing"),
        ("--hosts a:2 --slurm", "--hosts and --slurm both name the hosts"),
        ('--slurm "-N 2" --engines mpi', "--engines does not go with --slurm"),
        ('--slurm "-N 2 hostname"', "'hostname' is no option of salloc"),
        ("--slurm -N 2 -t 10", "all options are within one pair of quotes, as "),
        ("-n 2 --interface eth0", "--interface is for hosts"),
    ],
)
def test_what_does_not_go_with_slurm_is_refused(
    ipython: InteractiveShell, line: str, why: str
) -> None:
    with capture_output() as seen:
        result = ipython.run_cell(f"%dist_init {line}")
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert why in seen.stderr


def test_a_job_of_slurm_without_ranks_is_refused(ipython: InteractiveShell) -> None:
    with capture_output() as seen:
        ipython.run_cell("%dist_attach --slurm 4711")
    assert "no ranks of yours are known in Slurm's job 4711" in plain(seen.stdout)


def test_an_interrupt_of_the_start_is_one_line(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(extension, "_start", interrupted)
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init -n 4")
    assert isinstance(result.error_in_exec, Interrupted)
    said = "Interrupted: %dist_init after 0.0 s; what it had started is ended\n"
    assert plain(seen.stdout + seen.stderr) == said


@pytest.mark.parametrize(
    ("there", "line", "attached"),
    [
        (["night"], "%dist_attach", "cluster night"),
        (["night", "day"], "%dist_attach", "several clusters run: name the one"),
        (["night", "day"], "%dist_attach day", "cluster day"),
        (["job", "night"], "%dist_attach", "job None"),
        (["night"], "%dist_attach 10.0.0.1:29400", "job 10.0.0.1:29400"),
        ([], "%dist_attach", "job None"),
    ],
)
def test_a_kept_cluster_is_found_without_its_name(
    ipython: InteractiveShell,
    monkeypatch: pytest.MonkeyPatch,
    there: list[str],
    line: str,
    attached: str,
) -> None:
    """As by one who comes back after an hour; the job of a script goes first."""

    def found(what: object) -> None:
        raise ClusterError(str(what))

    def cluster(connection_file: str, **_: object) -> None:
        found(f"cluster {connection_file}")

    clusters = [
        SimpleNamespace(cluster_id=one, connection_file=one, notebook="01.ipynb")
        for one in there
        if one != "job"
    ]
    monkeypatch.setattr(extension, "cluster_files", lambda: clusters)
    monkeypatch.setattr(extension, "job_files", lambda: there.count("job") * [None])
    monkeypatch.setattr(Cluster, "attach", cluster)
    monkeypatch.setattr(Job, "attach", lambda at, key: found(f"job {at}"))
    with capture_output() as seen:
        ipython.run_cell(line)
    assert attached in plain(seen.stdout)


def test_a_dry_run_shows_what_would_be_submitted(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "prepare", None)
    monkeypatch.setenv("SLURM_JOB_ID", "21")
    with capture_output() as seen:
        ipython.run_cell('%dist_init --slurm "-p gpu -N 2" --dry-run').raise_error()
        ipython.run_cell("%dist_init --slurm --dry-run -n 4").raise_error()
    submitted, inside = seen.stdout.splitlines()
    assert submitted.startswith("salloc --job-name=rankscope -p gpu -N 2 sh -c ")
    assert inside == "nothing is submitted: job 21"


class Ranks:
    """A cluster of no processes."""

    launcher, advice, owned, n = "local", "", True, 2

    def __init__(self) -> None:
        self.closed = False
        self.ranks = range(self.n)

    def shutdown(self, **_: object) -> None:
        self.closed = True

    def status(self, **_: object) -> ClusterStatus:
        return ClusterStatus("id", "default", "local", "", "running", ())


def test_running_ranks_are_replaced(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Ranks] = []

    def start(values: object, progress: object) -> Ranks:
        started.append(Ranks())
        return started[-1]

    monkeypatch.setattr(extension, "_start", start)
    ipython.user_ns.pop("np", None)
    with capture_output() as seen:
        ipython.run_cell("%dist_init -n 2")
        assert ipython.user_ns["np"] is np
        ipython.user_ns["np"] = "mine"
        refused = ipython.run_cell("%dist_init -n 3").error_in_exec
        assert "--replace swaps them for new ones" in str(refused)
        ipython.run_cell("%dist_init -n 3 --replace")
        # What was asked for is known: the same again is no other cluster.
        assert ipython.run_cell("%dist_init -n 3").error_in_exec is None
        ipython.run_cell("%dist_mode on")
        ipython.run_cell("%dist_shutdown")
    assert "%dist_mode is off: cells run in the notebook" in seen.stdout
    assert [one.closed for one in started] == [True, True]
    assert ipython.user_ns["np"] == "mine"


def test_the_metrics_are_served_until_the_cluster_is_dropped(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = pytest.importorskip("rankscope.engines.observe.metrics")
    served: list[Any] = []

    class Server:
        """Where the metrics of a cluster are."""

        def __init__(self, cluster: Ranks, port: int) -> None:
            if port == 80:
                raise ClusterError("port 80 of 127.0.0.1: Permission denied")
            self.port = port
            self.address = f"http://127.0.0.1:{port}/metrics"
            self.closed = False
            served.append(self)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(extension, "_start", lambda values, progress: Ranks())
    monkeypatch.setattr(metrics, "MetricsServer", Server)
    with capture_output() as seen:
        ipython.run_cell("%dist_init -n 2 --metrics 9464").raise_error()
        ipython.run_cell("%dist_init -n 2 --metrics 9464").raise_error()
        assert [one.closed for one in served] == [False]
        # Another port, without new ranks; one that cannot be used leaves the present.
        no_port = ipython.run_cell("%dist_init -n 2 --metrics 80").error_in_exec
        assert [one.closed for one in served] == [False]
        ipython.run_cell("%dist_init -n 2 --metrics 9466").raise_error()
        ipython.run_cell("%dist_init -n 2").raise_error()
        assert [one.closed for one in served] == [True, False]
        ipython.run_cell("%dist_init -n 2 --metrics 9465 --replace").raise_error()
        ipython.run_cell("%dist_shutdown").raise_error()
        monkeypatch.setattr(arguments, "why_not", lambda: "it is missing")
        refused = ipython.run_cell("%dist_init -n 2 --metrics 0").error_in_exec
    assert "the metrics are at http://127.0.0.1:9464/metrics\n" in seen.stdout
    assert "port 80 of 127.0.0.1" in str(no_port)
    assert [one.closed for one in served] == [True, True, True]
    assert "--metrics 0: it is missing" in str(refused)


def test_torch_and_backend_exclude_each_other(ipython: InteractiveShell) -> None:
    with capture_output() as seen:
        result = ipython.run_cell("%dist_init -n 3 --torch --backend gloo")
    assert type(result.error_in_exec).__name__ == "UsageError"
    assert "for torch's group: --torch gloo" in plain(seen.stderr)


@pytest.mark.parametrize("name", ["dist_init", "dist_push", "dist_status"])
def test_the_help_is_the_documentation(ipython: InteractiveShell, name: str) -> None:
    magic = ipython.find_line_magic(name)
    assert f"usage: %{name}" in magic.__doc__


def test_the_extension_loads_with_an_unknown_ipykernel(
    ipython: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose shell channel thread has none of the names that are known."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "7.3.9")

    class Kernel:
        shell_channel_thread = SimpleNamespace()

        def do_inspect(self, code: str, cursor_pos: int) -> None: ...

    kernel = Kernel()
    monkeypatch.setattr(ipython, "kernel", kernel, raising=False)
    load_ipython_extension(ipython)
    assert vars(kernel.shell_channel_thread) == {}
