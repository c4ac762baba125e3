"""Assigning ranks to engines, their store, and rebuilding groups after a death."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rankscope.backends import BackendConfig
from rankscope.backends.groups.key import GroupKey
from rankscope.backends.interface.registry import registered_by_cells
from rankscope.backends.rank_sets import name_ranks, tell_ranks

from ..errors import ClusterError
from ..observe.rank_slots import environment, note_gpus
from ..status import Groups, GroupStatus, decode, find_groups
from ..wire import ipyparallel_private as private
from ..wire import requests
from ..wire.answers import Answers
from ..wire.launchers import needs_launcher
from ..wire.requests import EncodedSummary, ExportedGroups, Hello
from ..wire.torch_environment import TorchOptions
from . import torch_start
from .installation import install_agents
from .registry import EngineRegistry
from .torch_start import Progress

__all__ = [
    "assign_all",
    "export_groups",
    "find_or_assign",
    "find_restarted",
    "reassign",
    "rebuild",
]

#: Seconds that engines get for the assignment of ranks: some import cupy then.
ASSIGN_WAIT = 30.0
#: Seconds that engines get to say which ranks they have.
HELLO_WAIT = 0.8
#: Seconds that ranks get to host, or to connect to, the store.
STORE_WAIT = 12.0
#: Seconds that ranks of hosts which were out of reach get at most to answer: TCP sends
#: again only after as long as it has waited.
RETURN_WAIT = 30.0
#: Seconds that ranks get to make the groups of another library anew: they meet in it.
WATCHED_WAIT = 45.0


def assign_all(
    registry: EngineRegistry,
    engine_ids: Sequence[int],
    deadline: float,
    report: Progress,
    hellos: Mapping[int, Hello] | None = None,
) -> None:
    """Assign ranks to engines in the order of their job, and make the default group."""
    if hellos is None:
        hellos = install_agents(registry, engine_ids, deadline)
    for rank, number in enumerate(_in_order(hellos)):
        registry.assign(rank, number, hellos[number])
    ranks = range(len(hellos))
    _assign_ranks(registry, ranks)
    _open_store(registry)
    if registry.torch is None or registry.torch.over_rankscope:
        report("making the default group")
        _new_groups(registry)
    if registry.torch is not None:
        answers = torch_start.load(registry, ranks, deadline, report)
        torch_start.init_group(registry, answers, deadline, report)


def find_or_assign(
    registry: EngineRegistry,
    known: Mapping[str, Hello],
    deadline: float,
    report: Progress,
    *,
    assign: bool = True,
) -> None:
    """Take over the ranks of a running cluster, or `assign` ranks to its engines."""
    numbers = sorted(registry.client.ids)
    if not numbers:
        raise ClusterError("the cluster has no engines: start some, attach again")
    hellos = install_agents(registry, numbers, deadline, attach=True, known=known)
    if any(hello["assignment"] for hello in hellos.values()):
        _find_assigned(registry, hellos)
    elif assign:
        assign_all(registry, numbers, deadline, report, hellos)
    else:
        raise ClusterError("the engines of this cluster have no ranks yet")


def reassign(
    registry: EngineRegistry,
    ranks: Sequence[int],
    engine_ids: Sequence[int],
    deadline: float,
    exported: ExportedGroups | None,
    why: str,
    report: Progress,
) -> None:
    """Give `ranks` fresh engines, with the groups `exported` by the others, aborted."""
    if registry.torch is not None:
        registry.torch = registry.torch.restarted()
    hellos = install_agents(registry, engine_ids, deadline)
    for rank, number in zip(ranks, _in_order(hellos), strict=True):
        registry.assign(rank, number, hellos[number])
    _assign_ranks(registry, ranks)
    _join_store(registry, ranks)
    loaded = {}
    if registry.torch is not None:
        loaded = torch_start.load(registry, ranks, deadline, report)
    _resume_groups(registry, ranks, exported, why)
    if loaded:
        torch_start.init_group(registry, loaded, deadline, report)
    registry.start_status(ranks)


def _in_order(hellos: Mapping[int, Hello]) -> list[int]:
    """Return engine ids in the order of their ranks: the controller may reuse ids."""
    return sorted(hellos, key=lambda one: (hellos[one]["job_rank"] or 0, one))


def _assign_ranks(registry: EngineRegistry, ranks: Sequence[int]) -> None:
    """Send the engines of `ranks` their rank, and the others the new environment."""
    env = environment(registry.slots, registry.gpus, registry.torch)
    size = len(registry.slots)
    torch = None if registry.torch is None else asdict(registry.torch)
    answers = registry.ask(
        lambda rank: requests.AssignRank(
            {"rank": rank, "world_size": size, "torch": torch},
            env[rank],
            registry.owner,
        ),
        ranks,
        timeout=ASSIGN_WAIT,
    ).all()
    registry.advice.clear()
    registry.advice += note_gpus(registry.slots, answers)
    others = set(registry.uuids()) - set(ranks)
    # MASTER_PORT moves with rank 0.
    registry.ask(lambda rank: requests.SetEnvironment(env[rank]), others).all()


def _find_assigned(registry: EngineRegistry, hellos: Mapping[int, Hello]) -> None:
    """Take over the ranks that the agents report; one that none reports is dead."""
    registry.torch = None
    holders, size = _read_assignments(registry, hellos)
    for rank in range(size):
        if rank in holders:
            registry.assign(rank, holders[rank], hellos[holders[rank]])
        else:
            registry.vacate(rank)
    _find_store(registry, {rank: hellos[number] for rank, number in holders.items()})


def find_restarted(registry: EngineRegistry) -> list[int]:
    """Take over dead ranks that another process restarted; return them."""
    dead = {slot.rank for slot in registry.slots if not slot.alive}
    held = {slot.uuid for slot in registry.slots}
    engines = private.engine_uuids(registry.client) if dead else {}
    others = {number: uuid for number, uuid in engines.items() if uuid not in held}
    if not others:
        return []
    # One that is being started, by whomever, has no agent yet and does not answer.
    channel = registry.channel
    posted = {
        number: channel.post(uuid, requests.GetHello())
        for number, uuid in others.items()
    }
    hellos = Answers.wait(
        posted, HELLO_WAIT, lambda number, late: channel.drop(others[number], late)
    ).results
    holders, _ = _read_assignments(registry, hellos)
    found = []
    for rank in sorted(dead & holders.keys()):
        # An engine may have ended meanwhile.
        with contextlib.suppress(ClusterError):
            registry.assign(rank, holders[rank], hellos[holders[rank]])
            found.append(rank)
    if found:
        _find_store(registry, registry.ask(requests.GetHello()).results)
    return found


def _read_assignments(
    registry: EngineRegistry, hellos: Mapping[int, Hello]
) -> tuple[dict[int, int], int]:
    """Return rank → its engine, and how many ranks there are; note torch's options."""
    holders: dict[int, int] = {}
    size = 0
    for number, hello in hellos.items():
        assignment = hello["assignment"]
        if assignment is not None:
            holders[assignment["rank"]] = number
            size = max(size, assignment["world_size"])
            if assignment["torch"] is not None:
                found, known = TorchOptions(**assignment["torch"]), registry.torch
                # Ranks that lived on have those before the last restart.
                if known is None or found.restarts > known.restarts:
                    registry.torch = found
    return holders, size


def _find_store(registry: EngineRegistry, hellos: Mapping[int, Hello]) -> None:
    """Note which rank hosts the store, of those that answered, by rank."""
    hosts = (rank for rank, hello in hellos.items() if hello["hosts_store"])
    registry.store_host = next(hosts, None)


def _open_store(registry: EngineRegistry) -> None:
    """Open a store on the lowest living rank, and connect the others."""
    host, *others = sorted(registry.uuids())
    # The key is made on the host and goes over the control channel only.
    request = requests.HostStore(registry.address_of(host))
    store = registry.ask(request, [host], STORE_WAIT).all()[host]
    registry.ask(requests.JoinStore(**store), others, STORE_WAIT).all()
    registry.store_host = host


def _join_store(registry: EngineRegistry, ranks: Collection[int]) -> None:
    """Connect fresh `ranks` to the store; open another if its host is not there."""
    host = registry.store_host
    if host is None or host in ranks or not registry.slots[host].alive:
        _open_store(registry)
        return
    store = registry.ask(requests.GetStoreAddress(), [host]).all()[host]
    registry.ask(requests.JoinStore(**store), ranks, STORE_WAIT).all()


def _restore_store(registry: EngineRegistry, ranks: Iterable[int]) -> None:
    """Connect those of `ranks` that lost the store, as a network outage has them do."""
    host = registry.store_host
    if host is None or not registry.slots[host].alive:
        _open_store(registry)
        return
    # The host too is connected to its own store, and may have lost that connection.
    lost = registry.ask(requests.IsStoreLost(), {host, *ranks}).all()
    without = [rank for rank, is_lost in lost.items() if is_lost]
    if without:
        _join_store(registry, without)


def export_groups(
    registry: EngineRegistry, without: Sequence[int]
) -> ExportedGroups | None:
    """Return the groups of the living ranks except those in `without`."""
    others = set(registry.uuids()) - set(without)
    if not others:
        return None
    uses: dict[GroupKey, int] = {}
    # Of each kind, the groups as the first rank that has them describes them.
    groups: dict[str, dict[GroupKey, Any]] = {"groups": {}, "watched": {}}
    modules: dict[str, str] = {}
    for export in registry.ask(requests.ExportGroups(), others).all().values():
        modules.update(export["modules"])
        for name, ranks, count in export["uses"]:
            key = GroupKey(name, tuple(ranks))
            uses[key] = max(count, uses.get(key, 0))
        for kind, found in groups.items():
            for group in export[kind]:
                found.setdefault(GroupKey(group["name"], tuple(group["ranks"])), group)
    return {
        "modules": modules,
        "uses": [(*key, count) for key, count in uses.items()],
        **{kind: list(found.values()) for kind, found in groups.items()},
    }


def _new_groups(registry: EngineRegistry) -> None:
    """Make the default group on every rank; add advice on unusable backends."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    request = requests.InitGroup(registry.backend, registry.timeout)
    for rank, refused in registry.ask(request).all().items():
        for refusal in refused:
            ranks.setdefault(tuple(refusal), []).append(rank)
    for (device, name, why), members in ranks.items():
        registry.advice.append(
            f"{name} cannot be used on {name_ranks(members)}: {why.rstrip('.')}; "
            f"{device} arrays will be refused"
        )


def _resume_groups(
    registry: EngineRegistry,
    ranks: Sequence[int],
    exported: ExportedGroups | None,
    reason: str,
) -> None:
    """Make the groups `exported` by the others on fresh `ranks`, aborted as there."""
    if exported is None:
        if registry.torch is None or registry.torch.over_rankscope:
            registry.ask(
                requests.InitGroup(registry.backend, registry.timeout), ranks
            ).all()
        return
    if not _import_groups(registry, ranks, exported):
        return
    registry.ask(requests.Abort(None, reason, "the notebook"), ranks).all()
    _advise_on_cells(registry, ranks, exported)


def _import_groups(
    registry: EngineRegistry, ranks: Collection[int], exported: ExportedGroups
) -> bool:
    """Make the others' groups on `ranks`; return whether there is a default one."""
    found = {one["name"]: one for one in exported["groups"]}
    default = found.get("default")
    if default is None:
        return False
    registry.ask(
        requests.InitGroup(default["backend"], default["timeout"]), ranks
    ).all()
    registry.ask(requests.ImportGroups(exported), ranks).all()
    return True


def _advise_on_cells(
    registry: EngineRegistry, ranks: Sequence[int], exported: ExportedGroups
) -> None:
    """Add advice on backends that fresh `ranks` lack until they have run a cell."""
    for name in registered_by_cells(exported["modules"]):
        groups = [group["ranks"] for group in exported["groups"] if _uses(group, name)]
        users = [rank for rank in ranks if any(rank in members for members in groups)]
        if users:
            registry.advice.append(
                f"{tell_ranks(users, 'has')} no backend {name!r}, which a cell "
                "registered on the other ranks: run that cell there, too "
                f"(%%distributed -r {','.join(map(str, users))})"
            )


def _uses(group: Mapping[str, Any], backend: str) -> bool:
    config = BackendConfig.from_peer(group["backend"])
    return backend in config.device_backend_map.values()


def rebuild(registry: EngineRegistry, group: Groups | None) -> list[str]:
    """Begin a new generation of groups; return sentences on what cannot use it."""
    back = min(_longest_silence(registry), RETURN_WAIT)
    answers = registry.ask(requests.GetSummary(), timeout=max(2.0, back))
    summaries = {rank: decode(one) for rank, one in answers.results.items()}
    if not summaries:
        # No rank answered: raise the reasons.
        answers.all()
        raise ClusterError(
            "rebuild: every engine is gone; start them again with %dist_restart "
            "(Cluster.restart())"
        )
    known: dict[GroupKey, dict[int, GroupStatus]] = {}
    for rank, summary in summaries.items():
        for one in summary.groups:
            if one.unfinished:
                # Not made on all ranks yet: the wait is ended, and the store with it.
                reason = f"groups are rebuilt while group {one.name!r} is made"
                registry.ask(
                    requests.Abort([one.key.id], reason, "the notebook"), [rank]
                ).all()
                continue
            known.setdefault(one.key, {})[rank] = one
    one_job = any(
        needs_launcher(one.backend)
        for views in known.values()
        for one in views.values()
    )
    generations: dict[int, dict[str, int]] = {}
    without: set[int] = set()
    ready: list[GroupKey] = []
    for key in known if group is None else find_groups(group, known):
        views = known[key]
        _check_alive(registry, answers, key, one_job)
        begun = [one.generation for one in views.values()]
        generation = 1 + max(*begun, registry.generations.get(key.id, 0))
        registry.generations[key.id] = generation
        for rank in key.ranks:
            generations.setdefault(rank, {})[key.id] = generation
        # On some members the cell failed before it made the group, or destroyed it.
        without.update(set(key.ranks) - views.keys())
        if any(one.state == "ready" for one in views.values()):
            ready.append(key)
    if without:
        exported = export_groups(registry, ())
        assert exported is not None
        left = {rank for rank in without if not summaries[rank].groups}
        if not left or not _import_groups(registry, left, exported):
            # Those of torch, which a restarted rank joins, need no default group.
            left = set()
        if without - left:
            registry.ask(requests.ImportGroups(exported), without - left).all()
    for key in ready:
        reason = f"group {key.name!r} is being rebuilt"
        registry.ask(requests.Abort([key.id], reason, "the notebook"), key.ranks).all()
    _restore_store(registry, generations)
    watched = any(one.library for views in known.values() for one in views.values())
    rebuilt = registry.ask(
        lambda rank: requests.Rebuild(generations[rank]),
        generations,
        timeout=WATCHED_WAIT if watched else max(5.0, back),
    )
    for rank, encoded in rebuilt.results.items():
        registry.record_summary(rank, encoded)
    rebuilt.all()
    return _stale(rebuilt.results, generations)


def _longest_silence(registry: EngineRegistry) -> float:
    """Return the seconds since the last status of a living rank of another host."""
    away = (slot for slot in registry.slots if slot.alive and not slot.is_here)
    return max((slot.silent_for or 0.0 for slot in away), default=0.0)


def _stale(
    answers: Mapping[int, EncodedSummary], rebuilt: Mapping[int, Mapping[str, int]]
) -> list[str]:
    """Return the sentences on what cannot use the rebuilt groups, each once."""
    ranks: dict[str, list[int]] = {}
    for rank, encoded in answers.items():
        for group in decode(encoded).groups:
            if group.key.id in rebuilt[rank]:
                for sentence in group.stale:
                    known = ranks.setdefault(sentence, [])
                    if rank not in known:
                        known.append(rank)
    return [f"on {name_ranks(known)}, {one}" for one, known in ranks.items()]


def _check_alive(
    registry: EngineRegistry, answers: Answers, key: GroupKey, one_job: bool
) -> None:
    """Raise `ClusterError` if a rank of the group is dead or does not answer."""
    name, ranks = key
    dead = [one for one in registry.slots if one.rank in ranks and not one.alive]
    if dead:
        which = ",".join(str(one.rank) for one in dead)
        what = "it" if len(dead) == 1 else "them"
        how = f"%dist_restart {which} (Cluster.restart([{which}]))"
        if one_job:
            what = "all ranks"
            how = (
                "%dist_restart all (Cluster.restart()), as an MPI job cannot replace "
                "single ranks"
            )
        raise ClusterError(
            f"group {name!r} cannot be rebuilt: "
            f"{'; '.join(str(one.reason) for one in dead)}. Start {what} again with "
            f"{how}, then rebuild"
        )
    silent = [rank for rank in ranks if rank in answers.errors]
    if silent:
        raise ClusterError(
            f"group {name!r} cannot be rebuilt: rank {silent[0]}: "
            f"{answers.errors[silent[0]]}"
        )
