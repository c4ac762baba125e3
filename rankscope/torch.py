"""The groups of ``torch.distributed`` in scripts and notebooks.

After ``import rankscope.torch; rankscope.torch.watch()``, before or after the groups
are made, they are in the summaries, flight records and verdicts of Rankscope. A
notebook sees a script's job on its board with ``%dist_attach HOST:PORT``, the line that
rank 0 prints. ``torchrun -m rankscope.torch train.py`` does it without a changed line.

The import registers the backend ``rankscope`` with torch, when torch is there:
``init_process_group("rankscope")`` has Rankscope's groups do torch's ops, and
`rebuild`, `shrink` and `rejoin` train on with the same models after an abort or a
death.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.backends.errors import DistNetworkError
from rankscope.backends.groups.inquiry import line_of
from rankscope.backends.groups.unattended import attendance
from rankscope.backends.groups.world import world
from rankscope.backends.hang_report.settings import Settings
from rankscope.backends.slurm_step import fill_environment, why_port_is_taken
from rankscope.backends.torch_backend.options import Options
from rankscope.backends.torch_backend.registering import register
from rankscope.backends.torch_watch.patching import when_imported
from rankscope.backends.torch_watch.private.groups import C10D
from rankscope.backends.torch_watch.rewrapping import rewrap
from rankscope.backends.torch_watch.watch import TorchWatch
from rankscope.backends.torch_watch.watch import watch as _watch
from rankscope.engines.script.options import JobOptions, add_metrics, add_script
from rankscope.engines.script.publication import Publication
from rankscope.engines.script.rank_process import end_with_launcher
from rankscope.engines.script.value_log import EVERY, Log, ValueLog
from rankscope.hang_reports import AGENT, begin

if TYPE_CHECKING:
    import torch

__all__ = [
    "Options",
    "TorchWatch",
    "abort",
    "rebuild",
    "rejoin",
    "rewrap",
    "shrink",
    "watch",
]

_lock = threading.Lock()
_publication: Publication | None = None
_value_log: ValueLog | None = None


def watch(
    *,
    publish: bool = True,
    host: str | None = None,
    port: int | None = None,
    allow_abort: bool | None = None,
    metrics: int | None = None,
    log: Log | None = None,
    log_every: float = EVERY,
) -> TorchWatch:
    """Watch the groups of ``torch.distributed`` in this process; return the watch.

    Later calls return the same watch and change nothing but `log`. Torch is not
    imported: the watch begins when it is. In a script, every rank calls this, and need
    not keep the watch. The script may have groups of Rankscope, too, or only those.

    Parameters
    ----------
    publish : bool, default True
        Whether a notebook may attach to the job with ``%dist_attach``, once there is a
        default group of torch, or of Rankscope. On the ranks of
        a cluster, which has its board, nothing is published in addition.
    host : str, optional
        The address of rank 0's host that notebooks and the other ranks connect to;
        ``None``: ``RANKSCOPE_HOST``, or else 127.0.0.1, which only processes of that
        host reach.
    port : int, optional
        The port of rank 0; ``None``: ``RANKSCOPE_PORT``, or else a free one.
    allow_abort : bool, optional
        Whether a notebook may abort groups; ``None``: ``RANKSCOPE_ALLOW_ABORT``, or
        else not.
    metrics : int, optional
        The port of 127.0.0.1 on rank 0's host at which ``rankscope metrics`` serves
        what the ranks do to Prometheus, in a process that ends with rank 0; 0: a free
        one, which it prints. ``None``: ``RANKSCOPE_METRICS``, or else there is none.
    log : callable, optional
        Called as ``log(values)`` every `log_every` seconds, on a thread of its own,
        with a dict of names and floats about this rank, all of its groups together.
        Since the last call: ``rankscope/ops`` and ``rankscope/bytes``, of ops that have
        completed; ``rankscope/op_seconds`` and ``rankscope/waiting_seconds``, from
        start to end of them and for which threads waited, as far as torch tells;
        ``rankscope/stalls``, ops that have been in flight for
        ``RANKSCOPE_REPORT_AFTER`` seconds; ``rankscope/aborts``, groups. What was
        rebuilt since the last call is counted from the rebuild on: neither the abort
        nor the ops before it are. Now:
        ``rankscope/in_flight``, ops; ``rankscope/oldest_seconds``, the age of the
        oldest. What is not known has no name. Where it raises, the error is logged, and
        it is not called again. A later call's takes the place of the one before.
    log_every : float, default 10
        Seconds between two calls of `log`.

    Raises
    ------
    ValueError
        `log_every` is not above 0, `port` or `metrics` is no port, there is no
        prometheus_client for metrics, or ``RANKSCOPE_REPORT_AFTER`` is no number of
        seconds.

    Notes
    -----
    A rank whose op is in flight for long, fails, or that ends while others wait, has
    all ranks of its host write a report into ``rankscope-report/``, or into the folder
    that ``RANKSCOPE_REPORT`` names; ``RANKSCOPE_REPORT=0`` switches that off.
    """
    global _publication, _value_log
    if not log_every > 0:
        raise ValueError(f"log_every={log_every}: expected seconds, above 0")
    watching = _watch()
    # Torch, and with it the other ranks, may be here already.
    begin(torch=watching)
    if publish and AGENT not in sys.modules:
        options = JobOptions.of(host, port, allow_abort, metrics)
        with _lock:
            if _publication is None:
                published = _publication = Publication(watching, options)
                attendance.append(lambda: published.is_attended)
    if log is not None:
        with _lock:
            if _value_log is not None:
                _value_log.close()
            _value_log = ValueLog(log, log_every, Settings.of().after)
    return watching


def abort(*, group: str | None = None, reason: str = "rankscope.torch.abort()") -> None:
    """Fail what is in flight on a group, on all of its ranks; return at once.

    In a script that is watched, the errors of all ranks say `reason`. Both are given by
    name: a text alone could be either.

    Parameters
    ----------
    group : str, optional
        The name or id of a group of this rank, as the board shows it; ``None``: all.
    reason : str, default "rankscope.torch.abort()"
        Why; the errors on all ranks say it.

    Raises
    ------
    ValueError
        This rank is in no such group.
    """
    world.abort(None if group is None else [group], reason)


def rebuild(timeout: float = 300.0) -> None:
    """Make torch's groups of the backend ``rankscope`` usable again after an abort.

    Every rank calls it. Nothing is sent: the groups, and the modules that hold them,
    stay the same objects. `rejoin` then has the models agree.

    In a job of ``rankscope.run`` it waits for all ranks, and so for a fresh process of
    one that died. The fresh process need not call it; where it does, before any op, it
    can do without `rejoin`, as ranks do that train no model.

    Parameters
    ----------
    timeout : float, default 300
        Seconds to wait for the other ranks in a job of ``rankscope.run``.

    Raises
    ------
    DistBackendError
        Torch has no such group; or ranks that are waited for ended without an error,
        or are not started again: `shrink` goes on without those.
    DistStoreTimeoutError
        Ranks did not come within `timeout`; the message names them. Call it again to
        wait on.
    """
    from rankscope.backends.torch_backend import recovering  # it imports torch

    recovering.rebuild(timeout)


def shrink(ranks: Sequence[int] | None = None, timeout: float = 300.0) -> list[int]:
    """Have torch's groups of the backend ``rankscope`` go on without some ranks.

    The ranks that stay call it, in the place of `rebuild`; nothing is sent. The groups,
    and the modules that hold them, stay the same objects. Torch numbers the ranks anew:
    ``get_rank()`` and ``get_world_size()`` say less than before, and the samplers of a
    DataLoader, which have read them, have to be made again. `rejoin` then has the
    models agree.

    In a job of ``rankscope.run --min-ranks`` the launcher says which ranks are lost:
    those that it does not start again. This function waits for fresh processes of the
    others, as `rebuild` does; where no rank is lost it is `rebuild`.

    Parameters
    ----------
    ranks : sequence of int, optional
        The ranks that are lost, as ``get_rank()`` named them before; the same on every
        rank that stays. ``None``: those that the abort of the default group names as
        its cause, such as ranks that died.
    timeout : float, default 300
        Seconds to wait for the other ranks in a job of ``rankscope.run``.

    Returns
    -------
    list of int
        The lost ranks, as ``get_rank()`` named them before.

    Raises
    ------
    ValueError
        No rank is given, and the abort names none; or this rank is among them; or they
        are not ranks of the default group; or ranks are given in a job of
        ``rankscope.run``.
    DistBackendError
        Torch has no such group; or ranks that are waited for ended without an error.
    DistStoreTimeoutError
        Ranks did not come within `timeout`; the message names them.
    """
    from rankscope.backends.torch_backend import recovering  # it imports torch

    return recovering.shrink(ranks, timeout)


def rejoin(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    load: Callable[[], int] | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> int:
    """Have a model and its optimizer be of one step on all ranks, after `rebuild`.

    Every rank calls it, and a fresh process of a rank that died, before any other op:
    its random number generators begin anew. An abort may find ranks in different steps:
    the rank with most steps sends its parameters, buffers and the state of its
    optimizer to those that have the same ones. These are the ranks of the group of a
    DistributedDataParallel, the replicas of a shard of `fully_shard` over a device mesh
    (HSDP) or of tensor parallelism, or else all ranks. A fresh process sends only where
    all are fresh. Where ranks have different parameters, it is the latest step of which
    each parameter is on a rank that lives.

    Gradients are dropped, and DistributedDataParallel and `fully_shard` forget the pass
    that failed; they stay the same objects. The states of random number generators stay
    as they are, since ranks differ in them.

    Parameters
    ----------
    model : torch.nn.Module
        A module, or several in a ``ModuleList``. Its parameters are the same on all
        ranks, but for those of a DistributedDataParallel over fewer, and for DTensors.
    optimizer : torch.optim.Optimizer, optional
        The optimizer of its parameters. The state of a scheduler of its learning rate
        is not sent.
    step : int, optional
        How many steps this rank has done. ``None``: what the state of the optimizer
        says, or else 0; of ranks with the same number the first one sends. An optimizer
        that counts none, as SGD, needs it where ranks have different parameters.
    load : callable, optional
        Called on all ranks where the state of a rank is lost, as that of a shard
        without replicas, or of a ZeroRedundancyOptimizer after any abort. It loads a
        checkpoint into `model` and `optimizer`, by ops as it likes, and returns the
        number of its steps.
    group : torch.distributed.ProcessGroup, optional
        The ranks that call it, which train together, in the same steps. ``None``: all.

    Returns
    -------
    int
        The number of steps that all ranks have done now.

    Raises
    ------
    ValueError
        The ranks do not have the same parameters where they should, a device mesh has
        lost ranks in a `shrink`, nobody counts the steps, or the model is a
        FullyShardedDataParallel.
    DistBackendError
        The state of a rank is lost, and `load` was not given: the culprits are the
        ranks. Or torch has no group of the backend ``rankscope``.
    """
    from rankscope.backends.torch_backend import rejoining  # it imports torch

    return rejoining.rejoin(model, optimizer, step=step, load=load, group=group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script, or with ``-m`` a module, whose groups are watched."""
    end_with_launcher()
    parser = argparse.ArgumentParser(
        prog="torchrun … -m rankscope.torch",
        description="Run a script with its groups watched, of torch.distributed or of "
        "Rankscope: a notebook attaches to it with %%dist_attach, the line that rank 0 "
        "prints.",
    )
    parser.add_argument(
        "--host", help="address of rank 0's host to listen at (default: 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="port (default: a free one)")
    parser.add_argument(
        "--allow-abort",
        action="store_true",
        default=None,
        help="let a notebook abort groups",
    )
    add_metrics(parser)
    add_script(parser)
    given = parser.parse_args(arguments)
    # srun sets no variables by which torch's ranks meet.
    fill_environment()
    try:
        watch(
            host=given.host,
            port=given.port,
            allow_abort=given.allow_abort,
            metrics=given.metrics,
        )
    except ValueError as error:
        parser.error(str(error))
    sys.argv = [given.script, *given.arguments]
    try:
        if given.module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            # As Python itself does for a script; with -m it is the current folder.
            sys.path[0] = str(Path(given.script).resolve().parent)
            runpy.run_path(given.script, run_name="__main__")
    except SystemExit as end:
        # Nothing has it any more when the others are told that this rank leaves.
        world.exit_line = line_of(end)
        raise
    except RuntimeError as error:
        # Torch's error when rank 0 cannot listen; it names the port alone.
        if "EADDRINUSE" in str(error) and (taken := why_port_is_taken()):
            raise DistNetworkError(taken) from error
        raise


when_imported(C10D, lambda _: register())

if __name__ == "__main__":
    # Of the module that a script imports: a job is published once.
    importlib.import_module("rankscope.torch").main()
