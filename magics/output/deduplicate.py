"""OutputDeduplicator: the outputs of several ranks as one sequence without repeats.

Plain data in, plain data out; time is an argument. Each rank has a
sequence of entries (a line, a display, an error). The merged sequence keeps
every rank's own order, and an item of it stands for one entry of one rank or
for equal entries of several.

Two forms are made. *Live* (`feed`, `poll`), an entry that other ranks may
still repeat is held back for at most `hold` seconds; when no other rank can repeat
it any more, it is shown at once. *Final* (`final`), when all output has arrived, the
same rule is applied to the whole sequences, so that what a notebook keeps does not
depend on which rank was a little late.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Entry", "Item", "OutputDeduplicator"]

#: Seconds that an entry is held back for other ranks to repeat it, and how many
#: more for an error: the first traceback of a process takes long to format.
HOLD = 0.12
PATIENCE = 0.3

#: Seconds between two entries, of any rank, that a reader notices as a pause: the
#: final order keeps the entries before a pause in front.
PAUSE = 0.25


@dataclass(frozen=True)
class Entry:
    """One output of a rank; entries with equal `key` are the same output.

    `kind` is ``"stdout"`` or ``"stderr"`` (the content is a line), ``"text"`` or
    ``"display"`` (a mime bundle) or ``"error"``.
    """

    kind: str
    key: Hashable
    content: Any = field(compare=False)


@dataclass(frozen=True)
class Item:
    """Equal entries of `ranks`; `contents` are theirs, in rank order."""

    kind: str
    ranks: tuple[int, ...]
    contents: tuple[Any, ...]

    @property
    def content(self) -> Any:
        return self.contents[0]


class OutputDeduplicator:
    """Merges the entries of `ranks`; ``collapse=False`` only labels them."""

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        collapse: bool = True,
        keep: int = 5_000,
    ) -> None:
        self._queues = _Queues(ranks)
        self._open = set(self._queues.ranks)
        self._hold = HOLD if collapse else 0.0
        self._collapse = collapse
        self._keep = keep
        self._log: list[tuple[float, int, Entry]] | None = []

    # -- live ---------------------------------------------------------------

    def feed(self, rank: int, entry: Entry, now: float) -> None:
        if not self._collapse:
            entry = Entry(entry.kind, (rank, entry.key), entry.content)
        patience = PATIENCE if self._collapse and entry.kind == "error" else 0.0
        self._queues.push(rank, entry, now + patience)
        if self._log is not None:
            self._log.append((now, rank, entry))
            if len(self._log) > self._keep:
                self._log = None

    def finish(self, rank: int) -> None:
        """Note that `rank` has no further output."""
        self._open.discard(rank)

    @property
    def keeps(self) -> bool:
        """Whether all entries are kept for the final form."""
        return self._log is not None

    @property
    def deadline(self) -> float | None:
        """When to `poll` at the latest; ``None`` while nothing is held back."""
        oldest = self._queues.oldest()
        return None if oldest is None else oldest + self._hold

    def poll(self, now: float) -> list[Item]:
        """Return what can be shown now, in order."""
        queues = self._queues
        items = []
        while heads := queues.heads():
            head = self._settled(heads)
            if head is None:
                oldest = queues.oldest()
                assert oldest is not None
                if now < oldest + self._hold:
                    break
                # Entries shortly after the one that is due are shown with it, so
                # that a burst of all ranks is in rank order.
                due = oldest + self._hold / 2
                head = self._due(heads, due)
            items.append(queues.pop(head))
        return items

    def _settled(self, heads: dict[Hashable, _Head]) -> _Head | None:
        """Return the next head, if no entry can precede or join it any more."""
        if not self._open:
            return _best(heads.values())
        if len(heads) > 1:
            return None
        (only,) = heads.values()
        shared = only.holders == self._queues.ranks_with(only.key)
        return only if shared and only.holders >= self._open else None

    def _due(self, heads: dict[Hashable, _Head], due: float) -> _Head:
        late = [head for head in heads.values() if head.since <= due]
        best = _best(late)
        if best.loss:
            # Another rank has the same entry further back: show the entries in
            # front of that one first, if they can be shown.
            having = self._queues.ranks_with(best.key)
            blockers = [h for h in heads.values() if not h.loss and h.holders & having]
            if blockers:
                return _best(blockers)
        return best

    def clear(self, rank: int) -> None:
        self._queues.drop(rank)
        if self._log is not None:
            self._log = [event for event in self._log if event[1] != rank]

    def restart(self) -> list[Item] | None:
        """Return the `final` form so far; all of it counts as shown."""
        items = self.final()
        if items is not None:
            for rank in self._queues.ranks:
                self._queues.drop(rank)
        return items

    # -- final --------------------------------------------------------------

    def final(self) -> list[Item] | None:
        """Return the merged sequence of all entries; ``None``: they are too many."""
        if self._log is None:
            return None
        queues = _Queues(self._queues.ranks)
        for bucket, rank, entry in _buckets(self._log):
            queues.push(rank, entry, bucket)
        items = []
        while heads := queues.heads():
            items.append(queues.pop(_best(heads.values(), by_time=True)))
        return items


@dataclass
class _Head:
    """The same entry at the front of the queues of `holders`."""

    key: Hashable
    holders: set[int]
    since: float
    #: The number of pairs of ranks that cannot share it if it is shown now.
    loss: int = 0


def _best(heads: Iterable[_Head], by_time: bool = False) -> _Head:
    return min(
        heads, key=lambda h: (h.loss, h.since if by_time else 0.0, min(h.holders))
    )


class _Queues:
    """The entries of each rank that have not been shown."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = sorted(ranks)
        self._queues: dict[int, deque[tuple[float, Entry]]] = {
            rank: deque() for rank in self.ranks
        }
        self._counts: dict[int, Counter[Hashable]] = {r: Counter() for r in self.ranks}
        self._ranks_by_key: dict[Hashable, set[int]] = {}

    def push(self, rank: int, entry: Entry, when: float) -> None:
        self._queues[rank].append((when, entry))
        self._counts[rank][entry.key] += 1
        self._ranks_by_key.setdefault(entry.key, set()).add(rank)

    def drop(self, rank: int) -> None:
        self._queues[rank].clear()
        for key in self._counts.pop(rank):
            self._remove(rank, key)
        self._counts[rank] = Counter()

    def _remove(self, rank: int, key: Hashable) -> None:
        self._ranks_by_key[key].discard(rank)
        if not self._ranks_by_key[key]:
            del self._ranks_by_key[key]

    def ranks_with(self, key: Hashable) -> set[int]:
        return self._ranks_by_key[key]

    def oldest(self) -> float | None:
        return min(
            (queue[0][0] for queue in self._queues.values() if queue), default=None
        )

    def heads(self) -> dict[Hashable, _Head]:
        heads: dict[Hashable, _Head] = {}
        for rank, queue in self._queues.items():
            if not queue:
                continue
            when, entry = queue[0]
            head = heads.setdefault(entry.key, _Head(entry.key, set(), when))
            head.holders.add(rank)
            head.since = min(head.since, when)
        for head in heads.values():
            others = self._ranks_by_key[head.key] - head.holders
            if others:
                # A holder with more of these entries than the other rank has a spare.
                spare = min(self._counts[rank][head.key] for rank in head.holders)
                losers = sum(self._counts[r][head.key] >= spare for r in others)
                head.loss = losers * len(head.holders)
        return heads

    def pop(self, head: _Head) -> Item:
        ranks = tuple(sorted(head.holders))
        entries = [self._queues[rank].popleft()[1] for rank in ranks]
        for rank in ranks:
            self._counts[rank][head.key] -= 1
            if not self._counts[rank][head.key]:
                del self._counts[rank][head.key]
                self._remove(rank, head.key)
        return Item(entries[0].kind, ranks, tuple(entry.content for entry in entries))


def _buckets(
    log: Sequence[tuple[float, int, Entry]],
) -> Iterable[tuple[float, int, Entry]]:
    """Yield the log with times replaced by the number of pauses before them.

    The entries of a rank after its last line are its outcome: they are put at the
    end, beside the outcomes of the other ranks.
    """
    last_line = {
        rank: i
        for i, (_, rank, entry) in enumerate(log)
        if entry.kind in ("stdout", "stderr")
    }
    bucket, last = 0.0, None
    for i, (when, rank, entry) in enumerate(log):
        if last is not None and when - last > PAUSE:
            bucket += 1
        last = when
        outcome = i > last_line.get(rank, -1)
        yield (math.inf if outcome else bucket), rank, entry
