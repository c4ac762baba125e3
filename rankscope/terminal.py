"""``rankscope status`` and the like: act on a running cluster from a terminal.

The commands attach to the cluster beside the notebook: they need nothing of its kernel,
which may hang, be stopped or have been killed.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rankscope.backends.install import pip_install, with_extra
from rankscope.backends.printable import printable
from rankscope.backends.rank_sets import name_ranks
from rankscope.command_output import DONE, FAILED, HANGS, fail, say
from rankscope.engines import ClusterError
from rankscope.engines.launch.cluster_file import ClusterFile, cluster_files, end_reason
from rankscope.engines.wire.job_file import JobFile, job_files
from rankscope.widgets.tables import aligned

if TYPE_CHECKING:
    from rankscope.engines import Cluster, Job

__all__ = ["run"]

#: The reason of an abort and its author, as the errors on the ranks show them.
REASON, BY = "abort requested from a terminal", "a terminal"

#: Seconds that an engine gets to say which rank it has; then the cluster's file does.
ATTACH_WAIT = 1.5
#: Seconds in which ranks may send their status; later ones are shown as silent.
ANSWER = 0.8
#: Seconds between two looks at whether the ranks whose metrics are served have ended.
END_PERIOD = 1.0
#: Seconds between two updates of `rankscope top` at least.
SHORTEST = 0.1


_NONE = "no cluster or watched job of yours runs here"
_UNMET = (
    "no cluster of yours runs here, and nobody can attach to your watched job: its "
    "ranks have not met yet, or rank 0 has ended; rankscope diagnose says where they "
    "are"
)


@dataclass(frozen=True)
class Running:
    """A cluster or a script's job that runs."""

    file: ClusterFile | JobFile

    @property
    def name(self) -> str:
        """What a command takes: the cluster's id, or the job's address."""
        if isinstance(self.file, ClusterFile):
            return self.file.cluster_id or "ipcluster"
        return self.file.address

    @property
    def notebook(self) -> str:
        """The notebook that uses the cluster, or the script of the job."""
        if isinstance(self.file, ClusterFile):
            return self.file.notebook
        return self.file.script

    @property
    def facts(self) -> tuple[str, str, str, str]:
        """The columns of its row in a list."""
        ranks = when = ""
        if isinstance(self.file, ClusterFile):
            ranks = str(self.file.world_size)
            when = time.strftime("%d %b %H:%M", time.localtime(self.file.since))
        where = f"{self.notebook} (pid {self.file.pid} on {self.file.node})"
        return self.name, ranks, where, when

    def is_called(self, name: str) -> bool:
        """Whether `name` begins its name or id, or is that of its notebook."""
        begins = (self.name, self.name.removeprefix("rankscope-"))
        file = self.notebook.rpartition("/")[2]
        return name in (self.notebook, file) or any(
            one.startswith(name) for one in begins
        )

    def attach(self, attends: bool = True) -> Cluster | Job:
        """Attach to it; `attends`: a person looks, see `Job.attach`."""
        # Here: their import takes longer than the rest of a command, and a job needs
        # no ipyparallel.
        if isinstance(self.file, JobFile):
            from rankscope.engines import Job

            return Job.attach(self.file.address, self.file.key, attends=attends)
        from rankscope.engines import Cluster

        return Cluster.attach(
            connection_file=str(self.file.connection_file),
            attach_timeout=ATTACH_WAIT,
            briefly=True,
        )


def running() -> list[Running]:
    """Return the clusters and jobs of this user that run, the newest first."""
    return [*map(Running, cluster_files()), *map(Running, job_files())]


# -- the commands: each imports what it alone needs -----------------------------


def _status(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.engines import Job
    from rankscope.widgets.board.model import BoardModel
    from rankscope.widgets.board.text import board_text

    if not isinstance(cluster, Job) and cluster.slurm_job is not None:
        cluster.slurm_job.await_answer(ANSWER)
    status = cluster.status(fresh=True, timeout=ANSWER)
    model = BoardModel.of(status, cluster.lateness())
    say(board_text(model, shutil.get_terminal_size().columns))
    return DONE


def _diagnose(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    verdicts = cluster.diagnose()
    for verdict in verdicts:
        say(f"{verdict.fault.value}: {verdict}")
    if verdicts:
        return HANGS
    say(cluster.no_hang())
    return DONE


def _profile(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.widgets import ProfileReport
    from rankscope.widgets.stack_text import stack_text

    if values.time is None:
        if values.output is not None:
            raise ClusterError("-o FILE is for a flame graph: -t SECONDS is missing")
        say(stack_text(cluster.stacks(every=values.all), values.all))
        return DONE
    report = ProfileReport(cluster.sample(values.time, every=values.all), values.all)
    say(report)
    if values.output is not None:
        report.save(values.output)
        say(f"\n{values.output} written: a browser shows the flame graph")
    return DONE


def _metrics(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.engines.script.metrics_process import why_not

    if why := why_not():
        raise ClusterError(why)
    from rankscope.engines.observe.metrics import MetricsServer
    from rankscope.engines.observe.spans import spans_if_installed

    server = MetricsServer(cluster, values.port, spans_if_installed(cluster))
    try:
        # In the log of a script, too.
        say(
            f"rankscope: the metrics of {cluster.cluster_id} are at {server.address} "
            "until it ends"
        )
        sys.stdout.flush()
        while not cluster.closed:
            time.sleep(END_PERIOD)
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return DONE


def _abort(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.backends.observe.verdicts import on_groups
    from rankscope.engines.status import name_groups

    verdicts = cluster.explain()
    if values.group is not None:
        cluster.status(fresh=True, timeout=ANSWER)
        wanted = cluster.glance().find_groups(values.group)
        verdicts = on_groups(verdicts, wanted)
    for verdict in verdicts:
        say(f"{verdict.fault.value}: {verdict}")
    aborted = cluster.abort(values.group, REASON, by=BY, verdicts=verdicts)
    names = [name for one in aborted.values() for name in one]
    if not names:
        say("no group to abort: nothing has changed")
        return DONE
    status = cluster.glance()
    after, ended = "the script's ops end with an error that says why", ""
    if not status.script:
        after = "%dist_rebuild, or rankscope rebuild, makes what was aborted usable"
    elif status.dead:
        ended = f"; {name_ranks(status.dead)} ended"
    say(f"{name_groups(names)} aborted{ended}; {after}")
    return DONE


def _rebuild(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.engines.status import name_groups

    stale = cluster.rebuild(values.group)
    say("\n".join([f"{name_groups(values.group)} rebuilt", *stale]))
    return DONE


def _stop(cluster: Cluster | Job, values: argparse.Namespace) -> int:
    from rankscope.engines import Job

    if isinstance(cluster, Job):
        raise ClusterError(
            f"the ranks are those of a script ({cluster.launcher}): who started it "
            "ends it"
        )
    ranks = name_ranks(cluster.ranks)
    # Nobody looks at a last status.
    cluster.shutdown(end_reason("stopped from a terminal"), fresh=False)
    say(f"{ranks} of {cluster.cluster_id} ended")
    return DONE


def _top(one: Running, values: argparse.Namespace) -> int:
    """Show `one` until the user quits."""
    with _first_screen(one.name):
        from rankscope.widgets.top.app import TopApp

        app = TopApp(one.name, one.attach, values.delay)
    failed = app.run()
    app.close()
    if failed is not None:
        return fail("top", failed)
    return FAILED if app.return_code else DONE


@contextlib.contextmanager
def _first_screen(name: str) -> Iterator[None]:
    """Show what `TopApp` shows first, while it is imported: most of its start."""
    shown = f"\x1b[?1049h\x1b[2J\x1b[H\x1b[2mrankscope top · {printable(name)}\x1b[m"
    print(f"{shown}\nAttaching…", end="", file=sys.stderr, flush=True)
    try:
        yield
    except BaseException:
        # Else Textual leaves the alternate screen, at its end.
        print("\x1b[?1049l", end="", file=sys.stderr, flush=True)
        raise


def _no_top(values: argparse.Namespace) -> str | None:
    if find_spec("textual") is None:
        return f"it needs Textual: {pip_install(with_extra('top'))}"
    # Textual draws on the standard error.
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "it needs a terminal (with ssh: ssh -t); rankscope status prints once"
    if values.delay < SHORTEST:
        return f"-d {values.delay:g}: at least {SHORTEST:g} seconds are expected"
    return None


COMMANDS: dict[str, Callable[[Cluster | Job, argparse.Namespace], int]] = {
    "status": _status,
    "diagnose": _diagnose,
    "profile": _profile,
    "metrics": _metrics,
    "abort": _abort,
    "rebuild": _rebuild,
    "stop": _stop,
}


def run(values: argparse.Namespace) -> int:
    """Run the command of parsed arguments; return its exit status."""
    if values.command == "top" and (why := _no_top(values)) is not None:
        return fail("top", why)
    there = running()
    found = [
        one for one in there if values.cluster is None or one.is_called(values.cluster)
    ]
    if len(found) != 1:
        return _not_one(values, there, found)
    try:
        if values.command == "top":
            return _top(found[0], values)
        with found[0].attach(values.command != "metrics") as cluster:
            return COMMANDS[values.command](cluster, values)
    except (ClusterError, TimeoutError, OSError, ValueError) as error:
        return fail(values.command, error)


def _not_one(
    values: argparse.Namespace, there: Sequence[Running], found: Sequence[Running]
) -> int:
    """List what runs, where none or several were meant."""
    # It takes longer to import than a command that has its cluster.
    from rankscope import attach

    if values.command == "status" and values.cluster is None:
        # Of several, the list is the answer.
        say(_table(found) or (_UNMET if attach.watched_jobs() else _NONE))
        return DONE if found else FAILED
    why = "several clusters run: name the one that is meant"
    if not there:
        jobs = attach.watched_jobs()
        if jobs and values.command == "diagnose" and values.cluster is None:
            return attach.run_watched(jobs, values)
        why = _UNMET if jobs else _NONE
        if not jobs and values.command == "diagnose":
            why += "; --jobs looks at jobs that nobody has prepared"
    elif not found:
        why = f"no cluster is called {values.cluster!r}; there are"
    elif values.cluster is not None:
        why = f"several clusters are called {values.cluster!r}"
    listed = _table(found or there)
    return fail(values.command, why + (f"\n{listed}" if listed else ""))


def _table(there: Sequence[Running]) -> str:
    if not there:
        return ""
    rows = [("CLUSTER", "RANKS", "NOTEBOOK", "SINCE"), *(one.facts for one in there)]
    return "\n".join(aligned(rows, [False] * 4))
