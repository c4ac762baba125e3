"""Which transports the ranks of a group use between each other, as one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rankscope.backends.rank_sets import format_ranks

__all__ = ["Connections", "transports_text"]

#: A rank → the transports, e.g. ``shm,cma`` → the ranks it is connected to with them.
Connections = Mapping[int, Mapping[str, tuple[int, ...]]]

#: Two ranks, the lower first.
_Pair = tuple[int, int]


def transports_text(
    connections: Connections, hosts: Mapping[int, str], size: int
) -> str:
    """Return the transports and the ranks between which they are used.

    ``"shm+cma between all ranks"``, ``"shm+cma within each host, tcp between ranks 0–1
    and 2–3"``; empty while no rank is connected to another: they connect at their first
    message to each other. `hosts` is rank → its host, of the ranks that have reported
    it, and `size` the number of ranks of the group.
    """
    found = _by_transports(connections, hosts)
    pairs = [pair for those in found.values() for pair in those]
    if len(found) == 1:
        (name,) = found
        every = size * (size - 1) // 2
        return f"{name} between {'all' if len(pairs) == every else 'connected'} ranks"
    inside = {pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]}
    across = set(pairs) - inside
    parts = []
    # Those within hosts first, then those of few pairs, which are the exception.
    order = sorted(found, key=lambda name: (found[name] != inside, len(found[name])))
    for name in order:
        those = found[name]
        if those == inside and across:
            parts.append(f"{name} within each host")
        elif those == across and inside:
            parts.append(f"{name} between {_hosts_text(hosts)}")
        else:
            parts.append(f"{name} between {_pairs_text(those)}")
    return ", ".join(parts)


def _by_transports(
    connections: Connections, hosts: Mapping[int, str]
) -> dict[str, set[_Pair]]:
    """Return ``"shm+cma"`` → the pairs of ranks that use both, in either direction."""
    pairs: dict[_Pair, tuple[str, ...]] = {}
    for rank, peers in sorted(connections.items()):
        for joined, others in peers.items():
            names = tuple(joined.split(","))
            for peer in others:
                if peer == rank or peer not in hosts or rank not in hosts:
                    continue
                pair = (rank, peer) if rank < peer else (peer, rank)
                other = pairs.setdefault(pair, names)
                if other != names:
                    pairs[pair] = tuple(dict.fromkeys((*other, *names)))
    found: dict[str, set[_Pair]] = defaultdict(set)
    for pair, names in pairs.items():
        found["+".join(names)].add(pair)
    return found


def _hosts_text(hosts: Mapping[int, str]) -> str:
    if len(set(hosts.values())) > 2:
        return "hosts"
    members: dict[str, list[int]] = defaultdict(list)
    for rank, host in sorted(hosts.items()):
        members[host].append(rank)
    return _joined(members.values())


def _pairs_text(pairs: Iterable[_Pair]) -> str:
    """Return the ranks of `pairs`: each of one set with each of another, or in one."""
    pairs = set(pairs)
    peers: dict[int, set[int]] = defaultdict(set)
    for one, other in pairs:
        peers[one].add(other)
        peers[other].add(one)
    ranks = set(peers)
    first = min(ranks)
    one_side, other_side = ranks - peers[first], peers[first]
    if all(peers[rank] == other_side for rank in one_side) and all(
        peers[rank] == one_side for rank in other_side
    ):
        return _joined([one_side, other_side])
    if all(peers[rank] == ranks - {rank} for rank in ranks):
        return f"ranks {_listed(ranks)}"
    return f"{len(pairs)} pairs among ranks {_listed(ranks)}"


def _joined(sets: Iterable[Iterable[int]]) -> str:
    return f"ranks {' and '.join(map(_listed, sets))}"


def _listed(ranks: Iterable[int]) -> str:
    return format_ranks(ranks, "–")
