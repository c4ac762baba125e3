"""Job: a script's ranks that a notebook watches, and may abort if allowed."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, ClassVar, NoReturn

from rankscope import __version__
from rankscope.backends.errors import DistError
from rankscope.backends.observe.verdicts import Verdict
from rankscope.backends.stores.tcp import TCPStore

from ..errors import ClusterError
from ..observe.observed_ranks import Chosen, ObservedRanks
from ..status import Groups
from ..wire.job_channel import JOB
from ..wire.job_file import JobFile, job_files
from ..wire.job_keys import key_of_environment
from ..wire.requests import NcclReport
from .job_registry import JobRegistry

__all__ = ["Job"]

#: Seconds that each rank gets to send its first status.
FIRST_STATUS_WAIT = 2.0


class Job(ObservedRanks):
    r"""The ranks of a script with ``rankscope.torch.watch()``; made by :meth:`attach`.

    Status, board, diagnosis and traces are those of a `Cluster`. The ranks take no
    cells, and their groups are aborted only where the script allows it. As a context
    manager it detaches; the script never notices.

    Parameters
    ----------
    store : TCPStore
        The store of the job.
    address : str
        Its ``HOST:PORT``.
    about : dict
        What the job says of itself.
    attends : bool, default True
        As in `attach`.

    Examples
    --------
    In a notebook, while a script of torchrun runs::

        with rankscope.Job.attach() as job:
            print(job.status())
            print(*job.diagnose(), sep="\n")
    """

    _closed_because: ClassVar[str] = (
        "this notebook has detached from the job: attach again with Job.attach "
        "(%dist_attach)"
    )
    #: The job does not end with this process.
    owned: ClassVar[bool] = False
    #: Advice about the ranks; there is none.
    advice: ClassVar[str] = ""

    def __init__(
        self, store: TCPStore, address: str, about: dict[str, Any], attends: bool = True
    ) -> None:
        self._registry: JobRegistry
        self._registry = JobRegistry(store, int(about["world_size"]), attends)
        #: The script as the job was started with it.
        self.script = str(about["script"])
        #: Whether the script lets notebooks abort groups.
        self.allow_abort = bool(about["allow_abort"])
        self._script_name = PurePath(self.script).name or "script"
        super().__init__(
            self._registry,
            cluster_id=address,
            profile="",
            launcher=self._script_name,
            backend=None,
        )

    @classmethod
    def attach(
        cls,
        address: str | None = None,
        key: str | None = None,
        *,
        attach_timeout: float = 10,
        attends: bool = True,
    ) -> Job:
        """Attach to a job, at the address that its rank 0 printed.

        Parameters
        ----------
        address : str, optional
            ``HOST:PORT``; ``None``: the only job of this user on this host.
        key : str, optional
            As printed; ``None``: that of the job's file, which a job of this user on
            this host, or with the same home folder, has in Jupyter's runtime folder, or
            else of ``RANKSCOPE_KEY``.
        attach_timeout : float, default 10
            Seconds that the job may take to answer.
        attends : bool, default True
            Whether a person looks, who reads why an op hangs: meanwhile the ranks write
            no report of a hang. A program that collects metrics does not.

        Returns
        -------
        Job
            The job.

        Raises
        ------
        ClusterError
            There is no such job, its key is another one, or it runs another version of
            Rankscope.
        """
        host, port, key = _find(address, key)
        store = _connect(host, port, key, attach_timeout)
        try:
            about = json.loads(store.get(JOB, attach_timeout))
            if about["version"] != __version__:
                raise ClusterError(
                    f"the job runs Rankscope {about['version']}, this notebook "
                    f"{__version__}: install the same version"
                )
            self = cls(store, f"{host}:{port}", about, attends)
        except DistError as error:
            store.close()
            raise ClusterError(f"{host}:{port} is no job to attach to: {error}") from (
                error
            )
        except BaseException:
            store.close()
            raise
        self._registry.start_status(FIRST_STATUS_WAIT)
        return self

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Job {self.launcher!r} at {self.cluster_id}: {self.n} ranks{state}>"

    @property
    def ended(self) -> str | None:
        """Why the job has ended; ``None`` while it runs."""
        return self._registry.ended

    # -- what a script has not -------------------------------------------------------

    def tell_ranks(self, verdicts: Sequence[Verdict]) -> None:
        """Do nothing: a notebook that is attached changes nothing in a script."""

    def nccl_report(self, rank: int) -> NcclReport | None:
        """Return ``None``: a script's rank does not query NCCL's RAS service."""
        return None

    @property
    def refused(self) -> dict[str, str]:
        """What cannot be done to the script's ranks → why."""
        return refusals(self._script_name, self.allow_abort)

    def rebuild(self, group: Groups | None = None) -> NoReturn:
        """Raise `ClusterError`: the script has to make its groups again."""
        raise ClusterError(self.refused["rebuild"])

    def restart(self, ranks: Chosen = None) -> None:
        """Raise `ClusterError`: who started the script restarts it."""
        raise ClusterError(self.refused["restart"])

    def _ended_by_abort(self, ranks: Sequence[int]) -> list[int]:
        slots = self._registry.slots
        over = self._registry.ended is not None
        return [rank for rank in ranks if over or not slots[rank].alive]

    # -- the end -----------------------------------------------------------------------

    def _disconnect(self) -> None:
        self._registry.close()

    #: What ends a cluster only detaches from a job.
    shutdown = ObservedRanks.close


def refusals(script: str, allow_abort: bool) -> dict[str, str]:
    """Return what a notebook cannot do to the ranks of `script` → why."""
    why = (
        f"the ranks are those of a script ({script}), which runs on its own: this "
        "notebook sees them, and no more"
    )
    found = {what: f"{what}: {why}" for what in ("rebuild", "restart")}
    if not allow_abort:
        found["abort"] = (
            f"{script} does not allow notebooks to abort: start it with "
            "RANKSCOPE_ALLOW_ABORT=1, or rankscope.torch.watch(allow_abort=True)"
        )
    return found


def _find(address: str | None, key: str | None) -> tuple[str, int, str]:
    if address is None:
        files = job_files()
        if not files:
            raise ClusterError(
                "no job of this user runs here: give the address that rank 0 printed "
                "(%dist_attach HOST:PORT --key KEY)"
            )
        if len(files) > 1:
            listed = ", ".join(f"{one.address} ({one.script})" for one in files)
            raise ClusterError(f"several jobs run: give the address of one: {listed}")
        return files[0].host, files[0].port, key or files[0].key
    host, colon, number = address.rpartition(":")
    if not colon or not number.isdecimal() or not 0 < int(number) < 65536:
        raise ClusterError(f"{address!r} is no address: HOST:PORT is expected")
    host = host.strip("[]")
    # A tunnel leads to one of another host, which has the same address here.
    found = [one.key for one in JobFile.load_all() if one.address == address]
    key = key or next(iter(found), None) or key_of_environment()
    if key is None:
        raise ClusterError(
            f"the key of the job at {address} is not known: give the one that its rank "
            f"0 printed (%dist_attach {address} --key KEY)"
        )
    return host, int(number), key


def _connect(host: str, port: int, key: str, timeout: float) -> TCPStore:
    try:
        secret = bytes.fromhex(key)
        if not secret:
            raise ValueError("empty")
    except ValueError:
        raise ClusterError(
            "the key is no hexadecimal number: give it as rank 0 printed it"
        ) from None
    try:
        # ZeroMQ would go on trying where nothing listens.
        socket.create_connection((host, port), timeout).close()
        return TCPStore(host, port, timeout=timeout, key=secret, reports_deaths=True)
    except OSError as error:
        raise ClusterError(
            f"no job listens at {host}:{port} ({error.strerror or error}): has the "
            "script ended, or does it run on another host?"
        ) from None
    except DistError as error:
        if "refused" not in str(error):
            raise ClusterError(f"the job at {host}:{port}: {error}") from None
        raise ClusterError(
            f"the job at {host}:{port} refused this notebook: its key is another one, "
            "or what listens there is no job"
        ) from None
