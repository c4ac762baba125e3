"""Seating ranks, opening their store, rebuilding groups after a death."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .channel import Answers, name_ranks
from .errors import ClusterError
from .roster import Roster
from .seats import environment, members
from .summary import unpack

__all__ = ["export_groups", "find_or_seat", "rebuild", "reseat", "seat_all"]

#: Seconds that ranks get to take their seats: some import cupy then.
SIT_WAIT = 30.0
#: Seconds that ranks get to host, or to connect to, the store.
STORE_WAIT = 12.0


def seat_all(
    roster: Roster,
    engine_ids: Sequence[int],
    backend: str | None,
    timeout: float | None,
    deadline: float,
) -> int:
    """Seat engines on ranks in the order of their ids; return the store's host.

    They get the default group, with `backend` and `timeout`.
    """
    hellos = roster.install(engine_ids, _left(deadline))
    return _seat_fresh(roster, hellos, backend, timeout)


def _seat_fresh(
    roster: Roster,
    hellos: Mapping[int, Mapping[str, Any]],
    backend: str | None,
    timeout: float | None,
) -> int:
    for rank, number in enumerate(sorted(hellos)):
        roster.take(rank, number, hellos[number])
    _sit(roster, range(len(hellos)))
    host = _open_store(roster)
    _new_groups(roster, backend, timeout)
    return host


def find_or_seat(
    roster: Roster, backend: str | None, timeout: float | None, deadline: float
) -> int | None:
    """Find who sits where in a running cluster, or seat everybody.

    Returns the store's host, ``None`` if it is dead.
    """
    numbers = sorted(roster.client.ids)
    if not numbers:
        raise ClusterError("the cluster has no engines: start some, attach again")
    hellos = roster.install(numbers, _left(deadline), attach=True)
    if any(hello["seat"] for hello in hellos.values()):
        return _find_seats(roster, hellos)
    return _seat_fresh(roster, hellos, backend, timeout)


def reseat(
    roster: Roster,
    ranks: Sequence[int],
    engine_ids: Sequence[int],
    deadline: float,
    exported: Mapping[str, Any] | None,
    store_host: int | None,
    why: str,
    backend: str | None,
    timeout: float | None,
) -> int:
    """Give `ranks` fresh engines; return the store's host.

    They get the groups `exported` by the others, aborted for the reason
    `why`, as those of the others are.
    """
    hellos = roster.install(engine_ids, _left(deadline))
    # Ids that were in use a moment ago are given again, or not. In an MPI job
    # the ranks have to be the job's, whatever the ids.
    order = sorted(hellos, key=lambda one: (hellos[one]["job_rank"] or 0, one))
    for rank, number in zip(ranks, order, strict=True):
        roster.take(rank, number, hellos[number])
    _sit(roster, ranks)
    host = _join_store(roster, ranks, store_host)
    _resume_groups(roster, ranks, exported, why, backend, timeout)
    roster.listen(ranks)
    return host


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _sit(roster: Roster, ranks: Sequence[int]) -> None:
    """Tell the engines that hold `ranks` who they are, and the others about it."""
    env = environment(roster.seats, roster.gpus)
    size = len(roster.seats)
    answers = roster.ask(
        "sit",
        lambda rank: {"seat": {"rank": rank, "world_size": size}, "env": env[rank]},
        ranks,
        timeout=SIT_WAIT,
    ).all()
    sharing = [rank for rank, answer in answers.items() if answer["must_share"]]
    roster.advice.clear()
    if sharing:
        roster.advice.append(
            f"{name_ranks(sharing)} have to share GPUs, which NCCL refuses; "
            "--share-gpu makes it work, slowly, for learning"
        )
    others = set(roster.uuids()) - set(ranks)
    # MASTER_PORT moves with rank 0.
    roster.ask("set_environment", lambda rank: {"env": env[rank]}, others).all()


def _find_seats(roster: Roster, hellos: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Seat engines where their agents say they sit; return the store's host.

    A rank that nobody holds is dead. ``hellos`` are by engine id.
    """
    holders = {
        hello["seat"]["rank"]: number
        for number, hello in hellos.items()
        if hello["seat"]
    }
    size = max(hello["seat"].get("world_size", 0) for hello in hellos.values())
    for rank in range(size):
        if rank in holders:
            roster.take(rank, holders[rank], hellos[holders[rank]])
        else:
            roster.leave_empty(rank)
    hosts = [rank for rank, one in holders.items() if hellos[one]["hosts_store"]]
    return hosts[0] if hosts else None


def _open_store(roster: Roster) -> int:
    """Open a store on the lowest living rank, connect the others; return that rank."""
    living = sorted(roster.uuids())
    host = living[0]
    places = {one.host for one in roster.seats}
    address = "127.0.0.1" if len(places) == 1 else roster.seats[host].address
    # The key is made on the host and goes over the control channel only.
    store = roster.ask("host_store", {"host": address}, [host], STORE_WAIT).all()[host]
    roster.ask("join_store", store, living[1:], STORE_WAIT).all()
    return host


def _join_store(roster: Roster, ranks: Sequence[int], host: int | None) -> int:
    """Connect fresh `ranks` to the store; open another if its host is not there."""
    if host is None or host in ranks or not roster.seats[host].alive:
        return _open_store(roster)
    store = roster.ask("store_address", {}, [host]).all()[host]
    roster.ask("join_store", store, ranks, STORE_WAIT).all()
    return host


def _mend_store(roster: Roster, host: int | None, ranks: Iterable[int]) -> int:
    """See to it that `ranks` have a store; return its host.

    A network that was down for half a minute ends the connections to it.
    """
    if host is None or not roster.seats[host].alive:
        return _open_store(roster)
    # The host has a connection too, which may be the one that is gone.
    lost = roster.ask("store_lost", {}, {host, *ranks}).all()
    without = [rank for rank, is_lost in lost.items() if is_lost]
    return _join_store(roster, without, host) if without else host


def export_groups(roster: Roster, without: Sequence[int]) -> dict[str, Any] | None:
    """What the living ranks, but those in `without`, have between them."""
    others = set(roster.uuids()) - set(without)
    if not others:
        return None
    exports = roster.ask("export_groups", {}, others).all().values()
    uses: dict[tuple[str, tuple[int, ...]], int] = {}
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for export in exports:
        for name, ranks, count in export["uses"]:
            key = (name, tuple(ranks))
            uses[key] = max(count, uses.get(key, 0))
        for group in export["groups"]:
            groups.setdefault((group["name"], tuple(group["ranks"])), group)
    return {
        "uses": [(*key, count) for key, count in uses.items()],
        "groups": list(groups.values()),
    }


def _new_groups(roster: Roster, backend: str | None, timeout: float | None) -> None:
    """Make the default group on every rank; advise on what it cannot use."""
    args = {"backend": backend, "timeout": timeout}
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, refused in roster.ask("init_group", args).all().items():
        for refusal in refused:
            ranks.setdefault(tuple(refusal), []).append(rank)
    for (device, name, why), who in ranks.items():
        roster.advice.append(
            f"{name} cannot be used on {name_ranks(who)}: {why}; {device} arrays "
            "will be refused"
        )


def _resume_groups(
    roster: Roster,
    ranks: Sequence[int],
    exported: Mapping[str, Any] | None,
    reason: str,
    backend: str | None,
    timeout: float | None,
) -> None:
    """Make on fresh `ranks` the groups that the others have, aborted as theirs are.

    `exported` is what a rank that lived on has, ``None`` if there is none:
    then the default group is made anew, with `backend` and `timeout`.
    """
    if exported is None:
        args = {"backend": backend, "timeout": timeout}
        roster.ask("init_group", args, ranks).all()
        return
    found = {one["name"]: one for one in exported["groups"]}
    default = found.get("default")
    if default is None:
        return
    args = {"backend": default["backend"], "timeout": default["timeout"]}
    roster.ask("init_group", args, ranks).all()
    roster.ask("import_groups", {"exported": exported}, ranks).all()
    roster.ask("abort", {"group": None, "reason": reason}, ranks).all()


def rebuild(roster: Roster, group: str | None, store_host: int | None) -> int:
    """Begin a new generation of a group (``None``: all); return the store's host.

    Raises `ClusterError` naming the dead ranks of the group and what to do,
    before anything is touched.
    """
    answers = roster.ask("summary")
    summaries = {rank: unpack(one) for rank, one in answers.results.items()}
    if not summaries:
        # Nobody answered: say who did not, and why.
        answers.all()
        raise ClusterError(
            "rebuild: every engine is gone; start them again with %dist_restart "
            "(Cluster.restart())"
        )
    known: dict[str, None] = {}
    for summary in summaries.values():
        known.update(dict.fromkeys(one["name"] for one in summary["groups"]))
    if group is not None and group not in known:
        raise ClusterError(
            f"no group called {group!r}; there is "
            f"{', '.join(map(repr, known)) or 'none'}"
        )
    generations: dict[int, dict[str, int]] = {}
    without: set[int] = set()
    ready: dict[int, list[str]] = {}
    for name in known if group is None else [group]:
        for ranks, said in members(summaries, name).items():
            _check_alive(roster, answers, name, ranks)
            generation = 1 + max(one["generation"] for one in said)
            for rank in ranks:
                generations.setdefault(rank, {})[name] = generation
            if len(said) < len(ranks):
                without.update(_lacking(summaries, name, ranks))
            if any(one["state"] == "ready" for one in said):
                for rank in ranks:
                    ready.setdefault(rank, []).append(name)
    if without:
        exported = export_groups(roster, ())
        roster.ask("import_groups", {"exported": exported}, without).all()
    for name in dict.fromkeys(one for names in ready.values() for one in names):
        chosen = [rank for rank, names in ready.items() if name in names]
        reason = f"group {name!r} is being rebuilt"
        roster.ask("abort", {"group": name, "reason": reason}, chosen).all()
    store_host = _mend_store(roster, store_host, generations)
    roster.ask(
        "rebuild",
        lambda rank: {"generations": generations[rank]},
        generations,
        timeout=5.0,
    ).all()
    return store_host


def _lacking(
    summaries: Mapping[int, Mapping[str, Any]], name: str, ranks: Sequence[int]
) -> set[int]:
    """The members of a group that have not made it: their cell failed before that."""
    return {
        rank
        for rank in ranks
        if not any(
            one["name"] == name and rank in one["ranks"]
            for one in summaries[rank]["groups"]
        )
    }


def _check_alive(
    roster: Roster, answers: Answers, name: str, ranks: Sequence[int]
) -> None:
    dead = [one for one in roster.seats if one.rank in ranks and not one.alive]
    if dead:
        which = ",".join(str(one.rank) for one in dead)
        raise ClusterError(
            f"group {name!r} cannot be rebuilt: "
            f"{'; '.join(str(one.death) for one in dead)}. Start "
            f"{'it' if len(dead) == 1 else 'them'} again with %dist_restart {which} "
            f"(Cluster.restart([{which}])), then rebuild"
        )
    silent = [rank for rank in ranks if rank in answers.errors]
    if silent:
        raise ClusterError(
            f"group {name!r} cannot be rebuilt: rank {silent[0]}: "
            f"{answers.errors[silent[0]]}"
        )
