"""Making clusters: launcher options, Open MPI, finding a running cluster."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineSetLauncher
from traitlets import TraitError
from traitlets.config import Config

from rankscope.backends.install import pip_install, with_extra

from ..errors import ClusterError, ClusterStartError
from ..wire import ipyparallel_private as private
from . import controller_main, mpiexec_main
from .cluster_file import cluster_files, is_elsewhere
from .engine_launcher import ForkedEngineSetLauncher
from .files import folder_error, session_folder
from .hosts import FORWARDED, HOSTS, LOST_AFTER, Hosts
from .launched import Launched
from .local_host import LocalHost
from .ports import reserved_ports

__all__ = ["Found", "find", "find_mpiexec", "launcher_names", "prepare"]

# ipyparallel would print these messages into the notebook; add a handler to see them.
_log = logging.getLogger("rankscope.engines.launch.clusters")
_log.propagate = False
_log.addHandler(logging.NullHandler())

#: For ``engines=``: engines of this machine, each started from scratch. With ``local``
#: one process imports, and the engines are forked from it.
SPAWN = "spawn"
#: Milliseconds between two heartbeats of the hub, which registers a new engine only
#: after a heartbeat: with the default of 3,000 a start takes seconds longer.
HEARTBEAT = 250
#: Milliseconds after a heartbeat of the controller at which an engine looks for it.
_CHECK_LATE = 500
#: Heartbeats that an engine may miss whose end is reported without them: a person may
#: keep a rank at a debugger for hours.
ANY_MISSES = 2**31 - 1
#: Ports that a controller listens at, and some more.
_PORTS = 24
_CONTROLLER_ARGS: dict[str, object] = {
    "HeartMonitor.period": HEARTBEAT,
    # ERROR: its log would grow by a line per cell and status message.
    "IPController.log_level": 40,
    # The hub would keep every cell's code, arrays and outputs for ever.
    "IPController.db_class": "NoDB",
    # Messages carry the key of the ranks' store: encrypt, not only sign.
    "IPController.enable_curve": True,
}


def launcher_names() -> list[str]:
    """Return the names that ``engines=`` takes here."""
    found = entry_points(group="ipyparallel.engine_launchers")
    return sorted({SPAWN, *(one.name for one in found)})


def prepare(
    engines: str,
    profile: str | None,
    cluster_id: str | None,
    *,
    keep: bool,
    lost_after: float = LOST_AFTER,
    hosts: Hosts | None = None,
) -> Launched:
    """Make a cluster, not started yet: it ends with this process, or is to `keep`."""
    # Those of killed notebooks are deleted, with all that they have left.
    cluster_files()
    launched = _make(engines, profile, cluster_id, keep)
    cluster = launched.cluster
    try:
        if _runs(Path(cluster.cluster_file)):
            raise ClusterStartError(
                f"a cluster with id {cluster.cluster_id!r} runs already: attach to it "
                "(Cluster.attach), or choose another id"
            )
        if launched.uses_mpi:
            _configure_mpi(cluster, hosts, 0 if keep else os.getpid())
            if hosts is not None:
                address = hosts.address
                cluster.controller_ip = cluster.controller_location = address
    except BaseException:
        launched.close()
        raise
    if cluster.engine_launcher_class is LocalEngineSetLauncher:
        if engines == HOSTS:
            launched.hosts = hosts
        else:
            by_command = engines == SPAWN or not _can_fork(cluster)
            launched.hosts = LocalHost(by_command=by_command)
            launched.hosts.kept = keep
        cluster.engine_launcher_class = ForkedEngineSetLauncher
    # This process hears of the ends of engines as long as the cluster is there.
    waits = not keep and cluster.engine_launcher_class is ForkedEngineSetLauncher
    far = engines not in ("local", SPAWN, "mpi") or hosts is not None
    if "engine_args" not in cluster.config.EngineLauncher:
        arguments = _engine_arguments(waits, lost_after if far else None)
        cluster.config.EngineLauncher.engine_args = arguments
    _configure_controller(
        launched, keep, ANY_MISSES if waits else int(1000 * lost_after / HEARTBEAT)
    )
    return launched


def _make(
    engines: str, profile: str | None, cluster_id: str | None, keep: bool
) -> Launched:
    config = _config()
    # One engine at a time, 0.1 s apart, is the default.
    config.LocalEngineSetLauncher.delay = 0
    options: dict[str, Any] = {
        "engines": "local" if engines in (SPAWN, HOSTS) else engines,
        "cluster_id": cluster_id or f"rankscope-{secrets.token_hex(6)}",
        "config": config,
        "log": _log,
        "delay": 0,
        # Cluster.shutdown ends the cluster, and else what `Launched` says.
        "shutdown_atexit": False,
    }
    if profile is not None:
        options["profile"] = profile
    try:
        return Launched(lambda: ipyparallel.Cluster(**options), kept=keep)
    except TraitError as error:
        raise ClusterStartError(
            f"engines={engines!r}: no such launcher here; there are "
            f"{', '.join(launcher_names())}"
        ) from error
    except OSError as error:
        raise folder_error(error) or error from None


def _engine_arguments(waits: bool, lost_after: float | None) -> list[str]:
    # On a busy machine 5 s, the default, are too few for the controller.
    arguments = ["--IPEngine.timeout=60"]
    if waits:
        # A nanny sends signals to its engine and reports its end to the hub. This
        # process does both. A third of a second of CPU time, 25 MiB for each rank.
        arguments.append("--IPEngine.enable_nanny=False")
    if lost_after is not None:
        misses = int(1000 * lost_after / (HEARTBEAT + _CHECK_LATE))
        arguments.append(f"--IPEngine.max_heartbeat_misses={misses}")
    return arguments


def _configure_controller(launched: Launched, keep: bool, misses: int) -> None:
    """Have the controller end as the cluster does, and give up engines in time."""
    cluster = launched.cluster
    chosen = {**_CONTROLLER_ARGS, "HeartMonitor.max_heartmonitor_misses": misses}
    given = " ".join(cluster.controller_args)
    if cluster.controller_launcher_class.__name__ == "LocalControllerLauncher":
        command = [sys.executable, controller_main.__file__, launched.thread]
        command += ["kept" if keep else "", cluster.profile_dir, cluster.cluster_id]
        command.append("" if launched.is_local else cluster.cluster_file)
        launcher = cluster.config.LocalControllerLauncher
        if "controller_cmd" in launcher:
            command += LocalControllerLauncher(config=cluster.config).controller_cmd
        launcher.controller_cmd = command
        # A configuration may have the ports that a firewall lets through.
        if not Path(cluster.profile_dir, "ipcontroller_config.py").exists():
            ports = launched.until_started.enter_context(reserved_ports(_PORTS))
            if ports:
                chosen["IPController.ports"] = ",".join(map(str, ports))
    cluster.controller_args = [
        *(f"--{k}={v}" for k, v in chosen.items() if k not in given),
        *cluster.controller_args,
    ]


def _can_fork(cluster: ipyparallel.Cluster) -> bool:
    """Whether the profile says nothing of how a local engine is started."""
    return not any(
        option in cluster.config[one.__name__]
        for one in LocalEngineSetLauncher.mro()[:-1]
        for option in ("engine_cmd", "environment")
    )


def _runs(cluster_file: Path) -> bool:
    """Whether the cluster of a file runs: another with its id would overwrite it."""
    if not cluster_file.is_file():
        return False
    controller = json.loads(cluster_file.read_text()).get("controller", {})
    pid = (controller.get("state") or {}).get("pid", -1)
    # A controller on another machine cannot be checked: it counts as running.
    return pid < 0 or psutil.pid_exists(pid)


def _config() -> Config:
    config = Config()
    # Seconds that a thread which waits for a process takes to end after a detach.
    config.LocalProcessLauncher.poll_seconds = 1
    return config


@dataclass
class Found:
    """A cluster that runs; ``launched`` where its launchers are known."""

    client: ipyparallel.Client
    launched: Launched | None
    cluster_id: str
    profile_dir: str


def find(
    profile: str | None,
    cluster_id: str | None,
    connection_file: str | None,
    timeout: float,
) -> Found:
    """Find a running cluster and connect to it.

    `connection_file` is a controller's ``ipcontroller-...-client.json`` or a
    cluster's ``cluster-....json``. Without one, `cluster_id` names a cluster
    of the profile; without that, it is the one of ``ipcluster start``, or the
    only one there is. Raises `ClusterError` saying what there is instead.
    """
    clients, clusters = _files(profile, cluster_id, connection_file)
    if clusters is not None and is_elsewhere(
        clusters.stem.removeprefix("cluster-"), str(clusters.parent.parent)
    ):
        # Its processes are not those of this host with the same numbers.
        clusters = None
    if clusters is not None:
        cluster_file = str(clusters)
        launched = Launched(
            lambda: ipyparallel.Cluster.from_file(
                cluster_file, config=_config(), log=_log
            )
        )
        if launched.cluster.controller is not None:
            if launched.uses_mpi:
                _configure_mpi(launched.cluster, None, 0)
            client = private.connect(
                lambda context: launched.run(
                    launched.cluster.connect_client(context=context, timeout=timeout),
                    timeout,
                )
            )
            return Found(
                client,
                launched,
                launched.cluster.cluster_id,
                launched.cluster.profile_dir,
            )
        launched.close()
        if clients is None or not clients.exists():
            raise ClusterError(f"the cluster of {clusters} does not run any more")
    assert clients is not None
    name = clients.name.removeprefix("ipcontroller").removesuffix("client.json")
    try:
        return Found(
            private.connect(
                lambda context: ipyparallel.Client(
                    str(clients), context=context, timeout=timeout
                )
            ),
            None,
            name.strip("-"),
            str(clients.parent.parent),
        )
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"no controller answers for {clients}: {error}") from error


def _files(
    profile: str | None, cluster_id: str | None, connection_file: str | None
) -> tuple[Path | None, Path | None]:
    """The client's connection file and the cluster file; at least one exists."""
    if connection_file is not None:
        path = Path(connection_file).expanduser()
        if not path.is_file():
            raise ClusterError(f"there is no connection file {path}")
        if "cluster" in json.loads(path.read_text()):
            return None, path
        name = path.name.removeprefix("ipcontroller").removesuffix("client.json")
        beside = path.parent / f"cluster-{name.strip('-')}.json"
        return path, beside if beside.is_file() else None
    security = _security_dir(profile)
    ids = sorted(
        one.name.removeprefix("cluster-").removesuffix(".json")
        for one in security.glob("cluster-*.json")
        # Clusters that were killed leave their files.
        if _runs(one)
    )
    if cluster_id is None:
        cluster_id = ids[0] if len(ids) == 1 else ""
    dashed = f"-{cluster_id}" if cluster_id else ""
    clients = security / f"ipcontroller{dashed}-client.json"
    clusters = security / f"cluster-{cluster_id}.json"
    if clusters.is_file():
        return clients, clusters
    if clients.is_file():
        return clients, None
    there = f"; there are {', '.join(map(repr, ids))}" if ids else ""
    wanted = f"with id {cluster_id!r} " if cluster_id else ""
    raise ClusterError(f"no cluster {wanted}runs under {security.parent}{there}")


def _security_dir(profile: str | None) -> Path:
    options = {} if profile is None else {"profile": profile}
    cluster = ipyparallel.Cluster(
        config=Config(), load_profile=False, shutdown_atexit=False, **options
    )
    return Path(cluster.profile_dir, "security")


def find_mpiexec() -> str | None:
    """Return the path of the mpiexec beside this Python, else of the one on PATH."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])
    return shutil.which("mpiexec", path=path)


def _configure_mpi(
    cluster: ipyparallel.Cluster, hosts: Hosts | None, owner: int
) -> None:
    """Find mpiexec, and set what Open MPI needs to run and to survive a death.

    Open MPI puts its session files into a folder of the cluster: a killed mpiexec
    leaves them, and a later one that gets its pid does not start. Settings of the
    profile's own ``ipcluster_config.py`` are kept.
    """
    launcher = cluster.config.MPILauncher
    if "mpi_cmd" not in launcher:
        found = find_mpiexec()
        if found is None:
            raise ClusterStartError(
                "engines='mpi': no mpiexec found beside this Python or on PATH; "
                f"install one with: {pip_install(with_extra('mpi'))}"
            )
        launcher.mpi_cmd = [found]
    version = subprocess.run(
        [*launcher.mpi_cmd, "--version"], capture_output=True, text=True, check=False
    ).stdout
    mpiexec = launcher.mpi_cmd
    main = [sys.executable, "-I", "-S", mpiexec_main.__file__, str(owner)]
    launcher.mpi_cmd = [*main, *mpiexec]
    if "Open MPI" not in version and "OpenRTE" not in version:
        if hosts is not None:
            raise ClusterStartError(
                f"{mpiexec[0]} is not Open MPI's mpiexec, the only one that "
                "can start ranks on hosts here"
            )
        return
    if "mpi_args" not in launcher:
        # More ranks than cores; and the death of a rank must not end the others.
        where = ["--oversubscribe"] if hosts is None else _mpi_placement(hosts)
        launcher.mpi_args = [*where, "--with-ft", "ulfm"]
    if "environment" not in launcher:
        # The user of a container is often root. For other users this changes nothing.
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
        launcher.environment = {
            **{name + end: "1" for name in names for end in ("", "_CONFIRM")},
            "PRTE_MCA_prte_tmpdir_base": str(session_folder(cluster.cluster_id)),
        }


def _mpi_placement(hosts: Hosts) -> list[str]:
    """Return the options by which Open MPI starts ranks on hosts, in their order."""
    variables = ["IPP_CONNECTION_INFO", "IPP_CLUSTER_ID"]
    variables += [one for one in os.environ if one.startswith(FORWARDED)]
    return [
        *("--host", ",".join(f"{name}:{n}" for name, n in hosts.ranks.items())),
        *("--map-by", "slot", "--bind-to", "none"),
        # A question for a password would wait for ever.
        *("--prtemca", "plm_ssh_args", "-oBatchMode=yes -oConnectTimeout=20"),
        *(word for one in variables for word in ("-x", one)),
    ]
