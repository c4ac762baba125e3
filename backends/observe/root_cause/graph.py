"""The wait-for graph: ranks, and for whom each of them waits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

__all__ = ["components", "final_components", "is_acyclic", "shortest_cycle"]


def final_components(edges: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that wait for nobody outside of their set.

    Each set is a rank that waits for nobody, or ranks that wait for each other.
    """
    return [
        members
        for members in components(edges)
        if all({*members}.issuperset(edges.get(member, ())) for member in members)
    ]


def components(edges: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that wait for each other, and each other rank alone.

    Only what an edge names is in the graph. (Tarjan's strongly connected components,
    without recursion: a chain may have thousands of ranks.)
    """
    graph = {rank: sorted(set(targets)) for rank, targets in edges.items()}
    nodes = sorted({*graph, *(one for targets in graph.values() for one in targets)})
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    placed: set[int] = set()
    path: list[int] = []
    found: list[tuple[int, ...]] = []
    for root in nodes:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        path.append(root)
        work = [(root, iter(graph.get(root, ())))]
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    path.append(target)
                    work.append((target, iter(graph.get(target, ()))))
                    break
                if target not in placed:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == index[node]:
                    place = path.index(node)
                    members = path[place:]
                    del path[place:]
                    placed.update(members)
                    found.append(tuple(sorted(members)))
    return sorted(found)


def is_acyclic(members: Iterable[int], edges: Mapping[int, Iterable[int]]) -> bool:
    """Return whether no rank of `members` waits for itself by way of others of them."""
    inside = set(members)
    awaited = {rank: inside.intersection(edges.get(rank, ())) for rank in inside}
    try:
        TopologicalSorter(awaited).prepare()
    except CycleError:
        return False
    return True


def shortest_cycle(
    members: Iterable[int], edges: Mapping[int, Iterable[int]]
) -> list[int]:
    """Return the fewest ranks of `members` that wait for each other, in that order."""
    inside = set(members)
    best: list[int] = []
    for start in sorted(inside):
        before: dict[int, int] = {}
        row = [start]
        while row and start not in before:
            following: list[int] = []
            for node in row:
                for target in sorted(inside.intersection(edges.get(node, ()))):
                    if target not in before:
                        before[target] = node
                        following.append(target)
            row = following
        if start in before:
            path = [before[start]]
            while path[-1] != start:
                path.append(before[path[-1]])
            if not best or len(path) < len(best):
                best = path[::-1]
        if len(best) == 2:
            break
    return best
