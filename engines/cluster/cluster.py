"""Cluster: ranks that are started, or found."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rankscope.backends import BackendConfig

from ..launch import clusters, preconditions
from ..launch.cluster_file import ClusterFile, file_of_job, job_of
from ..launch.host_names import HostSpec
from ..launch.host_options import hosts_for
from ..launch.hosts import HOSTS, LOST_AFTER
from ..launch.slurm import SlurmJob
from ..wire import ipyparallel_private as private
from ..wire.gpu_environment import Gpus, parse_devices
from ..wire.launchers import launchers_of
from . import recovery
from .launched_ranks import LaunchedRanks, Progress, silent

__all__ = ["Cluster"]

_log = logging.getLogger(__name__)

C = TypeVar("C")

#: Launchers whose engines run with the libraries of this process.
_IN_THIS_ENVIRONMENT = ("local", clusters.SPAWN, "mpi")


def _end_after_failure(end: Callable[[], None]) -> None:
    try:
        end()
    except Exception:  # noqa: BLE001 - the error of the start is the cause
        _log.exception("the ranks that did not start could not all be ended")


class _TheClass:
    """An attribute whose value is the class: another name for calling it."""

    def __get__(self, instance: object, owner: type[C]) -> type[C]:
        return owner


class Cluster(LaunchedRanks):
    """`n` ranks, each an ipyparallel engine that keeps its variables.

    Made by ``Cluster(n)``, which is also called :meth:`start`, or by :meth:`attach`. It
    starts a controller and `n` engines, with one default group over them. Usable from
    any thread. As a context manager it ends what was started here; an attached
    cluster, and one started with ``keep=True``, runs on.

    Parameters
    ----------
    n : int, optional
        The number of ranks, where `hosts` or `slurm` does not say it.
    hosts : str, path or mapping of str to int, optional
        The hosts of the ranks, in rank order, with the number of ranks on each:
        ``"a:4,b:4"``, ``{"a": 4, "b": 4}``, or a hostfile with such a line for each
        host. Other hosts than this one are reached by the system's ``ssh``, with its
        configuration and keys, without a password. The launcher ``mpi`` starts them by
        Open MPI's mpiexec instead.
    slurm : str or bool, default False
        The options of ``salloc`` for a job of Slurm whose nodes are the hosts, as in
        ``"-p gpu -N 2 --gpus-per-node 8 -t 1:00:00"``; the job is submitted, waited for
        however long it is pending, and ends with the cluster. ``True``: the job that
        this process is in. Without `n` there are as many ranks as the job has tasks, if
        those are more than its nodes, else one for each GPU, else one on each node.
    remote_python : str, optional
        The Python of the other hosts, which has Rankscope; by default the path of this
        one.
    interface : str, optional
        The network interface of this host, or its address, at which the `hosts` reach
        the controller; by default the one by which ssh has reached them.
    engines : str, optional
        The launcher: ``local``, ``spawn``, ``mpi``, or another one of ipyparallel, as
        ``pbs`` (never tried). ``None``: the launcher that `backend` needs
        (``mpi`` for MPI), else ``local``. The ranks of ``local`` are forked from one
        process that has imported what they need; with ``spawn`` it starts each from
        scratch instead.
    backend : str, optional
        Config of the default group, as in `init_process_group`.
    timeout : float, optional
        Timeout of the default group in seconds, as in `init_process_group`.
    torch : bool or str, default False
        Whether cells begin with ``torch.distributed``: ``torch``, ``dist`` and
        ``device`` are there, the environment is that of torchrun, and the default group
        is torch's, with `timeout`. A text names its backends, as in ``"gloo"`` or
        ``"cpu:gloo,cuda:nccl"``, the default where every rank has a GPU. Then there is
        no group of Rankscope until a cell calls ``rankscope.init_process_group()``, and
        `backend` is not given.
    keep : bool, default False
        Whether the cluster runs on when this process ends; `attach` finds it.
    profile, cluster_id : str, optional
        The IPython profile, and the id of the cluster (``None``: a new one).
    devices : str, int or sequence of int, optional
        The GPUs of each host, as in ``[0, 2]`` or ``"0,2-3"``, that become the
        current devices of its ranks in turn; empty: all GPUs.
    share_gpu : bool, default False
        Whether several ranks may use one GPU. NCCL then works over loopback
        sockets: for learning on a machine with one GPU, not for measuring.
    force : bool, default False
        Whether to start more ranks on this machine than its cores and its free
        memory allow: 32 a core, 60 MB each.
    start_timeout : float, default 120
        Seconds that the start may take, once a job of `slurm` has its nodes.
    lost_after : float, default 600
        Seconds without a sign of life after which ranks of another host are given up,
        and end. Until then they are unreachable, and go on when their host answers. It
        is not for ranks that are processes of this one's host.
    progress : callable, optional
        Called with a line of text at each step.

    Raises
    ------
    ValueError
        For an invalid `backend`, `torch`, `devices`, `hosts` or `slurm`.
    ClusterError
        `n` is no number of ranks. A `ClusterStartError` if the library of every named
        backend is missing, or torch; if `n` ranks are too many for this machine; if a
        host is not reached, or lacks what its ranks need; and, with the last lines of
        the logs, if the cluster is not ready in time or a process of it ended. Nothing
        is left running then.

    Examples
    --------
    >>> with dist.Cluster(2) as cluster:
    ...     cluster.push({"x": 1})
    ...     done = cluster.execute("y = x + dist.get_rank()").result()
    ...     found = cluster.pull("y")
    ...     cell = cluster.execute("print('at', y); y * 10", keep_value=True).result()
    ...     values = cluster.values(cell)
    >>> found, values
    ({0: 1, 1: 2}, {0: 10, 1: 20})
    >>> cell.outputs(1)[0]["text"]
    'at 2\\n'

    Rank 1 does not come to a barrier: why it hangs, the end of the wait, and after it.

    >>> with dist.Cluster(2) as cluster:
    ...     hangs = cluster.execute("if dist.get_rank() == 0: dist.barrier()")
    ...     while not (verdicts := cluster.diagnose()):
    ...         pass  # it has not hung for half a second yet
    ...     aborted = cluster.abort(reason="rank 1 does not come")
    ...     ended = hangs.wait(10)
    ...     stale = cluster.rebuild()
    ...     done = cluster.execute("dist.barrier()").result(10)
    >>> verdicts[0].fault.value, verdicts[0].culprits, verdicts[0].waiting
    ('missing ranks', (1,), (0,))
    >>> aborted, ended, hangs.errors[0].ename
    ({0: ['default'], 1: ['default']}, True, 'DistAbortedError')

    What the ranks have done, and how fast an op is.

    >>> with dist.Cluster(2) as cluster:
    ...     done = cluster.execute("dist.barrier()").result()
    ...     status = cluster.status(fresh=True)
    ...     records = cluster.flight_records()
    ...     measured = cluster.bench("all_reduce", "1K,4K", iterations=2).result()
    >>> status.groups, status.ranks[0].groups[0].completed.op
    ({'default': [0, 1]}, 'barrier')
    >>> [record["op"] for record in records.dumps[1]["records"]]
    ['barrier']
    >>> measured["size"].tolist(), int(measured["wrong"].sum())
    ([1024, 4096], 0)
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        hosts: HostSpec | None = None,
        slurm: str | bool = False,
        remote_python: str | None = None,
        interface: str | None = None,
        engines: str | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        torch: bool | str = False,
        keep: bool = False,
        profile: str | None = None,
        cluster_id: str | None = None,
        devices: str | int | Sequence[int] = (),
        share_gpu: bool = False,
        force: bool = False,
        start_timeout: float = 120,
        lost_after: float = LOST_AFTER,
        progress: Progress | None = None,
    ) -> None:
        if not lost_after > 0:
            raise ValueError(f"lost_after={lost_after!r}: seconds, above 0")
        needed = launchers_of(BackendConfig(backend))
        launcher = engines or next(iter(needed), None)
        places = hosts_for(
            hosts, slurm, n, launcher, keep, remote_python, interface, lost_after
        )
        if places is not None:
            n = len(places.names) or n
            # mpiexec connects to hosts itself, else this process does.
            launcher = "mpi" if launcher == "mpi" else HOSTS
        # Without a number the nodes of a job decide.
        if n is not None or slurm is False:
            n = preconditions.number_of_ranks(n)
        # Refused here, not seconds later on every engine.
        options = preconditions.torch_options(torch, backend)
        try:
            gpus = Gpus(parse_devices(devices), share_gpu)
        except ValueError as error:
            raise ValueError(f"devices={devices!r}: {error}") from None
        launcher = launcher or "local"
        preconditions.check_folder()
        if n is not None and launcher in _IN_THIS_ENVIRONMENT:
            if options is not None:
                preconditions.check_torch()
            if options is None or options.over_rankscope:
                preconditions.check_backend(n, backend)
            if not force and places is None:
                preconditions.check_capacity(n)
        elif places is not None and not force:
            places.limited = True
        private.check()
        report = progress or silent
        launched = clusters.prepare(
            launcher,
            profile,
            cluster_id,
            keep=keep,
            lost_after=lost_after,
            hosts=places,
        )
        if launched.hosts is not None:
            launched.hosts.torch = options is not None
        try:
            launched.reserve(report)
            deadline = time.monotonic() + start_timeout
            self._connect(
                launched.start(n, start_timeout, report),
                launched,
                owned=not keep,
                cluster_id=launched.cluster.cluster_id,
                profile=launched.cluster.profile_dir,
                launcher=launcher,
                backend=backend,
                timeout=timeout,
            )
        except BaseException:
            _end_after_failure(launched.stop)
            raise
        try:
            self._watch_launched()
            self._registry.gpus = gpus
            self._registry.owner = self._registry.this_client
            if options is not None:
                self._registry.torch = options.of_run(self.cluster_id)
            ids = sorted(self._client.ids)
            recovery.assign_all(self._registry, ids, deadline, report)
            self._registry.start_status()
            if places is None and launched.is_local:
                self._job = SlurmJob.watched(os.environ.get("SLURM_JOB_ID", ""))
            self._announce()
            launched.keep()
        except BaseException:
            _end_after_failure(partial(self.shutdown, fresh=False))
            raise
        report(f"{self.n} ranks are ready")

    #: ``Cluster.start(n)`` is ``Cluster(n)``, with the same options.
    start = _TheClass()

    @classmethod
    def attach(
        cls,
        *,
        profile: str | None = None,
        cluster_id: str | None = None,
        connection_file: str | None = None,
        slurm: str | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        torch: bool | str = False,
        attach_timeout: float = 30,
        briefly: bool = False,
        progress: Progress | None = None,
    ) -> Cluster:
        """Attach to a cluster that runs: ``ipcluster start``'s, or a kept one.

        Engines that have ranks keep their ranks, groups and variables; otherwise the
        agents are installed and the default group is made. The cluster runs on after
        this process.

        Parameters
        ----------
        profile, cluster_id, connection_file : str, optional
            Where the cluster is: its `connection_file`, or its id in an IPython
            profile. Without both, the cluster of ``ipcluster start``, or the only one
            in the profile.
        slurm : str, optional
            The number of the job of Slurm that the ranks are in, in the place of these.
        backend : str, optional
            As for the class.
        timeout : float, optional
            Timeout of the default group in seconds, if it is made.
        torch : bool or str, default False
            As for the class.
        attach_timeout : float, default 30
            Seconds that the engines get to answer. An engine that does not has the rank
            that the cluster's file in Jupyter's runtime folder names, if it does.
        briefly : bool, default False
            Whether to attach for a moment, beside the notebook that uses the cluster:
            engines without ranks get none, and the ranks send no status by themselves.
        progress : callable, optional
            As for the class.

        Returns
        -------
        Cluster
            The cluster.

        Raises
        ------
        ClusterError
            The cluster does not run or has no engines, engines do not answer in time,
            or they have no ranks and get none.
        """
        options = preconditions.torch_options(torch, backend)
        private.check()
        report = progress or silent
        report("looking for the cluster")
        if slurm is not None:
            connection_file = str(file_of_job(slurm).connection_file)
        found = clusters.find(profile, cluster_id, connection_file, attach_timeout)
        self = cls.__new__(cls)
        self._connect(
            found.client,
            found.launched,
            owned=False,
            cluster_id=found.cluster_id,
            profile=found.profile_dir,
            launcher="attached",
            backend=backend,
            timeout=timeout,
        )
        try:
            if found.launched is not None:
                self._watch_launched()
            if self.slurm_job is None:
                job = job_of(self.cluster_id, self.profile)
                self._job = SlurmJob.watched(job)
            report(f"requesting the ranks of {len(found.client.ids)} engines")
            if options is not None:
                self._registry.torch = options.of_run(self.cluster_id)
            file = ClusterFile.read(self.cluster_id, self.profile)
            recovery.find_or_assign(
                self._registry,
                {} if file is None else file.hellos,
                time.monotonic() + attach_timeout,
                report,
                assign=not briefly,
            )
            if not briefly:
                self._registry.start_status()
                self._announce()
        except BaseException:
            self.close()
            raise
        report(f"{self.n} ranks are ready")
        return self

    def __repr__(self) -> str:
        state = "" if self._open else ", closed"
        return f"<Cluster {self.cluster_id!r}: {self.n} ranks ({self.launcher}){state}>"
