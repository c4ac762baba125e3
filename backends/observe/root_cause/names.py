"""How texts name ops, groups and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ...rank_sets import brief_members, name_ranks
from ..evidence import Group, IssuedOp, SourceLine
from .picture import Picture
from .scene import Wait

__all__ = ["Names", "direction", "have", "listed", "some", "they_wait"]

#: Runs of ranks that a sentence names one by one, and groups with one op.
PIECES, GROUPS = 12, 4


class Names:
    """The names of ops in texts on one picture.

    A group is not named where it is the only one, and that of all ranks. Of groups with
    one name the ranks are named, too.
    """

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        groups, ranks = picture.evidence.groups, picture.evidence.ranks
        self._one_group = len(groups) == 1 and (
            groups[0].complete and ranks.keys() <= set(groups[0].ranks)
        )
        self._named = Counter(group.name for group in groups)

    def wait(self, wait: Wait, *others: Group) -> str:
        """Return ``recv #1 from rank 0 of group 'pp' (train.py:31)``.

        `others` are more groups that have such a wait.
        """
        op = self.example(wait)
        if op is None:
            return f"op #{wait.seq}{self.of_group(wait.group, *others)}"
        return self.op(op, wait.group, *others)

    def edge(self, wait: Wait) -> str:
        """Return ``recv #1``, for a picture."""
        op = self.example(wait)
        return f"op #{wait.seq}" if op is None else str(op)

    def op(self, op: IssuedOp, group: Group | None = None, *others: Group) -> str:
        """Return ``all_reduce #13 of group 'dp' (train.py:31)``."""
        line = f" ({self.place(op.line)})" if op.line is not None else ""
        of_group = "" if group is None else self.of_group(group, *others)
        return f"{op}{direction(op)}{of_group}{line}"

    def place(self, line: SourceLine) -> str:
        """Return ``train.py:7``; with its caller where that one tells more."""
        return self._picture.callers.named(line) if line.callers else str(line)

    def of_group(self, *groups: Group) -> str:
        """Return `` of group 'dp'``, or `` of groups 'dp (0–1)' and 'dp (2–3)'``."""
        if self._one_group:
            return ""
        found = sorted(set(groups), key=lambda one: (one.name, one.ranks))
        labels = list(dict.fromkeys(repr(self.label(one)) for one in found))
        if len(labels) > GROUPS:
            labels[GROUPS - 1 :] = [f"{len(labels) - GROUPS + 1} more"]
        *first, last = labels
        listed = f"{', '.join(first)} and {last}" if first else last
        return f" of group{'s' if first else ''} {listed}"

    def label(self, group: Group) -> str:
        """Return the name of a group, with its ranks where others have the name."""
        if self._named[group.name] < 2 or not group.complete:
            return group.name
        return f"{group.name} ({brief_members(group.ranks)})"

    def example(self, wait: Wait) -> IssuedOp | None:
        """Return the op of a wait, as another rank issued it if need be."""
        if wait.op is not None:
            return wait.op
        for scene in self._picture.scenes:
            if scene.group == wait.group:
                return scene.named(wait.seq)
        return None


def direction(op: IssuedOp | None) -> str:
    """Return `` to rank 1`` for a send, `` from any rank`` for such a receive."""
    if op is None or not op.is_p2p:
        return ""
    if op.peer is not None:
        return f" {'to' if op.op == 'send' else 'from'} rank {op.peer}"
    return " from any rank" if op.op == "recv" and not op.lacks_peer else ""


def have(ranks: Collection[int]) -> str:
    """Return the verb for some ranks."""
    return "has" if len(set(ranks)) == 1 else "have"


def they_wait(waits: Iterable[Wait], besides: Collection[int] = ()) -> str:
    """Return ``ranks 0–2 wait``; empty if there are none but those of `besides`."""
    ranks = {wait.rank for wait in waits} - set(besides)
    if not ranks:
        return ""
    return f"{some(ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def some(ranks: Collection[int]) -> str:
    """Return the ranks, and their number where they are in many pieces."""
    text = name_ranks(ranks)
    pieces = text.split(", ")
    if len(pieces) <= PIECES:
        return text
    begin = ", ".join(pieces[: PIECES // 2]).removeprefix("ranks ")
    return f"{len(set(ranks))} ranks ({begin}, …)"


def listed(ranks: Collection[int]) -> str:
    """Return ``ranks 0 and 2–3``, for a list in which commas separate other things."""
    return " and ".join(some(ranks).rsplit(", ", 1))
