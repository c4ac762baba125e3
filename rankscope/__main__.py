"""``rankscope``, also ``python -m rankscope``: the commands that need no notebook."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rankscope import __version__
from rankscope.backends.printable import print_anywhere
from rankscope.command_output import fail

__all__ = ["command_parser", "main"]

#: The commands for what runs, and what they do.
_ON_CLUSTERS = {
    "status": "show what every rank is doing",
    "top": "show it live: who is late, who waits, the verdict; abort from there",
    "diagnose": "say why an op hangs: the rank at fault, and the line",
    "metrics": "serve what they do to Prometheus, until Ctrl-C",
    "profile": "show where the ranks are, or with -t, where they spend their time",
    "abort": "fail what is in flight on every rank, so that the cells end",
    "rebuild": "make aborted groups usable again",
    "stop": "end the cluster: its ranks and their variables",
}

_MORE = """\
It works while the notebook's cell hangs, and whatever state its kernel is in. The
ranks of scripts that rankscope.torch watches have status, top, diagnose, metrics,
profile and, where the script allows it, abort.
"""
_DIAGNOSE = """\
Say why an op hangs: the rank at fault, and the line.

CLUSTER: a cluster or a watched job that runs.
PATH: what a job has left, which may be dead: folders, files, tar and zip archives, of
any names, in any order. Torch's Flight Recorder dumps are read, pickled (of NCCL, gloo
and torchcomms) and as JSON; stacks of py-spy, faulthandler and torch's debug server;
logs and error files of torchrun; reports of NCCL's RAS service. Nothing in a file is
executed; a file that cannot be used is named, and the others are judged without it.
What exists as a path is a path; but train.py, a script or notebook in this folder, is
the job that runs it.

--pid, --jobs: processes that run, and that nobody has prepared. Of each rank you read
where it is, by py-spy (pip install 'rankscope[attach]'), which executes nothing in the
process and does not stop it. PID is a rank, any Python, or a launcher, which means the
ranks that it has started. --jobs finds those of torchrun, accelerate, deepspeed,
mpiexec, srun, torch.multiprocessing, notebook_launcher and ipyparallel on this host;
of root, those of all users. Ranks are what the launcher's variables in the environment
say. Stacks alone do not tell whether an op hangs: a verdict needs torch's debug server
or NCCL's RAS service, which are asked where the job has them.
"""
_TOP = """\
Show what every rank is doing, live: a row for each rank, or for ranks that are equal;
who is late and who waits; why an op hangs. Keys sort, filter, show the stacks of a rank
and abort; ? lists them. It needs Textual (pip install 'rankscope[top]') and a terminal,
over ssh, too (ssh -t). Colours are those of the terminal; NO_COLOR=1 leaves them out.
"""
_METRICS = """\
Serve the metrics of all ranks in OpenMetrics' format at a port of this host, for
Prometheus and Grafana, until Ctrl-C or the end of the ranks: collectives, ops in flight
and their age, lag, bandwidth, who is late and who waits, memory, CPU, stalls, aborts,
rebuilds. While it runs, the ranks send their status twice a second at most. It needs
prometheus_client (pip install 'rankscope[metrics]').
"""
#: Commands that a line does not describe.
_LONGER = {"diagnose": _DIAGNOSE, "top": _TOP, "metrics": _METRICS}
_JSON = """\

--json writes one object:
  {"version": 1,
   "verdicts": [{"kind", "culprits", "group", "op", "sequence_number", "line",
                 "text", "consequences"}],
   "files": [{"path", "kind", "ranks", "problem"}],
   "world_size",
   "late": [{"kind", "ranks", "group", "op", "line", "times", "of", "wait", "share",
             "text"}]}
Culprits and ranks are global ranks. Without a fault, verdicts is empty. A kind is one
of "missing ranks", "rank dead", "rank not responding", "rank busy elsewhere", "op
mismatch", "order mismatch", "deadlock" (of ranks that wait for each other), "size
mismatch", "dtype mismatch", "root mismatch", "reduce op mismatch", "split mismatch",
"tag mismatch", "execution hang", and "undecided", of which no culprit is known.
world_size is null if no file tells. late has who kept the others waiting in ops that
are over, where it is certain: in how many of how many ops, seconds each time, and the
part of their time.

With --pid and --jobs:
  {"version": 1,
   "jobs": [{"launcher", "id", "pid", "command", "notes",
             "processes": [{"pid", "rank", "line", "file", "function", "called",
                            "moves", "problem"}],
             "verdicts", "files", "world_size"}],
   "problems"}
Of a job, pid is its launcher's, or null; a rank is null where nothing tells it. A
process moves if two of its stacks differ; its problem says why there is no stack.
Problems of all are those of a PID that names nothing.
"""
_EXIT = """\
exit status: 0 done (diagnose: nothing hangs), 1 diagnose: something hangs,
2 not done: no such cluster, several of which none was named, no verdict, or an error
"""
_DOCTOR = """
Report what Rankscope finds on this machine: Python and platform, the backends that can
be used and why others cannot, what tcp uses within this host and towards others, the
libraries of gloo, UCX and MPI, GPUs and NCCL, PyTorch, py-spy, Textual, the versions of
the Jupyter packages, and the limits of this machine.
"""
_DOCTOR_EXIT = """
exit status: 0 ranks can be started and can exchange numpy arrays, 1 a requirement is
missing or broken: the lines marked "fault".
"""


#: How a person names a cluster.
_NAMED = (
    "its id or a beginning of it, a job's address, or the name of the notebook or "
    "script (default: the only one that runs)"
)


def _take_group(add: Callable[..., Any]) -> None:
    add("-g", "--group", help="name or id of a group (default: all)")


def _top_options(add: Callable[..., Any]) -> None:
    about = "seconds between two updates (default: 1)"
    add("-d", "--delay", type=float, default=1.0, metavar="SECONDS", help=about)


def _metrics_options(add: Callable[..., Any]) -> None:
    about = "port at 127.0.0.1 (default: 9464; 0: one that is free)"
    add("-p", "--port", type=int, default=9464, help=about)


def _profile_options(add: Callable[..., Any]) -> None:
    about = "sample for so many seconds (default: show the stacks of now)"
    add("-t", "--time", type=float, metavar="SECONDS", help=about)
    about = "with -t: write the flame graph there, as an HTML page"
    add("-o", "--output", metavar="FILE", help=about)
    about = "all threads, those of Jupyter and Rankscope too"
    add("-a", "--all", action="store_true", help=about)


def _diagnose_options(add: Callable[..., Any]) -> None:
    about = f"folder, file or archive of a dead job; or of what runs: {_NAMED}"
    add("paths", nargs="*", metavar="CLUSTER or PATH", help=about)
    about = "look at running processes, or at the ranks of a launcher"
    add("--pid", nargs="+", type=int, metavar="PID", help=about)
    about = "look at every job that this user has started on this host"
    add("--jobs", action="store_true", help=about)
    about = "write JSON; for a PATH, --pid and --jobs"
    add("--json", action="store_true", help=about)
    about = (
        "write one page there that can be sent to others; for a PATH, and for --pid "
        "and --jobs where they find one job"
    )
    add("--html", metavar="FILE", help=about)
    about = "write the ops as a trace for Perfetto there; for a PATH"
    add("--trace", metavar="FILE", help=about)


#: What adds the arguments of a command, by ``ArgumentParser.add_argument``.
_OPTIONS = {
    "abort": _take_group,
    "rebuild": _take_group,
    "top": _top_options,
    "metrics": _metrics_options,
    "profile": _profile_options,
    "diagnose": _diagnose_options,
}


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope",
        description="Rankscope's command line. Its commands find the clusters that "
        "your notebooks started, and the jobs of your scripts.",
        epilog="rankscope COMMAND --help says more; python -m rankscope is the same",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in _ON_CLUSTERS.items():
        begin = _LONGER.get(name, f"{what.capitalize()}.")
        command = commands.add_parser(
            name,
            help=what,
            description=f"{begin}\n{_MORE}",
            epilog=f"{_EXIT}{_JSON}" if name == "diagnose" else _EXIT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name != "diagnose":
            command.add_argument("cluster", nargs="?", metavar="CLUSTER", help=_NAMED)
        if name in _OPTIONS:
            _OPTIONS[name](command.add_argument)
    commands.add_parser(
        "doctor",
        help="tell what can be used here, and what to install for the rest",
        description=_DOCTOR,
        epilog=_DOCTOR_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _run(values: argparse.Namespace) -> int:
    # Here: the doctor runs where what the others import is missing, and a command loads
    # no more than it needs.
    if values.command == "doctor":
        from rankscope import doctor

        return doctor.main()
    if values.command == "diagnose":
        if values.pid is not None or values.jobs:
            from rankscope import attach

            return attach.run(values)
        if len(values.paths) > 1 or _are_paths(values.paths):
            from rankscope import post_mortem

            return post_mortem.run(values)
        values.cluster = values.paths[0] if values.paths else None
        for option in ("json", "html", "trace"):
            if getattr(values, option):
                more = "" if option == "trace" else ", --pid or --jobs"
                return fail("diagnose", f"--{option} is for a PATH{more}")
    from rankscope import terminal

    return terminal.run(values)


def _are_paths(names: Sequence[str]) -> bool:
    """Return whether one of `names` exists as a path, or can be nothing else.

    A script or notebook in this folder has left nothing: its name is that of a job.
    """
    return any(
        os.sep in name
        or (os.path.lexists(name) and not name.endswith((".py", ".ipynb")))
        for name in names
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name; return its exit status."""
    print_anywhere(sys.stdout)
    # At its end Python would look for garbage in all that was imported, for as long as
    # half of the import took.
    atexit.register(gc.freeze)
    values = command_parser().parse_args(arguments)
    try:
        status = _run(values)
        sys.stdout.flush()
    except BrokenPipeError:
        # Its reader, as head, has ended. Python would report it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
