"""The line magics: each calls the cluster and prints the result."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.backends.did_you_mean import did_you_mean
from rankscope.backends.rank_sets import name_ranks, tell_ranks
from rankscope.engines import Cluster, ClusterError, Job, PullError
from rankscope.engines.launch.cluster_file import cluster_files
from rankscope.engines.launch.preconditions import check_folder
from rankscope.engines.launch.slurm import submission
from rankscope.engines.status import name_groups
from rankscope.engines.wire.job_file import job_files
from rankscope.widgets import BenchReport, ProfileReport, ProgressLine, StatusTable
from rankscope.widgets.board.model import BoardModel
from rankscope.widgets.board.text import board_text
from rankscope.widgets.stack_text import stack_text

from .arguments import (
    check_init,
    chosen_ranks,
    known_group,
    reported,
    require,
    require_cluster,
    starts,
)
from .cell_magics import CellMagics
from .cells.benching import run_bench
from .cells.debugging import DebugSession
from .language.commands import DIST_INIT
from .language.options import Command, Values
from .language.values import trace_path
from .output.render import Renderer
from .output.wrapped import fit, wrapped
from .session import session

if TYPE_CHECKING:
    from rankscope.widgets.report.frame import ReportFrame

__all__ = ["RankscopeMagics"]

#: Seconds in which ranks may send their status; later ones are shown as silent.
ANSWER = 0.5


class RankscopeMagics(CellMagics):
    """``%%distributed`` and the ``%dist_*`` magics: a method for each command."""

    # -- the cluster ----------------------------------------------------------

    def dist_init(self, command: Command, values: Values) -> None:
        replace = values.pop("replace")
        check_init(values)
        if values.pop("dry_run"):
            print(_dry_run(values["slurm"]))
            return
        # They may be asked for, at another port, too, while the ranks run.
        metrics = values.pop("metrics")
        if session.cluster is not None:
            if not replace:
                self._report_running(session.cluster, values)
                self._serve_metrics(command, metrics)
                return
            if starts(values):
                # Before those that run are ended.
                with reported(command):
                    check_folder()
            self._end(command, session.cluster)
        began = time.monotonic()
        with (
            ProgressLine(self.shell) as progress,
            reported(command, undone=starts(values)),
        ):
            cluster = _start(values, progress.update)
            session.use(cluster, values)
            verb = "ready" if starts(values) else "attached"
            progress.done(
                f"{_size(cluster)} {verb} in {time.monotonic() - began:.1f} s · "
                f"{_kind(cluster)}"
            )
        if "np" not in self.shell.user_ns:
            # Cells of the ranks begin with it: one should work here as well.
            self.shell.push({"np": np}, interactive=False)  # type: ignore[no-untyped-call]
        if cluster.advice:
            print(cluster.advice)
        self._serve_metrics(command, metrics)
        if values["keep"]:
            job = cluster.slurm_job
            elsewhere = job and f", on another host %dist_attach --slurm {job.id}"
            print(
                f"to attach again: %dist_attach {cluster.cluster_id}{elsewhere or ''}; "
                "%dist_shutdown --all ends it"
            )
        self._show_board()

    def dist_attach(self, command: Command, values: Values) -> None:
        if session.cluster is not None:
            if session.request == values:
                print(f"already attached: {_size(session.cluster)}")
                return
            command.fail(
                f"{_size(session.cluster)} are here already ({_kind(session.cluster)});"
                " %dist_shutdown ends them, or detaches from a script"
            )
        with ProgressLine(self.shell) as progress, reported(command):
            progress.update("looking for the job")
            found = _attach(values, progress.update)
            session.use(found, values)
            if isinstance(found, Cluster):
                progress.done(f"{_size(found)} attached · {_kind(found)}")
            else:
                may = "Abort allowed" if found.allow_abort else "read-only"
                progress.done(f"{_size(found)} of {found.launcher} attached · {may}")
        self._show_board()

    def _serve_metrics(self, command: Command, port: int | None) -> None:
        if port is not None:
            with reported(command):
                print(f"the metrics are at {session.serve_metrics(port)}")

    def _show_board(self) -> None:
        if getattr(self.shell, "kernel", None) is not None:
            session.show_board(self.shell, fit)

    def _report_running(self, cluster: Cluster | Job, values: Values) -> None:
        running = f"{_size(cluster)} · {_kind(cluster)}"
        if values != session.request:
            DIST_INIT.fail(
                f"other ranks are running ({running}); %dist_shutdown ends them, "
                "--replace swaps them for new ones"
            )
        dead = cluster.status().dead
        if dead:
            how = cluster.refused.get("restart", "%dist_restart replaces them")
            print(f"{running}; {name_ranks(dead)} dead: {how}")
        else:
            print(f"already running: {running}")
        # The output of this cell, which had the board, begins anew.
        self._show_board()

    def dist_shutdown(self, command: Command, values: Values) -> None:
        cluster = session.cluster
        if cluster is None:
            print(session.ended or "no cluster: there is nothing to shut down")
            return
        self._end(command, cluster, values["everything"])
        if self.mode.options is not None:
            self.mode.options = None
            print("%dist_mode is off: cells run in the notebook")

    def _end(
        self, command: Command, cluster: Cluster | Job, everything: bool = False
    ) -> None:
        """End the ranks; detach from attached or kept ones, or end `everything`."""
        if everything:
            require_cluster(command)
        size = _size(cluster)
        with ProgressLine(self.shell) as progress, reported(command):
            # The board, and a saved notebook, keep the last state.
            if isinstance(cluster, Job) or not (cluster.owned or everything):
                dead = cluster.status(fresh=True, timeout=ANSWER).dead
                # The board says at its end whether the ranks run on.
                cluster.close()
                session.drop()
                progress.done(f"detached from {size}; {_rest(dead, cluster.n)}")
                return
            progress.update(f"ending {size}")
            try:
                cluster.shutdown()
            finally:
                session.drop()
            progress.done(f"{size} ended")

    def dist_restart(self, command: Command, values: Values) -> None:
        cluster = require_cluster(command)
        if values["ranks"]:
            ranks = chosen_ranks(command, "", ",".join(values["ranks"]), cluster)
        else:
            ranks = cluster.status().dead
            if not ranks:
                print("every rank is alive; name those to restart: %dist_restart 0")
                return
        began = time.monotonic()
        with ProgressLine(self.shell) as progress, reported(command):
            progress.update(f"restarting {name_ranks(ranks)}")
            cluster.restart(ranks)
            took = time.monotonic() - began
            whose = "its" if len(ranks) == 1 else "their"
            progress.done(
                f"{name_ranks(ranks)} restarted in {took:.1f} s, {whose} variables are "
                "lost; %dist_rebuild makes aborted groups usable"
            )
        if cluster.advice:
            print(cluster.advice)

    def dist_status(self, command: Command, values: Values) -> None:
        with reported(command):
            # The last published status may be older than the last cell.
            cluster = require(command)
            status = cluster.status(fresh=True, timeout=ANSWER)
            table = StatusTable(status, cluster.lateness())
        self.shell.display_pub.publish(table._repr_mimebundle_())

    def dist_board(self, command: Command, values: Values) -> None:
        """Show the live board, or in a terminal the state as text."""
        if values["pin"] and values["unpin"]:
            command.fail("--pin and --unpin exclude each other")
        cluster = require(command)
        if values["in_cells"] is not None:
            session.in_cells = values["in_cells"]
            return
        if getattr(self.shell, "kernel", None) is not None:
            if not values["unpin"]:
                session.show_board(self.shell, fit)
            if values["pin"] or values["unpin"]:
                session.pin_board(bool(values["pin"]))
            return
        with reported(command):
            status = cluster.status(fresh=True, timeout=ANSWER)
            model = BoardModel.of(status, cluster.lateness())
            print(board_text(model, shutil.get_terminal_size().columns))

    def dist_diagnose(self, command: Command, values: Values) -> None:
        with reported(command):
            cluster = require(command)
            verdicts = cluster.diagnose()
            nothing = "" if verdicts else cluster.no_hang()
        for verdict in verdicts:
            print(wrapped(f"{verdict.fault.value}: {verdict}"))
        if nothing:
            print(wrapped(nothing))

    def dist_open(self, command: Command, values: Values) -> ReportFrame:
        paths: list[str] = values["paths"]
        missing = [path for path in paths if not os.path.lexists(path)]
        if missing:
            command.fail(f"no such file or folder: {', '.join(map(repr, missing))}")
        # The readers of dead jobs cost 70 ms at the start of a notebook.
        from rankscope.backends.post_mortem.report import examine
        from rankscope.widgets.report.frame import ReportFrame

        with reported(command, OSError):
            return ReportFrame(examine(paths), ", ".join(paths))

    def dist_profile(self, command: Command, values: Values) -> ProfileReport | None:
        """Print where the ranks are, or return where they spend the next seconds."""
        cluster = require(command)
        ranks = chosen_ranks(command, "-r ", values["ranks"], cluster)
        seconds, every = values["seconds"], values["every"]
        with reported(command, ValueError):
            if seconds is None:
                print(stack_text(cluster.stacks(ranks, every=every), every))
                return None
            with ProgressLine(self.shell) as progress:
                profile = cluster.sample(
                    seconds,
                    ranks,
                    every=every,
                    on_progress=lambda so_far: progress.update(
                        f"sampling {name_ranks(ranks)}: {so_far:.0f} of {seconds:g} s"
                    ),
                )
            return ProfileReport(profile, every)

    def dist_debug(self, command: Command, values: Values) -> None:
        cluster = require_cluster(command)
        if values["rank"] is None:
            ranks = cluster.status(fresh=True, timeout=ANSWER).failed
            if len(ranks) != 1:
                which = f"{name_ranks(ranks)} have failed" if ranks else "none has"
                command.fail(
                    f"-r RANK is missing, the rank whose failure it is: {which}"
                )
        else:
            ranks = chosen_ranks(command, "-r ", values["rank"], cluster)
        if len(ranks) != 1:
            command.fail(f"-r {values['rank']}: one rank at a time has the prompt")
        (rank,) = ranks
        with reported(command):
            found = cluster.status(fresh=True, timeout=ANSWER).ranks[rank]
            if found.state != "idle":
                raise ClusterError(
                    found.reason
                    or f"rank {rank} is {found.state}: its cell has to end before, by "
                    "%dist_abort or an interrupt"
                )
            renderer = Renderer(self.shell, cluster.ranks)
            serve = session.serve_messages
            DebugSession(cluster, rank, renderer, serve=serve).run()

    def dist_trace(self, command: Command, values: Values) -> None:
        try:
            path = trace_path(values["path"])
        except ValueError as error:
            command.fail(f"{values['path']}: {error}")
        with reported(command):
            records = require(command).flight_records()
        with reported(command, OSError, ValueError):
            files = records.save(path)
        for rank, why in records.errors.items():
            print(f"rank {rank} is left out: {why}")
        if path.endswith(".json"):
            print(f"{files[0]} written: open it at ui.perfetto.dev")
        elif files:
            through = f" … {files[-1]}" if len(files) > 1 else ""
            print(
                f"{files[0]}{through} written, {len(files)} in all: PyTorch's "
                "torchfrtrace reads them"
            )
        else:
            print("no rank answered: nothing is written")

    def dist_bench(self, command: Command, values: Values) -> BenchReport | None:
        cluster = require_cluster(command)
        known_group(command, values["group"], cluster)
        with reported(command, OSError, ValueError):
            return run_bench(self.shell, cluster, values, session.serve_messages)

    # -- groups ---------------------------------------------------------------

    def dist_abort(self, command: Command, values: Values) -> None:
        cluster = require(command)
        group = known_group(command, values["group"], cluster)
        if _lacks_groups(cluster):
            print("no rank has a group: there is nothing to abort")
            return
        with reported(command):
            aborted = cluster.abort(group, "aborted with %dist_abort")
        names = dict.fromkeys(name for one in aborted.values() for name in one)
        them = "it" if len(names) == 1 else "them"
        after = f"%dist_rebuild makes {them} usable again"
        if isinstance(cluster, Job):
            after = "the script's ops end with an error that says why"
        print(f"{name_groups(names)} aborted; {after}")

    def dist_rebuild(self, command: Command, values: Values) -> None:
        cluster = require_cluster(command)
        group = known_group(command, values["group"], cluster)
        if _lacks_groups(cluster):
            print("no rank has a group: there is nothing to rebuild")
            return
        with reported(command):
            stale = cluster.rebuild(group)
        print("\n".join([f"{name_groups(group)} rebuilt", *stale]))

    # -- variables ------------------------------------------------------------

    def dist_push(self, command: Command, values: Values) -> None:
        cluster = require_cluster(command)
        ranks = chosen_ranks(command, "-r ", values["ranks"], cluster)
        namespace = self.shell.user_ns
        for name in values["names"]:
            if name not in namespace:
                # Not those that IPython has put there: open, exit, In.
                hidden = self.shell.user_ns_hidden
                known = [
                    key
                    for key in namespace
                    if not key.startswith("_") and key not in hidden
                ]
                command.fail(
                    f"the notebook has no variable {name!r}{did_you_mean(name, known)}"
                )
        what, refused = ", ".join(values["names"]), (TypeError, AttributeError)
        with (
            ProgressLine(self.shell) as progress,
            reported(command, *refused, pickle.PicklingError),
        ):
            cluster.push(
                {name: namespace[name] for name in values["names"]},
                ranks,
                progress=progress.transfer(f"{what} → {name_ranks(ranks)}"),
            )
        print(f"{what} → {name_ranks(ranks)}")

    def dist_pull(self, command: Command, values: Values) -> None:
        cluster = require_cluster(command)
        ranks = chosen_ranks(command, "-r ", values["ranks"], cluster)
        for name in values["names"]:
            if not name.isidentifier():
                command.fail(f"{name!r} is not the name of a variable")
        single = values["ranks"] is not None and len(ranks) == 1
        names, user_ns = values["names"], self.shell.user_ns
        direction = f"{', '.join(names)} ← {name_ranks(ranks)}"
        with ProgressLine(self.shell) as progress, reported(command):
            try:
                pulled = cluster.pull(
                    names, ranks, progress=progress.transfer(direction)
                )
            except PullError as error:
                for name in names:
                    if found := error.of(name, ranks):
                        user_ns[name] = found[0] if single else found
                raise
        for name in names:
            found = [pulled[rank][name] for rank in ranks]
            user_ns[name] = found[0] if single else found
        what = "" if single else f" (lists of {len(ranks)})"
        print(f"{direction}{what}")


def _start(values: Values, progress: Callable[[str], None]) -> Cluster:
    """Start, or attach to, what ``%dist_init`` names, else with the defaults."""
    given = {
        name: value
        for name, value in values.items()
        if value is not None and value is not False
    }
    make = Cluster.start if starts(values) else Cluster.attach
    return make(**given, progress=progress)


def _attach(values: Values, progress: Callable[[str], None]) -> Cluster | Job:
    """Return what ``%dist_attach`` names: a cluster, or the job of a script."""
    address = values["address"]
    if values["slurm"] is not None:
        return Cluster.attach(slurm=values["slurm"], progress=progress)
    clusters = cluster_files()
    if address is not None:
        clusters = [one for one in clusters if one.cluster_id == address]
    elif values["key"] is not None or job_files():
        clusters = []
    if len(clusters) > 1:
        names = ", ".join(f"{one.cluster_id} ({one.notebook})" for one in clusters)
        raise ClusterError(f"several clusters run: name the one that is meant: {names}")
    if clusters:
        file = str(clusters[0].connection_file)
        return Cluster.attach(connection_file=file, progress=progress)
    return Job.attach(address, values["key"])


def _dry_run(slurm: str | bool) -> str:
    if slurm is True:
        job = os.environ.get("SLURM_JOB_ID")
        return f"nothing is submitted: {f'job {job}' if job else 'there is no job'}"
    return shlex.join(submission(str(slurm)))


def _rest(dead: Sequence[int], n: int) -> str:
    """Return what becomes of `n` ranks without this notebook."""
    if not dead:
        return "they keep running"
    others = "" if len(dead) == n else ", the others keep running"
    return f"{tell_ranks(dead, 'is dead')}{others}"


def _size(cluster: Cluster | Job) -> str:
    return "1 rank" if cluster.n == 1 else f"{cluster.n} ranks"


def _kind(cluster: Cluster | Job) -> str:
    groups = [group for rank in cluster.status().ranks for group in rank.groups]
    # Our own, or else torch's.
    for name in ("default", "default_pg"):
        for group in groups:
            if group.name == name:
                library = f" of {group.library}" if group.library else ""
                return f"{group.backend} · group {name!r}{library}"
    return f"{cluster.launcher} · no group"


def _lacks_groups(cluster: Cluster | Job) -> bool:
    """Return whether no rank has a group; the last status may be older than one."""
    return not cluster.status(fresh=True, timeout=ANSWER).group_keys
